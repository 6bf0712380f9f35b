"""The compiled Triton kernels against what the GPU can do: its copy bandwidth and its matrix rate, measured in the same run.

    python benchmarks/gpu_kernels.py [--out result.json] [--sweep]

bfloat16, the sizes of current models (heads of 128, 8 KV heads). Times are medians of many launches, with the cache of the
GPU cleared before each (`triton.testing.do_bench`). Bytes are the least that must move: each input read once, each output
written once. `--sweep` also tries other tile sizes, warps and pipeline stages for the two attention kernels.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minivllm.bench.report import find_origin, to_json
from minivllm.entrypoints.cli.options import check_writable
from minivllm.kernels import reference

HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE = 128, 8, 16
NUM_CACHES = 2 * 28
"""Keys and values of each layer of Qwen3-0.6B."""
DECODE_CASES = list(itertools.product((64, 256), (1024, 4096, 8192), (4, 8)))
"""(sequences, tokens in each context, query heads to a KV head)."""
PREFILL_CASES = [(1, 1024), (1, 8192), (1, 32768), (16, 1024), (64, 256)]
"""(prompts, tokens of each)."""
SWEPT_PREFILLS = [(1, 8192, 4), (16, 1024, 4), (16, 512, 4), (64, 256, 4), (16, 1024, 2), (16, 1024, 3), (1, 2048, 4, 200)]
"""(prompts, tokens of each, query heads to a KV head, decodes beside them)."""
PREFILL_TILES = [
    *((256, 64, 8, 3), (256, 64, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3)),
    *((128, 32, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3)),
]
"""(query rows, tokens of keys, warps, pipeline stages): those that were best in one of the cases when 54 were tried."""
BANDWIDTH_GOAL = 0.85
"""Share of the copy bandwidth."""
PREFILL_GOALS = {(1, 8192): 500, (16, 1024): 350}
"""TFLOP/s."""
VOCAB_SIZE = 151_936
SAMPLING_GOAL = 0.5
"""Milliseconds for a step's rows."""


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of a launch."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=200, return_mode="median"))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def make_cache(num_seqs: int, context_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, block tables in random order, and context lengths."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    caches = [random(num_seqs * num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    tables = torch.randperm(num_seqs * num_blocks, device="cuda", dtype=torch.int32).view(num_seqs, num_blocks)
    return *caches, tables, torch.full((num_seqs,), context_len, dtype=torch.int32, device="cuda")


def measure_copy_bandwidth() -> float:
    """GB/s of a large copy on the device, bytes read and written."""
    source = torch.randn(2**29, device="cuda")
    destination = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: destination.copy_(source)) / 1e6


def measure_matrix_rate() -> float:
    """TFLOP/s of a large bfloat16 product by the vendor's library."""
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def make_decode(num_seqs: int, context_len: int, group: int) -> tuple:
    """The arguments of a decode."""
    keys, values, tables, lengths = make_cache(num_seqs, context_len)
    return random(num_seqs, NUM_KV_HEADS * group, HEAD_DIM), keys, values, tables, lengths, HEAD_DIM**-0.5


def decode_case(num_seqs: int, context_len: int, group: int) -> tuple[Callable[[], Tensor], int]:
    """A decode, and the bytes that it must read."""
    from minivllm.kernels import triton

    args = make_decode(num_seqs, context_len, group)
    query = args[0]
    num_bytes = 2 * num_seqs * context_len * NUM_KV_HEADS * HEAD_DIM * 2 + 2 * query.nbytes
    return lambda: triton.paged_decode_attention.unchecked(*args), num_bytes


def prefill_case(num_seqs: int, context_len: int, group: int = 4, num_decodes: int = 0) -> tuple[Callable[[], Tensor], float]:
    """Prompts, and decodes of the same contexts beside them; and the operations of their causal attention."""
    from minivllm.kernels import triton

    keys, values, tables, lengths = make_cache(num_seqs + num_decodes, context_len)
    new_tokens = torch.tensor([0, *[context_len] * num_seqs, *[1] * num_decodes])
    starts = new_tokens.cumsum(0).to(torch.int32).cuda()
    query = random(int(new_tokens.sum()), NUM_KV_HEADS * group, HEAD_DIM)
    args = (query, keys, values, tables, lengths, starts, HEAD_DIM**-0.5)
    num_scores = num_seqs * context_len * (context_len + 1) / 2 + num_decodes * context_len
    operations = 4 * NUM_KV_HEADS * group * HEAD_DIM * num_scores
    return lambda: triton.paged_prefill_attention.unchecked(*args), operations


def memory_cases() -> dict[str, tuple[Callable[[], object], int]]:
    """Operations that move memory and compute little, with the bytes that they must move."""
    from minivllm.kernels import triton

    tokens, hidden, intermediate, heads = 32768, 4096, 12288, 32
    x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    gate_up = random(tokens, 2 * intermediate)
    qkv = random(tokens, heads + 2 * NUM_KV_HEADS, HEAD_DIM)
    query, key, value = qkv.split([heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    head_weight = random(HEAD_DIM)
    cos, sin = torch.rand(2, tokens, HEAD_DIM // 2, device="cuda")
    positions = torch.arange(tokens, device="cuda")
    keys, values, tables, _ = make_cache(tokens // 1024, 1024)
    slots = (tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).flatten()[:tokens]
    blocks = random(NUM_CACHES, 256, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pairs = [(i, 128 + i) for i in range(128)]

    def fused(rows: int) -> None:
        q, k, v, where, to = query[:rows], key[:rows], value[:rows], positions[:rows], slots[:rows]
        weights = head_weight, head_weight, 1e-6
        triton.norm_rope_and_cache.unchecked(where, q, k, v, cos, sin, keys, values, to, *weights)

    def single(rows: int) -> None:
        q, k = (triton.rms_norm.unchecked(x[:rows], head_weight, 1e-6) for x in (query, key))
        q, k = triton.rotary_embedding.unchecked(positions[:rows], q, k, cos, sin)
        triton.reshape_and_cache.unchecked(k, value[:rows], keys, values, slots[:rows])

    return {
        "reshape_and_cache": (lambda: triton.reshape_and_cache.unchecked(key, value, keys, values, slots), 4 * key.numel() * 2),
        "rms_norm": (lambda: triton.rms_norm(x, weight, 1e-6), 2 * x.nbytes),
        "rms_norm of queries": (lambda: triton.rms_norm(query, head_weight, 1e-6), 4 * query.numel()),
        "add_rms_norm": (lambda: triton.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
        "silu_and_mul": (lambda: triton.silu_and_mul(gate_up), gate_up.nbytes * 3 // 2),
        "rotary_embedding": (
            lambda: triton.rotary_embedding.unchecked(positions, query, key, cos, sin),
            4 * (query.numel() + key.numel()) + cos.nbytes + sin.nbytes,
        ),
        "norms, rotation and cache write": (lambda: fused(tokens), 2 * qkv.nbytes + cos.nbytes + sin.nbytes),
        "the same of 64 tokens": (lambda: fused(64), 128 * qkv[0].nbytes + 128 * cos[0].nbytes),
        "the same of 64 tokens, as four kernels": (lambda: single(64), 128 * qkv[0].nbytes + 128 * cos[0].nbytes),
        "copy_blocks": (lambda: triton.copy_blocks(blocks, blocks, pairs), blocks.nbytes),  # half is read, half is written
    }


def sampling_cases() -> dict[str, Callable[[], object]]:
    """Choosing a token for each row of logits: rows of a vocabulary as large as Qwen3's."""
    from minivllm.kernels import triton

    vocab_size = VOCAB_SIZE
    peaked, flat = random(256, vocab_size) * 3, random(256, vocab_size) * 0.1
    all_keys = torch.randint(-(2**31), 2**31, (256,), device="cuda").to(torch.int32)

    def case(
        temperature: float, top_k: int = vocab_size, top_p: float = 1.0, logits: Tensor = peaked, num_rows: int = 256
    ) -> Callable[[], object]:
        logits, keys = logits[:num_rows], all_keys[:num_rows]

        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device="cuda")

        temperatures, filters = column(temperature), (column(0.0), column(top_k, torch.int64), column(top_p))

        def sample() -> object:
            has_filters = top_k < vocab_size or top_p < 1
            thresholds = triton.filter_thresholds.unchecked(logits, temperatures, *filters) if has_filters else None
            return triton.draw.unchecked(logits, temperatures, keys, thresholds)

        return sample

    return {
        "256 rows, greedy": case(0.0),
        "256 rows, temperature 0.6": case(0.6),
        "256 rows, top-k 20": case(0.6, top_k=20),
        "256 rows, top-p 0.95": case(0.6, top_p=0.95),
        "256 rows, top-k 20, top-p 0.95": case(0.6, top_k=20, top_p=0.95),
        "256 flat rows, top-p 0.95": case(1.0, top_p=0.95, logits=flat),  # most of the vocabulary stays: the longest search
        "1 row, top-p 0.95": case(0.6, top_p=0.95, num_rows=1),
    }


def compare_with_reference() -> None:
    """A benchmark of a wrong kernel is worth nothing."""
    from minivllm.kernels import triton

    args = make_decode(4, 1000, 4)
    query, keys, values, tables, lengths, scale = (x.cpu() if isinstance(x, Tensor) else x for x in args)
    expected = reference.paged_decode_attention(query.double(), keys.double(), values.double(), tables, lengths, scale)
    error = (triton.paged_decode_attention(*args).double().cpu() - expected).norm() / expected.norm()
    if not error < 5e-3:
        raise SystemExit(f"Decode attention is wrong, by {error:.2g} of its norm: run the tests first.")


def sweep() -> list[dict]:
    """Other tiles, warps and stages for the attention kernels, best first."""
    from minivllm.kernels.triton import decode_attention, prefill_attention

    results = []
    chosen_decode, chosen_prefill = decode_attention.choose_tile, prefill_attention.choose_tiles
    decodes = {case: decode_case(*case) for case in ((64, 1024, 4), (64, 8192, 8), (256, 1024, 4))}
    for config in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
        decode_attention.choose_tile = lambda *_, config=config: config
        for case, (function, num_bytes) in decodes.items():
            results.append(_try("decode", case, config, function, num_bytes / 1e6, "GB/s"))
    decode_attention.choose_tile = chosen_decode
    prefills = {case: prefill_case(*case) for case in SWEPT_PREFILLS}
    for config in PREFILL_TILES:
        prefill_attention.choose_tiles = lambda *_, config=config: config
        for case, (function, operations) in prefills.items():
            results.append(_try("prefill", case, config, function, operations / 1e9, "TFLOP/s"))
    prefill_attention.choose_tiles = chosen_prefill
    results.sort(key=lambda result: (result["kernel"], str(result["case"]), -result["rate"]))
    for _, group in itertools.groupby(results, key=lambda result: (result["kernel"], str(result["case"]))):
        for result in itertools.islice(group, 4):
            print(
                f"{result['kernel']:>10} {result['case']!s:>16} {result['config']!s:>18} {result['rate']:>9.0f} {result['unit']}"
            )
    return results


def _try(kernel: str, case: tuple, config: tuple, function: Callable[[], object], work: float, unit: str) -> dict:
    try:
        rate = work / milliseconds(function)
    except Exception as error:  # too much shared memory, or what the compiler does not like
        rate, unit = 0.0, f"({type(error).__name__})"
    return {"kernel": kernel, "case": case, "config": config, "rate": rate, "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes (some minutes)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here: this benchmark is for GPUs (benchmarks/cpu_kernels.py is for CPUs).")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(args.out)
    torch.manual_seed(0)
    compare_with_reference()
    bandwidth, matrix_rate = measure_copy_bandwidth(), measure_matrix_rate()
    origin = find_origin()
    print(f"{origin['machine']}\ncopy {bandwidth:.0f} GB/s, bfloat16 matrix product {matrix_rate:.0f} TFLOP/s\n")
    rows = []

    def report(name: str, ms: float, rate: float, unit: str, ceiling: float, goal: float) -> None:
        rows.append(
            {"name": name, "ms": ms, "rate": rate, "unit": unit, "share": rate / ceiling, "goal": goal, "met": rate >= goal}
        )
        mark = "" if goal == 0 else "goal met" if rate >= goal else f"goal {goal:.0f}"
        print(f"{name:<44}{ms:>9.3f} ms{rate:>8.0f} {unit:<8}{rate / ceiling:>6.0%}  {mark}", flush=True)

    for case in DECODE_CASES:
        function, num_bytes = decode_case(*case)
        ms = milliseconds(function)
        name = f"decode, {case[0]} x {case[1]} tokens, {case[2]}:1 heads"
        report(name, ms, num_bytes / ms / 1e6, "GB/s", bandwidth, BANDWIDTH_GOAL * bandwidth)
        del function
    for case in ((1, 32768, 4), (4, 32768, 4)):
        function, num_bytes = decode_case(*case)
        ms = milliseconds(function)
        report(f"decode, {case[0]} x {case[1]} tokens, {case[2]}:1 heads", ms, num_bytes / ms / 1e6, "GB/s", bandwidth, 0)
    for name, (function, num_bytes) in memory_cases().items():
        ms = milliseconds(function)
        goal = BANDWIDTH_GOAL * bandwidth if name in ("reshape_and_cache", "rms_norm", "add_rms_norm", "silu_and_mul") else 0
        report(name, ms, num_bytes / ms / 1e6, "GB/s", bandwidth, goal)
    for name, function in sampling_cases().items():
        ms = milliseconds(function)
        num_bytes = int(name.split()[0]) * VOCAB_SIZE * 2  # the logits, once
        report(f"sampling, {name}", ms, num_bytes / ms / 1e6, "GB/s", bandwidth, num_bytes / SAMPLING_GOAL / 1e6)
    for case in PREFILL_CASES:
        function, operations = prefill_case(*case)
        ms = milliseconds(function)
        goal = PREFILL_GOALS.get(case, 0)
        prompts = f"{case[1]} tokens" if case[0] == 1 else f"{case[0]} x {case[1]} tokens"
        report(f"prefill, {prompts}, 4:1 heads", ms, operations / ms / 1e9, "TFLOP/s", matrix_rate, goal)
    result = origin | {"copy_gb_s": bandwidth, "matrix_tflop_s": matrix_rate, "kernels": rows}
    if args.sweep:
        print()
        result["sweep"] = sweep()
    if args.out:
        args.out.write_text(to_json(result))


if __name__ == "__main__":
    main()
