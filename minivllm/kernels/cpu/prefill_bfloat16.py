"""`prefill_attention` for a cache in bfloat16, by instructions that multiply such numbers: AMX (see `amx`), or VDPBF16PS (see `panels`).

The steps are the same. Queries and weights are rounded to bfloat16, two in a word; sums are float32. The decode kernel rounds neither: the
two differ by more than the order of sums.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from minivllm.kernels.cpu.launch import LOG2_E, MINUS_INFINITY, round_bfloat16
from minivllm.kernels.cpu.native.amx import TILE_ROWS, TILE_WORDS, configure_tiles, multiply_tiles, release_tiles
from minivllm.kernels.cpu.native.features import HAS_BFLOAT16_AMX
from minivllm.kernels.cpu.native.panels import ATTENTION_ROWS, PANEL, ROW_PADDING, multiply_rows
from minivllm.kernels.cpu.native.softmax import finish, weigh
from minivllm.kernels.cpu.native.transpose import transpose
from minivllm.kernels.cpu.window import hide_scores, window_bounds

TOKENS = 64
"""Cached tokens that are attended to at a time: for AMX two tiles of 16 words with two tokens each, so that sums are loaded half as often."""


@njit(error_model="numpy")
def _copy_tokens(cache, table, kv_head, start, end, rows, channels):
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
def _new_tiles(num_words, head_dim):
    """Places for a tile of keys, `[TOKENS, words]`, and of values, `[channels, words]`."""
    num_channels = -(-head_dim // TILE_ROWS) * TILE_ROWS
    return np.zeros((TOKENS, num_words), np.uint32), np.zeros((num_channels, TOKENS // 2), np.uint32)


@njit(error_model="numpy")
def _load_tile_keys(key_cache, table, kv_head, start, end, rows, keys, channels):
    """Keys need not be transposed for AMX, as the rows of a tile are tokens."""
    _copy_tokens(key_cache, table, kv_head, start, end, keys.view(np.int16), channels)


@njit(error_model="numpy")
def _load_tile_values(value_cache, table, kv_head, start, end, values, channels):
    """Values must be, so that rows are channels."""
    _copy_tokens(value_cache, table, kv_head, start, end, values.view(np.int16).T, channels)


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
def _new_columns(num_words, head_dim):
    """The same places for VDPBF16PS, as `multiply_rows` takes them: `[tiles of rows, words, ATTENTION_ROWS + ROW_PADDING]`."""
    keys = np.zeros((TOKENS // ATTENTION_ROWS, num_words, ATTENTION_ROWS + ROW_PADDING), np.uint32)
    return keys, np.zeros((-(-head_dim // ATTENTION_ROWS), TOKENS // 2, ATTENTION_ROWS + ROW_PADDING), np.uint32)


@njit(error_model="numpy")
def _load_column_keys(key_cache, table, kv_head, start, end, rows, keys, channels):
    """By way of `rows`, `[TOKENS, words]`."""
    _copy_tokens(key_cache, table, kv_head, start, end, rows.view(np.int16), channels)
    for i in range(len(keys)):
        transpose(rows, i * ATTENTION_ROWS, keys, i, 0, ATTENTION_ROWS, 0, rows.shape[1])


@njit(error_model="numpy")
def _load_column_values(value_cache, table, kv_head, start, end, values, channels):
    """A word holds the numbers of two tokens."""
    block_size, head_dim = value_cache.shape[1], len(channels)
    nothing = np.zeros(head_dim, np.int16)
    for t in range(0, TOKENS, 2):
        first = second = nothing
        if start + t < end:
            first = value_cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
        if start + t + 1 < end:
            second = value_cache[table[(start + t + 1) // block_size], (start + t + 1) % block_size, kv_head]
        for d in range(head_dim):
            low, high = np.uint32(np.uint16(first[d])), np.uint32(np.uint16(second[d]))
            values[d // ATTENTION_ROWS, t // 2, d % ATTENTION_ROWS] = np.uint32(low | np.uint32(high << np.uint32(16)))


if HAS_BFLOAT16_AMX:
    _WORDS_MULTIPLE = TILE_WORDS
    _new_places, _load_keys, _load_values, _multiply = _new_tiles, _load_tile_keys, _load_tile_values, _multiply_tokens
else:
    _WORDS_MULTIPLE = 1
    _new_places, _load_keys, _load_values, _multiply = _new_columns, _load_column_keys, _load_column_values, multiply_rows


@njit(error_model="numpy")
def attend_bfloat16(query, key_cache, value_cache, table, kv_head, position, scale, window, out, channels, group):
    """One KV head for a tile of query tokens, the first of them at `position` of its sequence; with a `window`, 0 for none."""
    num_tokens, head_dim, group_size = len(query), len(channels), len(group)
    num_columns, end = num_tokens * group_size, position + num_tokens
    num_panels = -(-num_columns // PANEL)
    num_words = -(-head_dim // (2 * _WORDS_MULTIPLE)) * _WORDS_MULTIPLE
    rows = np.zeros((num_panels * PANEL, 2 * num_words), np.uint16)
    positions = np.full((num_panels, PANEL), -1, np.int32)
    for column in range(num_columns):
        token, head = column // group_size, kv_head * group_size + column % group_size
        positions[column // PANEL, column % PANEL] = position + token
        for d in range(head_dim):
            rows[column, d] = round_bfloat16(query[token, head, d] * (scale * LOG2_E))
    queries = np.empty((num_panels, num_words, PANEL), np.uint32)
    for panel in range(num_panels):
        transpose(rows.view(np.uint32), panel * PANEL, queries, panel, 0, PANEL, 0, num_words)
    maxima = np.full((num_panels, PANEL), MINUS_INFINITY, np.float32)
    sums = np.zeros((num_panels, PANEL), np.float32)
    keys, values = _new_places(num_words, head_dim)
    key_rows = np.zeros((TOKENS, num_words), np.uint32)
    nothing = np.zeros(num_panels * PANEL, np.float32)
    scores = np.empty((TOKENS, num_panels * PANEL), np.float32)
    weights = np.empty((num_panels, TOKENS // 2, PANEL), np.uint32)
    output = np.zeros((-(-head_dim // TILE_ROWS) * TILE_ROWS, num_panels * PANEL), np.float32)
    if HAS_BFLOAT16_AMX:
        configure_tiles(TILE_ROWS)
    begin, hidden_end = window_bounds(position, num_tokens, window)
    for start in range(begin, end, TOKENS):
        _load_keys(key_cache, table, kv_head, start, end, key_rows, keys, channels)
        _load_values(value_cache, table, kv_head, start, end, values, channels)
        first_panel = max(0, start - position) * group_size // PANEL  # columns before see nothing of this tile
        _multiply(keys, queries, first_panel, nothing, scores)
        if start < hidden_end:
            hide_scores(scores, start, position, window, first_panel * PANEL, num_columns, group_size)
        last_seen = positions - np.int32(start)
        for panel in range(first_panel, num_panels):
            weigh(scores, panel, last_seen, maxima, sums, output, weights)
        _multiply(values, weights, first_panel, output, output)
    if HAS_BFLOAT16_AMX:
        release_tiles()
    finish(output, sums, kv_head, out, channels, group)
