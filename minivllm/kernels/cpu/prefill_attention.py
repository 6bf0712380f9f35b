"""Paged prefill attention: a ragged batch of prompts, chunks behind a cached prefix, and decodes.

Arithmetic is the limit here, not memory: a tile of keys and values is loaded once for many queries, as FlashAttention (Dao et al., 2022,
arXiv:2205.14135) does in a GPU's shared memory. The queries are the columns of all matrices, 16 of them in a vector:

    scores  = keys [tokens, channels] @ queries [channels, columns]
    weights = 2 ** (scores - the largest of their column so far)
    output += values.T [channels, tokens] @ weights [tokens, columns]

Both products are those of the linear layers (`panels`), with queries and weights in the place of a packed weight, and the softmax between
them needs no sum or maximum across a vector.

A sequence with a single new token is left to the decode kernel, so that its numbers are the same whether or not its batch has prompts. (The
last token of a prompt, if it is a chunk by itself, is computed so too: its sums have another order than in a longer chunk.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.cpu.decode_attention import _decode
from minivllm.kernels.cpu.features import HAS_BFLOAT16_AMX
from minivllm.kernels.cpu.launch import (
    LOG2_E,
    MINUS_INFINITY,
    TILE,
    ZERO,
    as_numpy,
    check_launch,
    constant,
    load,
    use_threads_of_torch,
)
from minivllm.kernels.cpu.panels import PANEL, ROW_PADDING, WIDTHS, multiply_panels
from minivllm.kernels.cpu.prefill_amx import attend_by_amx
from minivllm.kernels.cpu.softmax import finish, weigh
from minivllm.kernels.cpu.thread_pool import parallel_for

QUERY_TILE = 64
"""Query tokens that share a tile of the cache."""
ROWS = 8 if 8 in WIDTHS else 4
"""Rows of the products that are computed at a time: tokens of the scores, channels of the output. `TILE` is a multiple of it."""
_WIDTH = WIDTHS[ROWS]


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
    starts, lengths, tables = query_start_loc.numpy(), context_lens.numpy(), block_tables.numpy()
    queries, keys, values = (as_numpy(x) for x in (query.float().contiguous(), key_cache, value_cache))
    num_threads, scale = use_threads_of_torch(), np.float32(scale)
    channels, group = constant(query.shape[2]), constant(query.shape[1] // key_cache.shape[2])
    result = query.new_empty(query.shape, dtype=torch.float32)
    out = result.numpy()
    out[starts[-1] :] = 0
    decodes = np.flatnonzero(np.diff(starts) == 1)
    if len(decodes) > 0:
        rows = starts[decodes]
        attended = np.empty((len(rows), *out.shape[1:]), np.float32)
        _decode(queries[rows], keys, values, tables[decodes], lengths[decodes], scale, num_threads, attended, channels, group)
        out[rows] = attended
    tiles = _order_tiles(starts, lengths)
    if len(tiles) > 0:
        _prefill(num_threads, tiles, queries, keys, values, tables, lengths, starts, scale, out, channels, group)
    return result.to(query.dtype)


def _order_tiles(starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
    """The query tiles of a prefill, those with the most work first: threads take one after the other, and the last are short.

    A tile's work is the context that it sees. Sequences of one token have none: they are decodes.

    Returns:
        `[tiles, 2]`: the sequence of each tile, and its first row in it.
    """
    tiles = [
        (context_len - (end - start) + first, seq, first)
        for seq, (start, end, context_len) in enumerate(zip(starts[:-1], starts[1:], context_lens, strict=True))
        if end - start > 1
        for first in range(0, end - start, QUERY_TILE)
    ]
    tiles.sort(reverse=True)
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)[:, 1:].copy()


@njit(error_model="numpy")
def _multiply_rows(x, panels, first_panel, start, out):
    """`out` = `start` + `x` times the panels from `first_panel` on; `x` is `[tiles, words, ROWS + ROW_PADDING]`."""
    for i in range(len(x)):
        panel = first_panel
        while panel < len(panels):
            count = _WIDTH if len(panels) - panel >= _WIDTH else 1
            multiply_panels(
                x[i], panels, panel, start, out, i * ROWS, ROWS, count, 0, 0
            )  # all is in the cache: nothing to prefetch
            panel += count


@njit(error_model="numpy")
def _load_keys(key_cache, table, kv_head, start, end, keys, channels):
    """A tile of keys as `x` of the scores: `[TILE / ROWS, channels, ROWS + ROW_PADDING]`; zero beyond the end."""
    block_size = key_cache.shape[1]
    for t in range(TILE):
        if start + t < end:
            key = key_cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
            for d in range(len(channels)):
                keys[t // ROWS, d, t % ROWS] = load(key[d])
        else:
            for d in range(len(channels)):
                keys[t // ROWS, d, t % ROWS] = ZERO


@njit(error_model="numpy")
def _load_values(value_cache, table, kv_head, start, end, values, channels):
    """A tile of values as `x` of the output: `[channels / ROWS, TILE, ROWS + ROW_PADDING]`; zero beyond the end."""
    block_size, head_dim = value_cache.shape[1], len(channels)
    for t in range(TILE):
        if start + t < end:
            value = value_cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
            for i in range(head_dim // ROWS):
                for d in range(ROWS):
                    values[i, t, d] = load(value[i * ROWS + d])
            for d in range(head_dim // ROWS * ROWS, head_dim):
                values[d // ROWS, t, d % ROWS] = load(value[d])
        else:
            for i in range(len(values)):
                for d in range(ROWS):
                    values[i, t, d] = ZERO


@njit(error_model="numpy")
def _attend(query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group):
    """One KV head for a tile of query tokens, the first of them at `position` of its sequence."""
    num_tokens, head_dim, group_size = len(query), len(channels), len(group)
    num_columns, end = num_tokens * group_size, position + num_tokens
    num_panels = -(-num_columns // PANEL)
    queries = np.zeros((num_panels, head_dim, PANEL), np.float32)
    positions = np.full((num_panels, PANEL), -1, np.int32)
    for column in range(num_columns):
        token, head = column // group_size, kv_head * group_size + column % group_size
        positions[column // PANEL, column % PANEL] = position + token
        for d in range(head_dim):
            queries[column // PANEL, d, column % PANEL] = query[token, head, d] * scale * LOG2_E
    maxima = np.full((num_panels, PANEL), MINUS_INFINITY, np.float32)
    sums = np.zeros((num_panels, PANEL), np.float32)
    keys = np.empty((TILE // ROWS, head_dim, ROWS + ROW_PADDING), np.float32)
    values = np.zeros((-(-head_dim // ROWS), TILE, ROWS + ROW_PADDING), np.float32)
    nothing = np.zeros(num_panels * PANEL, np.float32)
    scores = np.empty((TILE, num_panels * PANEL), np.float32)
    weights = np.empty((num_panels, TILE, PANEL), np.float32)
    output = np.zeros((len(values) * ROWS, num_panels * PANEL), np.float32)
    for start in range(0, end, TILE):
        _load_keys(key_cache, table, kv_head, start, end, keys, channels)
        _load_values(value_cache, table, kv_head, start, end, values, channels)
        first_panel = max(0, start - position) * group_size // PANEL  # columns before see nothing of this tile
        _multiply_rows(keys, queries, first_panel, nothing, scores)
        last_seen = positions - np.int32(start)
        for panel in range(first_panel, num_panels):
            weigh(scores, panel, last_seen, maxima, sums, output, weights)
        _multiply_rows(values, weights, first_panel, output, output)
    finish(output, sums, kv_head, out, channels, group)


def attend(*arguments):
    """One KV head for a tile of query tokens, by whichever instructions suit the cache."""
    raise NotImplementedError("only within compiled functions")


@overload(attend)
def _compile_attend(query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group):
    kernel = attend_by_amx if HAS_BFLOAT16_AMX and key_cache.dtype == types.int16 else _attend
    return lambda query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group: kernel(
        query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group
    )


@njit(error_model="numpy")
def _prefill_part(part, tiles, query, key_cache, value_cache, block_tables, context_lens, starts, scale, out, channels, group):
    """A KV head of a tile of queries."""
    num_kv_heads = key_cache.shape[2]
    seq, first = tiles[part // num_kv_heads]
    start, end = starts[seq] + first, min(starts[seq] + first + QUERY_TILE, starts[seq + 1])
    position = context_lens[seq] - (starts[seq + 1] - start)
    attend(
        query[start:end], key_cache, value_cache, block_tables[seq], part % num_kv_heads, position, scale, out[start:end],
        channels, group,
    )  # fmt: skip


@njit(error_model="numpy", cache=True)
def _prefill(num_threads, tiles, query, key_cache, *arguments):
    num_parts = len(tiles) * key_cache.shape[2]
    parallel_for(num_threads, num_parts, _prefill_part, (tiles, query, key_cache, *arguments))
