"""Rows to columns: a block of 16 rows and 16 words in vector registers, in LLVM IR, as compilers move one word at a time.

A transposition of 2 x 2 swaps the two numbers off the diagonal. One of 16 x 16 swaps the two blocks of 8 x 8 off the diagonal, then
within each quarter those of 4 x 4, and so on: in four steps, each a shuffle of two registers for every register.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from minivllm.kernels.cpu.native.memory import call_llvm
from minivllm.kernels.cpu.native.panels import PANEL

MIN_ROWS = 8
"""Fewer rows go word by word."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_WORDS = ir.VectorType(_INT32, PANEL)


def _swap_blocks(builder: ir.IRBuilder, rows: list[Any], size: int) -> list[Any]:
    """In all squares of `2 * size` rows and words, swap the two blocks off the diagonal."""

    def merge(first: Any, second: Any, shift: int) -> Any:
        """Of every `2 * size` words, those of one half from each of two rows."""
        lanes = [lane + shift if lane & size == 0 else PANEL + lane - size + shift for lane in range(PANEL)]
        return builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes))

    result = list(rows)
    for i in range(PANEL):
        if i & size == 0:
            result[i], result[i + size] = (merge(rows[i], rows[i + size], shift) for shift in (0, size))
    return result


@intrinsic
def transpose_block(typing_context, x, first_row, first_word, columns, tile, first_column, count):
    """16 words of up to 16 rows: `columns[tile, first_word + j, first_column + i] = x[first_row + i, first_word + j]`.

    Args:
        x: `[rows, words]`, of 4 bytes each, contiguous. Rows past the end repeat the last row.
        first_row, first_word: Where the block begins. 16 words must be left.
        columns: `[tiles, words, columns]`, contiguous.
        tile, first_column: Where it goes.
        count: How many rows to write, at most 16.
    """
    if any(array.layout != "C" or array.dtype.bitwidth != 32 for array in (x, columns)):
        raise TypingError("transpose_block takes contiguous arrays of 4-byte numbers.")

    def generate(context, builder, signature, arguments):
        source, target = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 3))
        first_row, first_word, tile, first_column, count = (
            context.cast(builder, arguments[i], signature.args[i], types.intp) for i in (1, 2, 4, 5, 6)
        )
        num_rows, num_words = cgutils.unpack_tuple(builder, source.shape)
        _, num_target_words, width = cgutils.unpack_tuple(builder, target.shape)

        def vector(array: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(array.data, [offset]), _WORDS.as_pointer())

        last = builder.sub(num_rows, _INT64(1))
        rows = []
        for i in range(PANEL):
            row = builder.add(first_row, _INT64(i))
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            rows.append(builder.load(vector(source, builder.add(builder.mul(row, num_words), first_word)), align=4))
        for size in (8, 4, 2, 1):
            rows = _swap_blocks(builder, rows, size)

        undefined = ir.Constant(_WORDS, ir.Undefined)
        limit = builder.insert_element(undefined, builder.trunc(count, _INT32), _INT32(0))
        limit = builder.shuffle_vector(limit, undefined, ir.Constant(_WORDS, [0] * PANEL))
        mask = builder.icmp_signed("<", ir.Constant(_WORDS, list(range(PANEL))), limit)
        first = builder.mul(tile, num_target_words)
        for j, column in enumerate(rows):
            place = builder.add(first, builder.add(first_word, _INT64(j)))
            address = vector(target, builder.add(builder.mul(place, width), first_column))
            call_llvm(builder, f"masked.store.v{PANEL}i32.p0", column, address, _INT32(4), mask)
        return context.get_dummy_value()

    return types.void(x, first_row, first_word, columns, tile, first_column, count), generate


@njit(error_model="numpy")
def transpose(x, first_row, columns, tile, first_column, num_rows, start, stop):
    """The words from `start` to `stop` of some rows, as columns: `columns[tile, k, first_column + i] = x[first_row + i, k]`."""
    word = start
    if num_rows >= MIN_ROWS:
        while word + PANEL <= stop:
            for i in range(0, num_rows, PANEL):
                transpose_block(x, first_row + i, word, columns, tile, first_column + i, min(PANEL, num_rows - i))
            word += PANEL
    for k in range(word, stop):
        for i in range(num_rows):
            columns[tile, k, first_column + i] = x[min(first_row + i, len(x) - 1), k]
