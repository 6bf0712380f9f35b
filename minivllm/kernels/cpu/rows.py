"""What goes on around attention and the linear layers: small loops over rows, in one pass and without copies.

A decode step calls each of them once or twice a layer with a few rows. The work takes microseconds, so what counts is how
little it takes to call them: they are handed addresses and row lengths, as kernels on a GPU are, and run on one thread.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from minivllm.kernels import checks, reference
from minivllm.kernels.cpu.launch import FASTMATH, LOG2_E, exp2
from minivllm.kernels.reference import DIGIT_BASE, DIGIT_ZERO, LARGEST

MAX_ROWS = 256
"""More rows are worth two threads: torch computes them."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, then scale: see `reference.rms_norm`."""
    if not _is_small(x):
        return reference.rms_norm(x, weight, eps)
    checks.check_rms_norm(x, weight)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    _norm(x.data_ptr(), 0, weight.contiguous().data_ptr(), x.numel() // size, size, np.float32(eps), out.data_ptr(), 0)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and normalize the sum: see `reference.add_rms_norm`."""
    if not _is_small(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    checks.check_rms_norm(x, weight, residual)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    _norm(
        x.data_ptr(), residual.data_ptr(), weight.contiguous().data_ptr(), x.numel() // size, size, np.float32(eps),
        out.data_ptr(), total.data_ptr(),
    )  # fmt: skip
    return out, total


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions: see `reference.rotary_embedding`."""
    checks.check_rotary_embedding(positions, query, key, cos, sin)
    if not _is_small(query) or positions.dtype != torch.int64 or not (_has_whole_rows(query) and _has_whole_rows(key)):
        return reference.rotary_embedding(positions, query, key, cos, sin)
    positions = positions.contiguous()
    rotated = torch.empty(query.shape), torch.empty(key.shape)
    for x, out in zip((query, key), rotated, strict=True):
        num_tokens, num_heads, head_dim = x.shape
        _rotate(
            positions.data_ptr(), x.data_ptr(), num_tokens, x.stride(0), num_heads, head_dim, cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
    return rotated


def silu_and_mul(x: Tensor) -> Tensor:
    """The gate of SwiGLU: see `reference.silu_and_mul`."""
    if not _is_small(x):
        return reference.silu_and_mul(x)
    checks.check_silu_and_mul(x)
    x = x.contiguous()
    out = torch.empty(x.shape[0], x.shape[1] // 2)
    _gate(x.data_ptr(), x.shape[0], out.shape[1], out.data_ptr())
    return out


def split_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of two digits for each row: see `reference.split_digits`."""
    if not _is_small(x):
        return reference.split_digits(x)
    checks.check_digits(x)
    x = x.contiguous()
    digits, scales = torch.empty((2 * x.shape[0], x.shape[1]), dtype=torch.uint8), torch.empty(x.shape[0])
    _split(x.data_ptr(), x.shape[0], x.shape[1], digits.data_ptr(), scales.data_ptr())
    return digits, scales


def join_digits(products: Tensor, scales: Tensor) -> Tensor:
    """Put together the products of high and low digits: see `reference.join_digits`."""
    if not _is_small(products):
        return reference.join_digits(products, scales)
    checks.check_digits(products, scales)
    products = products.contiguous()
    out = torch.empty(len(scales), products.shape[1])
    _join(products.data_ptr(), len(scales), products.shape[1], scales.data_ptr(), out.data_ptr())
    return out


def _is_small(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and 0 < x.shape[0] <= MAX_ROWS


def _has_whole_rows(x: Tensor) -> bool:
    """Whether the heads of a token lie side by side."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _pointer_to(dtype: Any) -> Any:
    """A compiled function that turns an address into what `numba.carray` makes an array of."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: list) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.intp), generate

    return pointer


_floats, _integers, _bytes = _pointer_to(types.float32), _pointer_to(types.int64), _pointer_to(types.uint8)


@njit
def _row(address, row, stride, size):
    """`size` numbers from the beginning of a row on; the rows begin `stride` numbers apart."""
    return numba.carray(_floats(address + 4 * row * stride), (size,))


@njit(fastmath=FASTMATH, error_model="numpy", cache=True)
def _norm(x_address, residual_address, weight_address, num_rows, size, eps, out_address, total_address):
    """Without a residual (address 0), `x` itself is normalized."""
    weight = _row(weight_address, 0, 0, size)
    for row in range(num_rows):
        x = _row(x_address, row, size, size)
        if residual_address != 0:
            residual, total = _row(residual_address, row, size, size), _row(total_address, row, size, size)
            for i in range(size):
                total[i] = x[i] + residual[i]
            x = total
        squares = np.float32(0)
        for i in range(size):
            squares += x[i] * x[i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        out = _row(out_address, row, size, size)
        for i in range(size):
            out[i] = x[i] * factor * weight[i]


@njit(fastmath=FASTMATH, error_model="numpy", cache=True)
def _rotate(positions_address, x_address, num_tokens, stride, num_heads, head_dim, cos_address, sin_address, out_address):
    positions = numba.carray(_integers(positions_address), (num_tokens,))
    half = head_dim // 2
    for token in range(num_tokens):
        x = _row(x_address, token, stride, num_heads * head_dim)
        out = _row(out_address, token, num_heads * head_dim, num_heads * head_dim)
        cos, sin = _row(cos_address, positions[token], half, half), _row(sin_address, positions[token], half, half)
        for head in range(num_heads):
            start = head * head_dim
            for i in range(half):
                first, second = x[start + i], x[start + half + i]
                out[start + i] = first * cos[i] - second * sin[i]
                out[start + half + i] = second * cos[i] + first * sin[i]


@njit(fastmath=FASTMATH, error_model="numpy", cache=True)
def _gate(x_address, num_rows, size, out_address):
    """silu(g) = g / (1 + e**-g), with e**-|g|, which never overflows."""
    for row in range(num_rows):
        x, out = _row(x_address, row, 2 * size, 2 * size), _row(out_address, row, size, size)
        for i in range(size):
            gate = x[i]
            small = exp2(-abs(gate) * LOG2_E)
            share = np.float32(1) / (np.float32(1) + small)
            out[i] = gate * (share if gate >= np.float32(0) else small * share) * x[size + i]


@njit(fastmath=FASTMATH, error_model="numpy", cache=True)
def _split(x_address, num_rows, size, digits_address, scales_address):
    scales = _row(scales_address, 0, 0, num_rows)
    for row in range(num_rows):
        x = _row(x_address, row, size, size)
        high = numba.carray(_bytes(digits_address + row * size), (size,))
        low = numba.carray(_bytes(digits_address + (num_rows + row) * size), (size,))
        # Without their sign, floats stand in the same order as their bits do as integers, whose maximum is fast to find.
        largest = np.int32(0)
        for i in range(size):
            largest = max(largest, np.int32(np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF)))
        scale = max(np.int32(largest).view(np.float32) / np.float32(LARGEST), np.float32(1e-30))
        scales[row] = scale
        for i in range(size):
            whole = np.int32(np.floor(x[i] / scale + np.float32(0.5)))
            upper = np.int32((whole + np.int32(DIGIT_BASE // 2)) >> np.int32(6))
            high[i] = np.uint8(upper + np.int32(DIGIT_ZERO))
            low[i] = np.uint8(whole - np.int32(DIGIT_BASE) * upper + np.int32(DIGIT_ZERO))


@njit(fastmath=FASTMATH, error_model="numpy", cache=True)
def _join(products_address, num_rows, size, scales_address, out_address):
    scales = _row(scales_address, 0, 0, num_rows)
    for row in range(num_rows):
        high, low = _row(products_address, row, size, size), _row(products_address, num_rows + row, size, size)
        out = _row(out_address, row, size, size)
        for i in range(size):
            out[i] = (high[i] * np.float32(DIGIT_BASE) + low[i]) * scales[row]
