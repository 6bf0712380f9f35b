"""Attention of a prompt on the CPU: the Numba kernel with a cache in float32 and in bfloat16, against torch, which gathers blocks first.

    python benchmarks/prefill_attention.py

One layer of SmolLM2-135M (9 query heads, 3 KV heads of 64, block size 16), whose blocks are in random order. Writing keys and values to the
cache is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from minivllm.bench.report import format_table, report
from minivllm.entrypoints.cli.options import check_writable
from minivllm.kernels import cpu, reference

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
LENGTHS = (32, 104, 508, 1000, 2000)
REPEATS = 15
SETTLING_SECONDS = 0.01
"""How long a way runs before a call of it counts: torch's threads spin for milliseconds once they have done their work, in the way of others."""


@torch.inference_mode()
def measure(length: int) -> dict[str, float]:
    """Median milliseconds of each way, measured in turns."""
    torch.manual_seed(0)
    num_blocks = -(-length // BLOCK_SIZE)
    keys, values = torch.randn(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    query = torch.randn(length, NUM_HEADS, HEAD_DIM)
    tables = torch.randperm(num_blocks, dtype=torch.int32)[None]
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    ways = {
        "torch": (reference, keys, values),
        "float32": (cpu, keys, values),
        "bfloat16": (cpu, keys.bfloat16(), values.bfloat16()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, (kernels, key_cache, value_cache) in ways.items():
            settled = time.perf_counter() + SETTLING_SECONDS
            start = 0.0
            while start < settled:
                start = time.perf_counter()
                # Unchecked, as queries are float32 even where the cache is bfloat16.
                kernels.paged_prefill_attention.unchecked(query, key_cache, value_cache, tables, lengths, starts, HEAD_DIM**-0.5)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def format_times(results: dict[int, dict[str, float]]) -> str:
    """The measurements as a table of text, with the multiply-adds that a causal mask leaves."""
    rows = []
    for length, ms in results.items():
        products = length * (length + 1) * NUM_HEADS * HEAD_DIM
        rates = (f"{products / ms[name] / 1e6:.0f}" for name in ("float32", "bfloat16"))
        rows.append((length, *(f"{value:.2f} ms" for value in ms.values()), *rates))
    title = f"Attention of one layer, {NUM_HEADS} heads of {HEAD_DIM}, {torch.get_num_threads()} threads; billions of multiply-adds per second"
    return f"{title}\n\n{format_table(('tokens', 'torch', 'float32', 'bfloat16', 'float32/s', 'bfloat16/s'), rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    results: dict[Any, dict[str, float]] = {length: measure(length) for length in LENGTHS}
    report("attention of prompts", format_times(results), {"milliseconds": results}, file=arguments.json)


if __name__ == "__main__":
    main()
