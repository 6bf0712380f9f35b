"""Writing new keys and values to the cache."""

from __future__ import annotations

import numba
from numba import njit
from numba.extending import overload
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.cpu.launch import as_numpy, check_launch, store
from minivllm.kernels.cpu.native.memory import pointer_to
from minivllm.kernels.cpu.rows import has_whole_rows


@checks.RESHAPE_AND_CACHE
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots: see `reference.reshape_and_cache`."""
    check_launch(key_cache)
    key, value = (x if has_whole_rows(x) else x.contiguous() for x in (key, value))
    _write(
        len(key), as_numpy(key[:0].contiguous()), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        as_numpy(key_cache), as_numpy(value_cache), slot_mapping.numpy(),
    )  # fmt: skip


def row_like(x, address, row, stride, size):
    """A row of numbers of the same type as those of `x`; rows are `stride` numbers apart."""
    raise NotImplementedError("only within compiled functions")


@overload(row_like)
def _compile_row_like(x, address, row, stride, size):
    pointer, num_bytes = pointer_to(x.dtype), x.dtype.bitwidth // 8
    return lambda x, address, row, stride, size: numba.carray(pointer(address + num_bytes * row * stride), (size,))


@njit(cache=True)
def _write(num_tokens, like, key_address, key_stride, value_address, value_stride, key_cache, value_cache, slot_mapping):
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
