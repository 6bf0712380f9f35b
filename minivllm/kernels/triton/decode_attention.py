"""Paged decode attention: one new token per sequence reads its whole context once.

A program handles one KV head of one sequence, so that a key is read once for all query heads that share it. Where that
gives too few programs to fill the GPU (few sequences, few heads, long contexts), each context is split among several,
and a second kernel puts their parts together: Flash-Decoding (Dao et al., 2023). The softmax is computed online
(Milakov and Gimelshein, 2018, arXiv:1805.02867), with 2**x in place of e**x because that is one instruction.

The keys and values come from blocks that lie anywhere, so each tile of positions is first looked up in the block table:
PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import math
import sys
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, needs_float32, on_device

MAX_SPLITS = 64
TOKENS_PER_SPLIT = 256
"""Fewer tokens than this are not worth a program of their own."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor that the split aims at."""


@checks.DECODE
def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one new token per sequence: see `reference.paged_decode_attention`.

    Args:
        query, key_cache, value_cache, block_tables, context_lens, scale, window: As there.
        num_splits: Programs among which each context is split; chosen from the sizes if None.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    group = num_heads // num_kv_heads
    check_launch(query, head_dim, group)
    out = query.new_empty(query.shape)
    if num_seqs == 0:
        return out
    if num_splits is None:
        max_context = min(block_tables.shape[1] * block_size, window or sys.maxsize)
        num_splits = choose_num_splits(num_seqs * num_kv_heads, max_context, _num_processors(query.device))
    if not 1 <= num_splits <= MAX_SPLITS:
        raise KernelError(f"num_splits is {num_splits}, but must be 1 to {MAX_SPLITS}.")
    channels = max(16, triton.next_power_of_2(head_dim))
    tile, num_warps, num_stages = choose_tile(channels, query.element_size())
    # A part is a weighted sum, with the largest score and the sum of weights in two more columns.
    parts = out.new_empty((num_seqs, num_heads, num_splits, channels + 2), dtype=torch.float32) if num_splits > 1 else out
    with on_device(query):
        _decode[(num_seqs, num_kv_heads, num_splits)](
            out, parts, query, key_cache, value_cache, block_tables, context_lens, scale * math.log2(math.e),
            *out.stride()[:2], *parts.stride()[:3], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            block_tables.stride(0),
            GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, CHANNELS=channels, BLOCK_SIZE=block_size, TILE=tile, SPLITS=num_splits,
            WINDOW=window, EXACT=needs_float32(query.dtype), num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        if num_splits > 1:
            _combine[(num_seqs, num_heads)](
                out, parts, *out.stride()[:2], *parts.stride()[:3],
                HEAD_DIM=head_dim, CHANNELS=channels, SPLITS=num_splits, SPLITS_PADDED=triton.next_power_of_2(num_splits),
            )  # fmt: skip
    return out


def choose_num_splits(num_programs: int, max_context: int, num_processors: int) -> int:
    """Programs among which each context is split, so that all processors have work and none has too little.

    A power of 2, because the kernel is compiled for each number.
    """
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors, num_programs)
    worthwhile = max(1, min(wanted, max_context // TOKENS_PER_SPLIT, MAX_SPLITS))
    return 1 << (worthwhile.bit_length() - 1)


def choose_tile(channels: int, element_size: int) -> tuple[int, int, int]:
    """Tokens of a tile, warps and pipeline stages: tiles in flight must fit in shared memory and hide its latency."""
    row_bytes = channels * element_size
    if row_bytes <= 128:
        return 128, 4, 3
    if row_bytes <= 256:
        return 64, 4, 3
    if row_bytes <= 512:
        return 32, 4, 3
    return 16, 4, 2


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["table_stride"])  # it changes from step to step
def _decode(
    out_ptr, parts_ptr, query_ptr, key_ptr, value_ptr, tables_ptr, context_lens_ptr, scale,
    out_stride, out_head_stride, parts_stride, parts_head_stride, parts_split_stride, query_stride, query_head_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    table_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One sequence, one KV head, one split of the context. `scale` includes the factor from e**x to 2**x."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + seq).to(tl.int32)
    # With a window, the loops of all splits together begin at its first token: there is nothing to mask.
    first_token = tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
    split_len = tl.cdiv(tl.cdiv(context_len - first_token, TILE), SPLITS) * TILE
    first = first_token + split * split_len
    last = tl.minimum(first + split_len, context_len)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, CHANNELS)
    heads = kv_head * GROUP + rows
    query_inside = (rows < GROUP)[:, None] & (channels < HEAD_DIM)[None, :]
    query_rows = query_ptr + seq * query_stride + heads[:, None] * query_head_stride
    query = tl.load(query_rows + channels[None, :], mask=query_inside, other=0.0)
    if EXACT:
        query = query.to(tl.float32)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(first, last, TILE):
        positions = start + tl.arange(0, TILE)
        visible = positions < last
        inside = visible[:, None] & (channels < HEAD_DIM)[None, :]
        blocks = tl.load(tables_ptr + seq * table_stride + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        offsets = positions % BLOCK_SIZE
        key_rows = key_ptr + blocks * key_block_stride + offsets * key_slot_stride + kv_head * key_head_stride
        keys = tl.load(key_rows[:, None] + channels[None, :], mask=inside, other=0.0)
        value_rows = value_ptr + blocks * value_block_stride + offsets * value_slot_stride + kv_head * value_head_stride
        values = tl.load(value_rows[:, None] + channels[None, :], mask=inside, other=0.0)
        if EXACT:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)

        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        output = output * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = new_maximum

    if SPLITS == 1:
        output = output / tl.where(total > 0, total, 1.0)[:, None]
        out_rows = out_ptr + seq * out_stride + heads[:, None] * out_head_stride
        tl.store(out_rows + channels[None, :], output.to(out_ptr.dtype.element_ty), mask=query_inside)
    else:
        part_rows = parts_ptr + seq * parts_stride + heads * parts_head_stride + split * parts_split_stride
        tl.store(part_rows[:, None] + channels[None, :], output, mask=(rows < GROUP)[:, None])
        tl.store(part_rows + CHANNELS, maximum, mask=rows < GROUP)
        tl.store(part_rows + CHANNELS + 1, total, mask=rows < GROUP)


@triton.jit
def _combine(
    out_ptr, parts_ptr, out_stride, out_head_stride, parts_stride, parts_head_stride, parts_split_stride,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: its parts, each scaled to the largest score of all."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, SPLITS_PADDED)
    channels = tl.arange(0, CHANNELS)
    parts = parts_ptr + seq * parts_stride + head * parts_head_stride + splits * parts_split_stride
    maxima = tl.load(parts + CHANNELS, mask=splits < SPLITS, other=float("-inf"))
    totals = tl.load(parts + CHANNELS + 1, mask=splits < SPLITS, other=0.0)
    outputs = tl.load(parts[:, None] + channels[None, :], mask=(splits < SPLITS)[:, None], other=0.0)
    maximum = tl.max(maxima, axis=0)
    # A padded sequence has no scores at all; -inf minus -inf would be NaN.
    weights = tl.where(totals > 0, tl.exp2(maxima - tl.where(maximum > float("-inf"), maximum, 0.0)), 0.0)
    total = tl.sum(totals * weights, axis=0)
    output = tl.sum(outputs * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    out_row = out_ptr + seq * out_stride + head * out_head_stride
    tl.store(out_row + channels, output.to(out_ptr.dtype.element_ty), mask=channels < HEAD_DIM)
