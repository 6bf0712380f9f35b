"""What happens to a token's query, key and value between the QKV product and attention, in one launch.

As single operations these are four kernels (two norms, the rotation, the write to the cache). In a decode step each of them has
so little to do that starting it takes much of its time. vLLM fuses them too: `fused_qk_norm_rope`, `do_rope_and_kv_cache_update`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, on_device
from minivllm.kernels.triton.rows import NUMBERS_PER_PROGRAM


@checks.NORM_ROPE_AND_CACHE
def norm_rope_and_cache(
    positions: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Normalize and rotate queries and keys, and write keys and values to the cache: see `reference.norm_rope_and_cache`.

    The numbers are those of the single kernels: rounded where these write their results, and summed in the same order.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    check_launch(query, head_dim)
    new_query = query.new_empty(query.shape)
    if num_tokens == 0:
        return new_query
    channels = triton.next_power_of_2(head_dim)
    heads = max(1, NUMBERS_PER_PROGRAM // channels)
    query_parts, kv_parts = triton.cdiv(num_heads, heads), triton.cdiv(num_kv_heads, heads)
    has_norm = query_weight is not None and key_weight is not None
    with on_device(query):
        _norm_rope_and_cache[(num_tokens, query_parts + kv_parts)](
            new_query, query, key, value, key_cache, value_cache, positions, slot_mapping, cos, sin,
            query_weight if has_norm else query, key_weight if has_norm else query, eps, num_heads, num_kv_heads, query_parts,
            *new_query.stride()[:2], *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            *key_cache.stride()[:3], *value_cache.stride()[:3],
            NORM=has_norm, BLOCK_SIZE=key_cache.shape[1], HEAD_DIM=head_dim, CHANNELS=channels, HALF=head_dim // 2,
            PAIRS=triton.next_power_of_2(head_dim // 2), HEADS=heads,
        )  # fmt: skip
    return new_query


@triton.jit
def _norm_rope_and_cache(
    new_query_ptr, query_ptr, key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    query_weight_ptr, key_weight_ptr, eps, num_heads, num_kv_heads, query_parts,
    new_query_stride, new_query_head_stride, query_stride, query_head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, key_cache_block_stride, key_cache_slot_stride, key_cache_head_stride,
    value_cache_block_stride, value_cache_slot_stride, value_cache_head_stride,
    NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: of its query, or of its key and value."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pairs = tl.arange(0, PAIRS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    if part < query_parts:
        heads = (part * HEADS + tl.arange(0, HEADS))[:, None]
        inside = heads < num_heads
        _norm_and_rotate(
            new_query_ptr + token * new_query_stride + heads * new_query_head_stride, inside,
            query_ptr + token * query_stride + heads * query_head_stride, inside, query_weight_ptr, eps, cos, sin,
            NORM, HEAD_DIM, CHANNELS, HALF, PAIRS,
        )  # fmt: skip
    else:
        heads = ((part - query_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        slot = tl.load(slots_ptr + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        inside = heads < num_kv_heads
        written = inside & (slot >= 0)  # padding has no slot
        key_slot = key_cache_ptr + block * key_cache_block_stride + offset * key_cache_slot_stride
        _norm_and_rotate(
            key_slot + heads * key_cache_head_stride, written,
            key_ptr + token * key_stride + heads * key_head_stride, inside, key_weight_ptr, eps, cos, sin,
            NORM, HEAD_DIM, CHANNELS, HALF, PAIRS,
        )  # fmt: skip
        channels = tl.arange(0, CHANNELS)[None, :]
        written = written & (channels < HEAD_DIM)
        value = tl.load(value_ptr + token * value_stride + heads * value_head_stride + channels, mask=written)
        value_slot = value_cache_ptr + block * value_cache_block_stride + offset * value_cache_slot_stride
        tl.store(value_slot + heads * value_cache_head_stride + channels, value, mask=written)


@triton.jit
def _norm_and_rotate(
    out_rows, written, x_rows, inside, weight_ptr, eps, cos, sin,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Heads at `x_rows`, `[HEADS, 1]`, to `out_rows`: channel i and channel i + HALF are the coordinates that are rotated."""
    pairs = tl.arange(0, PAIRS)[None, :]
    is_pair = pairs < HALF
    first = tl.load(x_rows + pairs, mask=inside & is_pair, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(x_rows + HALF + pairs, mask=inside & is_pair, other=0.0).to(tl.float32)
    if NORM:
        # Whole heads once more, so that squares are summed in the order of `_rms_norm`. The processor has just read them.
        channels = tl.arange(0, CHANNELS)[None, :]
        x = tl.load(x_rows + channels, mask=inside & (channels < HEAD_DIM), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weight_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    tl.store(out_rows + pairs, (first * cos - second * sin).to(dtype), mask=written & is_pair)
    tl.store(out_rows + HALF + pairs, (second * cos + first * sin).to(dtype), mask=written & is_pair)
