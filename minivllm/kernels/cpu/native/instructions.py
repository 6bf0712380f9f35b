"""How a function of this folder is written: as Python code that writes LLVM's instructions into its caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


class ArrayArgument:
    """An array that an intrinsic is given.

    Attributes:
        dtype, ndim, layout: Known while the caller is compiled.
        data, shape: The address of its first number, and its lengths, when the caller runs.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: types.Array, value: Any) -> None:
        self.dtype, self.ndim, self.layout = kind.dtype, kind.ndim, kind.layout
        array = context.make_array(kind)(context, builder, value)
        self.data, self.shape = array.data, cgutils.unpack_tuple(builder, array.shape)
        self.locate = functools.partial(cgutils.get_item_pointer, context, builder, kind, array, wraparound=False)

    def row(self, *indices: Any) -> Any:
        """The address of a row: of the number at these indices, and 0 for the last dimension."""
        return self.locate([*indices, INT64(0)])


def in_llvm(write: Callable[..., Any], returns: types.Type = types.void, prefer_literal: bool = False) -> Any:
    """Make an intrinsic of a function that writes instructions. Compiled code calls it without the builder.

    Of its arguments, the function gets arrays as `ArrayArgument`s, whole numbers with 64 bits, and the length of a `launch.constant`. With
    `prefer_literal`, the caller's literals are `ir.Constant`s.
    """

    def get_argument(context: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            return ArrayArgument(context, builder, kind, value)
        return len(kind) if isinstance(kind, types.BaseTuple) else context.cast(builder, value, kind, types.intp)

    @functools.wraps(write)
    def declare(typing_context: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: list) -> Any:
            pairs = zip(signature.args, values, strict=True)
            result = write(builder, *(get_argument(context, builder, kind, value) for kind, value in pairs))
            return context.get_dummy_value() if result is None else result

        return returns(*kinds), generate

    return intrinsic(prefer_literal=prefer_literal)(declare)


def call_llvm(builder: ir.IRBuilder, name: str, *arguments: Any, returns: ir.Type | None = None) -> Any:
    """Call one of LLVM's functions, whose name is given without the leading `llvm.`."""
    function_type = ir.FunctionType(returns or ir.VoidType(), [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}"), arguments)


def prefetch_line(builder: ir.IRBuilder, address: Any, level: int) -> None:
    """Ask for a cache line, to be kept in the first-level cache (`level` 3) or the second-level one (2), without waiting for it."""
    start = builder.bitcast(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "prefetch.p0", start, INT32(0), INT32(level), INT32(1))  # to read (0), data rather than instructions (1)
