"""Real processes for lesson 12: forks of this one, linked to it by pipes, and to each other in a ring of shared memory.

A fork knows the classes of a notebook, which no other process could import. It ends when this process ends, when the `with` block does, or
when it is killed; nothing has a name, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from minivllm.distributed.message_queue import QueueEnds, QueueReader, QueueWriter
from minivllm.distributed.shared_memory import create_group_memory
from minivllm.errors import WorkerError

MOST_SECONDS = 30.0
"""How long a rank waits for its neighbour, and, twice that, how long its leader waits for it."""
_MOST_ENDS = 1000
"""How often the end of a rank is told: who asks again and again would never end."""
_PR_SET_PDEATHSIG = 1


class ProcessRing:
    """What `ranks.Ring` is between threads, between processes.

    Attributes:
        rank, world_size: This one, and how many there are.
        num_bytes, num_messages: What it has sent.
    """

    def __init__(self, rank: int, queues: list[QueueEnds]) -> None:
        self.rank, self.world_size = rank, len(queues)
        self.num_bytes = self.num_messages = 0
        before = queues[rank - 1]
        self._next = QueueWriter(queues[rank].memory, [queues[rank].bells[0][1]])
        self._before = QueueReader(before.memory, before.bells[0][0])
        for number, queue in enumerate(queues):
            keep = [queue.bells[0][1]] if number == rank else []
            keep += [queue.bells[0][0]] if queue is before else []
            queue.close(but=keep)

    def send(self, x: Tensor) -> None:
        """Send a tensor to the next rank; up to a megabyte, this returns at once."""
        x = x.detach().contiguous()
        self.num_bytes, self.num_messages = self.num_bytes + x.nbytes, self.num_messages + 1
        self._next.write(pickle.dumps((x.dtype, tuple(x.shape))) + x.reshape(-1).view(torch.uint8).numpy().tobytes())

    def receive(self) -> Tensor:
        """The next tensor from the rank before."""
        try:
            data = self._before.read(MOST_SECONDS)
        except EOFError:
            raise WorkerError(f"Rank {(self.rank - 1) % self.world_size} has ended, and rank {self.rank} waits for it.") from None
        if data is None:
            raise WorkerError(
                f"Rank {self.rank} has waited {MOST_SECONDS:g} s for a message from rank {(self.rank - 1) % self.world_size}."
            )
        dtype, shape = pickle.loads(data)
        numbers = bytearray(data[len(pickle.dumps((dtype, shape))) :])
        return torch.frombuffer(numbers, dtype=dtype).view(shape) if numbers else torch.empty(shape, dtype=dtype)


class WorkerLink:
    """A worker's end of its link to the executor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """The next message. Raises EOFError when the executor is gone."""
        return self._connection.recv_bytes()

    def send(self, data: bytes) -> None:
        """Answer the executor."""
        self._connection.send_bytes(data)


class RankProcesses:
    """Processes, one for each rank, and this process's links to them. Use it in a `with` statement, which ends them.

    Args:
        world_size: How many.
        run: Called in each process, with its ring, its `WorkerLink`, and a file descriptor of memory for a `SharedMemoryGroup`.
    """

    def __init__(self, world_size: int, run: Callable[[ProcessRing, WorkerLink, int], None]) -> None:
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._errors: list[Connection] = []
        """What each process says if its function raises."""
        self._num_ends = 0
        context, memory = multiprocessing.get_context("fork"), create_group_memory(world_size)
        queues: list[QueueEnds] = []
        try:
            queues += [QueueEnds.create(1) for _ in range(world_size)]
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                told, tell = context.Pipe(duplex=False)
                self._connections.append(ours)
                self._errors.append(told)
                process = context.Process(
                    target=self._run, args=(run, rank, queues, (theirs, tell), memory, os.getpid()), daemon=True
                )
                with warnings.catch_warnings():  # later versions of Python warn of a fork when there are threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                self._processes.append(process)
                theirs.close()
                tell.close()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
            for queue in queues:
                queue.close()

    def _run(
        self, run: Any, rank: int, queues: list[QueueEnds], ends: tuple[Connection, Connection], memory: int, parent: int
    ) -> None:
        """In the new process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the notebook, which ends this one
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        for ours in (*self._connections, *self._errors):
            ours.close()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the rest of this process
        logging.disable()
        torch.set_num_threads(1)
        ring = ProcessRing(rank, queues)
        connection, tell = ends
        with contextlib.suppress(EOFError, BrokenPipeError):
            try:
                run(ring, WorkerLink(connection), memory)
            except Exception as error:
                tell.send_bytes(f"{type(error).__name__}: {error}".encode())
        os._exit(0)

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def process_ids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._processes]

    def send(self, rank: int, data: bytes) -> None:
        """Send a message to a rank. If it has ended, `wait` says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connections[rank].send_bytes(data)

    def receive(self, rank: int) -> bytes:
        """The next message of a rank.

        Raises:
            EOFError: It has ended.
            WorkerError: Its function has raised.
        """
        try:
            return self._connections[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(EOFError):
                if self._errors[rank].poll():
                    raise WorkerError(f"Rank {rank}: {self._errors[rank].recv_bytes().decode()}") from None
            self._num_ends += 1
            if self._num_ends > _MOST_ENDS:
                raise WorkerError(f"Rank {rank} has ended, and is asked for messages again and again.") from None
            raise EOFError from None

    def wait(self, seconds: float | None = None) -> list[int]:
        """The ranks that have something to read, a message or their end; none if nothing comes within so many seconds.

        Raises:
            WorkerError: There is no limit, and nothing has come for a minute.
        """
        ready = wait(self._connections, 2 * MOST_SECONDS if seconds is None else seconds)
        if not ready and seconds is None:
            raise WorkerError(f"No rank has answered for {2 * MOST_SECONDS:g} s: they wait for each other, or for a message.")
        return [rank for rank, connection in enumerate(self._connections) if connection in ready]

    def kill(self, rank: int) -> None:
        """Kill a rank, as the operating system does when memory runs out."""
        self._processes[rank].kill()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:  # they hold nothing that outlives them
            process.kill()
        for process in self._processes:
            process.join()
        for connection in (*self._connections, *self._errors):
            connection.close()
        self._connections, self._processes, self._errors = [], [], []

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_on_ranks(world_size: int, function: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
    """Call a function on each rank, a process with one thread. Returns their plain results, by rank.

    Args:
        world_size: The number of ranks.
        function: Gets the package's `SharedMemoryGroup`; its attribute `ring` is a `ProcessRing`.
        timeout: In seconds.

    Raises:
        WorkerError: It raised, or took too long.
    """
    from minivllm.distributed.shared_memory_group import SharedMemoryGroup

    def run(ring: ProcessRing, link: WorkerLink, memory: int) -> None:
        try:
            group: Any = SharedMemoryGroup(memory, ring.rank, world_size, timeout)
            group.ring = ring
            result = True, function(group)
        except Exception as error:
            result = False, f"Rank {ring.rank}: {type(error).__name__}: {error}"
        link.send(pickle.dumps(result))

    results: list[Any] = [None] * world_size
    with RankProcesses(world_size, run) as processes:
        for rank in range(world_size):
            if not wait([processes._connections[rank]], timeout):
                raise WorkerError(f"Rank {rank} has not answered within {timeout:g} s.")
            try:
                succeeded, results[rank] = pickle.loads(processes.receive(rank))
            except EOFError:
                raise WorkerError(f"Rank {rank} has ended.") from None
            if not succeeded:
                raise WorkerError(results[rank])
    return results


def ring_sum(x: Tensor, ring: ProcessRing) -> None:
    """Replace `x`, one row of numbers, by the sum over all ranks, which goes round in a ring."""
    chunks, n = list(x.tensor_split(ring.world_size)), ring.world_size
    for k in range(n - 1):
        ring.send(chunks[(ring.rank - k) % n])
        chunks[(ring.rank - k - 1) % n].add_(ring.receive())
    for k in range(n - 1):
        ring.send(chunks[(ring.rank + 1 - k) % n])
        chunks[(ring.rank - k) % n].copy_(ring.receive())
