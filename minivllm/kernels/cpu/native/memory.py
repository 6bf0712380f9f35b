"""Addresses of arrays, pointers, and prefetching, for compiled callers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic


@njit
def address(x):
    """Where an array's numbers begin, as the kernels of `rows` take it: of the type that an address has in Python, so that they are compiled
    once. The array must be used after the call that takes the address, or `kept` until then: after its last use it is freed."""
    return np.int64(x.ctypes.data)


@njit
def keep(x):
    """A use of an array, up to which it is not freed."""
    return x.size


@intrinsic
def prefetch(typing_context: Any, array: Any, block: Any, offset: Any, head: Any, channels: Any) -> Any:
    """Ask for the memory of `array[block, offset, head]` without waiting for it: one instruction for each cache line.

    `channels` is the `constant` of the row's length. Numba has no such function, but lets one write it in the compiler's
    own language.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list) -> Any:
        array_type = signature.args[0]
        struct = context.make_array(array_type)(context, builder, arguments[0])
        pairs = zip(arguments[1:4], signature.args[1:4], strict=True)
        indices = [context.cast(builder, value, kind, types.intp) for value, kind in pairs]
        indices.append(context.get_constant(types.intp, 0))
        int32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        address = cgutils.get_item_pointer(context, builder, array_type, struct, indices, wraparound=False)
        address = builder.bitcast(address, pointer)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32]), "llvm.prefetch.p0"
        )
        num_bytes = len(signature.args[4]) * array_type.dtype.bitwidth // 8
        for line in range(0, num_bytes, 64):
            # For reading (0), to be kept in the second-level cache (2), data rather than instructions (1).
            builder.call(function, [builder.gep(address, [int32(line)]), int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(array, block, offset, head, channels), generate


def pointer_to(dtype: Any) -> Any:
    """A compiled function that turns an address into a pointer for `numba.carray`."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: list) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.intp), generate

    return pointer
