"""Linear layers with 8-bit weights: the loop of `linear`, four input features at a time.

A decode step is bound by reading the weights, and 8 bits are a quarter of float32. A few inputs are much larger than all others
(outliers), so that 8 bits leave little of the others (Dettmers et al., 2022, arXiv:2208.07339). So inputs and weights are transformed
first, which changes nothing in their product and spreads outliers evenly: see `reference.hadamard_transform`. Each row of inputs and each
output has its own scale.

VPDPBUSD, of AVX-512 VNNI, multiplies four unsigned 8-bit integers with four signed ones and adds the products to a 32-bit sum, for 16
outputs at once; AMX does so for 16 rows as well (see `native.amx`). Without VNNI the integers become 16-bit in registers. Sums of integers
are exact, so the three give the same bits, and a token's numbers do not depend on its batch. But rounding amplifies small differences:
where attention is summed in another order (draft tokens, recomputation after preemption, a chunk of one token), tokens can diverge sooner
than in float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.kernels.cpu.linear import (
    Packed,
    count_parts,
    multiply_tile,
    panels_of_part,
    tile_of,
    transpose_tiles,
    what_to_prefetch,
)
from minivllm.kernels.cpu.native.amx import TILE_WORDS, configure_tiles, multiply_row_tiles, release_tiles, tile_rows
from minivllm.kernels.cpu.native.features import HAS_INT8_AMX
from minivllm.kernels.cpu.native.memory import address, keep
from minivllm.kernels.cpu.native.panels import PANEL
from minivllm.kernels.cpu.native.thread_pool import parallel_for
from minivllm.kernels.cpu.rows import INPUT_ZERO, PARALLEL_ROWS, _round, hadamard_transform, row_at
from minivllm.kernels.reference import HADAMARD_BLOCK, hadamard_order, round_transformed_weight


@njit(error_model="numpy")
def _round_rows(x, num_words, num_threads):
    """The rows of `x`, transformed and rounded, `[rows, words]`, and their scales."""
    num_rows, in_features = x.shape
    words, row_scales = np.empty((num_rows, num_words), np.int32), np.empty(num_rows, np.float32)
    num_threads = 1 if num_rows < PARALLEL_ROWS else num_threads
    _round(num_threads, num_rows, in_features, address(x), 4 * num_words, address(words), address(row_scales))
    keep(x)
    return words, row_scales


@njit(error_model="numpy")
def _scale_sums(sums, row, token, first_output, row_scales, scales, bias, out):
    """Writes a row of sums to a row of `out`, from `first_output` on. Rounds after each operation.

    Rows come by their addresses: a slice of an array updates its reference count, for which threads that share the array contend.
    """
    size = sums.shape[1]
    place = row_at(address(out), token, out.shape[1], out.shape[1])[first_output : first_output + size]
    row_scale = row_scales[token]
    for i in range(size):
        place[i] = (np.float32(sums[row, i]) * row_scale) * scales[i] + bias[i]


@njit(error_model="numpy", cache=True)
def _multiply_vectors(x, weight, out, num_threads):
    """`linear.multiply_float32` for a packed 8-bit weight."""
    panels, corrections, scales, bias = weight
    words, row_scales = _round_rows(x, panels.shape[1], num_threads)
    rows, width = tile_of(len(out))
    columns = transpose_tiles(words, len(out) // rows, num_threads, rows)
    num_parts = count_parts(panels, num_threads)
    parallel_for(
        num_threads, num_parts, _multiply_part,
        (num_parts, columns, panels, corrections, scales, bias, row_scales, out, rows, width),
    )  # fmt: skip


@njit(error_model="numpy")
def _multiply_part(part, num_parts, columns, panels, corrections, scales, bias, row_scales, out, rows, width):
    """Some panels by all rows, one tile at a time."""
    first, last = panels_of_part(part, num_parts, len(panels), width)
    start, stop = first * PANEL, last * PANEL
    own_panels, own_corrections = panels[first:last], corrections[start:stop]
    own_scales, own_bias = scales[start:stop], bias[start:stop]
    sums = np.empty((rows, stop - start), np.int32)
    for i in range(len(columns)):
        place, pace = what_to_prefetch(own_panels, 0, last - first, i, len(columns))
        multiply_tile(columns[i], own_panels, 0, last - first, own_corrections, sums, 0, rows, width, place, pace)
        for row in range(min(rows, len(row_scales) - i * rows)):
            _scale_sums(sums, row, i * rows + row, start, row_scales, own_scales, own_bias, out)


@njit(error_model="numpy", cache=True)
def _multiply_amx(x, weight, out, num_threads):
    """The same by AMX. `out` needs no more rows than `x` has."""
    panels, corrections, scales, bias = weight
    words, row_scales = _round_rows(x, panels.shape[1], num_threads)
    num_parts = count_parts(panels, num_threads)
    parallel_for(
        num_threads, num_parts, _multiply_amx_part,
        (num_parts, words, panels, corrections, scales, bias, row_scales, out, tile_rows(len(x), 2)),
    )  # fmt: skip


@njit(error_model="numpy")
def _multiply_amx_part(part, num_parts, words, panels, corrections, scales, bias, row_scales, out, rows):
    """Some panels by all rows, a pair of tiles at a time. The last tiles end with the batch: some rows are computed twice."""
    first, last = panels_of_part(part, num_parts, len(panels), 2)
    start, stop = first * PANEL, last * PANEL
    own_panels, own_corrections = panels[first:last], corrections[start:stop]
    own_scales, own_bias = scales[start:stop], bias[start:stop]
    end = len(words) - rows
    sums = np.empty((2 * rows, stop - start), np.int32)
    configure_tiles(rows)
    for tile in range(0, len(words), 2 * rows):
        row, next_row = min(tile, end), min(tile + rows, end)
        num_tiles = 2 if next_row > row else 1
        multiply_row_tiles(words, row, next_row, own_panels, 0, last - first, own_corrections, sums, 0, rows, num_tiles)
        for i in range(num_tiles * rows):
            token = row + i if i < rows else next_row + i - rows
            _scale_sums(sums, i, token, start, row_scales, own_scales, own_bias, out)
    release_tiles()


multiply_int8 = _multiply_amx if HAS_INT8_AMX else _multiply_vectors


class PackedInt8Weight(Packed):
    """An 8-bit weight in panels; each word holds four input features of one output, transformed and rounded by `reference.round_weight`."""

    number_dtype = torch.int8
    word_dtype = np.int32
    words_multiple = max(HADAMARD_BLOCK // 4, TILE_WORDS)
    multiply = staticmethod(multiply_int8)

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.scales = np.zeros_like(self.bias)
        # Inputs are stored plus `INPUT_ZERO`, which adds that times the sum of an output's weights: the sums start at minus it.
        self.corrections = np.zeros(len(self.bias), np.int32)

    def _round(self, first: int, rows: Tensor) -> Tensor:
        rounded, scales = round_transformed_weight(hadamard_transform(rows.float()).div_(hadamard_order(self.in_features)))
        self.scales[first : first + len(rows)] = scales.numpy()
        self.corrections[first : first + len(rows)] = (-INPUT_ZERO * rounded.sum(dim=1, dtype=torch.int32)).numpy()
        return rounded

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.corrections, self.scales, self.bias

    def get_rows(self, outputs: Tensor) -> Tensor:
        """As they are multiplied: rounded."""
        rows = self._copy_rows(outputs, 4 * self.words.shape[1])
        rows.numpy()[:] *= self.scales[outputs.numpy(), None]
        return hadamard_transform(rows)[:, : self.in_features].contiguous()
