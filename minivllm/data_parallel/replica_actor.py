"""The Ray actor that has a replica's process on its node: it starts the process, and tells the command that serves how that fares.

It holds no part of the model, and the process is the one that a replica has without Ray. Its own process ends with the replica's, and if Ray
ends it, with its node or alone, the replica's process hangs up. Ray imports this module on the node, so it imports little.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from minivllm import __version__

if TYPE_CHECKING:
    from minivllm.data_parallel.engine_core_proc import Note, ReplicaSetup
    from minivllm.data_parallel.replica_process import ReplicaProcess

SIGN_SECONDS = 1.0
"""How often an actor answers though there is nothing new."""
LOOK_SECONDS = 0.02
"""How often it looks at its process."""


class ActorPlace(NamedTuple):
    """Where an actor runs, and with which version of minivllm."""

    node_id: str
    ip: str
    version: str


class ProcessNews(NamedTuple):
    """What an actor knows of its process.

    Attributes:
        notes: As of `ReplicaProcess`.
        is_silent: Whether it was killed because it showed no sign of life.
        end, exit_status, was_killed: How it has ended, as of `ReplicaProcess`; None while it runs.
    """

    process_id: int
    notes: frozenset[Note]
    is_silent: bool
    end: str | None
    exit_status: int | None
    was_killed: bool


class Clock(NamedTuple):
    """The time on a machine, in seconds of `time.perf_counter`, and which machine that is."""

    seconds: float
    boot_id: str

    @classmethod
    def now(cls) -> Clock:
        """This machine's."""
        path = Path("/proc/sys/kernel/random/boot_id")
        return cls(time.perf_counter(), path.read_text() if path.exists() else "")

    def offset_to(self, other: Clock) -> float:
        """By how many seconds this clock is ahead of another, which was read just now: 0 on the same machine."""
        return 0.0 if self.boot_id and self.boot_id == other.boot_id else self.seconds - other.seconds


class ReplicaActor:
    """Several of its methods run at a time, each in a thread: one of them waits for news."""

    def __init__(self) -> None:
        self._process: ReplicaProcess | None = None
        self._patience = math.inf
        self._is_silent = False

    def introduce(self) -> ActorPlace:
        """Where it is. Answered as soon as there is a place for it."""
        import ray

        from minivllm.distributed.ray_cluster import own_address

        context = ray.get_runtime_context()
        # The replica's process finds the cluster by this, if its workers are to be actors, too.
        os.environ["RAY_ADDRESS"] = context.gcs_address
        return ActorPlace(context.get_node_id(), own_address(), __version__)

    def start(
        self, setup: ReplicaSetup, num_threads: int | None, num_replicas: int, patience: float, clock: Clock
    ) -> ProcessNews:
        """Start the process.

        Args:
            setup: For it, except for its clock's offset.
            num_threads: Threads that it computes with; None for its share of the node, if all the replicas are spread evenly.
            patience: Seconds without a sign of life after which it is killed.
            clock: The API servers'.

        Asked again, because the answer was lost, it starts no other one.

        Raises:
            OSError: The system refuses.
        """
        if self._process is not None:
            return self._look()
        offset = Clock.now().offset_to(clock)
        import msgspec

        from minivllm.data_parallel.replica_process import ReplicaProcess
        from minivllm.distributed.ray_cluster import share_of_processors

        self._patience = patience
        setup = msgspec.structs.replace(setup, clock_offset=offset)
        self._process = ReplicaProcess(setup, num_threads or share_of_processors(num_replicas))
        return self._look()

    def watch(self, seen: ProcessNews) -> ProcessNews:
        """What is known of the process, as soon as it differs from what was `seen`, or after a while."""
        end = time.monotonic() + SIGN_SECONDS
        while (news := self._look()) == seen and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return news

    def _look(self) -> ProcessNews:
        process = self._process
        assert process is not None
        self._is_silent |= process.kill_if_silent(self._patience)
        end = process.poll()
        has_ended = end is not None
        return ProcessNews(
            process.process_id,
            frozenset(process.notes),
            self._is_silent,
            end,
            process.exit_status,
            has_ended and process.was_killed,
        )

    def kill(self) -> None:
        """Kill the process."""
        assert self._process is not None
        self._process.kill()

    def drain(self) -> None:
        """Let the process finish what it has, and end."""
        assert self._process is not None
        self._process.drain()
