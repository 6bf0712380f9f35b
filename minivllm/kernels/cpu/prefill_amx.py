"""`prefill_attention` by AMX, for a cache in bfloat16: the same steps with the products of `amx`.

Keys need not be transposed, as the rows of a tile are tokens; values must be, so that rows are channels. Queries and weights are rounded to
bfloat16, sums are float32. The decode kernel rounds neither: the two differ by more than the order of sums.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from minivllm.kernels.cpu.amx import TILE_ROWS, TILE_WORDS, configure_tiles, multiply_tiles, release_tiles
from minivllm.kernels.cpu.launch import LOG2_E, MINUS_INFINITY, round_bfloat16
from minivllm.kernels.cpu.panels import PANEL
from minivllm.kernels.cpu.softmax import finish, weigh

TOKENS = 64
"""Cached tokens that are attended to at a time: two tiles of 16 words with two tokens each, so that sums are loaded half as often."""


@njit(error_model="numpy")
def _multiply_tokens(x, panels, first_panel, start, out):
    """`out` = `start` + `x` times the panels from `first_panel` on."""
    for row in range(0, len(x), 2 * TILE_ROWS):
        num_tiles = 2 if row + TILE_ROWS < len(x) else 1
        for panel in range(first_panel, len(panels), 2):
            multiply_tiles(
                x, row, row + TILE_ROWS, panels, panel, start, out, row, row + TILE_ROWS, num_tiles, min(2, len(panels) - panel)
            )


@njit(error_model="numpy")
def _load_tokens(cache, table, kv_head, start, end, rows, channels):
    """A tile of keys, or of values transposed: `[TOKENS, channels]`, zero beyond the end."""
    block_size = cache.shape[1]
    for t in range(TOKENS):
        if start + t < end:
            numbers = cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
            for d in range(len(channels)):
                rows[t, d] = numbers[d]
        else:
            for d in range(len(channels)):
                rows[t, d] = 0


@njit(error_model="numpy")
def attend_by_amx(query, key_cache, value_cache, table, kv_head, position, scale, out, channels, group):
    """One KV head for a tile of query tokens, the first of them at `position` of its sequence."""
    num_tokens, head_dim, group_size = len(query), len(channels), len(group)
    num_columns, end = num_tokens * group_size, position + num_tokens
    num_panels = -(-num_columns // PANEL)
    num_words = -(-head_dim // (2 * TILE_WORDS)) * TILE_WORDS
    queries = np.zeros((num_panels, num_words, PANEL, 2), np.uint16)
    positions = np.full((num_panels, PANEL), -1, np.int32)
    for column in range(num_columns):
        token, head = column // group_size, kv_head * group_size + column % group_size
        positions[column // PANEL, column % PANEL] = position + token
        for d in range(head_dim):
            queries[column // PANEL, d // 2, column % PANEL, d % 2] = round_bfloat16(query[token, head, d] * scale * LOG2_E)
    query_words = queries.reshape((num_panels, num_words, 2 * PANEL)).view(np.uint32)
    maxima = np.full((num_panels, PANEL), MINUS_INFINITY, np.float32)
    sums = np.zeros((num_panels, PANEL), np.float32)
    keys = np.zeros((TOKENS, 2 * num_words), np.int16)
    values = np.zeros((-(-head_dim // TILE_ROWS) * TILE_ROWS, TOKENS), np.int16)
    nothing = np.zeros(num_panels * PANEL, np.float32)
    scores = np.empty((TOKENS, num_panels * PANEL), np.float32)
    weights = np.empty((num_panels, TOKENS // 2, PANEL), np.uint32)
    output = np.zeros((len(values), num_panels * PANEL), np.float32)
    configure_tiles(TILE_ROWS)
    for start in range(0, end, TOKENS):
        _load_tokens(key_cache, table, kv_head, start, end, keys, channels)
        _load_tokens(value_cache, table, kv_head, start, end, values.T, channels)
        first_panel = max(0, start - position) * group_size // PANEL  # columns before see nothing of this tile
        _multiply_tokens(keys.view(np.uint32), query_words, first_panel, nothing, scores)
        last_seen = positions - np.int32(start)
        for panel in range(first_panel, num_panels):
            weigh(scores, panel, last_seen, maxima, sums, output, weights)
        _multiply_tokens(values.view(np.uint32), weights, first_panel, output, output)
    release_tiles()
    finish(output, sums, kv_head, out, channels, group)
