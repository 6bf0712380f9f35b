"""The sliding window of a prefill: the loop begins at the first token that a tile of queries sees, and where windows begin, scores are hidden."""

from __future__ import annotations

from numba import njit

from minivllm.kernels.cpu.launch import MINUS_INFINITY


@njit(error_model="numpy")
def window_bounds(position, num_tokens, window):
    """Of query tokens from `position` on: the first cached token that one of them sees, and the first that all of them may see."""
    if window == 0:
        return 0, 0
    return max(0, position - window + 1), position + num_tokens - window


@njit(error_model="numpy")
def hide_scores(scores, start, position, window, first_column, num_columns, group_size):
    """What lies before the window of a query counts for nothing: the scores, `[tokens, columns]`, of the cached tokens from `start` on."""
    for column in range(first_column, num_columns):
        first_seen = position + column // group_size - window + 1
        for t in range(min(len(scores), first_seen - start)):
            scores[t, column] = MINUS_INFINITY
