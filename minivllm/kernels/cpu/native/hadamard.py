"""The Hadamard transform of rows: sums and differences of neighbours, of pairs, of groups of four, and so on.

The first six steps stay within 64 numbers, which are four vector registers: they are written in LLVM IR, as compilers do not vectorize
steps within a register. The others add and subtract whole stretches of a row.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.errors import TypingError

from minivllm.kernels.cpu.native.instructions import FLOAT, INT32, INT64, call_llvm, in_llvm
from minivllm.kernels.reference import HADAMARD_BLOCK

_LANES = 16
_FLOATS = ir.VectorType(FLOAT, _LANES)


@in_llvm
def _transform_block(builder, x, start):
    """The first six steps for `HADAMARD_BLOCK` numbers of `x`, `[size]`, float32, contiguous, in place."""
    if x.layout != "C" or x.dtype != types.float32 or x.ndim != 1:
        raise TypingError("_transform_block takes a contiguous row of float32.")
    places = [
        builder.bitcast(builder.gep(x.data, [builder.add(start, INT64(i))]), _FLOATS.as_pointer())
        for i in range(0, HADAMARD_BLOCK, _LANES)
    ]
    vectors = [builder.load(place, align=4) for place in places]

    for half in (1, 2, 4, 8):  # within each register: the partner plus or minus the number
        partners = ir.Constant(ir.VectorType(INT32, _LANES), [lane ^ half for lane in range(_LANES)])
        signs = ir.Constant(_FLOATS, [-1.0 if lane & half else 1.0 for lane in range(_LANES)])
        vectors = [
            call_llvm(builder, f"fma.v{_LANES}f32", each, signs, builder.shuffle_vector(each, each, partners), returns=_FLOATS)
            for each in vectors
        ]
    for half in (1, 2):  # between registers
        for i in range(len(vectors)):
            if i & half == 0:
                one, other = vectors[i], vectors[i + half]
                vectors[i], vectors[i + half] = builder.fadd(one, other), builder.fsub(one, other)

    for vector, place in zip(vectors, places, strict=True):
        builder.store(vector, place, align=4)


@in_llvm
def _combine(builder, x, start, half):
    """One step for 16 numbers from `start` on and 16 from `start + half` on: their sums and their differences, in place."""
    places = [builder.bitcast(builder.gep(x.data, [i]), _FLOATS.as_pointer()) for i in (start, builder.add(start, half))]
    one, other = (builder.load(place, align=4) for place in places)
    for place, result in zip(places, (builder.fadd(one, other), builder.fsub(one, other)), strict=True):
        builder.store(result, place, align=4)


@njit(error_model="numpy")
def transform(x):
    """`reference.hadamard_transform` of one row, in place. Its length is a multiple of `HADAMARD_BLOCK`."""
    size = len(x)
    for start in range(0, size, HADAMARD_BLOCK):
        _transform_block(x, start)
    half, order = HADAMARD_BLOCK, size & -size
    while half < order:
        for start in range(0, size, 2 * half):
            for i in range(start, start + half, _LANES):
                _combine(x, i, half)
        half *= 2
