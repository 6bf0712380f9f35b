"""`prefill_attention` in float32, whatever the cache holds."""

from __future__ import annotations

import numpy as np
from numba import njit

from minivllm.kernels.cpu.launch import LOG2_E, MINUS_INFINITY, TILE, ZERO, load
from minivllm.kernels.cpu.native.panels import ATTENTION_ROWS, PANEL, ROW_PADDING, multiply_rows
from minivllm.kernels.cpu.native.softmax import finish, weigh
from minivllm.kernels.cpu.native.transpose import transpose
from minivllm.kernels.cpu.window import hide_scores, window_bounds


@njit(error_model="numpy")
def _load_keys(key_cache, table, kv_head, start, end, rows, keys, channels):
    """A tile of keys as `x` of the scores: `[TILE / ATTENTION_ROWS, channels, ATTENTION_ROWS + ROW_PADDING]`, by way of `rows`; zero beyond the end."""
    block_size, head_dim = key_cache.shape[1], len(channels)
    for t in range(TILE):
        if start + t < end:
            key = key_cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
            for d in range(head_dim):
                rows[t, d] = load(key[d])
        else:
            for d in range(head_dim):
                rows[t, d] = ZERO
    for i in range(len(keys)):
        transpose(rows, i * ATTENTION_ROWS, keys, i, 0, ATTENTION_ROWS, 0, head_dim)


@njit(error_model="numpy")
def _load_values(value_cache, table, kv_head, start, end, values, channels):
    """A tile of values as `x` of the output: `[channels / ATTENTION_ROWS, TILE, ATTENTION_ROWS + ROW_PADDING]`; zero beyond the end."""
    block_size, head_dim = value_cache.shape[1], len(channels)
    for t in range(TILE):
        if start + t < end:
            value = value_cache[table[(start + t) // block_size], (start + t) % block_size, kv_head]
            for i in range(head_dim // ATTENTION_ROWS):
                for d in range(ATTENTION_ROWS):
                    values[i, t, d] = load(value[i * ATTENTION_ROWS + d])
            for d in range(head_dim // ATTENTION_ROWS * ATTENTION_ROWS, head_dim):
                values[d // ATTENTION_ROWS, t, d % ATTENTION_ROWS] = load(value[d])
        else:
            for i in range(len(values)):
                for d in range(ATTENTION_ROWS):
                    values[i, t, d] = ZERO


@njit(error_model="numpy")
def attend_float32(query, key_cache, value_cache, table, kv_head, position, scale, window, out, channels, group):
    """One KV head for a tile of query tokens, the first of them at `position` of its sequence; with a `window`, 0 for none."""
    num_tokens, head_dim, group_size = len(query), len(channels), len(group)
    num_columns, end = num_tokens * group_size, position + num_tokens
    num_panels = -(-num_columns // PANEL)
    rows = np.zeros((max(num_panels * PANEL, TILE), head_dim), np.float32)
    positions = np.full((num_panels, PANEL), -1, np.int32)
    for column in range(num_columns):
        token, head = column // group_size, kv_head * group_size + column % group_size
        positions[column // PANEL, column % PANEL] = position + token
        for d in range(head_dim):
            rows[column, d] = query[token, head, d] * (scale * LOG2_E)
    queries = np.empty((num_panels, head_dim, PANEL), np.float32)
    for panel in range(num_panels):
        transpose(rows, panel * PANEL, queries, panel, 0, PANEL, 0, head_dim)
    maxima = np.full((num_panels, PANEL), MINUS_INFINITY, np.float32)
    sums = np.zeros((num_panels, PANEL), np.float32)
    keys = np.empty((TILE // ATTENTION_ROWS, head_dim, ATTENTION_ROWS + ROW_PADDING), np.float32)
    values = np.zeros((-(-head_dim // ATTENTION_ROWS), TILE, ATTENTION_ROWS + ROW_PADDING), np.float32)
    nothing = np.zeros(num_panels * PANEL, np.float32)
    scores = np.empty((TILE, num_panels * PANEL), np.float32)
    weights = np.empty((num_panels, TILE, PANEL), np.float32)
    output = np.zeros((len(values) * ATTENTION_ROWS, num_panels * PANEL), np.float32)
    begin, hidden_end = window_bounds(position, num_tokens, window)
    for start in range(begin, end, TILE):
        _load_keys(key_cache, table, kv_head, start, end, rows, keys, channels)
        _load_values(value_cache, table, kv_head, start, end, values, channels)
        first_panel = max(0, start - position) * group_size // PANEL  # columns before see nothing of this tile
        multiply_rows(keys, queries, first_panel, nothing, scores)
        if start < hidden_end:
            hide_scores(scores, start, position, window, first_panel * PANEL, num_columns, group_size)
        last_seen = positions - np.int32(start)
        for panel in range(first_panel, num_panels):
            weigh(scores, panel, last_seen, maxima, sums, output, weights)
        multiply_rows(values, weights, first_panel, output, output)
    finish(output, sums, kv_head, out, channels, group)
