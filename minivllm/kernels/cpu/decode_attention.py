"""Paged decode attention: one new token per sequence reads its whole context once.

Every cached number is used for one multiplication per query head, so memory bandwidth is the limit. To come close to it:

- The heads of a token are contiguous, so one thread handles them all and reads sequentially.
- Memory is prefetched one tile ahead, because the hardware cannot predict the next block.
- The threads share the cached tokens of the whole batch evenly, wherever sequences begin and end. Each sequence is cut into pieces of
  some tiles, and their partial results are combined, as in Flash-Decoding (Dao et al., 2023).

Where a sequence is cut depends on its length alone, not on its batch or the number of threads. So its sums always have the same order, and
its result is the same to the last bit.

The softmax is computed online (Milakov and Gimelshein, 2018, arXiv:1805.02867): with each tile the largest score so far
may rise, and earlier sums are scaled down accordingly.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.cpu.launch import (
    FASTMATH,
    LOG2_E,
    MINUS_INFINITY,
    TILE,
    ZERO,
    as_numpy,
    check_launch,
    constant,
    exp2,
    largest,
    use_threads_of_torch,
)
from minivllm.kernels.cpu.native.decode_products import TOKENS, add_value, add_values_of_tokens, score_tokens
from minivllm.kernels.cpu.native.memory import prefetch
from minivllm.kernels.cpu.native.thread_pool import parallel_for

PARTS_PER_THREAD = 2
"""Runs of pieces that the batch is divided into, for each thread."""
MIN_TILES, MAX_PIECES = 4, 64
"""The fewest tiles of a piece, and the most pieces of a sequence."""


@checks.DECODE
def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of one new token per sequence: see `reference.paged_decode_attention`."""
    check_launch(key_cache)
    num_threads = use_threads_of_torch()
    out = query.new_empty(query.shape, dtype=torch.float32)
    _decode(
        as_numpy(query.float().contiguous()), as_numpy(key_cache), as_numpy(value_cache), block_tables.numpy(), context_lens.numpy(),
        np.float32(scale), window, num_threads, out.numpy(),
        constant(query.shape[2]), constant(query.shape[1] // key_cache.shape[2]),
    )  # fmt: skip
    return out.to(query.dtype)


@njit
def tile_size(block_size):
    """Tokens of a tile: whole blocks, about TILE tokens."""
    return max(1, TILE // block_size) * block_size


@njit
def piece_size(num_tiles):
    """Tiles of a piece, in a sequence of `num_tiles`."""
    return max(MIN_TILES, (num_tiles + MAX_PIECES - 1) // MAX_PIECES)


@njit
def common_pieces(first_tile, part, num_parts, seq):
    """The pieces of a sequence that begin in a part of the batch's tiles: the first, and one past the last."""
    num_tiles, start, size = first_tile[-1], first_tile[seq], piece_size(first_tile[seq + 1] - first_tile[seq])
    first = max(num_tiles * part // num_parts, start) - start
    last = min(num_tiles * (part + 1) // num_parts, first_tile[seq + 1]) - start
    return (first + size - 1) // size, (last + size - 1) // size


@njit(error_model="numpy")
def _next_block(table, next_table, position, start, context_len, tile, block_size):
    """The block to prefetch: one tile after `position`, which is in the tile from `start` on; past the context, the next sequence's."""
    if position + tile < context_len:
        return table[(position + tile) // block_size]
    return next_table[min((position - start) // block_size, len(next_table) - 1)]


@njit(fastmath=FASTMATH, error_model="numpy")
def _attend(
    query, key_cache, value_cache, table, next_table, first, last, first_seen, context_len, scale, output, maxima, sums, channels, group
):  # fmt: skip
    """Attend to the cached tokens from `first` to `last`: unnormalized output, largest score and sum of each head. Those before `first_seen` count
    for nothing."""
    num_heads, head_dim = query.shape[0], len(channels)
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    tile = tile_size(block_size)
    scaled = np.empty((num_heads, head_dim), np.float32)
    weights = np.empty((num_heads, tile + TOKENS), np.float32)  # scores are written that many at a time
    for head in range(num_heads):
        maxima[head] = MINUS_INFINITY
        sums[head] = ZERO
        for d in range(head_dim):
            scaled[head, d] = query[head, d] * scale * LOG2_E
            output[head, d] = ZERO
    for start in range(first, last, tile):
        end = min(start + tile, last)
        # Scores: the dot product of each query head with the key that its group shares.
        for block_start in range(start, end, block_size):
            block, length = table[block_start // block_size], min(block_size, end - block_start)
            next_block = _next_block(table, next_table, block_start, start, context_len, tile, block_size)
            for t in range(0, length, TOKENS):
                for kv_head in range(num_kv_heads):
                    for i in range(TOKENS):
                        prefetch(key_cache, next_block, t + i, kv_head, channels)
                    score_tokens(scaled, kv_head, key_cache, block, t, length, weights, block_start - start + t, channels, group)
        # Online softmax: scores become weights, relative to the largest score so far.
        for head in range(num_heads):
            row = weights[head, : end - start]
            for t in range(first_seen - start):
                row[t] = MINUS_INFINITY
            maximum = largest(row, maxima[head])
            total = ZERO
            for t in range(end - start):
                row[t] = exp2(row[t] - maximum)
                total += row[t]
            if maximum > maxima[head]:
                shrink = exp2(maxima[head] - maximum)
                maxima[head] = maximum
                sums[head] *= shrink
                for d in range(head_dim):
                    output[head, d] *= shrink
            sums[head] += total
        # Values, weighted.
        for block_start in range(start, end, block_size):
            block, length = table[block_start // block_size], min(block_size, end - block_start)
            next_block = _next_block(table, next_table, block_start, start, context_len, tile, block_size)
            for t in range(0, length - length % TOKENS, TOKENS):
                for kv_head in range(num_kv_heads):
                    for i in range(TOKENS):
                        prefetch(value_cache, next_block, t + i, kv_head, channels)
                    add_values_of_tokens(
                        weights, block_start - start + t, value_cache, block, t, kv_head, output, channels, group
                    )  # fmt: skip
            for t in range(length - length % TOKENS, length):
                for kv_head in range(num_kv_heads):
                    add_value(weights, block_start - start + t, value_cache, block, t, kv_head, output, channels, group)


@njit(error_model="numpy")
def _attend_part(
    part, query, key_cache, value_cache, block_tables, context_lens, first_block, first_tile, first_piece, scale, window, num_parts, outputs,
    maxima, sums, channels, group,
):  # fmt: skip
    block_size = key_cache.shape[1]
    tile = tile_size(block_size)
    for seq in range(len(query)):
        first, last = common_pieces(first_tile, part, num_parts, seq)
        size = tile * piece_size(first_tile[seq + 1] - first_tile[seq])
        next_seq = min(seq + 1, len(query) - 1)
        # Tables and positions without the blocks before the window.
        table, next_table = block_tables[seq, first_block[seq] :], block_tables[next_seq, first_block[next_seq] :]
        context_len = context_lens[seq] - first_block[seq] * block_size
        first_seen = max(0, context_len - window) if window > 0 else 0
        for piece in range(first, last):
            place = first_piece[seq] + piece
            _attend(
                query[seq], key_cache, value_cache, table, next_table, piece * size, min((piece + 1) * size, context_len), first_seen,
                context_len, scale, outputs[place], maxima[place], sums[place], channels, group,
            )  # fmt: skip


@njit(fastmath=FASTMATH, error_model="numpy")
def _combine_pieces(seq, first_piece, outputs, maxima, sums, out):
    """Put a sequence together from its pieces, in their order."""
    num_heads, head_dim = out.shape[1:]
    for head in range(num_heads):
        maximum, total = MINUS_INFINITY, ZERO
        for d in range(head_dim):
            out[seq, head, d] = ZERO
        for place in range(first_piece[seq], first_piece[seq + 1]):
            new_maximum = max(maximum, maxima[place, head])
            shrink, weight = exp2(maximum - new_maximum), exp2(maxima[place, head] - new_maximum)
            maximum, total = new_maximum, total * shrink + sums[place, head] * weight
            for d in range(head_dim):
                out[seq, head, d] = out[seq, head, d] * shrink + outputs[place, head, d] * weight
        if first_piece[seq] < first_piece[seq + 1]:
            for d in range(head_dim):
                out[seq, head, d] /= total


@njit(error_model="numpy", cache=True)
def _decode(query, key_cache, value_cache, block_tables, context_lens, scale, window, num_threads, out, channels, group):
    num_seqs, num_heads, head_dim = query.shape
    block_size = key_cache.shape[1]
    tile = tile_size(block_size)
    first_tile, first_piece = np.zeros(num_seqs + 1, np.int64), np.zeros(num_seqs + 1, np.int64)
    first_block = np.zeros(num_seqs, np.int64)  # that the window touches
    for seq in range(num_seqs):
        if window > 0:
            first_block[seq] = max(0, context_lens[seq] - window) // block_size
        num_tiles = (context_lens[seq] - first_block[seq] * block_size + tile - 1) // tile
        size = piece_size(num_tiles)
        first_tile[seq + 1] = first_tile[seq] + num_tiles
        first_piece[seq + 1] = first_piece[seq] + (num_tiles + size - 1) // size
    num_parts = 1 if num_threads == 1 else PARTS_PER_THREAD * num_threads
    outputs = np.empty((first_piece[-1], num_heads, head_dim), np.float32)
    maxima = np.empty((first_piece[-1], num_heads), np.float32)
    sums = np.empty((first_piece[-1], num_heads), np.float32)
    parallel_for(
        num_threads, num_parts, _attend_part,
        (
            query, key_cache, value_cache, block_tables, context_lens, first_block, first_tile, first_piece, scale, window, num_parts, outputs,
            maxima, sums, channels, group,
        ),
    )  # fmt: skip
    parallel_for(num_threads, num_seqs, _combine_pieces, (first_piece, outputs, maxima, sums, out))
