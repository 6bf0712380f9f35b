"""Attention of a decode step on the CPU: the Numba backend against the torch backend, which gathers blocks first.

All 30 layers of SmolLM2-135M (9 query heads, 3 KV heads of 64, float32, block size 16), including the writes of new keys and values. Each
layer has its own cache, with blocks in random order. A step must read the keys and values of its contexts; how fast the machine can do
that is measured, too: the same threads touch every cache line of the same blocks.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from minivllm.bench.report import format_table
from minivllm.kernels.cpu.launch import use_threads_of_torch
from minivllm.layers.attention import AttentionMetadata
from minivllm.layers.attention_backends import CPUAttentionBackend, TorchAttentionBackend

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
CASES = ((1, 150), (1, 1000), (1, 4000), (16, 150), (16, 1000), (64, 500))
"""(sequences, tokens in each context)."""


@njit(parallel=True, fastmath=True, error_model="numpy")
def touch(keys, values, sums):
    """Read one number of each cache line, as fast as memory allows."""
    num_threads = len(sums)
    for thread in prange(num_threads):
        total = np.float32(0)
        for i in range(len(keys) * thread // num_threads, len(keys) * (thread + 1) // num_threads):
            for j in range(0, keys.shape[1], 16):
                total += keys[i, j] + values[i, j]
        sums[thread] = total


def make_step(num_seqs: int, context_len: int) -> tuple[list[tuple[Tensor, Tensor]], AttentionMetadata]:
    """Filled caches of all layers, and the metadata of a decode step over them."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    shape = (num_seqs * num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = [tuple(torch.zeros(shape).normal_() for _ in range(2)) for _ in range(NUM_LAYERS)]
    block_tables = torch.randperm(num_seqs * num_blocks, dtype=torch.int32).view(num_seqs, num_blocks)
    last = context_len - 1
    metadata = AttentionMetadata(
        is_decode=True,
        slot_mapping=block_tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=block_tables,
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
    )
    return caches, metadata


@torch.inference_mode()
def measure(num_seqs: int, context_len: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step with each backend, and of touching the same memory, measured in turns."""
    caches, metadata = make_step(num_seqs, context_len)
    query = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)
    key, value = torch.randn(2, num_seqs, NUM_KV_HEADS, HEAD_DIM)
    use_threads_of_torch()
    sums = np.empty(torch.get_num_threads(), np.float32)
    ways = {}
    for name, backend_cls in (("torch", TorchAttentionBackend), ("cpu", CPUAttentionBackend)):
        backend = backend_cls(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        ways[name] = lambda cache, backend=backend: backend.forward(query, key, value, cache, metadata)
    ways["touch"] = lambda cache: touch(cache[0].flatten(1).numpy(), cache[1].flatten(1).numpy(), sums)
    assert torch.allclose(ways["cpu"](caches[0]), ways["torch"](caches[0]), atol=1e-5)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            for cache in caches:
                way(cache)
            if repeat > 0:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_attention(repeats: int = 9) -> list[dict[str, Any]]:
    """Milliseconds for each of `CASES`, and the gigabytes per second that the Numba kernel reads and could read at best."""
    torch.manual_seed(0)
    rows = []
    for num_seqs, context_len in CASES:
        ms = measure(num_seqs, context_len, repeats)
        gigabytes = 2 * NUM_LAYERS * num_seqs * NUM_KV_HEADS * HEAD_DIM * 4 / 1e9
        touched = -(-context_len // BLOCK_SIZE) * BLOCK_SIZE
        rows.append(
            {"sequences": num_seqs, "context": context_len, "milliseconds": ms}
            | {"reads": gigabytes * context_len / ms["cpu"] * 1e3, "possible": gigabytes * touched / ms["touch"] * 1e3}
        )
    return rows


def format_attention(rows: list[dict[str, Any]]) -> str:
    """The measurements as a table of text."""
    headers = ("sequences", "context", "torch", "cpu", "ratio", "cpu reads", "possible", "share")
    table = []
    for row in rows:
        ms, reads, possible = row["milliseconds"], row["reads"], row["possible"]
        times = (f"{ms['torch']:.2f} ms", f"{ms['cpu']:.2f} ms", f"{ms['torch'] / ms['cpu']:.1f}")
        rates = (f"{reads:.1f} GB/s", f"{possible:.1f} GB/s", f"{reads / possible:.0%}")
        table.append((row["sequences"], row["context"], *times, *rates))
    return format_table(headers, table, left=0)
