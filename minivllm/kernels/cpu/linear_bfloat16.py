"""Linear layers with bfloat16 weights: the loop of `linear`, two input features at a time.

A decode step is bound by reading the weights, and bfloat16 is half of float32. Inputs are rounded to bfloat16 as well; sums are float32. A
processor with AMX multiplies tiles (see `amx`). AMD's processors with an instruction for such products (VDPBF16PS, of AVX-512 BF16) use it.
On others, Intel's included, whose VDPBF16PS takes two cycles, it is faster to turn the weights into float32 in registers, by a shift: memory
is read half as much all the same. (The three differ in the last bit, and both instructions take subnormal numbers for zero.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from minivllm.kernels.cpu.launch import round_bfloat16
from minivllm.kernels.cpu.linear import (
    PARALLEL_NUMBERS,
    Packed,
    _multiply_part,
    count_parts,
    panels_of_part,
    tile_of,
    transpose_tiles,
)
from minivllm.kernels.cpu.native.amx import TILE_WORDS, configure_tiles, multiply_row_tiles, release_tiles, tile_rows
from minivllm.kernels.cpu.native.features import HAS_BFLOAT16_AMX, HAS_BFLOAT16_DOT
from minivllm.kernels.cpu.native.thread_pool import parallel_for


@njit(error_model="numpy")
def _pair_part(part, num_parts, x, words):
    """Words of two neighbours of a row, rounded."""
    numbers = words.view(np.uint16)  # the lower half of a word comes first
    for row in range(len(x) * part // num_parts, len(x) * (part + 1) // num_parts):
        for k in range(x.shape[1]):
            numbers[row, k] = round_bfloat16(x[row, k])
        numbers[row, x.shape[1] :] = 0


@njit(error_model="numpy")
def _round_part(part, num_parts, x, numbers):
    """The numbers of a row, rounded, but still float32."""
    for row in range(len(x) * part // num_parts, len(x) * (part + 1) // num_parts):
        for k in range(x.shape[1]):
            numbers[row, k] = np.uint32(np.uint32(round_bfloat16(x[row, k])) << np.uint32(16)).view(np.float32)
        for k in range(x.shape[1], numbers.shape[1]):
            numbers[row, k] = np.float32(0)


_fill_part, _DTYPE, _PER_WORD = (_pair_part, np.uint32, 1) if HAS_BFLOAT16_DOT else (_round_part, np.float32, 2)


@njit(error_model="numpy", cache=True)
def _multiply_vectors(x, weight, out, num_threads):
    """`linear.multiply_float32` for a packed bfloat16 weight."""
    panels, bias = weight
    rows, width = tile_of(len(out))
    numbers = np.empty((len(x), _PER_WORD * panels.shape[1]), _DTYPE)
    num_parts = 1 if numbers.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _fill_part, (num_parts, x, numbers))
    columns = transpose_tiles(numbers, len(out) // rows, num_threads, rows)
    num_parts = count_parts(panels, num_threads)
    parallel_for(num_threads, num_parts, _multiply_part, (num_parts, columns, panels, bias, out, rows, width))


@njit(error_model="numpy")
def _multiply_amx_part(part, num_parts, words, panels, bias, out, rows):
    """Some panels by all rows, a pair of tiles at a time. The last tiles end with the batch: some rows are computed twice."""
    first, last = panels_of_part(part, num_parts, len(panels), 2)
    end = len(words) - rows
    configure_tiles(rows)
    for start in range(0, len(words), 2 * rows):
        row, next_row = min(start, end), min(start + rows, end)
        num_tiles = 2 if next_row > row else 1
        multiply_row_tiles(words, row, next_row, panels, first, last, bias, out, row, next_row, num_tiles)
    release_tiles()


@njit(error_model="numpy", cache=True)
def _multiply_amx(x, weight, out, num_threads):
    """The same by AMX. `out` needs no more rows than `x` has."""
    panels, bias = weight
    words = np.empty((len(x), panels.shape[1]), np.uint32)
    num_parts = 1 if words.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _pair_part, (num_parts, x, words))
    num_parts = count_parts(panels, num_threads)
    parallel_for(num_threads, num_parts, _multiply_amx_part, (num_parts, words, panels, bias, out, tile_rows(len(x), 2)))


multiply_bfloat16 = _multiply_amx if HAS_BFLOAT16_AMX else _multiply_vectors


class PackedBfloat16Weight(Packed):
    """A bfloat16 weight in panels; each word holds two input features of one output."""

    number_dtype = torch.bfloat16
    word_dtype = np.uint32
    words_multiple = TILE_WORDS if HAS_BFLOAT16_AMX else 1
    multiply = staticmethod(multiply_bfloat16)
