"""Paged prefill attention: a ragged batch of prompts, chunks behind a cached prefix, and decodes, in one launch.

FlashAttention (Dao et al., 2022, arXiv:2205.14135; 2023, arXiv:2307.08691) over a block table. A program handles a tile
of query tokens of one sequence and all query heads that share one KV head: the rows of its matrices are (token, head)
pairs, so that a key is read once for the whole group and a decode fills as many rows as there are heads in it.

The tiles of all sequences are numbered through, and a program finds its sequence by binary search: sequence i owns the
tiles from `query_start_loc[i] // tokens + i` on, which is always room enough (the trick is that of
`vllm/v1/attention/ops/triton_unified_attention.py`).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, needs_float32, on_device

LONG_PROMPT = 512
"""New tokens to a sequence from which on tiles are large. On an H100 the small ones are faster with 256, the large ones with 1,024."""


@checks.PREFILL
def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of a ragged batch: see `reference.paged_prefill_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = key_cache.shape[2], context_lens.shape[0]
    group = num_heads // num_kv_heads
    check_launch(query, head_dim, group)
    out = query.new_empty(query.shape).zero_()  # rows that belong to no sequence are 0
    if num_tokens == 0 or num_seqs == 0:
        return out
    channels = max(16, triton.next_power_of_2(head_dim))
    block_size = key_cache.shape[1]
    tiles = choose_tiles(channels, query.element_size(), group, block_size, num_tokens / num_seqs, window)
    rows, tile, num_warps, num_stages = tiles
    rows = max(rows, triton.next_power_of_2(group))
    tokens = rows // group
    with on_device(query):
        _prefill[(num_tokens // tokens + num_seqs, num_kv_heads)](
            out, query, key_cache, value_cache, block_tables, context_lens, query_start_loc, num_seqs,
            scale * math.log2(math.e),
            *out.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            block_tables.stride(0),
            GROUP=group, TOKENS=tokens, ROWS=rows, HEAD_DIM=head_dim, CHANNELS=channels, BLOCK_SIZE=block_size,
            TILE=tile, WINDOW=window, EXACT=needs_float32(query.dtype), num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def choose_tiles(
    channels: int, element_size: int, group: int, block_size: int, mean_tokens: float, window: int = 0
) -> tuple[int, int, int, int]:
    """Rows of a query tile, tokens of a key tile, warps and pipeline stages, for sequences with so many new tokens on average.

    Large tiles reuse more of what they load; queries, output and the tiles in flight must fit in registers and shared memory. A
    short sequence leaves much of a large tile empty, as a decode that shares the step with a prompt does.
    """
    if element_size == 4:
        return (64, 32, 8, 2) if channels <= 64 else (32, 32, 8, 2) if channels <= 128 else (16, 16, 4, 2)
    if channels <= 64:
        return 128, 64, 4, 3
    if channels > 128 or mean_tokens < LONG_PROMPT:
        return 64, 32, 4, 2
    # The largest needs every register; with more to compute for an address, or a window, some would be spilled.
    return (256, 64, 8, 3) if block_size <= 16 and not window and group & (group - 1) == 0 else (128, 64, 8, 3)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # they change from step to step
def _prefill(
    out_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, context_lens_ptr, starts_ptr, num_seqs, scale,
    out_stride, out_head_stride, query_stride, query_head_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    table_stride,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of query tokens of one sequence, one KV head. `scale` includes the factor from e**x to 2**x."""
    # The last tiles of a prompt see most, so they go first: the short ones fill up the end.
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, query_start, query_len, first_token = _find_tile(starts_ptr, query_tile, num_seqs, TOKENS)
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq).to(tl.int32)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, CHANNELS)
    tokens = first_token + rows // GROUP
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    # Where a group does not divide ROWS, the last rows are left over: computed, and not stored.
    own_rows = (rows < TOKENS * GROUP) & (tokens < query_len)
    inside = own_rows[:, None] & (channels < HEAD_DIM)[None, :]
    query_rows = query_ptr + (query_start + tokens).to(tl.int64) * query_stride + heads * query_head_stride
    query = tl.load(query_rows[:, None] + channels[None, :], mask=inside, other=0.0)
    if EXACT:
        query = query.to(tl.float32)

    first_position = context_len - query_len + first_token
    query_positions = first_position + rows // GROUP
    # With a window, a row may see nothing of its first tiles, and -inf minus -inf would be NaN.
    maximum = tl.full([ROWS], float("-inf") if WINDOW == 0 else -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, CHANNELS], tl.float32)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    key_ptr += kv_head.to(tl.int64) * key_head_stride
    value_ptr += kv_head.to(tl.int64) * value_head_stride
    # Tiles that every row sees whole need no mask; the ones along the diagonal do, and those where windows begin.
    unmasked_end = (first_position + 1) // TILE * TILE
    last = tl.minimum(context_len, first_position + TOKENS)
    first_key = 0
    unmasked_start = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        unmasked_start = tl.minimum(tl.cdiv(tl.maximum(first_position + TOKENS - WINDOW, 0), TILE) * TILE, unmasked_end)
        for start in range(first_key // TILE * TILE, unmasked_start, TILE):
            maximum, total, output = _attend(
                query, maximum, total, output, query_positions, start, first_key, last, scale, table_ptr, key_ptr, value_ptr,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
                HEAD_DIM, CHANNELS, BLOCK_SIZE, TILE, WINDOW, EXACT, MASKED=True,
            )  # fmt: skip
    for start in range(unmasked_start, unmasked_end, TILE):
        maximum, total, output = _attend(
            query, maximum, total, output, query_positions, start, first_key, last, scale, table_ptr, key_ptr, value_ptr,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            HEAD_DIM, CHANNELS, BLOCK_SIZE, TILE, WINDOW, EXACT, MASKED=False,
        )  # fmt: skip
    for start in range(unmasked_end, last, TILE):
        maximum, total, output = _attend(
            query, maximum, total, output, query_positions, start, first_key, last, scale, table_ptr, key_ptr, value_ptr,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            HEAD_DIM, CHANNELS, BLOCK_SIZE, TILE, WINDOW, EXACT, MASKED=True,
        )  # fmt: skip

    output *= (1 / (tl.where(total > 0, total, 1.0) if WINDOW > 0 else total))[:, None]
    # Found again, because the loops need all registers: nothing is kept during them only to know where the output goes.
    seq, query_start, query_len, first_token = _find_tile(starts_ptr, query_tile, num_seqs, TOKENS)
    pairs = first_token * GROUP + rows
    tokens, heads = pairs // GROUP, (kv_head * GROUP + pairs % GROUP).to(tl.int64)
    own_rows = (rows < TOKENS * GROUP) & (tokens < query_len)
    out_rows = out_ptr + (query_start + tokens).to(tl.int64) * out_stride + heads * out_head_stride
    inside = own_rows[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(out_rows[:, None] + channels[None, :], output.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _find_tile(starts_ptr, query_tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence that owns a tile (the last one whose first tile is not behind it), its first row, its number of new tokens,
    and which of these is the tile's first."""
    low = query_tile * 0  # 0, but a tensor, as it must be to change within a loop
    high = num_seqs
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle).to(tl.int32) // TOKENS + middle <= query_tile:
            low = middle
        else:
            high = middle
    query_start = tl.load(starts_ptr + low).to(tl.int32)
    query_len = tl.load(starts_ptr + low + 1).to(tl.int32) - query_start
    return low, query_start, query_len, (query_tile - (query_start // TOKENS + low)) * TOKENS


@triton.jit
def _attend(
    query, maximum, total, output, query_positions, start, first_key, last, scale, table_ptr, key_ptr, value_ptr,
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the cached tokens from `start` on."""
    positions = start + tl.arange(0, TILE)
    channels = tl.arange(0, CHANNELS)
    inside = (channels < HEAD_DIM)[None, :]
    if MASKED:
        visible = positions < last
        if WINDOW > 0:
            visible = visible & (positions >= first_key)
        inside = inside & visible[:, None]
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    offsets = positions % BLOCK_SIZE
    key_rows = key_ptr + blocks * key_block_stride + offsets * key_slot_stride
    keys = tl.load(key_rows[:, None] + channels[None, :], mask=inside, other=0.0)
    value_rows = value_ptr + blocks * value_block_stride + offsets * value_slot_stride
    values = tl.load(value_rows[:, None] + channels[None, :], mask=inside, other=0.0)
    if EXACT:
        keys = keys.to(tl.float32)
        values = values.to(tl.float32)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if MASKED:  # the causal rule; what lies behind `last` was not even loaded
        scores = tl.where(positions[None, :] <= query_positions[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(positions[None, :] > query_positions[:, None] - WINDOW, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    shrink = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores * scale - new_maximum[:, None])  # one instruction for the product and the difference
    total = total * shrink + tl.sum(weights, axis=1)
    output = output * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_maximum, total, output
