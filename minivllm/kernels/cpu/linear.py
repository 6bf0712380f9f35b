"""Linear layers for the few rows of a decode step: `x @ W.T + b` at the speed of reading `W` once.

A general matrix product, made for large matrices, is far from that with 16 rows. Instead:

- The weight is packed once, when it is loaded, in panels of 16 output features (see `panels`), which a thread reads sequentially.
- The sums of up to 24 rows of `x`, for the 16 outputs of a panel, stay in vector registers while the panel is read: one
  vector is loaded, and used for one multiply-add per row.
- Memory is prefetched a few thousand bytes ahead.

The innermost loop, `multiply_panels`, is written in LLVM IR; it is this loop:

    for k in range(in_features):
        for row in range(rows):
            sums[row, :] += x[k, row] * panel[k, :]

Each output is summed in the order of the input features, whatever the number of rows: the numbers of a sequence are
bitwise the same, alone or in a batch. Goto and van de Geijn, 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels.cpu.features import HAS_AVX512
from minivllm.kernels.cpu.launch import constant, use_threads_of_torch
from minivllm.kernels.cpu.panels import PANEL, multiply_panels
from minivllm.kernels.cpu.thread_pool import parallel_for

if TYPE_CHECKING:
    from minivllm.kernels.cpu.linear_bfloat16 import PackedBfloat16Weight
    from minivllm.kernels.cpu.linear_int8 import PackedInt8Weight

FEW_ROWS = (1, 2, 4, 8, 12, 16, 20, 24) if HAS_AVX512 else (1, 2, 4, 6)
"""Batch sizes that read each panel once; a kernel is compiled for each. Their sums must fit the vector registers: AVX-512 has
32, AVX2 has 16 of half the size."""
MANY_ROWS, MANY_PANELS = (12, 2) if HAS_AVX512 else (3, 2)
"""Larger batches go in tiles of this many rows and panels: each number of `x` that is loaded is used twice."""
PART_BYTES = 2**17
"""How much of a weight a thread takes at a time: little, so that no thread waits long for the last part; the panels stay in the
second-level cache while all rows pass by."""
PARALLEL_NUMBERS = 2**13
"""A transposition of fewer numbers is not worth a second thread."""


class PackedWeight:
    """A weight in the layout of `packed_linear`.

    Args:
        weight: `[out_features, in_features]`, float32 on the CPU; copied.
        bias: `[out_features]` or None.
    """

    dtype = torch.float32
    """In which to load the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_weight(weight)
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // PANEL)
        panels = np.zeros((num_panels, self.in_features, PANEL), np.float32)
        whole = self.out_features // PANEL
        torch.from_numpy(panels)[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, self.in_features).transpose(1, 2)
        if whole < num_panels:
            rest = weight[whole * PANEL :]
            torch.from_numpy(panels)[whole, :, : len(rest)] = rest.t()
        self.panels = panels
        self.bias = np.zeros(num_panels * PANEL, np.float32)
        if bias is not None:
            self.bias[: self.out_features] = bias.numpy()

    @property
    def fills_panels(self) -> bool:
        """Whether the outputs are whole panels, which compiled callers need."""
        return self.out_features % PANEL == 0

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.bias

    @property
    def multiply(self) -> Any:
        """The compiled product."""
        return multiply_float32


def check_weight(weight: Tensor) -> None:
    """Raise KernelError unless this weight can be packed."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.dim() != 2:
        raise KernelError(
            f"A {weight.dtype} weight of shape {list(weight.shape)} on {weight.device} cannot be packed: only float32 matrices on the CPU can."
        )


def packed_linear(weight: PackedWeight | PackedBfloat16Weight | PackedInt8Weight, x: Tensor) -> Tensor:
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
    tile, width = (few_rows(num_rows), 1) if num_rows <= FEW_ROWS[-1] else (MANY_ROWS, MANY_PANELS)
    out = x.new_empty(-(-num_rows // tile) * tile, len(weight.panels) * PANEL)
    num_threads = use_threads_of_torch()
    weight.multiply(x.contiguous().numpy(), weight.arrays, out.numpy(), num_threads, constant(tile), constant(width))
    return out if out.shape == (num_rows, weight.out_features) else out[:num_rows, : weight.out_features]


def few_rows(num_rows: int) -> int:
    """The batch size of `FEW_ROWS`, to which the output is padded, for a batch of at most 24."""
    return next(rows for rows in FEW_ROWS if rows >= num_rows)


@njit(error_model="numpy")
def _transpose_part(part, num_parts, x, columns, rows):
    num_tiles, in_features, _ = columns.shape
    for i in range(num_tiles):
        tokens = x[i * len(rows) : (i + 1) * len(rows)]
        for k in range(in_features * part // num_parts, in_features * (part + 1) // num_parts):
            if len(tokens) == len(rows):
                for row in range(len(rows)):
                    columns[i, k, row] = tokens[row, k]
            else:  # the last tile is filled up with its last row
                for row in range(len(rows)):
                    columns[i, k, row] = tokens[min(row, len(tokens) - 1), k]


@njit(error_model="numpy")
def _multiply_part(part, size, columns, panels, bias, out, rows, width):
    """`size` panels by all rows."""
    first, last = part * size, min((part + 1) * size, len(panels))
    odd = (last - first) % len(width)
    for i in range(len(columns)):
        for panel in range(first, last - odd, len(width)):
            multiply_panels(columns[i], panels, panel, bias, out, i * len(rows), rows, width)
        for panel in range(last - odd, last):
            multiply_panels(columns[i], panels, panel, bias, out, i * len(rows), rows, (None,))


@njit(error_model="numpy")
def transpose_tiles(x, num_tiles, num_threads, rows):
    """`[num_tiles, in_features, len(rows)]`: the rows of `x`, tile by tile."""
    columns = np.empty((num_tiles, x.shape[1], len(rows)), x.dtype)
    num_parts = 1 if columns.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _transpose_part, (num_parts, x, columns, rows))
    return columns


@njit(error_model="numpy")
def panels_per_part(panels, width):
    """How many panels a thread takes at a time."""
    return max(len(width), PART_BYTES // (4 * panels.shape[1] * panels.shape[2]))


@njit(error_model="numpy", cache=True)
def multiply_float32(x, weight, out, num_threads, rows, width):
    """`x @ W.T + b`, the arrays of `W` and `b` in `weight`. `out` has the rows of `x`, and as many more as fill the last tile."""
    panels, bias = weight
    columns = transpose_tiles(x, out.shape[0] // len(rows), num_threads, rows)
    size = panels_per_part(panels, width)
    parallel_for(num_threads, -(-len(panels) // size), _multiply_part, (size, columns, panels, bias, out, rows, width))
