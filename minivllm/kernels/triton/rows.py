"""The operations around attention and the linear layers, each in one pass over memory: torch would write what lies between its steps,
such as the gate's `silu`, to memory and read it again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, on_device

NUMBERS_PER_PROGRAM = 2048
"""Short rows (a head's query) are taken several at a time, long ones (a hidden state) alone."""
MAX_SIZE = 2**15
GATE_BLOCK = 1024
"""Numbers of a row that a program multiplies by their gate."""


@checks.RMS_NORM
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows: see `reference.rms_norm`. `x` has 2 or 3 dimensions."""
    return _normalize(x, None, weight, eps)[0]


@checks.ADD_RMS_NORM
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then normalize the sum: see `reference.add_rms_norm`."""
    return _normalize(x, residual, weight, eps)


def _normalize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
    block = triton.next_power_of_2(size)
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


@checks.ROTARY_EMBEDDING
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: see `reference.rotary_embedding`."""
    num_tokens, num_heads, head_dim = query.shape
    check_launch(query, head_dim)
    new_query, new_key = query.new_empty(query.shape), key.new_empty(key.shape)
    num_kv_heads = key.shape[1]
    if num_tokens > 0:
        with on_device(query):
            _rotary[(num_tokens,)](
                new_query, new_key, query, key, positions, cos, sin, num_heads, num_kv_heads,
                *new_query.stride()[:2], *new_key.stride()[:2], *query.stride()[:2], *key.stride()[:2],
                HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2),
                HEADS=triton.next_power_of_2(num_heads), KV_HEADS=triton.next_power_of_2(num_kv_heads),
            )  # fmt: skip
    return new_query, new_key


@triton.jit
def _rotary(
    new_query_ptr, new_key_ptr, query_ptr, key_ptr, positions_ptr, cos_ptr, sin_ptr, num_heads, num_kv_heads,
    new_query_stride, new_query_head_stride, new_key_stride, new_key_head_stride,
    query_stride, query_head_stride, key_stride, key_head_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one token's query and key."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pairs = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    _rotate(
        new_query_ptr + token * new_query_stride, query_ptr + token * query_stride, num_heads,
        new_query_head_stride, query_head_stride, cos, sin, HALF, BLOCK, HEADS,
    )  # fmt: skip
    _rotate(
        new_key_ptr + token * new_key_stride, key_ptr + token * key_stride, num_kv_heads,
        new_key_head_stride, key_head_stride, cos, sin, HALF, BLOCK, KV_HEADS,
    )  # fmt: skip


@triton.jit
def _rotate(
    out_ptr, x_ptr, num_heads, out_head_stride, x_head_stride, cos, sin,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one token: channel i and channel i + HALF are the coordinates that are rotated."""
    heads = tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, BLOCK)[None, :]
    inside = (heads < num_heads) & (pairs < HALF)
    first = tl.load(x_ptr + heads * x_head_stride + pairs, mask=inside, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(x_ptr + heads * x_head_stride + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + heads * out_head_stride + pairs, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(out_ptr + heads * out_head_stride + HALF + pairs, (second * cos + first * sin).to(dtype), mask=inside)


@checks.SILU_AND_MUL
def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(first half) * second half`: see `reference.silu_and_mul`."""
    check_launch(x)
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, size)
    if num_tokens > 0:
        with on_device(x):
            _silu_and_mul[(num_tokens, triton.cdiv(size, GATE_BLOCK))](out, x, size, out.stride(0), x.stride(0), BLOCK=GATE_BLOCK)
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
