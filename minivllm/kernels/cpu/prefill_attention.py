"""Paged prefill attention: a ragged batch of prompts, chunks behind a cached prefix, and decodes.

Arithmetic is the limit here, not memory: a tile of keys and values is loaded once for many queries, in float32 and with the
keys transposed, so that both products, queries by keys and weights by values, are sums of contiguous rows. FlashAttention (Dao et al., 2022, arXiv:2205.14135) does the same in a GPU's shared memory.
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
    load,
    use_threads_of_torch,
)
from minivllm.kernels.cpu.thread_pool import parallel_for

QUERY_TILE = 32
"""Query tokens that share a tile of the cache; even, because rows are taken two at a time."""


@checks.PREFILL
def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of a ragged batch: see `reference.paged_prefill_attention`."""
    check_launch(key_cache)
    starts, lengths = query_start_loc.numpy(), context_lens.numpy()
    out = query.new_empty(query.shape, dtype=torch.float32)
    out[int(starts[-1]) :] = 0
    _prefill(
        use_threads_of_torch(), _order_tiles(starts, lengths), as_numpy(query.float().contiguous()), as_numpy(key_cache),
        as_numpy(value_cache), block_tables.numpy(), lengths, starts, np.float32(scale), out.numpy(),
        constant(query.shape[2]), constant(query.shape[1] // key_cache.shape[2]),
    )  # fmt: skip
    return out.to(query.dtype)


def _order_tiles(starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
    """The query tiles of a prefill, those with the most work first: threads take one after the other, and the last are short.

    A tile's work is the context that it sees.

    Returns:
        `[tiles, 2]`: the sequence of each tile, and its first row in it.
    """
    tiles = [
        (context_len - (end - start) + first, seq, first)
        for seq, (start, end, context_len) in enumerate(zip(starts[:-1], starts[1:], context_lens, strict=True))
        for first in range(0, end - start, QUERY_TILE)
    ]
    tiles.sort(reverse=True)
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)[:, 1:].copy()


@njit(fastmath=FASTMATH, error_model="numpy", inline="always")
def _add_products(results, factors, rows, count):
    """results += factors @ rows for two rows of factors and the first `count` of `rows`, a multiple of 4.

    Each loaded number of `rows` is used for both results, and each loaded result takes four products.
    """
    for i in range(0, count, 4):
        a0, a1, a2, a3 = factors[0, i], factors[0, i + 1], factors[0, i + 2], factors[0, i + 3]
        b0, b1, b2, b3 = factors[1, i], factors[1, i + 1], factors[1, i + 2], factors[1, i + 3]
        for j in range(rows.shape[1]):
            r0, r1, r2, r3 = rows[i, j], rows[i + 1, j], rows[i + 2, j], rows[i + 3, j]
            results[0, j] += a0 * r0 + a1 * r1 + a2 * r2 + a3 * r3
            results[1, j] += b0 * r0 + b1 * r1 + b2 * r2 + b3 * r3


@njit(fastmath=FASTMATH, error_model="numpy")
def _attend(query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group):
    """One KV head for a tile of query tokens, the first of them at `position` of its sequence."""
    num_tokens, block_size = query.shape[0], key_cache.shape[1]
    head_dim, group_size = len(channels), len(group)
    num_rows, depth = QUERY_TILE * group_size, (head_dim + 3) // 4 * 4
    scaled = np.zeros((num_rows, depth), np.float32)
    output = np.zeros((num_rows, head_dim), np.float32)
    maxima = np.full(num_rows, MINUS_INFINITY, np.float32)
    sums = np.zeros(num_rows, np.float32)
    keys = np.zeros((depth, TILE), np.float32)
    values = np.zeros((TILE, head_dim), np.float32)
    scores = np.empty((2, TILE), np.float32)
    for row in range(num_tokens * group_size):
        for d in range(head_dim):
            scaled[row, d] = query[row // group_size, kv_head * group_size + row % group_size, d] * scale * LOG2_E
    for start in range(0, position + num_tokens, TILE):
        for t in range(min(TILE, position + num_tokens - start)):
            block, offset = table[(start + t) // block_size], (start + t) % block_size
            for d in range(head_dim):
                keys[d, t] = load(key_cache[block, offset, kv_head, d])
            for d in range(head_dim):
                values[t, d] = load(value_cache[block, offset, kv_head, d])
        for pair in range(0, num_tokens * group_size, 2):
            visible_end = position + (pair + 1) // group_size + 1 - start
            if visible_end <= 0:
                continue
            scores[:] = ZERO
            _add_products(scores, scaled[pair : pair + 2], keys, depth)
            for i in range(2):
                row = pair + i
                visible = min(TILE, position + row // group_size + 1 - start)
                scores[i, max(0, visible) :] = MINUS_INFINITY
                maximum = largest(scores[i], maxima[row])
                shift = maximum if maximum > MINUS_INFINITY else ZERO
                total = ZERO
                for t in range(TILE):
                    scores[i, t] = exp2(scores[i, t] - shift)
                    total += scores[i, t]
                if maximum > maxima[row]:
                    shrink = exp2(maxima[row] - maximum)
                    maxima[row] = maximum
                    sums[row] *= shrink
                    for d in range(head_dim):
                        output[row, d] *= shrink
                sums[row] += total
            _add_products(output[pair : pair + 2], scores, values, (min(TILE, visible_end) + 3) // 4 * 4)
    for row in range(num_tokens * group_size):
        for d in range(head_dim):
            out[row // group_size, kv_head * group_size + row % group_size, d] = output[row, d] / sums[row]


@njit(error_model="numpy")
def _prefill_part(part, tiles, query, key_cache, value_cache, block_tables, context_lens, starts, scale, out, channels, group):
    seq, first = tiles[part]
    start, end = starts[seq] + first, min(starts[seq] + first + QUERY_TILE, starts[seq + 1])
    position = context_lens[seq] - (starts[seq + 1] - start)
    for kv_head in range(key_cache.shape[2]):
        _attend(
            query[start:end], key_cache, value_cache, block_tables[seq], kv_head, position, scale, out[start:end],
            channels, group,
        )  # fmt: skip


@njit(error_model="numpy", cache=True)
def _prefill(num_threads, tiles, *arguments):
    parallel_for(num_threads, len(tiles), _prefill_part, (tiles, *arguments))
