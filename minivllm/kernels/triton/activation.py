"""The gate of SwiGLU in one pass: torch would write the intermediate `silu(gate)` to memory and read it again."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, on_device

BLOCK = 1024


@checks.SILU_AND_MUL
def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(first half) * second half`: see `reference.silu_and_mul`."""
    check_launch(x)
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, size)
    if num_tokens > 0:
        with on_device(x):
            _silu_and_mul[(num_tokens, triton.cdiv(size, BLOCK))](out, x, size, out.stride(0), x.stride(0), BLOCK=BLOCK)
    return out


@triton.jit
def _silu_and_mul(out_ptr, x_ptr, size, out_stride, x_stride, BLOCK: tl.constexpr):
    """A piece of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + size + columns, mask=inside, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)  # rounded here, as torch does
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * out_stride + columns, product.to(up.dtype), mask=inside)
