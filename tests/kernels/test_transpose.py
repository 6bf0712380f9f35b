"""Rows to columns, in blocks of registers and word by word."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from minivllm.kernels.cpu.native.transpose import transpose

_transpose = njit(lambda *arguments: transpose(*arguments))
FREE = -1


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70)), first_row=st.integers(0, 50), num_rows=st.integers(1, 40),
    ends=st.tuples(st.integers(0, 70), st.integers(0, 70)), before=st.integers(0, 3), after=st.integers(0, 3),
)  # fmt: skip
def test_transpose(sizes, first_row, num_rows, ends, before, after):
    """Rows beyond the last are as the last, and nothing else is written."""
    total_rows, num_words = sizes
    start, stop = sorted(min(end, num_words) for end in ends)
    x = np.arange(total_rows * num_words, dtype=np.int32).reshape(sizes)
    columns = np.full((2, num_words, before + num_rows + after), FREE, np.int32)
    _transpose(x, first_row, columns, 1, before, num_rows, start, stop)
    expected = np.full_like(columns, FREE)
    rows = np.minimum(first_row + np.arange(num_rows), total_rows - 1)
    expected[1, start:stop, before : before + num_rows] = x[rows, start:stop].T
    np.testing.assert_array_equal(columns, expected)
