"""Words of memory that several threads or processes read and write: atomic, and in the same order for all of them.

`state` is the address of an array of 64-bit words, `index` the place of one in it. For compiled callers.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

from llvmlite import ir
from numba.core import types

from minivllm.kernels.cpu.native.instructions import INT32, INT64, call_llvm, in_llvm

LINE = 16
"""Words between those that different threads write, so that they do not share a cache line: 128 bytes."""
_MACHINE = platform.machine().lower()


def _pointer(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, INT64.as_pointer()), [index])


@functools.partial(in_llvm, returns=types.int64)
def read(builder, state, index):
    """A word. What its writer wrote before it can be read afterwards."""
    return builder.load_atomic(_pointer(builder, state, index), "seq_cst", 8)


@in_llvm
def write(builder, state, index, value):
    """Set a word."""
    builder.store_atomic(value, _pointer(builder, state, index), "seq_cst", 8)


@functools.partial(in_llvm, returns=types.int64)
def add(builder, state, index, value):
    """Add to a word. Returns what it was before."""
    return builder.atomic_rmw("add", _pointer(builder, state, index), value, "seq_cst")


@functools.partial(in_llvm, returns=types.boolean)
def replace(builder, state, index, old, new):
    """Compare and swap: whether the word was `old`."""
    result = builder.cmpxchg(_pointer(builder, state, index), old, new, "seq_cst", "seq_cst")
    return builder.extract_value(result, 1)


@in_llvm
def pause(builder):
    """Tell the processor that this is a loop that waits."""
    if _MACHINE in ("x86_64", "amd64"):
        call_llvm(builder, "x86.sse2.pause")
    elif _MACHINE in ("aarch64", "arm64"):
        call_llvm(builder, "aarch64.hint", INT32(1))


@in_llvm
def call(builder, address, first, second):
    """Call the C function at an address with two words."""
    function = ir.FunctionType(ir.VoidType(), [INT64, INT64]).as_pointer()
    builder.call(builder.inttoptr(address, function), [first, second])
