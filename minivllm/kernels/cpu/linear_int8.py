"""The product of a few rows with 8-bit weights, for `decoder_layer`: the loop of `linear`, four input features at a time.

The instruction (VPDPBUSD, of AVX-512 VNNI) multiplies four unsigned 8-bit integers with four signed ones and adds the products to a
32-bit sum, for 16 outputs at once. Inputs come as the two digits of `split_digits`; sums of integers are exact, so the
result is bitwise that of torch's operator, which computes larger batches.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np
import torch
from numba import njit
from torch import Tensor

from minivllm.kernels.cpu.linear import PANEL, _multiply
from minivllm.kernels.cpu.rows import _split
from minivllm.kernels.reference import DIGIT_BASE, DIGIT_ZERO

HAS_INT8_DOT = llvmlite.binding.get_host_cpu_features().get("avx512vnni", False)
"""Whether this processor has the instruction."""


class PackedInt8Weight:
    """An 8-bit weight in panels; each 32-bit word holds four input features of one output.

    Args:
        rounded: `[out_features, in_features]`, int8.
        scales: `[out_features]`, float32: the weight is `scales * rounded`.
        bias: `[out_features]` or None.
    """

    def __init__(self, rounded: Tensor, scales: Tensor, bias: Tensor | None) -> None:
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
        """The arguments of the compiled product."""
        return self.panels, self.corrections, self.scales, self.bias


@njit(error_model="numpy")
def multiply_int8(x, weight, out, num_threads, rows):
    """A few rows of float32 by a packed 8-bit weight, for compiled callers; `out` has `len(rows)` rows."""
    panels, corrections, scales, bias = weight
    num_rows, in_features = x.shape
    tile, num_words = len(rows), panels.shape[1]
    digits = np.full((2 * tile, 4 * num_words), np.uint8(DIGIT_ZERO), np.uint8)
    row_scales = np.empty(num_rows, np.float32)
    _split(
        min(num_threads, num_rows), num_rows, in_features, x.ctypes.data, digits.ctypes.data, 4 * num_words, tile,
        row_scales.ctypes.data,
    )  # fmt: skip
    sums = np.empty((2 * tile, out.shape[1]), np.int32)
    _multiply(digits.view(np.int32), panels, corrections, sums, num_threads, rows, (None,))
    _scale(sums, scales, bias, row_scales, out, tile)


@njit(error_model="numpy")
def _scale(sums, scales, bias, row_scales, out, tile):
    """Rounds after each operation, like torch's operator and `join_digits`."""
    for row in range(len(row_scales)):
        for i in range(out.shape[1]):
            high, low = np.float32(sums[row, i]) * scales[i], np.float32(sums[tile + row, i]) * scales[i]
            out[row, i] = (high * np.float32(DIGIT_BASE) + low) * row_scales[row] + bias[i]
