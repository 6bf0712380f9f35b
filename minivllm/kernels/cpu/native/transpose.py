"""Rows to columns: a block of 16 rows and 16 words in vector registers, in LLVM IR, as compilers move one word at a time.

A transposition of 2 x 2 swaps the two numbers off the diagonal. One of 16 x 16 swaps the two blocks of 8 x 8 off the diagonal, then
within each quarter those of 4 x 4, and so on: in four steps, each a shuffle of two registers for every register.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core.errors import TypingError

from minivllm.kernels.cpu.native.instructions import INT32, INT64, ArrayArgument, call_llvm, in_llvm
from minivllm.kernels.cpu.native.panels import PANEL

MIN_ROWS = 8
"""Fewer rows go word by word."""

_WORDS = ir.VectorType(INT32, PANEL)


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


@in_llvm
def transpose_block(builder, x, first_row, first_word, columns, tile, first_column, count):
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
    num_rows, num_words = x.shape
    _, num_target_words, width = columns.shape

    def vector(array: ArrayArgument, offset: Any) -> Any:
        return builder.bitcast(builder.gep(array.data, [offset]), _WORDS.as_pointer())

    last = builder.sub(num_rows, INT64(1))
    rows = []
    for i in range(PANEL):
        row = builder.add(first_row, INT64(i))
        row = builder.select(builder.icmp_signed("<", row, last), row, last)
        rows.append(builder.load(vector(x, builder.add(builder.mul(row, num_words), first_word)), align=4))
    for size in (8, 4, 2, 1):
        rows = _swap_blocks(builder, rows, size)

    undefined = ir.Constant(_WORDS, ir.Undefined)
    limit = builder.insert_element(undefined, builder.trunc(count, INT32), INT32(0))
    limit = builder.shuffle_vector(limit, undefined, ir.Constant(_WORDS, [0] * PANEL))
    mask = builder.icmp_signed("<", ir.Constant(_WORDS, list(range(PANEL))), limit)
    first = builder.mul(tile, num_target_words)
    for j, column in enumerate(rows):
        place = builder.add(first, builder.add(first_word, INT64(j)))
        address = vector(columns, builder.add(builder.mul(place, width), first_column))
        call_llvm(builder, f"masked.store.v{PANEL}i32.p0", column, address, INT32(4), mask)


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
