"""Words of memory that several threads or processes read and write: atomic, and in the same order for all of them.

`state` is the address of an array of 64-bit words, `index` the place of one in it. For compiled callers.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from minivllm.kernels.cpu.native.memory import call_llvm

LINE = 16
"""Words between those that different threads write, so that they do not share a cache line: 128 bytes."""
_MACHINE = platform.machine().lower()


def _pointer(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, ir.IntType(64).as_pointer()), [index])


@intrinsic
def read(typing_context, state, index):
    """A word. What its writer wrote before it can be read afterwards."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_pointer(builder, *arguments), "seq_cst", 8)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def write(typing_context, state, index, value):
    """Set a word."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[2], _pointer(builder, *arguments[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def add(typing_context, state, index, value):
    """Add to a word. Returns what it was before."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _pointer(builder, *arguments[:2]), arguments[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def replace(typing_context, state, index, old, new):
    """Compare and swap: whether the word was `old`."""

    def generate(context, builder, signature, arguments):
        result = builder.cmpxchg(_pointer(builder, *arguments[:2]), arguments[2], arguments[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing_context):
    """Tell the processor that this is a loop that waits."""

    def generate(context, builder, signature, arguments):
        if _MACHINE in ("x86_64", "amd64"):
            call_llvm(builder, "x86.sse2.pause")
        elif _MACHINE in ("aarch64", "arm64"):
            call_llvm(builder, "aarch64.hint", ir.IntType(32)(1))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(typing_context, address, first, second):
    """Call the C function at an address with two words."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
