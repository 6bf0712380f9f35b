"""Linear layers: `x @ W.T + b`, for the few rows of a decode step at the speed of reading `W` once.

A general matrix product, made for large matrices, is far from that with 16 rows. Instead:

- The weight is packed once, when it is loaded, in panels of 16 output features (see `panels`), which a thread reads sequentially.
- The sums of up to 24 rows of `x`, for the 16 outputs of a panel or of a few panels, stay in vector registers while they are read: a
  vector is loaded once, and used for one multiply-add per row.
- Memory is prefetched a few thousand bytes ahead; with many rows, while one part of the weight is used the next is fetched.

The innermost loop, `multiply_panels`, is written in LLVM IR; it is this loop:

    for k in range(in_features):
        for row in range(rows):
            sums[row, :] += x[k, row] * panel[k, :]

Each output is summed in the order of the input features, whatever the number of rows: the numbers of a sequence are
bitwise the same, alone or in a batch. Goto and van de Geijn, 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels.cpu.launch import DTYPES, as_numpy, load, use_threads_of_torch
from minivllm.kernels.cpu.native.panels import (
    FEW_ROWS,
    LARGE_TILE,
    PANEL,
    PLACE_BITS,
    PREFETCH_DISTANCE,
    ROW_PADDING,
    SMALL_TILE,
    WIDTHS,
    multiply_panels,
)
from minivllm.kernels.cpu.native.thread_pool import parallel_for
from minivllm.kernels.cpu.native.transpose import transpose
from minivllm.kernels.cpu.rows import PARALLEL_ROWS
from minivllm.kernels.pages import SharedPages

if TYPE_CHECKING:
    from typing_extensions import Self

PART_BYTES = 2**17
"""How much of a weight a thread takes at a time: little, so that no thread waits long for the last part; and the panels stay in the
second-level cache while all rows pass by, next to those of the next part."""
ROWS_AT_A_TIME = 256
"""Rows that are packed at once: rounding takes several copies."""
PARALLEL_NUMBERS = 2**13
"""A transposition of fewer numbers is not worth a second thread."""

_PAGES = SharedPages()


class Packed:
    """What packed weights have in common: all zeros at first, then filled row by row, as a checkpoint is read.

    Args:
        out_features, in_features: The shape of the weight.

    Attributes:
        words: `[panels, words, PANEL]`, int32: see `kernels.cpu.native.panels`.
        panels: The same memory as the kernel takes it.
        bias: `[panels * PANEL]`, float32.
    """

    number_dtype = torch.float32
    """Of the numbers in the words."""
    word_dtype: Any = np.float32
    """Of the words, for the kernel."""
    words_multiple = 1
    """The words of an output are filled up with zeros to a multiple of this."""
    multiply: Callable[..., None]
    """The compiled product: of `x`, `arrays`, `out` and the number of threads."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features = out_features, in_features
        num_panels = -(-out_features // PANEL)
        num_words = -(-in_features * self.number_dtype.itemsize // 4)
        num_words += -num_words % self.words_multiple
        self.words = _PAGES.zeros((num_panels, num_words, PANEL), torch.int32)
        self.panels = self.words.numpy().view(self.word_dtype)
        self.bias = np.zeros(num_panels * PANEL, np.float32)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """A weight in packed form.

        Args:
            weight: `[out_features, in_features]`, of floats on the CPU; copied, and rounded where it has to be.
            bias: `[out_features]` or None.
        """
        if weight.device.type != "cpu" or weight.dtype not in DTYPES or weight.dim() != 2:
            raise KernelError(
                f"A {weight.dtype} weight of shape {list(weight.shape)} on {weight.device} cannot be packed: only float32, float16 and "
                "bfloat16 matrices on the CPU can."
            )
        packed = cls(*weight.shape)
        packed.set_rows(0, weight)
        if bias is not None:
            packed.set_bias(bias)
        return packed

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Write `[n, in_features]` to the weight, from its row `first` on."""
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            self._set_some_rows(first + start, rows[start : start + ROWS_AT_A_TIME])

    def _set_some_rows(self, first: int, rows: Tensor) -> None:
        numbers = self._round(first, rows)
        num_words = self.words.shape[1]
        padding = num_words * 4 // numbers.itemsize - numbers.shape[1]
        words = (F.pad(numbers, (0, padding)) if padding else numbers).view(torch.int32)
        num_whole = len(rows) // PANEL if first % PANEL == 0 else 0  # whole panels are fast to write
        panels = words[: num_whole * PANEL].view(num_whole, PANEL, num_words)
        self.words[first // PANEL : first // PANEL + num_whole] = panels.transpose(1, 2)
        rest = torch.arange(first + num_whole * PANEL, first + len(rows))
        self.words[rest // PANEL, :, rest % PANEL] = words[num_whole * PANEL :]

    def set_bias(self, bias: Tensor) -> None:
        """Write `[out_features]`."""
        self.bias[: self.out_features] = bias.float().numpy()

    def get_rows(self, outputs: Tensor) -> Tensor:
        """Rows of the weight, for an embedding that is the head as well: `[n]` to `[n, in_features]`, float32."""
        return self._copy_rows(outputs, self.in_features)

    def _copy_rows(self, outputs: Tensor, size: int) -> Tensor:
        """The first `size` numbers of each row, as float32."""
        indices, rows = outputs.numpy(), torch.empty(len(outputs), size)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.out_features:
            raise KernelError(f"The rows must be from 0 to {self.out_features - 1}, not {indices.min()} to {indices.max()}.")
        num_threads = use_threads_of_torch()
        numbers = as_numpy(self.words.view(self.number_dtype))
        _copy_rows(numbers, indices, rows.numpy(), 1 if len(indices) < PARALLEL_ROWS else num_threads)
        return rows

    def _round(self, first: int, rows: Tensor) -> Tensor:
        """The numbers of rows as the words hold them; `first` is where they belong."""
        return rows.to(self.number_dtype).contiguous()

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.bias


def packed_linear(weight: Packed, x: Tensor) -> Tensor:
    """`x @ W.T + b` for any number of rows.

    Args:
        weight: The packed `W` and `b`.
        x: `[num_tokens, in_features]`, float32.

    Returns:
        `[num_tokens, out_features]`.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(
            f"x is {list(x.shape)} of {x.dtype} on {x.device}, but [num_tokens, {weight.in_features}] of float32 on the CPU is needed."
        )
    num_rows = x.shape[0]
    out = x.new_empty(padded_rows(num_rows), len(weight.panels) * PANEL)
    if num_rows > 0:
        weight.multiply(x.contiguous().numpy(), weight.arrays, out.numpy(), use_threads_of_torch())
    return out if out.shape == (num_rows, weight.out_features) else out[:num_rows, : weight.out_features]


def padded_rows(num_rows: int) -> int:
    """How many rows `out` of a product must have, so that tiles are whole.

    Small tiles leave fewer rows over; large ones read the weight from the cache fewer times, which is worth about a sixteenth.
    """
    if num_rows <= FEW_ROWS[-1]:
        return next(rows for rows in FEW_ROWS if rows >= num_rows)
    small, large = (-(-num_rows // rows) * rows for rows in (SMALL_TILE, LARGE_TILE))
    return small if small + small // 16 < large else large


_WIDTHS = np.array([WIDTHS.get(rows, 1) for rows in range(FEW_ROWS[-1] + 1)])


@njit(error_model="numpy")
def _copy_row(i, numbers, outputs, rows):
    panel, lane = divmod(outputs[i], PANEL)
    in_features, per_word = rows.shape[1], numbers.shape[2] // PANEL
    for word in range(numbers.shape[1]):
        for k in range(word * per_word, min((word + 1) * per_word, in_features)):
            rows[i, k] = load(numbers[panel, word, (lane - word) * per_word + k])


@njit(error_model="numpy", cache=True)
def _copy_rows(numbers, outputs, rows, num_threads):
    """Rows of a packed weight as float32. torch would take its own threads, which go on spinning in the way of the kernels'."""
    parallel_for(num_threads, len(rows), _copy_row, (numbers, outputs, rows))


@njit(error_model="numpy")
def tile_of(out_rows):
    """The rows and panels of a tile for a batch that is padded to `out_rows` rows."""
    rows = LARGE_TILE if out_rows % LARGE_TILE == 0 else SMALL_TILE
    if out_rows <= FEW_ROWS[-1]:
        rows = out_rows
    return rows, _WIDTHS[rows]


@njit(error_model="numpy")
def words_of_part(part, num_parts, num_words):
    """The range of words in a part: whole blocks of `PANEL`; the last part also takes the rest."""
    num_blocks = num_words // PANEL
    start = num_blocks * part // num_parts * PANEL
    stop = num_words if part == num_parts - 1 else num_blocks * (part + 1) // num_parts * PANEL
    return start, stop


@njit(error_model="numpy")
def _transpose_part(part, num_parts, x, columns, rows):
    start, stop = words_of_part(part, num_parts, columns.shape[1])
    for i in range(len(columns)):
        transpose(x, i * rows, columns, i, 0, rows, start, stop)  # the last tile is filled up with the last row


@njit(error_model="numpy")
def multiply_tile(x, panels, first, last, bias, out, first_row, rows, width, place, pace):
    """A tile of rows by the panels from `first` to `last`, `width` at a time and the rest one by one."""
    panel = first
    while panel < last:
        count = width if last - panel >= width else 1
        multiply_panels(x, panels, panel, bias, out, first_row, rows, count, place, pace)
        place += count * panels.shape[1] * pace
        panel += count


@njit(error_model="numpy")
def what_to_prefetch(panels, first, last, tile, num_tiles):
    """`place` and `pace` of `multiply_panels`, for one of the tiles of rows that are multiplied by the panels from `first` to `last`.

    The first tile reads the panels from memory, unless the part before has prefetched them, and prefetches what it reads soon. The others
    find them in the cache, and each prefetches a share of the next part. So memory is read all the time.
    """
    num_words = panels.shape[1]
    vector = (4 * PANEL) << PLACE_BITS
    if tile == 0:
        return (first * num_words + PREFETCH_DISTANCE) * vector, vector
    pace = vector // (num_tiles - 1)
    return last * num_words * vector + (last - first) * num_words * (tile - 1) * pace, pace


@njit(error_model="numpy")
def _multiply_part(part, num_parts, columns, panels, bias, out, rows, width):
    """Some panels by all rows."""
    first, last = panels_of_part(part, num_parts, len(panels), width)
    for i in range(len(columns)):
        place, pace = what_to_prefetch(panels, first, last, i, len(columns))
        multiply_tile(columns[i], panels, first, last, bias, out, i * rows, rows, width, place, pace)


@njit(error_model="numpy")
def transpose_tiles(x, num_tiles, num_threads, rows):
    """`[num_tiles, in_features, rows + ROW_PADDING]`: the rows of `x`, tile by tile."""
    columns = np.empty((num_tiles, x.shape[1], rows + ROW_PADDING), x.dtype)
    num_parts = 1 if columns.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _transpose_part, (num_parts, x, columns, rows))
    return columns


@njit(error_model="numpy")
def count_parts(panels, num_threads):
    """How many parts the panels are cut into: one if they fit in `PART_BYTES`, else a multiple of `num_threads`."""
    num_parts = -(-panels.size * 4 // PART_BYTES)
    return 1 if num_parts == 1 else -(-num_parts // num_threads) * num_threads


@njit(error_model="numpy")
def panels_of_part(part, num_parts, num_panels, width):
    """The first panel of a part, and one past its last: all parts are about equal, and begin with a multiple of `width`."""
    num_groups = -(-num_panels // width)
    return num_groups * part // num_parts * width, min(num_groups * (part + 1) // num_parts * width, num_panels)


@njit(error_model="numpy", cache=True)
def multiply_float32(x, weight, out, num_threads):
    """`x @ W.T + b`, the arrays of `W` and `b` in `weight`. `out` has `padded_rows` of the rows of `x`, which are at least one."""
    panels, bias = weight
    rows, width = tile_of(len(out))
    columns = transpose_tiles(x, out.shape[0] // rows, num_threads, rows)
    num_parts = count_parts(panels, num_threads)
    parallel_for(num_threads, num_parts, _multiply_part, (num_parts, columns, panels, bias, out, rows, width))


class PackedWeight(Packed):
    """A float32 weight in the layout of `packed_linear`."""

    multiply = staticmethod(multiply_float32)
