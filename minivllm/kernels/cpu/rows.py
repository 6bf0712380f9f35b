"""The operations around attention and the linear layers, writing to the cache included: small loops over rows, in one pass and without
copies.

A decode step calls each of them once or twice a layer with a few rows. The work takes microseconds, so the overhead of a
call matters: they take addresses and row lengths, as kernels on a GPU do.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from minivllm.kernels import checks, reference
from minivllm.kernels.cpu.launch import (
    FASTMATH,
    LOG2_E,
    MAX_HEAD_DIM,
    as_numpy,
    check_launch,
    constant,
    exp2,
    store,
    use_threads_of_torch,
)
from minivllm.kernels.cpu.native.hadamard import transform
from minivllm.kernels.cpu.native.memory import pointer_to
from minivllm.kernels.cpu.native.thread_pool import parallel_for
from minivllm.kernels.reference import HADAMARD_BLOCK

PARALLEL_ROWS = 12
"""The fewest rows that are worth more than one thread."""
ROWS_PER_PART = 4
"""Rows that a thread takes at a time."""
INPUT_ZERO = 128
"""Added to rounded inputs of 8-bit weights, as the instructions take them unsigned."""


@checks.RESHAPE_AND_CACHE
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots: see `reference.reshape_and_cache`."""
    check_launch(key_cache)
    key, value = (x if has_whole_rows(x) else x.contiguous() for x in (key, value))
    _write_to_cache(
        len(key), as_numpy(key[:0].contiguous()), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        as_numpy(key_cache), as_numpy(value_cache), slot_mapping.numpy(),
    )  # fmt: skip


@checks.RMS_NORM
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, then scale: see `reference.rms_norm`."""
    if not _can_run(x):
        return reference.rms_norm.unchecked(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size
    _norm(_num_threads(num_rows), num_rows, size, x.data_ptr(), 0, weight.data_ptr(), np.float32(eps), out.data_ptr(), 0)
    return out


@checks.ADD_RMS_NORM
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalize the sum: see `reference.add_rms_norm`."""
    if not _can_run(x):
        return reference.add_rms_norm.unchecked(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size
    _norm(
        _num_threads(num_rows), num_rows, size, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), np.float32(eps),
        out.data_ptr(), total.data_ptr(),
    )  # fmt: skip
    return out, total


@checks.ROTARY_EMBEDDING
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions: see `reference.rotary_embedding`."""
    if (
        not _can_run(query)
        or query.shape[2] > MAX_HEAD_DIM
        or positions.dtype != torch.int64
        or not (has_whole_rows(query) and has_whole_rows(key))
    ):
        return reference.rotary_embedding.unchecked(positions, query, key, cos, sin)
    positions = positions.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    rotated_query, rotated_key = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate(
        _num_threads(num_tokens), num_tokens, positions.data_ptr(), constant(head_dim // 2), cos.data_ptr(), sin.data_ptr(),
        query.data_ptr(), query.stride(0), num_heads, rotated_query.data_ptr(),
        key.data_ptr(), key.stride(0), key.shape[1], rotated_key.data_ptr(),
    )  # fmt: skip
    return rotated_query, rotated_key


@checks.SILU_AND_MUL
def silu_and_mul(x: Tensor) -> Tensor:
    """The gate of SwiGLU: see `reference.silu_and_mul`."""
    if not _can_run(x):
        return reference.silu_and_mul.unchecked(x)
    x = x.contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, size)
    _gate(_num_threads(num_rows), num_rows, size, x.data_ptr(), out.data_ptr())
    return out


def hadamard_transform(x: Tensor) -> Tensor:
    """Mix the numbers of each row: see `reference.hadamard_transform`."""
    if not _can_run(x):
        return reference.hadamard_transform(x)
    x = x.contiguous()
    num_rows, size = x.shape
    out = x.new_empty(num_rows, size + -size % HADAMARD_BLOCK)
    _transform(_num_threads(num_rows), num_rows, size, x.data_ptr(), out.shape[1], out.data_ptr())
    return out


def random_uniform(keys: Tensor, size: int, first: int = 0) -> Tensor:
    """Random numbers between 0 and 1, for each row those of its key: see `reference.random_uniform`."""
    keys = keys.to(torch.int32).contiguous()
    num_rows = len(keys)
    out = torch.empty(num_rows, size, dtype=torch.float32, device="cpu")
    _hash(_num_threads(num_rows), num_rows, size, first, keys.data_ptr(), out.data_ptr())
    return out


def _can_run(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _num_threads(num_rows: int) -> int:
    num_threads = use_threads_of_torch()
    return 1 if num_rows < PARALLEL_ROWS else num_threads


def has_whole_rows(x: Tensor) -> bool:
    """Whether the heads of a token are contiguous."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


floats_at, _integers, _bytes = pointer_to(types.float32), pointer_to(types.int64), pointer_to(types.uint8)
_keys = pointer_to(types.int32)


@njit
def row_at(address, row, stride, size):
    """The first `size` numbers of a row; rows are `stride` numbers apart."""
    return numba.carray(floats_at(address + 4 * row * stride), (size,))


@njit
def _rows_of(part, num_rows):
    return range(part * ROWS_PER_PART, min((part + 1) * ROWS_PER_PART, num_rows))


@njit
def _num_parts(num_rows):
    return -(-num_rows // ROWS_PER_PART)


@njit(fastmath=FASTMATH, error_model="numpy")
def _norm_part(part, num_rows, size, x_address, residual_address, weight_address, eps, out_address, total_address):
    """Without a residual (address 0), `x` itself is normalized."""
    weight = row_at(weight_address, 0, 0, size)
    for row in _rows_of(part, num_rows):
        x = row_at(x_address, row, size, size)
        if residual_address != 0:
            residual, total = row_at(residual_address, row, size, size), row_at(total_address, row, size, size)
            for i in range(size):
                total[i] = x[i] + residual[i]
            x = total
        squares = np.float32(0)
        for i in range(size):
            squares += x[i] * x[i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        out = row_at(out_address, row, size, size)
        for i in range(size):
            out[i] = x[i] * factor * weight[i]


@njit(error_model="numpy", cache=True)
def _norm(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _norm_part, (num_rows, *arguments))


@njit(fastmath=FASTMATH, error_model="numpy")
def _rotate_heads(x, cos, sin, out, num_heads, half_head):
    half = len(half_head)
    for head in range(num_heads):
        start = 2 * half * head
        for i in range(half):  # two loops, because compilers do not vectorize one that writes to two places
            out[start + i] = x[start + i] * cos[i] - x[start + half + i] * sin[i]
        for i in range(half):
            out[start + half + i] = x[start + half + i] * cos[i] + x[start + i] * sin[i]


@njit(fastmath=FASTMATH, error_model="numpy")
def _rotate_part(
    part, num_tokens, positions_address, half_head, cos_address, sin_address, query_address, query_stride, num_heads,
    query_out_address, key_address, key_stride, num_kv_heads, key_out_address,
):  # fmt: skip
    positions = numba.carray(_integers(positions_address), (num_tokens,))
    half = len(half_head)
    query_size, key_size = 2 * half * num_heads, 2 * half * num_kv_heads
    for token in _rows_of(part, num_tokens):
        cos, sin = row_at(cos_address, positions[token], half, half), row_at(sin_address, positions[token], half, half)
        query, key = row_at(query_address, token, query_stride, query_size), row_at(key_address, token, key_stride, key_size)
        _rotate_heads(query, cos, sin, row_at(query_out_address, token, query_size, query_size), num_heads, half_head)
        _rotate_heads(key, cos, sin, row_at(key_out_address, token, key_size, key_size), num_kv_heads, half_head)


@njit(error_model="numpy", cache=True)
def _rotate(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _rotate_part, (num_rows, *arguments))


@njit(fastmath=FASTMATH, error_model="numpy")
def _gate_part(part, num_rows, size, x_address, out_address):
    """silu(g) = g / (1 + e**-g), with e**-|g|, which never overflows."""
    for row in _rows_of(part, num_rows):
        x, out = row_at(x_address, row, 2 * size, 2 * size), row_at(out_address, row, size, size)
        for i in range(size):
            gate = x[i]
            small = exp2(-abs(gate) * LOG2_E)
            share = np.float32(1) / (np.float32(1) + small)
            out[i] = gate * (share if gate >= np.float32(0) else small * share) * x[size + i]


@njit(error_model="numpy", cache=True)
def _gate(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _gate_part, (num_rows, *arguments))


@njit(error_model="numpy")
def _transform_row(x, out):
    for i in range(len(x)):  # an assignment of the whole row is several times slower
        out[i] = x[i]
    for i in range(len(x), len(out)):
        out[i] = 0
    transform(out)


@njit(error_model="numpy")
def _transform_part(part, num_rows, size, x_address, stride, out_address):
    for row in _rows_of(part, num_rows):
        out = row_at(out_address, row, stride, stride)
        _transform_row(row_at(x_address, row, size, size), out)


@njit(error_model="numpy", cache=True)
def _transform(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _transform_part, (num_rows, *arguments))


@njit(error_model="numpy")
def _round_part(part, num_rows, size, x_address, stride, numbers_address, scales_address):
    """Rows of `x`, transformed and rounded to integers from -127 to 127, plus `INPUT_ZERO`; and their scales."""
    scales = row_at(scales_address, 0, 0, num_rows)
    x = np.empty(stride, np.float32)
    for row in _rows_of(part, num_rows):
        _transform_row(row_at(x_address, row, size, size), x)
        # Without their sign, floats stand in the same order as their bits do as integers, whose maximum is fast to find.
        largest = np.int32(0)
        for i in range(stride):
            largest = max(largest, np.int32(np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF)))
        scale = max(np.int32(largest).view(np.float32) / np.float32(127), np.float32(1e-30))
        scales[row] = scale
        inverse = np.float32(1) / scale
        numbers = numba.carray(_bytes(numbers_address + row * stride), (stride,))
        for i in range(stride):
            numbers[i] = np.uint8(np.int32(np.floor(x[i] * inverse + np.float32(0.5))) + np.int32(INPUT_ZERO))


@njit(error_model="numpy", cache=True)
def _round(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _round_part, (num_rows, *arguments))


@njit
def _mix(bits):
    bits = np.uint32((bits ^ (bits >> np.uint32(17))) * np.uint32(0xED5AD4BB))
    bits = np.uint32((bits ^ (bits >> np.uint32(11))) * np.uint32(0xAC4C1B51))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint32(0x31848BAB))
    return np.uint32(bits ^ (bits >> np.uint32(14)))


@njit(error_model="numpy")
def _hash_part(part, num_rows, size, first, keys_address, out_address):
    keys = numba.carray(_keys(keys_address), (num_rows,))
    for row in _rows_of(part, num_rows):
        key, out = np.uint32(keys[row]), row_at(out_address, row, size, size)
        for i in range(size):
            bits = np.int32(_mix(np.uint32(_mix(np.uint32(first + i)) + key)))
            uniform = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32)
            out[i] = min(uniform - np.floor(uniform), np.float32(1 - 2.0**-24))


@njit(error_model="numpy", cache=True)
def _hash(num_threads, num_rows, *arguments):
    parallel_for(num_threads, _num_parts(num_rows), _hash_part, (num_rows, *arguments))


def row_like(x, address, row, stride, size):
    """A row of numbers of the same type as those of `x`; rows are `stride` numbers apart."""
    raise NotImplementedError("only within compiled functions")


@overload(row_like)
def _compile_row_like(x, address, row, stride, size):
    pointer, num_bytes = pointer_to(x.dtype), x.dtype.bitwidth // 8
    return lambda x, address, row, stride, size: numba.carray(pointer(address + num_bytes * row * stride), (size,))


@njit(cache=True)
def _write_to_cache(num_tokens, like, key_address, key_stride, value_address, value_stride, key_cache, value_cache, slot_mapping):
    """Rows come by their addresses, because those of values lie between queries and keys: copies of them would take longer than the rest.

    Args:
        like: An array of the dtype of keys and values.
    """
    block_size, size = key_cache.shape[1], key_cache.shape[2] * key_cache.shape[3]
    for token in range(num_tokens):
        slot = slot_mapping[token]
        if slot >= 0:
            block, offset = slot // block_size, slot % block_size
            _write_row(row_like(like, key_address, token, key_stride, size), key_cache, block, offset)
            _write_row(row_like(like, value_address, token, value_stride, size), value_cache, block, offset)


@njit
def _write_row(row, cache, block, offset):
    for head in range(cache.shape[2]):
        for d in range(cache.shape[3]):
            cache[block, offset, head, d] = store(row[head * cache.shape[3] + d], cache[0, 0, 0, 0])
