"""The engine on a GPU: tokens per second, as a share of what the card's memory and matrix units allow.

    python benchmarks/gpu_engine.py --json gpu_engine.json

The model has Qwen3-0.6B's sizes and random weights in bfloat16 (`load_format="dummy"`). The workload is nano-vllm's: 256 requests of 100 to 1,024 random tokens
in and out, drawn from `random.seed(0)`. No run can be faster than this limit: each decode step reads the keys and values of its contexts
and, once, the weights, at the copy bandwidth; the products of all tokens run at the matrix rate. Both rates are measured here. Medians of
several rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu_kernels import measure_copy_bandwidth, measure_matrix_rate

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from gpu_check import QWEN3

NUM_REQUESTS, MAX_NUM_SEQS = 256, 256
WAYS = {
    "256 requests, greedy": ({}, 0.0),
    "256 requests, temperature 0.6": ({}, 0.6),
    "256 requests, greedy, chunked prefill": ({"enable_chunked_prefill": True}, 0.0),
    "256 requests, greedy, one step in flight": ({"async_scheduling": False}, 0.0),
    "256 requests, temperature 0.6, one step in flight": ({"async_scheduling": False}, 0.6),
}
"""Options of the engine, and the temperature."""
DECODE_BATCHES = (1, 8, 64)
DECODE_LEN = 256


def make_workload() -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(NUM_REQUESTS)]
    return prompts, [random.randint(100, 1024) for _ in range(NUM_REQUESTS)]


def floor_seconds(prompt_lens: list[int], output_lens: list[int], bandwidth: float, matrix_rate: float) -> float:
    """The least time for the workload.

    Args:
        prompt_lens, output_lens: Tokens of each request.
        bandwidth: Bytes per second.
        matrix_rate: Floating-point operations per second.
    """
    layers, head_dim, hidden = QWEN3["num_hidden_layers"], QWEN3["head_dim"], QWEN3["hidden_size"]
    queries, kv_heads = QWEN3["num_attention_heads"] * head_dim, QWEN3["num_key_value_heads"]
    bytes_per_token = 2 * 2 * layers * kv_heads * head_dim
    layer = hidden * (queries + 2 * kv_heads * head_dim) + queries * hidden + 3 * hidden * QWEN3["intermediate_size"]
    parameters = layers * layer + QWEN3["vocab_size"] * hidden
    contexts = sum(prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) for step in range(1, output))
    num_bytes = contexts * bytes_per_token + max(output_lens) * 2 * parameters
    tokens = sum(prompt_lens) + sum(output_lens)
    operations = 2 * layers * layer * tokens + 2 * QWEN3["vocab_size"] * hidden * sum(output_lens)
    return num_bytes / bandwidth + operations / matrix_rate


def measure(llm: LLM, prompts: list[list[int]], output_lens: list[int], temperature: float) -> float:
    """Output tokens per second."""
    params = [SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True) for length in output_lens]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return sum(output_lens) / (time.perf_counter() - start)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload (default: 3)")
    parser.add_argument("--json", type=Path, help="where to save the result")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here.")
        return 1
    bandwidth, matrix_rate = measure_copy_bandwidth(), measure_matrix_rate()
    prompts, output_lens = make_workload()
    floor = sum(output_lens) / floor_seconds([*map(len, prompts)], output_lens, 1e9 * bandwidth, 1e12 * matrix_rate)
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(QWEN3))
        for options in ({}, {"enable_chunked_prefill": True}):
            llm = LLM(
                name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=16384, **options,
            )  # fmt: skip
            measure(llm, prompts[:8], [8] * 8, 0.6)  # warm up
            for _ in range(args.rounds):
                for way, (wanted, temperature) in WAYS.items():
                    if wanted == options:
                        speeds.setdefault(way, []).append(measure(llm, prompts, output_lens, temperature))
                if not options:
                    for batch in DECODE_BATCHES:
                        short = [prompt[:64] for prompt in prompts[:batch]]
                        speed = measure(llm, short, [DECODE_LEN] * batch, 0.0)
                        speeds.setdefault(f"decode only, {batch} sequence{'s'[: batch > 1]}", []).append(speed)
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    rows = []
    for way, values in speeds.items():
        middle = statistics.median(values)
        share = f"{middle / floor:.2f}" if way in WAYS else ""
        rows.append((way, f"{middle:,.0f}", f"{min(values):,.0f}-{max(values):,.0f}", share))
    table = format_table(("workload", "tokens/s", "range", "share of the limit"), rows)
    note = f"The limit for the 256 requests: {floor:,.0f} tokens/s, at {bandwidth / 1e3:.2f} TB/s and {matrix_rate:.0f} TFLOP/s."
    results = {
        "tokens_per_second": speeds,
        "floor_tokens_per_second": floor,
        "copy_gb_s": bandwidth,
        "matrix_tflop_s": matrix_rate,
    }
    report(
        f"Qwen3-0.6B's sizes, random weights, bfloat16, medians of {args.rounds}", f"{table}\n\n{note}", results, file=args.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
