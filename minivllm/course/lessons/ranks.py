"""Ranks as threads of this process that meet in memory: for the checks of lesson 12, and for its pictures.

They know who waits for whom. If nobody can go on, all are told at once, so a deadlock is a sentence and no program that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minivllm.course.observations import fail
from minivllm.distributed.parallel_state import GroupCoordinator

MOST_SECONDS = 10.0
"""After this time ranks that still compute are given up."""
STILL_COMPUTES = "Look at loops that do not end. This one goes on: restart the kernel, or it keeps a core busy."


class Stuck(Exception):  # noqa: N818 - not an error of its own: it says why the ranks were stopped
    """A rank waits for something that cannot come any more."""


class World:
    """Threads that wait for each other.

    Attributes:
        stuck: Who waits for what, if nobody can go on.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.stuck = ""
        self._changed = threading.Condition()
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._ended: set[int] = set()

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Wait until something has happened; `what` continues "rank 0 waits"."""
        with self._changed:
            self._waits[rank] = is_ready, what
            self._look()
            while not is_ready():
                if self.stuck:
                    raise Stuck(self.stuck)
                self._changed.wait()
            del self._waits[rank]

    def tell(self) -> None:
        """Something has happened."""
        with self._changed:
            if self.stuck:
                raise Stuck(self.stuck)
            self._changed.notify_all()

    def end(self, rank: int) -> None:
        """This rank has returned, or raised."""
        with self._changed:
            self._ended.add(rank)
            self._look()

    def stop(self, reason: str) -> None:
        """Stop all ranks when they wait or send the next time."""
        with self._changed:
            self.stuck = self.stuck or reason
            self._changed.notify_all()

    def _look(self) -> None:
        if len(self._waits) + len(self._ended) < self.world_size or any(is_ready() for is_ready, _ in self._waits.values()):
            return
        if self._waits and not self.stuck:
            waits = [f"rank {rank} waits {what}" for rank, (_, what) in sorted(self._waits.items())]
            ended = [f"rank {rank} has returned" for rank in sorted(self._ended)]
            self.stuck = ", ".join(waits + ended)
        self._changed.notify_all()


@dataclass(frozen=True)
class Message:
    """What went from a rank to its neighbour: the rank that sent it, its how many-th message it was, and its size."""

    source: int
    number: int
    num_bytes: int


class Ring:
    """Channels of a rank: to the next one, and from the one before.

    Attributes:
        rank, world_size: This one, and how many there are.
        sent: The messages that it has sent.
    """

    def __init__(self, world: World, rank: int, inboxes: list[list[Tensor]]) -> None:
        self.rank, self.world_size = rank, world.world_size
        self.sent: list[Message] = []
        self._world, self._inboxes = world, inboxes

    def send(self, x: Tensor) -> None:
        """Send a tensor to the next rank. Returns at once: the tensor is copied."""
        if not isinstance(x, Tensor):
            raise TypeError(f"ring.send takes a tensor, not {type(x).__name__}.")
        self._inboxes[(self.rank + 1) % self.world_size].append(x.detach().clone())
        self.sent.append(Message(self.rank, len(self.sent), x.nbytes))
        self._world.tell()

    def receive(self) -> Tensor:
        """The next tensor from the rank before. Waits until there is one."""
        inbox = self._inboxes[self.rank]
        self._world.wait(self.rank, lambda: bool(inbox), f"for a message from rank {(self.rank - 1) % self.world_size}")
        return inbox.pop(0)


class MemoryGroup(GroupCoordinator):
    """Collective operations between threads: all ranks see the same sum, in rank order.

    Attributes:
        calls: The operations that this rank has called, with the shape of what it gave.
    """

    def __init__(self, world: World, rank: int, tables: list[dict[int, tuple[str, Tensor]]]) -> None:
        super().__init__(rank, world.world_size)
        self.calls: list[tuple[str, list[int]]] = []
        self._world, self._tables = world, tables

    def _all_reduce(self, x: Tensor) -> None:
        total = self._meet("all_reduce", x)
        if any(part.shape != x.shape for part in total):
            raise ValueError(f"The ranks give all_reduce different shapes: {[list(part.shape) for part in total]}.")
        x.copy_(sum(total[1:], total[0].clone()))

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        parts = [part.reshape(-1) for part in self._meet("gather", x)]
        if [part.numel() for part in parts] != list(sizes):
            raise ValueError(
                f"The ranks give gather {[part.numel() for part in parts]} numbers, but were said to give {list(sizes)}: look at sizes."
            )
        return parts

    def _broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._meet("broadcast", x)[src])

    def _meet(self, kind: str, x: Tensor) -> list[Tensor]:
        number = len(self.calls)
        self.calls.append((kind, list(x.shape)))
        while len(self._tables) <= number:
            self._tables.append({})
        table = self._tables[number]
        table[self.rank] = kind, x.detach().clone()
        self._world.tell()
        missing = f"in {kind} for the others, who do not call it"
        self._world.wait(self.rank, lambda: len(table) == self.world_size, missing)
        kinds = [table[rank][0] for rank in range(self.world_size)]
        if len(set(kinds)) > 1:
            raise ValueError(f"The ranks call different operations: {', '.join(kinds)}.")
        return [table[rank][1] for rank in range(self.world_size)]


def run_rings(world_size: int, function: Callable[[Ring], Any], said: str = "") -> tuple[list[Any], list[Ring]]:
    """Call a function on each rank of a ring, in a thread of its own. Returns what they return, and the rings' ends.

    Args:
        world_size: The number of ranks.
        function: Gets a `Ring`.
        said: The situation, for the message if they wait for each other.
    """
    world, inboxes = World(world_size), [[] for _ in range(world_size)]
    rings = [Ring(world, rank, inboxes) for rank in range(world_size)]
    return _run(world, function, rings, said, "the order of `send` and `receive`, and how many rounds there are"), rings


def run_groups(world_size: int, function: Callable[[MemoryGroup], Any], said: str) -> tuple[list[Any], list[MemoryGroup]]:
    """As `run_rings`, for a function that gets a `MemoryGroup`."""
    world, tables = World(world_size), []
    groups = [MemoryGroup(world, rank, tables) for rank in range(world_size)]
    return _run(world, function, groups, said, "which ranks call it: every rank must call every operation of the group"), groups


def add_situation(error: BaseException, said: str) -> BaseException:
    """An error of a learner's code, which says in which situation it came (from Python 3.11 on)."""
    getattr(error, "add_note", str)(f"The situation: {said}")
    return error


@contextmanager
def situation(said: str) -> Iterator[None]:
    """Let errors of a learner's code in this block say in which situation they came."""
    try:
        yield
    except Exception as error:
        add_situation(error, said)
        raise


def _run(world: World, function: Callable[[Any], Any], ends: list[Any], said: str, look: str) -> list[Any]:
    results: list[Any] = [None] * world.world_size
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ends[rank])
        except Exception as error:
            errors[rank] = error
        finally:
            world.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world.world_size)]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + MOST_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        world.stop("the others were given up")
    for rank in sorted(errors):
        if not isinstance(errors[rank], Stuck):
            raise add_situation(errors[rank], said)
    if any(thread.is_alive() for thread in threads):
        fail(f"{said}\nExpected: all ranks return\nGot: one still computes after {MOST_SECONDS:g} s\n{STILL_COMPUTES}")
    if errors:
        fail(f"{said}\nExpected: all ranks return\nGot: {world.stuck}\nLook at {look}.")
    return results
