"""Addresses of arrays, pointers, prefetching, and calls of LLVM's own functions."""

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


def call_llvm(builder: ir.IRBuilder, name: str, *arguments: Any, returns: ir.Type | None = None) -> Any:
    """Call one of LLVM's functions, whose name is given without the leading `llvm.`."""
    function_type = ir.FunctionType(returns or ir.VoidType(), [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}"), arguments)


def prefetch_line(builder: ir.IRBuilder, address: Any, level: int) -> None:
    """Ask for a cache line, to be kept in the first-level cache (`level` 3) or the second-level one (2), without waiting for it."""
    int32, start = ir.IntType(32), builder.bitcast(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "prefetch.p0", start, int32(0), int32(level), int32(1))  # to read (0), data rather than instructions (1)


@intrinsic
def prefetch(typing_context, array, block, offset, head, channels):
    """Ask for the memory of `array[block, offset, head]` without waiting for it: one instruction for each cache line.

    `channels` is the `constant` of the row's length.
    """

    def generate(context, builder, signature, arguments):
        array_type = signature.args[0]
        struct = context.make_array(array_type)(context, builder, arguments[0])
        pairs = zip(arguments[1:4], signature.args[1:4], strict=True)
        indices = [context.cast(builder, value, kind, types.intp) for value, kind in pairs]
        indices.append(context.get_constant(types.intp, 0))
        address = cgutils.get_item_pointer(context, builder, array_type, struct, indices, wraparound=False)
        address = builder.bitcast(address, ir.IntType(8).as_pointer())
        num_bytes = len(signature.args[4]) * array_type.dtype.bitwidth // 8
        for line in range(0, num_bytes, 64):
            prefetch_line(builder, builder.gep(address, [ir.IntType(32)(line)]), level=2)
        return context.get_dummy_value()

    return types.void(array, block, offset, head, channels), generate


def pointer_to(dtype: Any) -> Any:
    """A compiled function that turns an address into a pointer for `numba.carray`."""

    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.intp), generate

    return pointer
