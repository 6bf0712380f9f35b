"""Linear layers with 8-bit weights: the loop of `linear`, four input features at a time.

The instruction (VPDPBUSD, of AVX-512 VNNI) multiplies four unsigned 8-bit integers with four signed ones and adds the products to a
32-bit sum, for 16 outputs at once. Inputs come as the two digits of `split_digits`; sums of integers are exact, so the
result is bitwise that of torch's operator, which is used where the instruction is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.kernels.cpu.linear import check_weight, panels_per_part, transpose_tiles
from minivllm.kernels.cpu.panels import PANEL, multiply_panels
from minivllm.kernels.cpu.rows import _split
from minivllm.kernels.cpu.thread_pool import parallel_for
from minivllm.kernels.reference import DIGIT_BASE, DIGIT_ZERO, round_weight


class PackedInt8Weight:
    """An 8-bit weight in panels; each 32-bit word holds four input features of one output.

    Args:
        weight: `[out_features, in_features]`, float32 on the CPU; rounded by `round_weight`.
        bias: `[out_features]` or None.
    """

    dtype = torch.float32
    """In which to load the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_weight(weight)
        rounded, scales = round_weight(weight)
        self.out_features, self.in_features = rounded.shape
        num_panels, num_words = -(-self.out_features // PANEL), -(-self.in_features // 4)
        padded = torch.zeros(num_panels * PANEL, num_words * 4, dtype=torch.int8)
        padded[: self.out_features, : self.in_features] = rounded
        panels = padded.view(num_panels, PANEL, num_words, 4).transpose(1, 2).contiguous()
        self.panels = panels.view(torch.int32).squeeze(-1).numpy()
        # Digits are stored plus 64, which adds 64 times the sum of an output's weights: the sums start at minus that.
        self.corrections = (-DIGIT_ZERO * padded.sum(dim=1, dtype=torch.int32)).numpy()
        self.scales, self.bias = (np.zeros(num_panels * PANEL, np.float32) for _ in range(2))
        self.scales[: self.out_features] = scales.numpy()
        if bias is not None:
            self.bias[: self.out_features] = bias.numpy()

    @property
    def fills_panels(self) -> bool:
        """Whether the outputs are whole panels, which compiled callers need."""
        return self.out_features % PANEL == 0

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.corrections, self.scales, self.bias

    @property
    def multiply(self) -> Any:
        """The compiled product."""
        return multiply_int8


@njit(error_model="numpy", cache=True)
def multiply_int8(x, weight, out, num_threads, rows, width):
    """`linear.multiply_float32` for a packed 8-bit weight."""
    panels, corrections, scales, bias = weight
    (num_rows, in_features), out_rows, num_words = x.shape, len(out), panels.shape[1]
    digits = np.empty((2 * out_rows, 4 * num_words), np.uint8)
    digits[num_rows:out_rows] = digits[out_rows + num_rows :] = DIGIT_ZERO
    digits[:, in_features:] = DIGIT_ZERO
    row_scales = np.empty(num_rows, np.float32)
    _split(
        num_threads, num_rows, in_features, x.ctypes.data, digits.ctypes.data, 4 * num_words, out_rows, row_scales.ctypes.data
    )  # fmt: skip
    columns = transpose_tiles(digits.view(np.int32), 2 * out_rows // len(rows), num_threads, rows)
    size = panels_per_part(panels, width)
    parallel_for(
        num_threads, -(-len(panels) // size), _multiply_part,
        (size, columns, panels, corrections, scales, bias, row_scales, out, rows, width),
    )  # fmt: skip


@njit(error_model="numpy")
def _multiply_part(part, size, columns, panels, corrections, scales, bias, row_scales, out, rows, width):
    """`size` panels by all rows: the sums of both digits, one tile at a time, then their total."""
    num_tiles, tile = len(columns) // 2, len(rows)
    first, last = part * size, min((part + 1) * size, len(panels))
    start, stop = first * PANEL, last * PANEL
    own_panels, own_corrections = panels[first:last], corrections[start:stop]
    odd = (last - first) % len(width)
    sums = np.empty((2, tile, stop - start), np.int32)
    for i in range(num_tiles):
        for digit in range(2):
            x, digit_sums = columns[digit * num_tiles + i], sums[digit]
            for panel in range(0, last - first - odd, len(width)):
                multiply_panels(x, own_panels, panel, own_corrections, digit_sums, 0, rows, width)
            for panel in range(last - first - odd, last - first):
                multiply_panels(x, own_panels, panel, own_corrections, digit_sums, 0, rows, (None,))
        for row in range(min(tile, len(row_scales) - i * tile)):
            token = i * tile + row
            _add_digits(
                sums[0, row], sums[1, row], scales[start:stop], row_scales[token], bias[start:stop], out[token, start:stop]
            )


@njit(error_model="numpy")
def _add_digits(high, low, scales, row_scale, bias, out):
    """Rounds after each operation, like torch's operator and `join_digits`."""
    for i in range(len(out)):
        total = (np.float32(high[i]) * scales[i]) * np.float32(DIGIT_BASE) + np.float32(low[i]) * scales[i]
        out[i] = total * row_scale + bias[i]
