"""Linear layers with the instructions that MINIVLLM_CPU_FEATURES leaves: compared with torch in float64, and row by row.

MINIVLLM_CPU_FEATURES=-avx512f python tests/support/linear_paths.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minivllm.kernels import cpu
from minivllm.kernels.cpu.features import HAS_AVX512, HAS_BFLOAT16_DOT
from minivllm.kernels.cpu.panels import FEW_ROWS

KINDS = {torch.float32: cpu.PackedWeight, torch.bfloat16: cpu.PackedBfloat16Weight}
TOLERANCE, INT8_ERROR = 1e-6, 0.02


def main() -> None:
    """Check each kind of weight with one row, some, and many."""
    print(f"AVX-512: {HAS_AVX512}, VDPBF16PS: {HAS_BFLOAT16_DOT}, VPDPBUSD: {cpu.HAS_INT8_DOT}, batches of {FEW_ROWS}")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(427, 577, generator=generator), torch.randn(427, generator=generator)  # several parts, with a rest
    x = torch.randn(30, 577, generator=generator)
    for dtype, kind in KINDS.items():
        packed = kind.of(weight, bias)
        rounded, factors = x.to(dtype).double(), weight.to(dtype).double()
        expected, size = F.linear(rounded, factors, bias.double()), F.linear(rounded.abs(), factors.abs())
        for rows in (*FEW_ROWS, FEW_ROWS[-1] + 1, 30):
            product = cpu.packed_linear(packed, x[:rows])
            assert ((product - expected[:rows]).abs() <= TOLERANCE * (size[:rows] + 1)).all(), (dtype, rows)
            assert torch.equal(product[:1], cpu.packed_linear(packed, x[:1])), (dtype, rows)
    if cpu.HAS_INT8_DOT:
        packed, expected = cpu.PackedInt8Weight.of(weight, bias), F.linear(x, weight, bias)
        for rows in (*FEW_ROWS, FEW_ROWS[-1] + 1, 30):
            product = cpu.packed_linear(packed, x[:rows])
            assert (product - expected[:rows]).norm() < INT8_ERROR * expected[:rows].norm(), rows
            assert torch.equal(product[:1], cpu.packed_linear(packed, x[:1])), rows


if __name__ == "__main__":
    main()
