"""Threads for the kernels: `parallel_for` runs a compiled function for each part of the work.

OpenMP assigns each thread its share in advance, and all threads spin until the last one is done. On a machine that runs something
else as well, a thread that has lost its core stalls the others for milliseconds, hundreds of times in a decode step. Here

- the work is cut into more parts than there are threads. Each thread has a range of neighbouring parts, because memory is read fastest in
  order, and takes over parts of the others when its own are done: a thread without a core takes none, and the others finish without
  it, the calling thread alone if need be;
- a waiting thread spins for about as long as Python takes to reach the next kernel, then sleeps, or yields its core;
- a worker yields its core now and then between two parts. Otherwise the operating system would preempt it within a part, and all
  others would wait for that part.

The threads share one array of integers, `_state`. A *job* is a function and the number of its parts. The word at `JOB` holds the job's
number in its upper half and the count of unclaimed parts in its lower half, so that one compare-and-swap claims a part and makes sure
that the job is still the same. Only then is it decided which part: the next one of the thread's own range, if there is one.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from minivllm.kernels.cpu.native.atomics import LINE, add, call, pause, read, replace, write

JOB, UNFINISHED, OWNED, CODE, DATA, PARTS, THREADS = 0, LINE, 2 * LINE, *range(3 * LINE, 3 * LINE + 4)
STOP, IDLE_SPINS, WAIT_SPINS, YIELD, ACQUIRE, RELEASE = range(4 * LINE, 4 * LINE + 6)
ASLEEP, LOCK, NEXT_PART = range(5 * LINE, 5 * LINE + 3)
"""Each thread has a line from here on: whether it is asleep, the lock that it sleeps on, and the next part of its range. Thread 0 is the
calling thread, which never sleeps; the others are the workers."""
MAX_THREADS = 256
UNCLAIMED = 2**32 - 1
"""The lower half of the word at `JOB`."""
PARTS_BETWEEN_YIELDS = 4
"""Parts that a worker runs before it yields its core."""
IDLE_MICROSECONDS = 100
"""How long a worker without work spins before it sleeps: longer than Python takes from one kernel to the next."""
WAIT_MICROSECONDS = 20
"""How long the calling thread spins for the last parts of others before it yields its core."""

_SYMBOL = "minivllm_thread_pool"
_state = np.zeros(5 * LINE + LINE * MAX_THREADS, np.int64)
llvmlite.binding.add_symbol(_SYMBOL, _state.ctypes.data)  # compiled code, kept on disk, finds the array by this name


@intrinsic
def _shared(typing_context):
    """The address of `_state`."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(context.get_c_value(builder, ir.IntType(64), _SYMBOL), ir.IntType(64))

    return types.int64(), generate


@njit
def _end_of_range(state, thread):
    return read(state, PARTS) * (thread + 1) // read(state, THREADS)


@njit
def _choose_part(state, thread):
    """A part that no thread has chosen. There is one: no more parts are claimed than there are, and a chosen part stays chosen."""
    owner = thread
    while True:
        if read(state, NEXT_PART + LINE * owner) < _end_of_range(state, owner):
            part = add(state, NEXT_PART + LINE * owner, 1)
            if part < _end_of_range(state, owner):
                return part
        owner = (owner + 1) % read(state, THREADS)


@njit
def _take_part(state, thread):
    """Run an unclaimed part. False if there is none."""
    job = read(state, JOB)
    while job & UNCLAIMED and thread < read(state, THREADS):
        # Until the claimed part is finished, the job is not: what is read of it from here on is of the same job as `JOB`.
        if replace(state, JOB, job, job - 1):
            call(read(state, CODE), read(state, DATA), _choose_part(state, thread))
            add(state, UNFINISHED, -1)
            return True
        job = read(state, JOB)
    return False


@njit
def _sleep(state, thread):
    """Sleep until `_wake`, unless there is a job already."""
    asleep = ASLEEP + LINE * thread
    write(state, asleep, 1)
    has_work = (read(state, JOB) & UNCLAIMED) != 0 or read(state, STOP) != 0
    if not has_work or not replace(state, asleep, 1, 0):
        call(read(state, ACQUIRE), read(state, LOCK + LINE * thread), 1)


@njit
def _wake(state, thread):
    asleep = ASLEEP + LINE * thread
    if read(state, asleep) == 1 and replace(state, asleep, 1, 0):
        call(read(state, RELEASE), read(state, LOCK + LINE * thread), 0)


@njit(nogil=True, cache=True)
def _work(thread):
    """A worker's loop."""
    state = _shared()
    spins = parts = 0
    while read(state, STOP) == 0:
        if _take_part(state, thread):
            spins, parts = 0, parts + 1
            if parts % PARTS_BETWEEN_YIELDS == 0:
                call(read(state, YIELD), 0, 0)
        elif spins < read(state, IDLE_SPINS):
            spins += 1
            pause()
        else:
            _sleep(state, thread)
            spins = 0


@njit
def _run(num_threads, num_parts, code, data):
    state = _shared()
    num_threads = min(num_threads, num_parts, MAX_THREADS)
    if num_threads < 2 or not replace(state, OWNED, 0, 1):
        # The pool is in use, by another thread or by the job whose part this is: run alone.
        for part in range(num_parts):
            call(code, data, part)
        return
    write(state, CODE, code)
    write(state, DATA, data)
    write(state, PARTS, num_parts)
    write(state, THREADS, num_threads)
    for thread in range(num_threads):
        write(state, NEXT_PART + LINE * thread, num_parts * thread // num_threads)
    write(state, UNFINISHED, num_parts)
    write(state, JOB, (((read(state, JOB) >> 32) + 1) & 0x3FFFFFFF) << 32 | num_parts)
    for worker in range(1, num_threads):
        _wake(state, worker)
    while _take_part(state, 0):
        pass
    spins = 0
    while read(state, UNFINISHED) != 0:
        spins += 1
        if spins < read(state, WAIT_SPINS):
            pause()
        else:
            call(read(state, YIELD), 0, 0)
    write(state, OWNED, 0)


@intrinsic
def _task(typing_context, function, arguments):
    """The addresses of a C function that calls `function(part, *arguments)`, and of what it takes `arguments` from.

    They are valid until the caller returns.
    """
    types_of_part = (types.int64, *arguments.types)
    function_signature = function.get_call_type(typing_context, types_of_part, {})

    def generate(context, builder, signature, values):
        word = ir.IntType(64)
        data = cgutils.alloca_once_value(builder, values[1])
        compiled = function.dispatcher.get_compile_result(function_signature)
        context.add_linking_libs([compiled.library])
        name = builder.module.get_unique_name("part_of_" + function.dispatcher.py_func.__name__)
        code = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [word, word]), name)
        code.linkage = "internal"
        inner = ir.IRBuilder(code.append_basic_block())
        packed = inner.load(inner.inttoptr(code.args[0], data.type))
        unpacked = cgutils.unpack_tuple(inner, packed, len(arguments.types))
        of_part = [
            context.cast(inner, value, given, wanted)
            for value, given, wanted in zip([code.args[1], *unpacked], types_of_part, function_signature.args, strict=True)
        ]
        context.call_internal_no_propagate(inner, compiled.fndesc, function_signature, of_part)
        inner.ret_void()
        addresses = [builder.ptrtoint(code, word), builder.ptrtoint(data, word)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return types.UniTuple(types.int64, 2)(function, arguments), generate


@njit
def parallel_for(num_threads, num_parts, function, arguments):
    """Call `function(part, *arguments)` for each part, in up to `num_threads` threads, in any order.

    For compiled callers. `function` is compiled too, and must not raise.
    """
    code, data = _task(function, arguments)
    _run(num_threads, num_parts, code, data)


_workers: list[threading.Thread] = []
_starting = threading.Lock()


def start_workers(num_workers: int) -> None:
    """Make sure that there are at least this many workers besides the calling thread."""
    num_workers = min(num_workers, MAX_THREADS - 1)
    if len(_workers) >= num_workers and _state[IDLE_SPINS]:  # every kernel asks: most calls end here
        return
    with _starting:
        if not _state[IDLE_SPINS]:
            _configure()
        while len(_workers) < num_workers:
            number = len(_workers) + 1
            thread = threading.Thread(target=_work, args=(number,), name=f"minivllm-kernels-{number}", daemon=True)
            _workers.append(thread)
            thread.start()


def waiting() -> tuple[int, int]:
    """How many times to spin before it is better to yield the core, and the address of the function that yields it."""
    start_workers(0)
    return int(_state[WAIT_SPINS]), int(_state[YIELD])


def _configure() -> None:
    api = ctypes.pythonapi
    api.PyThread_allocate_lock.restype = ctypes.c_void_p
    api.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
    yield_ = ctypes.windll.kernel32.SwitchToThread if sys.platform == "win32" else ctypes.CDLL(None).sched_yield
    for index, function in ((YIELD, yield_), (ACQUIRE, api.PyThread_acquire_lock), (RELEASE, api.PyThread_release_lock)):
        _state[index] = ctypes.cast(function, ctypes.c_void_p).value
    for thread in range(1, MAX_THREADS):
        lock = api.PyThread_allocate_lock()
        api.PyThread_acquire_lock(lock, 1)
        _state[LOCK + LINE * thread] = lock
    per_microsecond = _measure_spins()
    _state[WAIT_SPINS] = int(WAIT_MICROSECONDS * per_microsecond)
    _state[IDLE_SPINS] = max(1, int(IDLE_MICROSECONDS * per_microsecond))


@njit(cache=True)
def _spin(count):
    """Wait as the pool does."""
    state = _shared()
    for _ in range(count):
        if read(state, JOB) != -1:
            pause()


def _measure_spins() -> float:
    """Iterations of a waiting loop in a microsecond; processors differ by a factor of ten."""
    _spin(1)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        _spin(1000)
        times.append(time.perf_counter() - start)
    return 1000 / (min(times) * 1e6)


@njit(cache=True)
def _wake_all(num_workers):
    for worker in range(1, num_workers + 1):
        _wake(_shared(), worker)


@atexit.register
def _stop() -> None:
    """End the workers before the interpreter takes their code away."""
    _state[STOP] = 1
    _wake_all(len(_workers))
    for thread in _workers:
        thread.join()
