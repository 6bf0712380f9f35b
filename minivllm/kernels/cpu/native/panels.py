"""The innermost loop of the linear layers, in LLVM IR, because compilers do not keep an array of sums in registers.

A weight is packed once, when it is loaded, in *panels* of 16 output features. A panel is made of *words* of 32 bits, one for each
output and as many input features as fit: one of float32, two of bfloat16, four of 8 bits. It holds its 16 words for the first input
features, then for the next, and so on, so that a thread reads memory sequentially.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from minivllm.kernels.cpu.native.features import HAS_AVX512, HAS_INT8_DOT
from minivllm.kernels.cpu.native.instructions import FLOAT, INT32, INT64, call_llvm, in_llvm, prefetch_line

PANEL = 16
"""Output features of a panel: the words of one AVX-512 register."""
WIDTHS = {1: 4, 2: 4, 4: 2, 8: 2, 12: 2, 16: 1, 20: 1, 24: 1} if HAS_AVX512 else {1: 4, 2: 2, 3: 2, 4: 1, 6: 1, 8: 1, 12: 1}
"""Numbers of rows that have a loop of their own, and how many panels it takes at a time. Its sums must fit the vector registers:
AVX-512 has 32, AVX2 has 16 of half the size. Several are needed, because an addition takes four cycles, and the next one to the same sum
waits for it."""
HALF_PANEL_ROWS = () if HAS_AVX512 else (8, 12)
"""With so many rows, the sums of a panel would not fit: its first 8 outputs have a loop, and then the others, whose words are in the cache."""
FEW_ROWS = tuple(WIDTHS)
SMALL_TILE, LARGE_TILE = 8, 12
"""Batches that are larger than `FEW_ROWS` go in tiles of one of these numbers of rows."""
ATTENTION_ROWS = 8 if HAS_AVX512 else 4
"""Rows that `multiply_rows` computes at a time; the tiles of attention are multiples of it."""
_WIDTH = WIDTHS[ATTENTION_ROWS]
ROW_PADDING = 2
"""Numbers that are left out after each column of `x`. Where columns were as long as the rows of a panel, 64 bytes, compilers would address
both with one counter, which takes the processor twice as many steps."""
PREFETCH_DISTANCE = 64
"""How many vectors ahead memory is prefetched: 4 KiB."""
PLACE_BITS = 16
"""Where memory is prefetched is counted in units of 2**-16 bytes."""

_INT16 = ir.IntType(16)
_CASE = 64
"""The cases of the switch are `rows + _CASE * panels`."""
_LLVM = llvmlite.binding.llvm_version_info[0]


class _BFloat16(ir.Type):
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


@functools.partial(in_llvm, prefer_literal=True)
def multiply_panels(builder, x, panels, first_panel, bias, out, first_row, num_rows, num_panels, place, pace):
    """Some rows by some panels: `out` = bias + the sum over k of `x[k, row]` times `panels[panel, k, :]`, for 16 outputs each.

    The types say what the numbers are:

    ======= ======= ===================================================================================================
    x       panels  what they hold
    ======= ======= ===================================================================================================
    float32 float32 a number in a word
    uint32  uint32  two bfloat16 in a word, multiplied by VDPBF16PS
    float32 uint32  two bfloat16 in a word of the panel, made float32 in registers; `x` has two columns for each word
    int32   int32   four 8-bit integers in a word, unsigned in `x` and signed in `panels`, with int32 sums: by VPDPBUSD, or where it is
                    missing, made 16-bit in registers
    ======= ======= ===================================================================================================

    Args:
        x: `[words, num_rows + ROW_PADDING]`, or as the table says; contiguous, of exactly that width.
        panels: `[num_panels, words, PANEL]`.
        first_panel, first_row: Where to begin in `panels` and in `out`.
        bias: What the sums start with, for all outputs; or an array like `out`, or `out` itself, with a start for each sum.
        out: `[num_rows, outputs]`.
        num_rows, num_panels: Of `WIDTHS`, or 1 panel. If `num_rows` is a literal, only its loops are compiled.
        place, pace: What to prefetch meanwhile: where to begin, from the start of `panels`, and how much further with each vector, both
            in units of 2**-PLACE_BITS bytes. With fewer rows than `SMALL_TILE` they do not count: what is read soon is prefetched.
    """

    def at(start: Any, offset: Any) -> Any:
        return builder.gep(start, [offset])

    def as_pointer_to(kind: Any, address: Any) -> Any:
        return builder.bitcast(address, kind.as_pointer())

    kinds = x.dtype, panels.dtype
    is_int8 = kinds[1] == types.int32
    numbers_per_word = 2 if kinds == (types.float32, types.uint32) else 1

    num_words, out_width = panels.shape[1], out.shape[1]
    first_output = builder.mul(first_panel, INT64(PANEL))
    panel_size = builder.mul(num_words, INT64(PANEL))
    weights = at(as_pointer_to(INT32, panels.data), builder.mul(first_panel, panel_size))
    corner = at(out.data, builder.add(builder.mul(first_row, out_width), first_output))

    def generate_loop(height: int, width: int) -> None:
        lanes = PANEL // 2 if height in HALF_PANEL_ROWS else PANEL
        for first_lane in range(0, PANEL, lanes):
            generate_lanes(height, width, first_lane, lanes)

    def generate_lanes(height: int, width: int, first_lane: int, lanes: int) -> None:
        total, word = (ir.VectorType(kind, lanes) for kind in (INT32 if is_int8 else FLOAT, INT32))
        number = ir.VectorType(FLOAT if kinds[0] == types.float32 else INT32, lanes)
        undefined, to_all = ir.Constant(number, ir.Undefined), ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
        multiply_add = _get_multiply_add(builder, kinds, lanes)
        sums = [[cgutils.alloca_once(builder, total) for _ in range(width)] for _ in range(height)]
        for panel in range(width):
            for row in range(height):
                offset = builder.add(first_output, INT64(panel * PANEL + first_lane))
                if bias.ndim == 2:
                    offset = builder.add(offset, builder.mul(builder.add(first_row, INT64(row)), out_width))
                start = builder.load(as_pointer_to(total, at(bias.data, offset)), align=4)
                builder.store(start, sums[row][panel])
        with cgutils.for_range(builder, num_words) as loop:
            words = []
            for panel in range(width):
                offset = builder.add(builder.mul(panel_size, INT64(panel)), builder.mul(loop.index, INT64(PANEL)))
                words.append(builder.load(as_pointer_to(word, at(weights, builder.add(offset, INT64(first_lane)))), align=4))
                if first_lane > 0:
                    continue  # the first half has read this line
                if height < SMALL_TILE:
                    prefetch_line(builder, at(weights, builder.add(offset, INT64(PANEL * PREFETCH_DISTANCE))), level=3)
                else:
                    vector = builder.add(builder.mul(num_words, INT64(panel)), loop.index)
                    distance = builder.ashr(builder.add(place, builder.mul(vector, pace)), INT64(PLACE_BITS))
                    prefetch_line(builder, at(as_pointer_to(ir.IntType(8), panels.data), distance), level=3)
            stride = height + ROW_PADDING
            column = at(x.data, builder.mul(loop.index, INT64(stride * numbers_per_word)))
            for i in range(numbers_per_word):
                # The second of two bfloat16 numbers is the word without its lower half, the first is the lower half moved up.
                if numbers_per_word == 1:
                    factors = words
                elif i == 0:
                    factors = [builder.shl(each, ir.Constant(word, [16] * lanes)) for each in words]
                else:
                    factors = [builder.and_(each, ir.Constant(word, [-65536] * lanes)) for each in words]
                for row in range(height):
                    one = builder.load(at(column, INT64(i * stride + row)))
                    repeated = builder.shuffle_vector(builder.insert_element(undefined, one, INT32(0)), undefined, to_all)
                    for panel in range(width):
                        before = builder.load(sums[row][panel])
                        builder.store(multiply_add(repeated, factors[panel], before), sums[row][panel])
        for row in range(height):
            for panel in range(width):
                offset = builder.add(builder.mul(out_width, INT64(row)), INT64(panel * PANEL + first_lane))
                builder.store(builder.load(sums[row][panel]), as_pointer_to(total, at(corner, offset)), align=4)

    end, unknown = builder.append_basic_block("end"), builder.append_basic_block("unknown")
    switch = builder.switch(builder.add(num_rows, builder.mul(num_panels, INT64(_CASE))), unknown)
    with builder.goto_block(unknown):  # rather than return a product that was never computed
        call_llvm(builder, "trap")
        builder.unreachable()
    known = [num_rows.constant] if isinstance(num_rows, ir.Constant) else list(WIDTHS)
    for rows, width in sorted({(number, width) for number in known for width in (1, WIDTHS[number])}):
        block = builder.append_basic_block(f"rows{rows}x{width}")
        switch.add_case(INT64(rows + _CASE * width), block)
        builder.position_at_end(block)
        generate_loop(rows, width)
        builder.branch(end)
    builder.position_at_end(end)


def _get_multiply_add(builder: ir.IRBuilder, kinds: tuple[Any, Any], lanes: int) -> Callable[[Any, Any, Any], Any]:
    """The instruction: from `lanes` numbers or words of `x`, as many of the weight and as many sums to the new sums."""
    floats, words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
    if kinds == (types.int32, types.int32) and not HAS_INT8_DOT:
        return functools.partial(_multiply_add_int8, builder, lanes)
    if kinds[0] == types.float32:
        name, total, factors = f"fma.v{lanes}f32", floats, floats
    elif kinds == (types.uint32, types.uint32):
        # LLVM has given the inputs of both instructions a type of their own, one after the other.
        name, total = "x86.avx512bf16.dpbf16ps.512", floats
        factors = ir.VectorType(_BFloat16(), 2 * PANEL) if _LLVM >= 16 else words
    else:
        name, total = "x86.avx512.vpdpbusd.512", words
        factors = ir.VectorType(ir.IntType(8), 4 * PANEL) if _LLVM >= 21 else words

    def multiply_add(numbers: Any, weight: Any, before: Any) -> Any:
        pair = [builder.bitcast(numbers, factors), builder.bitcast(weight, factors)]
        if kinds == (types.uint32, types.uint32):
            pair.reverse()  # this instruction repeats only its last operand, if it comes from memory
        return call_llvm(builder, name, *([*pair, before] if kinds[0] == types.float32 else [before, *pair]), returns=total)

    return multiply_add


def _multiply_add_int8(builder: ir.IRBuilder, lanes: int, numbers: Any, weight: Any, before: Any) -> Any:
    """What VPDPBUSD does, for the even and then the odd bytes of 16-bit halves. Compilers know the sum of two neighbouring products as
    one instruction (PMADDWD)."""
    halves, wide = ir.VectorType(_INT16, 2 * lanes), ir.VectorType(INT32, 2 * lanes)
    x, w, eight = builder.bitcast(numbers, halves), builder.bitcast(weight, halves), ir.Constant(halves, [8] * 2 * lanes)
    even = builder.and_(x, ir.Constant(halves, [255] * 2 * lanes)), builder.ashr(builder.shl(w, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(w, eight)
    for pair in (even, odd):
        products = builder.mul(*(builder.sext(each, wide) for each in pair))
        first, second = (
            builder.shuffle_vector(products, products, ir.Constant(ir.VectorType(INT32, lanes), list(range(start, 2 * lanes, 2))))
            for start in (0, 1)
        )
        before = builder.add(before, builder.add(first, second))
    return before


@njit(error_model="numpy")
def multiply_rows(x, panels, first_panel, start, out):
    """`out` = `start` + `x` times the panels from `first_panel` on, all of it in the cache; `x` is `[tiles, words, ATTENTION_ROWS + ROW_PADDING]`."""
    for i in range(len(x)):
        panel = first_panel
        while panel < len(panels):
            count = _WIDTH if len(panels) - panel >= _WIDTH else 1
            multiply_panels(x[i], panels, panel, start, out, i * ATTENTION_ROWS, ATTENTION_ROWS, count, 0, 0)
            panel += count
