"""Memory that several processes share, for `distributed.shared_memory_group`: words that say who has come how far, and sums.

The memory begins with words of 64 bits. Each rank has a line of them, which only it writes: the number of the last operation that it has
entered, and what the last two were. Then come the buffers of the ranks: two for each, so that a rank may fill one while another still
reads the one before.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import njit

from minivllm.kernels.cpu.native.atomics import LINE, call, pause, read, write
from minivllm.kernels.cpu.rows import floats_at

NUMBER, CALLS, PID = 0, 1, 3
"""Words in the line of a rank: the operation that it has entered, what it is (two words, for even and odd numbers), and its process."""
FINISHED, WAITING, DIFFERENT = 0, 1, 2
"""How waiting ends: all ranks have entered; one is missing; one has entered another operation."""


@njit(nogil=True, cache=True)
def enter(words, rank, number, what):
    """Say that a rank's buffer is filled for an operation."""
    write(words, LINE * rank + CALLS + (number & 1), what)
    write(words, LINE * rank + NUMBER, number)


@njit(nogil=True, cache=True)
def entered(words, rank):
    """The number of the last operation that a rank has entered. What it wrote before it did is seen after this."""
    return read(words, LINE * rank + NUMBER)


@njit(nogil=True, cache=True)
def wait(words, world_size, number, what, spins, yields, yield_address):
    """Wait until all ranks have entered an operation: spin, then yield the core a number of times, then give up with `WAITING`."""
    for rank in range(world_size):
        tries = 0
        while read(words, LINE * rank + NUMBER) < number:
            tries += 1
            if tries < spins:
                pause()
            elif tries < spins + yields:
                call(yield_address, 0, 0)
            else:
                return WAITING
        if read(words, LINE * rank + CALLS + (number & 1)) != what:
            return DIFFERENT
    return FINISHED


@njit(nogil=True, cache=True)
def add_buffers(buffers, stride, world_size, out, size):
    """The sum of float32 numbers over the ranks, in their order: the same bits on each."""
    total, first = numba.carray(floats_at(out), (size,)), numba.carray(floats_at(buffers), (size,))
    for i in range(size):
        total[i] = first[i]
    for rank in range(1, world_size):
        numbers = numba.carray(floats_at(buffers + rank * stride), (size,))
        for i in range(size):
            total[i] += numbers[i]


@njit(nogil=True, cache=True)
def all_reduce(words, buffers, stride, rank, world_size, number, what, x, size, spins, yields, yield_address):
    """Sum `size` float32 numbers at `x`. Returns how waiting ended; if not with `FINISHED`, `x` is as before."""
    numbers, own = numba.carray(floats_at(x), (size,)), numba.carray(floats_at(buffers + rank * stride), (size,))
    for i in range(size):
        own[i] = numbers[i]
    enter(words, rank, number, what)
    status = wait(words, world_size, number, what, spins, yields, yield_address)
    if status == FINISHED:
        add_buffers(buffers, stride, world_size, x, size)
    return np.int64(status)
