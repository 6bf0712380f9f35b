"""The online softmax of 16 columns at once, in LLVM IR. For each column:

    largest = max(before, max(scores))
    shrink = 2 ** (before - largest)
    weights = 2 ** (scores - largest)
    sum = sum * shrink + sum(weights)
    output = output * shrink

Compilers make no vectors of such loops over 16 columns of several arrays, because the arrays might overlap.

Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.errors import TypingError

from minivllm.kernels.cpu.launch import POWERS_OF_TWO
from minivllm.kernels.cpu.native.instructions import FLOAT, INT32, INT64, ArrayArgument, call_llvm, in_llvm
from minivllm.kernels.cpu.native.panels import PANEL
from minivllm.kernels.cpu.native.transpose import transpose

_NUMBERS, _INTEGERS = ir.VectorType(FLOAT, PANEL), ir.VectorType(INT32, PANEL)


def _numbers(value: float) -> ir.Constant:
    return ir.Constant(_NUMBERS, [ir.Constant(FLOAT, value)] * PANEL)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_INTEGERS, [value] * PANEL)


def _exp2(builder: ir.IRBuilder, x: Any) -> Any:
    """`launch.exp2` of a vector."""
    x = builder.select(builder.fcmp_ordered("<", x, _numbers(-127.0)), _numbers(-127.0), x)
    whole = call_llvm(builder, f"floor.v{PANEL}f32", builder.fadd(x, _numbers(0.5)), returns=_NUMBERS)
    rest = builder.fsub(x, whole)
    power = _numbers(POWERS_OF_TWO[0])
    for coefficient in POWERS_OF_TWO[1:]:
        power = call_llvm(builder, f"fma.v{PANEL}f32", power, rest, _numbers(coefficient), returns=_NUMBERS)
    exponent = builder.add(builder.fptosi(whole, _INTEGERS), _integers(127))
    return builder.fmul(power, builder.bitcast(builder.shl(exponent, _integers(23)), _NUMBERS))


def _pair(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """Two vectors rounded to bfloat16, in one of words. Ties go up, which takes an addition less than to even, and weights are positive."""
    low, high = (builder.add(builder.bitcast(each, _INTEGERS), _integers(0x8000)) for each in (first, second))
    return builder.or_(builder.lshr(low, _integers(16)), builder.and_(high, _integers(-0x10000)))


@in_llvm
def weigh(builder, scores, panel, last_seen, maxima, sums, output, weights):
    """The scores of a tile of tokens become weights, for the 16 columns of a panel.

    Where a score is larger than all before, the sum of the weights so far and the output so far shrink.

    Args:
        scores: `[tokens, columns]`, float32, contiguous like all others; changed.
        panel: Which 16 columns.
        last_seen: `[panels, PANEL]`, int32: the last token of the tile that a column sees; those after it weigh nothing.
        maxima, sums: `[panels, PANEL]`, float32: of the scores and weights so far; changed.
        output: `[channels, columns]`, float32: what the values so far add up to; changed.
        weights: `[panels, tokens, PANEL]`, float32, or `[panels, tokens / 2, PANEL]`, uint32, of two bfloat16 numbers each; written.
    """
    if last_seen.dtype != types.int32 or any(array.layout != "C" for array in (scores, last_seen, maxima, sums, output, weights)):
        raise TypingError("weigh takes contiguous arrays, and last_seen of int32.")
    num_tokens, width = scores.shape
    start = builder.mul(panel, INT64(PANEL))

    def vector(array: ArrayArgument, offset: Any, kind: Any = _NUMBERS) -> Any:
        return builder.bitcast(builder.gep(array.data, [offset]), kind.as_pointer())

    def load(array: ArrayArgument, offset: Any, kind: Any = _NUMBERS) -> Any:
        return builder.load(vector(array, offset, kind), align=4)

    def store(value: Any, array: ArrayArgument, offset: Any) -> None:
        builder.store(value, vector(array, offset), align=4)

    def in_row(row: Any) -> Any:
        return builder.add(builder.mul(row, width), start)

    limits, before = load(last_seen, start, _INTEGERS), load(maxima, start)
    largest = cgutils.alloca_once_value(builder, before)
    lowest, undefined = _numbers(float("-inf")), ir.Constant(_INTEGERS, ir.Undefined)
    with cgutils.for_range(builder, num_tokens) as loop:
        token = builder.insert_element(undefined, builder.trunc(loop.index, INT32), INT32(0))
        token = builder.shuffle_vector(token, undefined, _integers(0))
        score = builder.select(builder.icmp_signed("<=", token, limits), load(scores, in_row(loop.index)), lowest)
        store(score, scores, in_row(loop.index))
        so_far = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", score, so_far), score, so_far), largest)
    maximum = builder.load(largest)
    shift = builder.select(builder.fcmp_ordered(">", maximum, lowest), maximum, _numbers(0.0))
    store(maximum, maxima, start)

    total = cgutils.alloca_once_value(builder, load(sums, start))
    rises = builder.bitcast(builder.fcmp_ordered(">", maximum, before), ir.IntType(PANEL))
    with builder.if_then(builder.icmp_unsigned("!=", rises, ir.IntType(PANEL)(0))):
        shrink = _exp2(builder, builder.fsub(before, shift))
        builder.store(builder.fmul(builder.load(total), shrink), total)
        with cgutils.for_range(builder, output.shape[0]) as loop:
            store(builder.fmul(load(output, in_row(loop.index)), shrink), output, in_row(loop.index))

    def get_weight(row: Any) -> Any:
        weight = _exp2(builder, builder.fsub(load(scores, in_row(row)), shift))
        builder.store(builder.fadd(builder.load(total), weight), total)
        return weight

    num_rows = weights.shape[1]
    first_weight = builder.mul(start, num_rows)
    with cgutils.for_range(builder, num_rows) as loop:
        place = builder.add(first_weight, builder.mul(loop.index, INT64(PANEL)))
        if weights.dtype == types.float32:
            store(get_weight(loop.index), weights, place)
        else:
            row = builder.mul(loop.index, INT64(2))
            first, second = (get_weight(builder.add(row, INT64(i))) for i in range(2))
            builder.store(_pair(builder, first, second), vector(weights, place, _INTEGERS), align=4)
    store(builder.load(total), sums, start)


@njit(error_model="numpy")
def finish(output, sums, kv_head, out, channels, group):
    """Divide by the sums of the weights, and write the columns of a KV head, `[channels, columns]`, to `[tokens, heads, channels]`."""
    columns = np.empty((1, output.shape[1], len(output)), np.float32)
    for channel in range(0, len(output), PANEL):
        num_channels = min(PANEL, len(output) - channel)
        transpose(output, channel, columns, 0, channel, num_channels, 0, output.shape[1])
    for column in range(len(out) * len(group)):
        token, head = column // len(group), kv_head * len(group) + column % len(group)
        total = sums[column // PANEL, column % PANEL]
        for d in range(len(channels)):
            out[token, head, d] = columns[0, column, d] / total
