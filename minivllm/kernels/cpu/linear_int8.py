"""Linear layers with 8-bit weights: the loop of `linear`, four input features at a time.

The instruction (VPDPBUSD, of AVX-512 VNNI) multiplies four unsigned 8-bit integers with four signed ones and adds the products to a
32-bit sum, for 16 outputs at once; AMX does so for 16 rows as well (see `amx`). Inputs come as the two digits of `split_digits`; sums of
integers are exact, so the result is bitwise that of torch's operator, which is used where the instruction is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.kernels.cpu.amx import configure_tiles, multiply_row_tiles, release_tiles, tile_rows
from minivllm.kernels.cpu.features import HAS_INT8_AMX
from minivllm.kernels.cpu.launch import address
from minivllm.kernels.cpu.linear import (
    PARALLEL_NUMBERS,
    Packed,
    count_parts,
    multiply_tile,
    panels_of_part,
    tile_of,
    what_to_prefetch,
    words_of_part,
)
from minivllm.kernels.cpu.panels import FEW_ROWS, PANEL, ROW_PADDING
from minivllm.kernels.cpu.rows import _split
from minivllm.kernels.cpu.thread_pool import parallel_for
from minivllm.kernels.cpu.transpose import transpose
from minivllm.kernels.reference import DIGIT_BASE, DIGIT_ZERO, round_weight


class PackedInt8Weight(Packed):
    """An 8-bit weight in panels; each word holds four input features of one output, rounded by `round_weight`."""

    number_dtype = torch.int8
    word_dtype = np.int32
    pads_for_amx = HAS_INT8_AMX

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.scales = np.zeros_like(self.bias)
        # Digits are stored plus 64, which adds 64 times the sum of an output's weights: the sums start at minus that.
        self.corrections = np.zeros(len(self.bias), np.int32)

    def _round(self, first: int, rows: Tensor) -> Tensor:
        rounded, scales = round_weight(rows.float())
        self.scales[first : first + len(rows)] = scales.numpy()
        self.corrections[first : first + len(rows)] = (-DIGIT_ZERO * rounded.sum(dim=1, dtype=torch.int32)).numpy()
        return rounded

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.corrections, self.scales, self.bias

    def get_rows(self, outputs: Tensor) -> Tensor:
        """As they are multiplied: rounded."""
        rows = super().get_rows(outputs)
        rows.numpy()[:] *= self.scales[outputs.numpy(), None]
        return rows

    @property
    def multiply(self) -> Any:
        """The compiled product."""
        return multiply_int8


_ROWS = tuple(rows // 2 for rows in FEW_ROWS if rows % 2 == 0)
"""Numbers of rows whose digits, two for each, have a loop."""


@njit(error_model="numpy")
def _rows_of_tile(num_rows):
    """For a small batch, the fewest that hold it; else see `linear.padded_rows`."""
    best, best_cost = _ROWS[-1], 2 * num_rows + _ROWS[-1]
    for rows in _ROWS[::-1]:
        padded = -(-num_rows // rows) * rows
        cost = padded + padded * (_ROWS[-1] - rows) // 64
        if rows >= num_rows or (num_rows > _ROWS[-1] and cost < best_cost):
            best, best_cost = rows, cost
    return best


@njit(error_model="numpy")
def _split_into_words(x, num_words, num_threads):
    """The digits of `x`, `[2, rows, words]`, and the scales of its rows. Digits beyond the end are zero."""
    num_rows, in_features = x.shape
    digits = np.empty((2, num_rows, 4 * num_words), np.uint8)
    digits[:, :, in_features:] = DIGIT_ZERO
    row_scales = np.empty(num_rows, np.float32)
    _split(
        num_threads, num_rows, in_features, address(x), address(digits), 4 * num_words, num_rows, address(row_scales)
    )  # fmt: skip
    return digits.view(np.int32), row_scales


@njit(error_model="numpy")
def _transpose_part(part, num_parts, digits, columns, rows):
    """Tiles of both digits of some rows: all high ones, then all low ones."""
    start, stop = words_of_part(part, num_parts, columns.shape[1])
    for i in range(len(columns)):
        for digit in range(2):
            transpose(digits[digit], i * rows, columns, i, digit * rows, rows, start, stop)


@njit(error_model="numpy", cache=True)
def _multiply_vectors(x, weight, out, num_threads):
    """`linear.multiply_float32` for a packed 8-bit weight."""
    panels, corrections, scales, bias = weight
    num_words = panels.shape[1]
    digits, row_scales = _split_into_words(x, num_words, num_threads)
    rows = _rows_of_tile(len(x))
    width = tile_of(2 * rows)[1]
    columns = np.empty((-(-len(x) // rows), num_words, 2 * rows + ROW_PADDING), np.int32)
    num_parts = 1 if columns.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _transpose_part, (num_parts, digits, columns, rows))
    num_parts = count_parts(panels, num_threads)
    parallel_for(
        num_threads, num_parts, _multiply_part,
        (num_parts, columns, panels, corrections, scales, bias, row_scales, out, rows, width),
    )  # fmt: skip


@njit(error_model="numpy")
def _multiply_part(part, num_parts, columns, panels, corrections, scales, bias, row_scales, out, rows, width):
    """Some panels by all rows: the sums of both digits, one tile at a time, then their total."""
    first, last = panels_of_part(part, num_parts, len(panels), width)
    start, stop = first * PANEL, last * PANEL
    own_panels, own_corrections = panels[first:last], corrections[start:stop]
    sums = np.empty((2 * rows, stop - start), np.int32)
    for i in range(len(columns)):
        place, pace = what_to_prefetch(own_panels, 0, last - first, i, len(columns))
        multiply_tile(columns[i], own_panels, 0, last - first, own_corrections, sums, 0, 2 * rows, width, place, pace)
        for row in range(min(rows, len(row_scales) - i * rows)):
            token = i * rows + row
            _add_digits(
                sums[row], sums[rows + row], scales[start:stop], row_scales[token], bias[start:stop], out[token, start:stop]
            )


@njit(error_model="numpy", cache=True)
def _multiply_amx(x, weight, out, num_threads):
    """The same by AMX: of two tiles, one holds the high digits of some rows, the other the low ones. `out` needs no more rows than `x` has."""
    panels, corrections, scales, bias = weight
    digits, row_scales = _split_into_words(x, panels.shape[1], num_threads)
    num_parts = count_parts(panels, num_threads)
    parallel_for(
        num_threads, num_parts, _multiply_amx_part,
        (num_parts, digits.reshape((2 * len(x), panels.shape[1])), panels, corrections, scales, bias, row_scales, out, tile_rows(len(x), 1)),
    )  # fmt: skip


@njit(error_model="numpy")
def _multiply_amx_part(part, num_parts, digits, panels, corrections, scales, bias, row_scales, out, rows):
    """Some panels by all rows. The last tiles end with the batch: some rows are computed twice."""
    first, last = panels_of_part(part, num_parts, len(panels), 2)
    start, stop = first * PANEL, last * PANEL
    own_panels, own_corrections = panels[first:last], corrections[start:stop]
    num_rows = len(row_scales)
    sums = np.empty((2 * rows, stop - start), np.int32)
    configure_tiles(rows)
    for tile in range(0, num_rows, rows):
        row = min(tile, num_rows - rows)
        multiply_row_tiles(digits, row, num_rows + row, own_panels, 0, last - first, own_corrections, sums, 0, rows, 2)
        for i in range(rows):
            _add_digits(
                sums[i], sums[rows + i], scales[start:stop], row_scales[row + i], bias[start:stop], out[row + i, start:stop]
            )
    release_tiles()


@njit(error_model="numpy")
def _add_digits(high, low, scales, row_scale, bias, out):
    """Rounds after each operation, like torch's operator and `join_digits`."""
    for i in range(len(out)):
        total = (np.float32(high[i]) * scales[i]) * np.float32(DIGIT_BASE) + np.float32(low[i]) * scales[i]
        out[i] = total * row_scale + bias[i]


multiply_int8 = _multiply_amx if HAS_INT8_AMX else _multiply_vectors
