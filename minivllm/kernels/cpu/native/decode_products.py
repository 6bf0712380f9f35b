"""The two products of decode attention, in LLVM IR, for the query heads g that share a KV head, and a few tokens t at a time:

    scores[g, t] = the sum over d of query[g, d] * key[t, d]
    output[g, d] += the sum over t of weights[g, t] * value[t, d]

Keys and values become float32 once for all heads of a group, and the scores of four tokens are summed up across their vectors together.
Compilers repeat both for each head and token, because the arrays might overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from minivllm.kernels.cpu.native.features import HAS_AVX512
from minivllm.kernels.cpu.native.memory import call_llvm

TOKENS = 4
"""Tokens whose scores are computed at a time."""
LANES = 16 if HAS_AVX512 else 8
"""Float32 numbers of a vector register."""
HEADS = 4 if HAS_AVX512 else 2
"""Heads whose scores are computed at a time: `TOKENS * HEADS` sums must fit the registers."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _floats(width: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, width)


def _repeat(kind: ir.Type, value: float, width: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, width), [value] * width)


def _cut(size: int) -> list[tuple[int, int]]:
    """Where the vectors of a row begin, and their widths: full ones, then smaller powers of two."""
    pieces, start, width = [], 0, LANES
    while start < size:
        while width > size - start:
            width //= 2
        pieces.append((start, width))
        start += width
    return pieces


def _load_numbers(builder: ir.IRBuilder, row: Any, start: int, width: int, dtype: Any) -> Any:
    """`launch.load` of neighbouring numbers."""
    kind = ir.VectorType(_FLOAT if dtype == types.float32 else _INT16, width)
    address = builder.bitcast(builder.gep(row, [_INT64(start)]), kind.as_pointer())
    numbers = builder.load(address, align=dtype.bitwidth // 8)
    if dtype == types.float32:
        return numbers
    words = ir.VectorType(_INT32, width)
    bits = builder.zext(numbers, words)
    if dtype == types.int16:
        return builder.bitcast(builder.shl(bits, _repeat(_INT32, 16, width)), _floats(width))
    sign = builder.shl(builder.and_(bits, _repeat(_INT32, 0x8000, width)), _repeat(_INT32, 16, width))
    magnitude = builder.shl(builder.and_(bits, _repeat(_INT32, 0x7FFF, width)), _repeat(_INT32, 13, width))
    magnitude = builder.fmul(builder.bitcast(magnitude, _floats(width)), _repeat(_FLOAT, 2.0**112, width))
    is_large = builder.fcmp_ordered(">=", magnitude, _repeat(_FLOAT, 2.0**16, width))
    magnitude = builder.bitcast(magnitude, words)
    magnitude = builder.select(is_large, builder.or_(magnitude, _repeat(_INT32, 0x7F800000, width)), magnitude)
    return builder.bitcast(builder.or_(magnitude, sign), _floats(width))


def _shuffle(builder: ir.IRBuilder, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes)))


def _sum_up(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The sums across four vectors, `[4]`: of each two vectors, neighbours are added, then the halves of what is left."""
    for step in (1, 2):
        lanes = [lane + LANES * (lane // step % 2) - step * (lane // step % 2) for lane in range(LANES)]
        vectors = [
            builder.fadd(_shuffle(builder, *pair, lanes), _shuffle(builder, *pair, [lane + step for lane in lanes]))
            for pair in zip(vectors[0::2], vectors[1::2], strict=True)
        ]
    (total,) = vectors
    while total.type.count > TOKENS:
        half = total.type.count // 2
        undefined = ir.Constant(total.type, ir.Undefined)
        total = builder.fadd(*(_shuffle(builder, total, undefined, range(start, start + half)) for start in (0, half)))
    return total


def _check(*arrays: Any) -> None:
    if any(array.layout != "C" or array.dtype != types.float32 for array in arrays):
        raise TypingError("All but the cache must be contiguous float32 arrays.")


def _row_of(context: Any, builder: ir.IRBuilder, kind: Any, value: Any, *indices: Any) -> Any:
    """The address of an array's numbers at these indices, and 0 for the last dimension."""
    array = context.make_array(kind)(context, builder, value)
    return cgutils.get_item_pointer(context, builder, kind, array, [*indices, _INT64(0)], wraparound=False)


@intrinsic
def score_tokens(typing_context, query, kv_head, key_cache, block, offset, end, scores, column, channels, group):
    """The scores of `TOKENS` cached tokens for the query heads that share a KV head.

    Args:
        query: `[num_heads, head_dim]`, float32, contiguous.
        kv_head: Whose.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, as `as_numpy` has it.
        block, offset, end: Where the tokens are: the block, the first of them, and the end of those that may be read. If fewer than `TOKENS`
            are left, the last is repeated, and its further scores mean nothing.
        scores: `[num_heads, columns]`, float32, contiguous; `TOKENS` columns are written.
        column: The first of them.
        channels, group: `constant`s of the head's size and of the query heads that share a KV head.
    """
    _check(query, scores)

    def generate(context, builder, signature, arguments):
        kinds, (head_dim, group_size) = signature.args, (len(kind) for kind in signature.args[-2:])
        kv_head, block, offset, end, column = (context.cast(builder, arguments[i], kinds[i], types.intp) for i in (1, 3, 4, 5, 7))
        last = builder.sub(end, _INT64(1))
        keys = []
        for i in range(TOKENS):
            token = builder.add(offset, _INT64(i))
            token = builder.select(builder.icmp_signed("<", token, last), token, last)
            keys.append(_row_of(context, builder, kinds[2], arguments[2], block, token, kv_head))
        first_head = builder.mul(kv_head, _INT64(group_size))
        for start in range(0, group_size, HEADS):
            heads = [builder.add(first_head, _INT64(head)) for head in range(start, min(start + HEADS, group_size))]
            queries = [_row_of(context, builder, kinds[0], arguments[0], head) for head in heads]
            sums = [[_repeat(_FLOAT, 0.0, LANES)] * TOKENS for _ in heads]
            for first, width in _cut(head_dim):
                of_tokens = [_load_numbers(builder, key, first, width, kinds[2].dtype) for key in keys]
                for row, of_head in zip(
                    sums, (_load_numbers(builder, each, first, width, types.float32) for each in queries), strict=True
                ):
                    for i, of_token in enumerate(of_tokens):
                        if width == LANES:
                            row[i] = call_llvm(builder, f"fma.v{width}f32", of_head, of_token, row[i], returns=_floats(width))
                        else:
                            products = builder.fmul(of_head, of_token)
                            zeros = _repeat(_FLOAT, 0.0, width)
                            lanes = [lane if lane < width else width for lane in range(LANES)]
                            row[i] = builder.fadd(row[i], _shuffle(builder, products, zeros, lanes))
            for head, row in zip(heads, sums, strict=True):
                place = builder.gep(_row_of(context, builder, kinds[6], arguments[6], head), [column])
                builder.store(_sum_up(builder, row), builder.bitcast(place, _floats(TOKENS).as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(query, kv_head, key_cache, block, offset, end, scores, column, channels, group), generate


def _make_add_values(num_tokens: int) -> Any:
    @intrinsic
    def add_values(typing_context, weights, column, value_cache, block, offset, kv_head, output, channels, group):
        """Add the weighted values of some cached tokens to the output of the query heads that share a KV head.

        Args:
            weights: `[num_heads, columns]`, float32, contiguous.
            column: Of the first token.
            value_cache, block, offset, kv_head: As for `score_tokens`.
            output: `[num_heads, head_dim]`, float32, contiguous; changed.
            channels, group: As for `score_tokens`.
        """
        _check(weights, output)

        def generate(context, builder, signature, arguments):
            kinds, (head_dim, group_size) = signature.args, (len(kind) for kind in signature.args[-2:])
            column, block, offset, kv_head = (context.cast(builder, arguments[i], kinds[i], types.intp) for i in (1, 3, 4, 5))
            values = [
                _row_of(context, builder, kinds[2], arguments[2], block, builder.add(offset, _INT64(i)), kv_head)
                for i in range(num_tokens)
            ]
            first_head = builder.mul(kv_head, _INT64(group_size))
            heads = [builder.add(first_head, _INT64(head)) for head in range(group_size)]
            factors = [builder.gep(_row_of(context, builder, kinds[0], arguments[0], head), [column]) for head in heads]
            outputs = [_row_of(context, builder, kinds[6], arguments[6], head) for head in heads]
            for first, width in _cut(head_dim):
                undefined, kind = ir.Constant(_floats(width), ir.Undefined), _floats(width).as_pointer()
                of_tokens = [_load_numbers(builder, value, first, width, kinds[2].dtype) for value in values]
                for factor, row in zip(factors, outputs, strict=True):
                    place = builder.bitcast(builder.gep(row, [_INT64(first)]), kind)
                    total = builder.load(place, align=4)
                    for i, of_token in enumerate(of_tokens):
                        weight = builder.load(builder.gep(factor, [_INT64(i)]))
                        weight = _shuffle(builder, builder.insert_element(undefined, weight, _INT32(0)), undefined, [0] * width)
                        total = call_llvm(builder, f"fma.v{width}f32", weight, of_token, total, returns=_floats(width))
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(weights, column, value_cache, block, offset, kv_head, output, channels, group), generate

    return add_values


add_values_of_tokens, add_value = _make_add_values(TOKENS), _make_add_values(1)
"""`TOKENS` at a time, so that the output is read and written less often; or one."""
