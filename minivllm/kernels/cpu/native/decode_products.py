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
from numba.core import types
from numba.core.errors import TypingError

from minivllm.kernels.cpu.native.features import HAS_AVX512
from minivllm.kernels.cpu.native.instructions import FLOAT, INT32, INT64, ArrayArgument, call_llvm, in_llvm

TOKENS = 4
"""Tokens whose scores are computed at a time."""
LANES = 16 if HAS_AVX512 else 8
"""Float32 numbers of a vector register."""
HEADS = 4 if HAS_AVX512 else 2
"""Heads whose scores are computed at a time: `TOKENS * HEADS` sums must fit the registers."""

_INT16 = ir.IntType(16)


def _floats(width: int) -> ir.VectorType:
    return ir.VectorType(FLOAT, width)


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
    kind = ir.VectorType(FLOAT if dtype == types.float32 else _INT16, width)
    address = builder.bitcast(builder.gep(row, [INT64(start)]), kind.as_pointer())
    numbers = builder.load(address, align=dtype.bitwidth // 8)
    if dtype == types.float32:
        return numbers
    words = ir.VectorType(INT32, width)
    bits = builder.zext(numbers, words)
    if dtype == types.int16:
        return builder.bitcast(builder.shl(bits, _repeat(INT32, 16, width)), _floats(width))
    sign = builder.shl(builder.and_(bits, _repeat(INT32, 0x8000, width)), _repeat(INT32, 16, width))
    magnitude = builder.shl(builder.and_(bits, _repeat(INT32, 0x7FFF, width)), _repeat(INT32, 13, width))
    magnitude = builder.fmul(builder.bitcast(magnitude, _floats(width)), _repeat(FLOAT, 2.0**112, width))
    is_large = builder.fcmp_ordered(">=", magnitude, _repeat(FLOAT, 2.0**16, width))
    magnitude = builder.bitcast(magnitude, words)
    magnitude = builder.select(is_large, builder.or_(magnitude, _repeat(INT32, 0x7F800000, width)), magnitude)
    return builder.bitcast(builder.or_(magnitude, sign), _floats(width))


def _shuffle(builder: ir.IRBuilder, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


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


def _check(*arrays: ArrayArgument) -> None:
    if any(array.layout != "C" or array.dtype != types.float32 for array in arrays):
        raise TypingError("All but the cache must be contiguous float32 arrays.")


@in_llvm
def score_tokens(builder, query, kv_head, key_cache, block, offset, end, scores, column, head_dim, group_size):
    """The scores of `TOKENS` cached tokens for the query heads that share a KV head.

    Args:
        query: `[num_heads, head_dim]`, float32, contiguous.
        kv_head: Whose.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, as `as_numpy` has it.
        block, offset, end: Where the tokens are: the block, the first of them, and the end of those that may be read. If fewer than `TOKENS`
            are left, the last is repeated, and its further scores mean nothing.
        scores: `[num_heads, columns]`, float32, contiguous; `TOKENS` columns are written.
        column: The first of them.
        head_dim, group_size: `constant`s: channels of a head, and query heads that share a KV head.
    """
    _check(query, scores)
    last = builder.sub(end, INT64(1))
    keys = []
    for i in range(TOKENS):
        token = builder.add(offset, INT64(i))
        token = builder.select(builder.icmp_signed("<", token, last), token, last)
        keys.append(key_cache.row(block, token, kv_head))
    first_head = builder.mul(kv_head, INT64(group_size))
    for start in range(0, group_size, HEADS):
        heads = [builder.add(first_head, INT64(head)) for head in range(start, min(start + HEADS, group_size))]
        queries = [query.row(head) for head in heads]
        sums = [[_repeat(FLOAT, 0.0, LANES)] * TOKENS for _ in heads]
        for first, width in _cut(head_dim):
            of_tokens = [_load_numbers(builder, key, first, width, key_cache.dtype) for key in keys]
            for row, of_head in zip(
                sums, (_load_numbers(builder, each, first, width, types.float32) for each in queries), strict=True
            ):
                for i, of_token in enumerate(of_tokens):
                    if width == LANES:
                        row[i] = call_llvm(builder, f"fma.v{width}f32", of_head, of_token, row[i], returns=_floats(width))
                    else:
                        products = builder.fmul(of_head, of_token)
                        zeros = _repeat(FLOAT, 0.0, width)
                        lanes = [lane if lane < width else width for lane in range(LANES)]
                        row[i] = builder.fadd(row[i], _shuffle(builder, products, zeros, lanes))
        for head, row in zip(heads, sums, strict=True):
            place = builder.gep(scores.row(head), [column])
            builder.store(_sum_up(builder, row), builder.bitcast(place, _floats(TOKENS).as_pointer()), align=4)


def _make_add_values(num_tokens: int) -> Any:
    @in_llvm
    def add_values(builder, weights, column, value_cache, block, offset, kv_head, output, head_dim, group_size):
        """Add the weighted values of some cached tokens to the output of the query heads that share a KV head.

        Args:
            weights: `[num_heads, columns]`, float32, contiguous.
            column: Of the first token.
            value_cache, block, offset, kv_head: As for `score_tokens`.
            output: `[num_heads, head_dim]`, float32, contiguous; changed.
            head_dim, group_size: As for `score_tokens`.
        """
        _check(weights, output)
        values = [value_cache.row(block, builder.add(offset, INT64(i)), kv_head) for i in range(num_tokens)]
        first_head = builder.mul(kv_head, INT64(group_size))
        heads = [builder.add(first_head, INT64(head)) for head in range(group_size)]
        factors = [builder.gep(weights.row(head), [column]) for head in heads]
        outputs = [output.row(head) for head in heads]
        for first, width in _cut(head_dim):
            undefined, kind = ir.Constant(_floats(width), ir.Undefined), _floats(width).as_pointer()
            of_tokens = [_load_numbers(builder, value, first, width, value_cache.dtype) for value in values]
            for factor, row in zip(factors, outputs, strict=True):
                place = builder.bitcast(builder.gep(row, [INT64(first)]), kind)
                total = builder.load(place, align=4)
                for i, of_token in enumerate(of_tokens):
                    weight = builder.load(builder.gep(factor, [INT64(i)]))
                    weight = _shuffle(builder, builder.insert_element(undefined, weight, INT32(0)), undefined, [0] * width)
                    total = call_llvm(builder, f"fma.v{width}f32", weight, of_token, total, returns=_floats(width))
                builder.store(total, place, align=4)

    return add_values


add_values_of_tokens, add_value = _make_add_values(TOKENS), _make_add_values(1)
"""`TOKENS` at a time, so that the output is read and written less often; or one."""
