"""RMSNorm in one pass over memory, with the residual addition that precedes it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, next_power_of_2, on_device

NUMBERS_PER_PROGRAM = 2048
"""Short rows (a head's query) are taken several at a time, long ones (a hidden state) alone."""
MAX_SIZE = 2**15


@checks.RMS_NORM
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows: see `reference.rms_norm`. `x` has 2 or 3 dimensions."""
    return _launch(x, None, weight, eps)[0]


@checks.ADD_RMS_NORM
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then normalize the sum: see `reference.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalized rows, and the rows with the residual added if there is one."""
    check_launch(x)
    if x.dim() not in (2, 3) or x.shape[-1] > MAX_SIZE:
        raise KernelError(f"x has the shape {tuple(x.shape)}: 2 or 3 dimensions are needed, the last of at most {MAX_SIZE}.")
    size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    out = x.new_empty(x.shape)
    new_residual = out if residual is None else x.new_empty(x.shape)
    if num_rows == 0:
        return out, new_residual
    block = next_power_of_2(size)
    rows = max(1, NUMBERS_PER_PROGRAM // block)

    def strides(tensor: Tensor) -> tuple[int, int]:
        return tensor.stride(0), tensor.stride(1) if tensor.dim() == 3 else 0

    added = residual if residual is not None else x
    with on_device(x):
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            out, new_residual, x, added, weight,
            num_rows, num_heads, eps, *strides(out), *strides(new_residual), *strides(x), *strides(added),
            ADD=residual is not None, SIZE=size, ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
    return out, new_residual


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    out_ptr, new_residual_ptr, x_ptr, residual_ptr, weight_ptr, num_rows, num_heads, eps,
    out_stride, out_head_stride, new_residual_stride, new_residual_head_stride,
    x_stride, x_head_stride, residual_stride, residual_head_stride,
    ADD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows, each a token's hidden state or one head of it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < SIZE)
    tokens = (rows // num_heads).to(tl.int64)[:, None]
    heads = (rows % num_heads).to(tl.int64)[:, None]
    x = tl.load(x_ptr + tokens * x_stride + heads * x_head_stride + columns, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        residual = tl.load(
            residual_ptr + tokens * residual_stride + heads * residual_head_stride + columns, mask=inside, other=0.0
        )
        x = (x + residual.to(tl.float32)).to(dtype)
        tl.store(new_residual_ptr + tokens * new_residual_stride + heads * new_residual_head_stride + columns, x, mask=inside)
        x = x.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / SIZE
    normalized = (x * tl.rsqrt(mean_square + eps)[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + tokens * out_stride + heads * out_head_stride + columns, (normalized * weight).to(dtype), mask=inside)
