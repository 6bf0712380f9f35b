"""AMX: products of whole tiles in one instruction, on Intel's server processors since 2023.

A *tile* is a register of 16 rows of 64 bytes; there are eight. TDPBF16PS multiplies a tile of `x`, 16 rows of 32 bfloat16 numbers, with a
tile of weights, 32 input features of 16 outputs, and adds the products to a tile of 16 by 16 float32 sums: 8,192 multiply-adds in 16
cycles, where AVX-512 does 512 in float32. TDPBUSD does the same for 8-bit integers, of which a tile has twice as many.

A tile of weights is 16 words of 16 outputs: 16 neighbouring vectors of a panel (see `panels`), as they lie in memory. A tile of `x` is
some rows as they lie in memory as well, so nothing is transposed. Intel, "Intel 64 and IA-32 Architectures Optimization Reference Manual",
chapter on AMX.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.errors import TypingError

from minivllm.kernels.cpu.native.instructions import INT64, ArrayArgument, call_llvm, in_llvm

TILE_ROWS = 16
"""Rows of a tile."""
TILE_WORDS = 16
"""Words of 32 bits in a row of a tile."""
_BYTES = 4 * TILE_WORDS
_SUMS, _X, _WEIGHTS = 0, 4, 6
"""The first tile of each kind: four for sums, two for rows of `x`, two for weights."""
_INT8 = ir.IntType(8)


@njit
def tile_rows(num_rows, tiles_at_a_time):
    """How many rows of a batch go into a tile: the fewest that need no more steps of `tiles_at_a_time`."""
    if num_rows <= TILE_ROWS:
        return num_rows
    num_steps = -(-num_rows // (tiles_at_a_time * TILE_ROWS))
    return -(-num_rows // (tiles_at_a_time * num_steps))


@in_llvm
def configure_tiles(builder, num_rows):
    """Make tiles ready on this thread: those of `x` and of sums with `num_rows` rows, those of weights with all 16. All become zero."""
    # Byte 0 is the palette, 16-bit numbers from byte 16 on are the bytes of a row, and bytes from 48 on are the rows.
    rows = builder.trunc(num_rows, _INT8)
    config = cgutils.alloca_once(builder, ir.ArrayType(_INT8, 64))
    start = builder.bitcast(config, _INT8.as_pointer())
    builder.store(ir.Constant(config.type.pointee, None), config)
    builder.store(_INT8(1), start)
    for tile in range(8):
        builder.store(_INT8(_BYTES), builder.gep(start, [INT64(16 + 2 * tile)]))
        builder.store(rows if tile < _WEIGHTS else _INT8(TILE_ROWS), builder.gep(start, [INT64(48 + tile)]))
    call_llvm(builder, "x86.ldtilecfg", start)


@in_llvm
def release_tiles(builder):
    """Give the tiles back: as long as they hold something, each switch of threads saves 8 KiB more."""
    call_llvm(builder, "x86.tilerelease")


@in_llvm
def multiply_tiles(
    builder, x, first_row, second_row, panels, first_panel, bias, out, first_out, second_out, num_tiles, num_panels
):
    """One or two tiles of rows by one or two panels: `out` = bias + `x` times the panels. The types say what the numbers are, as for
    `panels.multiply_panels`: two bfloat16 in a word of uint32 (TDPBF16PS), or four 8-bit integers in one of int32 (TDPBUSD).

    Args:
        x: `[rows, words]`, contiguous; `words` is a multiple of `TILE_WORDS`. A tile has as many rows as `configure_tiles` was told.
        first_row, second_row: Where the tiles begin in `x`; the second counts only if there are two.
        panels: `[num_panels, words, PANEL]`.
        first_panel: Where to begin in `panels`.
        bias: What the sums start with, for all outputs; or an array like `out`, or `out` itself, with a start for each sum.
        out: `[rows, outputs]`, contiguous.
        first_out, second_out: The rows of `out` where the tiles go.
        num_tiles, num_panels: 1 or 2 each.
    """

    if any(array.layout != "C" for array in (x, panels, bias, out)):
        raise TypingError("multiply_tiles takes contiguous arrays.")

    def at(start: Any, num_words: Any) -> Any:
        return builder.gep(start, [builder.mul(num_words, INT64(4))])

    def memory(array: ArrayArgument) -> Any:
        return builder.bitcast(array.data, _INT8.as_pointer())

    product = "x86.tdpbf16ps" if panels.dtype == types.uint32 else "x86.tdpbusd"
    num_words, out_width = x.shape[1], out.shape[1]
    panel_size, first_output = builder.mul(num_words, INT64(TILE_WORDS)), builder.mul(first_panel, INT64(TILE_WORDS))
    rows = [at(memory(x), builder.mul(row, num_words)) for row in (first_row, second_row)]
    weights = at(memory(panels), builder.mul(first_panel, panel_size))
    offsets = [builder.add(builder.mul(row, out_width), first_output) for row in (first_out, second_out)]
    starts, corners = ([at(memory(array), offset) for offset in offsets] for array in (bias, out))
    x_stride, out_stride = (builder.mul(width, INT64(4)) for width in (num_words, out_width))

    def generate_loop(tiles: range, columns: range) -> None:
        sums = {(tile, panel): _INT8(_SUMS + 2 * tile + panel) for tile in tiles for panel in columns}
        for (tile, panel), number in sums.items():
            if bias.ndim == 2:
                start, stride = at(starts[tile], INT64(panel * TILE_WORDS)), out_stride
            else:  # the same row again and again, as it is no distance to the next
                start, stride = at(memory(bias), builder.add(first_output, INT64(panel * TILE_WORDS))), INT64(0)
            call_llvm(builder, "x86.tileloadd64", number, start, stride)
        with cgutils.for_range(builder, builder.udiv(num_words, INT64(TILE_WORDS))) as loop:
            for tile in tiles:
                start = at(rows[tile], builder.mul(loop.index, INT64(TILE_WORDS)))
                call_llvm(builder, "x86.tileloadd64", _INT8(_X + tile), start, x_stride)
            for panel in columns:
                offset = builder.mul(loop.index, INT64(TILE_WORDS * TILE_WORDS))
                start = at(weights, builder.add(builder.mul(panel_size, INT64(panel)), offset))
                call_llvm(builder, "x86.tileloadd64", _INT8(_WEIGHTS + panel), start, INT64(_BYTES))
                for tile in tiles:
                    call_llvm(builder, product, sums[tile, panel], _INT8(_X + tile), _INT8(_WEIGHTS + panel))
        for (tile, panel), number in sums.items():
            call_llvm(builder, "x86.tilestored64", number, at(corners[tile], INT64(panel * TILE_WORDS)), out_stride)

    is_pair, has_two_panels = (builder.icmp_signed("==", count, INT64(2)) for count in (num_tiles, num_panels))
    with builder.if_else(is_pair) as (pair, single):
        for branch, tiles in ((pair, range(2)), (single, range(1))):
            with branch, builder.if_else(has_two_panels) as (two, one):
                with two:
                    generate_loop(tiles, range(2))
                with one:
                    generate_loop(tiles, range(1))


@njit(error_model="numpy")
def multiply_row_tiles(x, first_row, second_row, panels, first, last, bias, out, first_out, second_out, num_tiles):
    """One or two tiles of rows by the panels from `first` to `last`, two at a time."""
    for panel in range(first, last, 2):
        multiply_tiles(x, first_row, second_row, panels, panel, bias, out, first_out, second_out, num_tiles, min(2, last - panel))
