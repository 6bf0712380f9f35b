"""What the CPU kernels share: how they see tensors, which threads they use, and a few compiled functions."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numba.core import types
from numba.extending import overload
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels.cpu.native.thread_pool import start_workers

TILE = 32
"""Cached tokens whose scores are computed before their values are read."""
MAX_HEAD_DIM = 256
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""What the compiler may take for granted: sums in any order, so that they fit vector registers. NaN stays NaN."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LOG2_E = np.float32(np.log2(np.e))
MINUS_INFINITY = np.float32(-np.inf)
ZERO = np.float32(0)
POWERS_OF_TWO = (
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
    6.931472028550421e-1, 1.0,
)  # fmt: skip
"""Coefficients of a polynomial that is 2**x for x between -1/2 and 1/2 (that of the Cephes library)."""


def check_launch(cache: Tensor) -> None:
    """The device, dtype and head size that the kernels can take."""
    if cache.device.type != "cpu":
        raise KernelError(f"The tensors are on {cache.device}, but these kernels run on the CPU.")
    if cache.dtype not in DTYPES:
        raise KernelError(f"The cache has dtype {cache.dtype}, but these kernels take float32, float16 and bfloat16.")
    if cache.shape[3] > MAX_HEAD_DIM:
        raise KernelError(f"The heads have {cache.shape[3]} channels, but these kernels take at most {MAX_HEAD_DIM}.")


def as_numpy(x: Tensor) -> np.ndarray:
    """The tensor as Numba sees it: 16-bit floats are integers, unsigned for float16, signed for bfloat16 (see `load`)."""
    x = x.detach()
    if x.dtype in (torch.float32, torch.int8):
        return x.numpy()
    bits = x.view(torch.int16).numpy()
    return bits.view(np.uint16) if x.dtype == torch.float16 else bits


def constant(number: int) -> tuple:
    """A number that kernels are compiled for, as a tuple of that length.

    Numba compiles a function again for each type of its arguments, and a tuple's length is part of its type. So the
    compiler knows the length of the loops over channels and heads, and unrolls them.
    """
    return (None,) * number


def use_threads_of_torch() -> int:
    """As many threads as torch computes with; all but the calling one are there from now on."""
    num_threads = torch.get_num_threads()
    start_workers(num_threads - 1)
    return num_threads


def load(x):
    """A number in memory as float32; what its bits mean is told by their type (see `as_numpy`)."""
    raise NotImplementedError("only within compiled functions")


@overload(load)
def _compile_load(x):
    if x == types.float32:
        return lambda x: x
    if x == types.int8:
        return lambda x: np.float32(x)
    return _from_float16 if x == types.uint16 else _from_bfloat16


def _from_bfloat16(x):
    """The float32 whose upper half it is."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit
def round_bfloat16(x):
    """The upper half of a float32, as an unsigned integer, rounded to the nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))  # still NaN, when its lower bits are gone
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def store(x, number_type):
    """A number as the cache keeps it, whose type is that of `number_type`; float32 is rounded for a cache of bfloat16."""
    raise NotImplementedError("only within compiled functions")


@overload(store)
def _compile_store(x, number_type):
    if x == types.float32 and number_type == types.int16:
        return lambda x, number_type: np.uint16(round_bfloat16(x)).view(np.int16)
    if x == number_type:
        return lambda x, number_type: x
    return None  # no such conversion: an error when it is compiled


def _from_float16(x):
    """Exponent and fraction move to their new places, and the exponent's bias changes by 2**112.

    Infinity and NaN, whose exponent is all ones, become 2**16 or more by that, and are put right.
    """
    bits = np.uint32(x)
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    magnitude_bits = np.float32(magnitude).view(np.uint32)
    if magnitude >= np.float32(2.0**16):
        magnitude_bits |= np.uint32(0x7F800000)
    return np.uint32(magnitude_bits | sign).view(np.float32)


@njit(fastmath=FASTMATH)
def exp2(x):
    """2**x for x <= 0, accurate to a unit in the last place; what is no normal number may be 0, and NaN stays NaN.

    The nearest whole number goes into the exponent of a float, the rest through a polynomial. `math.exp2` would be a call for each number; this is arithmetic, eight or sixteen numbers at a time.
    """
    x = np.float32(-127.0) if x < np.float32(-127.0) else x
    whole = np.floor(x + np.float32(0.5))
    rest = x - whole
    power = np.float32(POWERS_OF_TWO[0])
    power = power * rest + np.float32(POWERS_OF_TWO[1])
    power = power * rest + np.float32(POWERS_OF_TWO[2])
    power = power * rest + np.float32(POWERS_OF_TWO[3])
    power = power * rest + np.float32(POWERS_OF_TWO[4])
    power = power * rest + np.float32(POWERS_OF_TWO[5])
    power = power * rest + np.float32(POWERS_OF_TWO[6])
    scale = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power * scale


@njit
def _turn(bits):
    """Turns the bits of negative floats over, so that as integers they stand in the same order. Its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit
def largest(numbers, at_least):
    """The largest number of a row, or `at_least` if that is larger; NaN is larger than all.

    Found among integers, because compilers take the maximum of floats, with its rules for NaN, one at a time.
    """
    result = _turn(np.float32(at_least).view(np.int32))
    for i in range(len(numbers)):
        result = max(result, _turn(np.float32(numbers[i]).view(np.int32)))
    return np.int32(_turn(result)).view(np.float32)
