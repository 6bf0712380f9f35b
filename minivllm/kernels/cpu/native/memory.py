"""Addresses of arrays, pointers, and prefetching, for compiled callers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from minivllm.kernels.cpu.native.instructions import INT32, in_llvm, prefetch_line


@njit
def address(x):
    """Where an array's numbers begin, as the kernels of `rows` take it: of the type that an address has in Python, so that they are compiled
    once. The array must be used after the call that takes the address, or `kept` until then: after its last use it is freed."""
    return np.int64(x.ctypes.data)


@njit
def keep(x):
    """A use of an array, up to which it is not freed."""
    return x.size


@in_llvm
def prefetch(builder, array, block, offset, head, num_channels):
    """Ask for the memory of `array[block, offset, head]` without waiting for it: one instruction for each cache line.

    `num_channels` is the `constant` of the row's length.
    """
    start = builder.bitcast(array.row(block, offset, head), ir.IntType(8).as_pointer())
    for line in range(0, num_channels * array.dtype.bitwidth // 8, 64):
        prefetch_line(builder, builder.gep(start, [INT32(line)]), level=2)


def pointer_to(dtype: Any) -> Any:
    """A compiled function that turns an address into a pointer for `numba.carray`."""

    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.intp), generate

    return pointer
