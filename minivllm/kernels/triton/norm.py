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


@checks.checked(checks.check_rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalize rows: see `reference.rms_norm`. `x` has 2 or 3 dimensions. `out` is written if given."""
    out = _prepare_out(x, out)
    _launch(x, None, weight, eps, out, None)
    return out


@checks.checked(checks.check_add_rms_norm)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, new_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add, then normalize the sum: see `reference.add_rms_norm`. `out` and `new_residual` are written if given."""
    out, new_residual = _prepare_out(x, out), _prepare_out(x, new_residual)
    _launch(x, residual, weight, eps, out, new_residual)
    return out, new_residual


def _prepare_out(x: Tensor, out: Tensor | None) -> Tensor:
    check_launch(x)
    if x.dim() not in (2, 3) or x.shape[-1] > MAX_SIZE:
        raise KernelError(f"x has the shape {tuple(x.shape)}: 2 or 3 dimensions are needed, the last of at most {MAX_SIZE}.")
    return checks.prepare_out(out, x)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, new_residual: Tensor | None) -> None:
    size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    rows = max(1, NUMBERS_PER_PROGRAM // block)
    added = residual is not None and new_residual is not None

    def strides(tensor: Tensor | None) -> tuple[int, int]:
        if tensor is None:
            return 0, 0
        return (tensor.stride(0), tensor.stride(1)) if tensor.dim() == 3 else (tensor.stride(0), 0)

    with on_device(x):
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            out, new_residual if added else out, x, residual if added else x, weight,
            num_rows, num_heads, eps, *strides(out), *strides(new_residual), *strides(x), *strides(residual),
            ADD=added, SIZE=size, ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip


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
