"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, next_power_of_2, on_device


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
                HALF=head_dim // 2, BLOCK=next_power_of_2(head_dim // 2),
                HEADS=next_power_of_2(num_heads), KV_HEADS=next_power_of_2(num_kv_heads),
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
