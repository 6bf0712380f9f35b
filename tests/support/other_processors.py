"""Linear layers and attention with the instructions that MINIVLLM_CPU_FEATURES leaves: compared with torch in float64; products also
row by row.

MINIVLLM_CPU_FEATURES=-avx512f python tests/support/other_processors.py
MINIVLLM_CPU_FEATURES=-avx512vnni python tests/support/other_processors.py products    # without attention: compiles in a third of the time
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from minivllm.kernels import cpu, reference
from minivllm.kernels.cpu.native import features
from minivllm.kernels.cpu.native.panels import FEW_ROWS

KINDS = {torch.float32: cpu.PackedWeight, torch.bfloat16: cpu.PackedBfloat16Weight}
TOLERANCE, INT8_ERROR = 1e-6, 0.02
BATCHES = (*FEW_ROWS, 17, FEW_ROWS[-1] + 1, 30)
HEADS = [(80, 2, 1), (23, 2, 5)]
"""Channels, KV heads, and query heads that share one."""
DECODE_HEADS = (23, 2, 5)
"""Channels that are no whole vectors, and more heads than are scored at a time."""
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DECODE_TOLERANCE = 1e-5


def main() -> None:
    """Check each kind of weight with one row, some, and many, and attention with several sizes of heads."""
    print({name: getattr(features, name) for name in dir(features) if name.startswith("HAS_")}, f"batches of {FEW_ROWS}")
    generator = torch.Generator().manual_seed(0)
    check_products(generator)
    if "products" in sys.argv:
        return
    for head_dim, num_kv_heads, group in HEADS:
        for dtype in ATTENTION_TOLERANCE:
            check_prefill(head_dim, num_kv_heads, group, dtype, generator)
    for dtype in (*ATTENTION_TOLERANCE, torch.float16):
        check_decode(*DECODE_HEADS, dtype, generator)


def check_products(generator: torch.Generator) -> None:
    """Of 427 outputs and 577 inputs: several parts, with a rest."""
    weight, bias = torch.randn(427, 577, generator=generator), torch.randn(427, generator=generator)
    x = torch.randn(30, 577, generator=generator)
    for dtype, kind in KINDS.items():
        packed = kind.of(weight, bias)
        rounded, factors = x.to(dtype).double(), weight.to(dtype).double()
        expected, size = F.linear(rounded, factors, bias.double()), F.linear(rounded.abs(), factors.abs())
        for rows in BATCHES:
            product = cpu.packed_linear(packed, x[:rows])
            assert ((product - expected[:rows]).abs() <= TOLERANCE * (size[:rows] + 1)).all(), (dtype, rows)
            assert torch.equal(product[:1], cpu.packed_linear(packed, x[:1])), (dtype, rows)
    packed, expected = cpu.PackedInt8Weight.of(weight, bias), F.linear(x, weight, bias)
    for rows in BATCHES:
        product = cpu.packed_linear(packed, x[:rows])
        assert (product - expected[:rows]).norm() < INT8_ERROR * expected[:rows].norm(), rows
        assert torch.equal(product[:1], cpu.packed_linear(packed, x[:1])), rows


def check_prefill(head_dim: int, num_kv_heads: int, group: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """A prompt, and a chunk behind 100 cached tokens; with a window, too."""
    new, lengths = [70, 30], [70, 130]
    query = torch.randn(sum(new), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    keys, values = (torch.randn(12, 24, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    tables = torch.stack([torch.randperm(12, generator=generator)[:6] for _ in new]).int()
    rest = tables, torch.tensor(lengths).int(), torch.tensor([0, *new]).cumsum(0).int(), head_dim**-0.5
    for window in (0, 37):
        ours = cpu.paged_prefill_attention(query, keys, values, *rest, window)
        theirs = reference.paged_prefill_attention(query.double(), keys.double(), values.double(), *rest, window)
        assert ((ours - theirs).abs() <= ATTENTION_TOLERANCE[dtype] * (theirs.abs() + 1)).all(), (head_dim, dtype, window)


def check_decode(head_dim: int, num_kv_heads: int, group: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Contexts of a single token, of whole blocks, and of two pieces."""
    query = torch.randn(3, num_kv_heads * group, head_dim, generator=generator)
    keys, values = (torch.randn(30, 16, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    tables = torch.stack([torch.randperm(29, generator=generator)[:10] + 1 for _ in query]).int()
    tables[0, 0] = 0
    rest = tables, torch.tensor([1, 48, 155]).int(), head_dim**-0.5
    theirs = reference.paged_decode_attention(query.double(), keys.double(), values.double(), *rest)
    keys[0, 1:], values[0, 1:] = float("inf"), float("nan")  # unused slots
    ours = cpu.paged_decode_attention.unchecked(query, keys, values, *rest)
    assert ((ours - theirs).abs() <= DECODE_TOLERANCE * (theirs.abs() + 1)).all(), (head_dim, dtype)


if __name__ == "__main__":
    main()
