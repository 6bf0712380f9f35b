"""The replicas that this command starts, on this machine or on the nodes of a Ray cluster: they are started again, and end with this process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from minivllm.data_parallel.engine_core_proc import Note, ReplicaSetup
from minivllm.data_parallel.liveness import HOPELESS
from minivllm.data_parallel.messages import NodeAlive, NodeWelcome, ReplicaDied, encode, replica_name
from minivllm.data_parallel.replica_process import ReplicaProcess
from minivllm.distributed.sockets import Sockets
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.engine_core_proc import RETURN_STATUS
from minivllm.executor.processes import GRACE_SECONDS, START_SECONDS

if TYPE_CHECKING:
    from minivllm.data_parallel.ray_replicas import RayReplica

logger = logging.getLogger(__name__)

EPOCH_SHIFT = 22
"""Processes that a node may start before its incarnations reach those of a node that was welcomed a millisecond later: 4 million."""
LAST_WORDS_SECONDS = 0.05
"""How long to wait for the last messages of a process that has ended."""
NODE_SECONDS = 1.0
"""How often a node tells the coordinator that it has its ranks."""


Start = Callable[[ReplicaSetup, int | None], "RayReplica"]
"""Starts a replica elsewhere, which computes with a number of threads; None for its share of its machine."""


class RestartPolicy:
    """When to start a process again that has died: at once after a long life; after a short one, following a pause that doubles each time;
    never after too many short lives in a row."""

    SHORT_LIFE_SECONDS = 10.0
    FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 32.0

    def __init__(self, max_short_lives: int) -> None:
        self.max_short_lives = max_short_lives
        self.num_short_lives = 0

    def next_pause(self, lived: float | None) -> float | None:
        """Seconds until the next may start, if a process has died this long after it was ready (None: it never was); None if none should."""
        if lived is not None and lived >= self.SHORT_LIFE_SECONDS:
            self.num_short_lives = 0
            return 0.0
        self.num_short_lives += 1
        if self.num_short_lives >= self.max_short_lives:
            return None
        return min(self.FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_short_lives - 1, 10), self.MAX_PAUSE_SECONDS)


@dataclass
class _Place:
    """A rank: the process that has it, and how those before it have fared."""

    policy: RestartPolicy
    process: ReplicaProcess | RayReplica | None = None
    due: float | None = None
    """When to start another, in seconds of `time.monotonic`; None if none is to be started."""
    num_deaths: int = 0
    is_leaving: bool = False
    """Whether the process was told to end, and nobody has the rank then."""
    returns: bool = False
    """Whether it was told to end, and another is to be started then."""
    ended_since: float | None = None
    """When the process was first seen to have ended."""


class LocalReplicas:
    """The replicas that are started here: with `restart` they are started again when they die, and they end with this process.

    Args:
        addresses: Where they connect to.
        sockets: Of this process; theirs have the same key.
        node_id: Under which the coordinator has welcomed them.
        num_threads: Threads that each computes with; their share of the processors if None.
        start: Starts them elsewhere; None for this machine.
        socket_folder, clock_offset: As for `ReplicaSetup`.
    """

    def __init__(
        self,
        config: EngineConfig,
        addresses: NodeWelcome,
        sockets: Sockets,
        node_id: str,
        *,
        restart: bool,
        num_threads: int | None = None,
        start: Start | None = None,
        socket_folder: str = "",
        clock_offset: float = 0.0,
    ) -> None:
        self._reports = sockets.connect(zmq.PUSH, addresses.report_address)
        self._parallel = config.parallel_config
        ranks = self._parallel.local_ranks
        self._start, self._num_threads = start, num_threads
        log_level = logging.getLogger().getEffectiveLevel()
        self._setup = ReplicaSetup(config.to_bytes(), socket_folder, log_level, addresses, sockets.key, clock_offset)
        self._incarnations = itertools.count(addresses.epoch << EPOCH_SHIFT)
        self._has_gpus = start is None and config.worker_config.device != "cpu" and torch.cuda.device_count() > 1
        self._node_id, self._restart, self._is_ending = node_id, restart, False
        self._max_size = config.parallel_config.data_parallel_size
        """How many replicas there have been at the same time, for their names."""
        self._patience = max(HOPELESS * config.parallel_config.replica_timeout, START_SECONDS)
        self._next_sign = 0.0
        self._places = {rank: _Place(RestartPolicy(config.parallel_config.max_replica_deaths)) for rank in ranks}
        for rank in ranks:
            self._start_one(rank)

    def _start_one(self, rank: int) -> None:
        place = self._places[rank]
        setup = msgspec.structs.replace(self._setup, engine_index=rank, incarnation=next(self._incarnations))
        place.due = None
        if self._start is not None:
            place.process = self._start(setup, self._num_threads)
            return
        # By default no two replicas need the same processor.
        num_threads = self._num_threads or max(1, torch.get_num_threads() // max(1, len(self._places)))
        gpus = divide_gpus(sorted(self._places), self._parallel.world_size, visible_gpus()) if self._has_gpus else {}
        place.process = ReplicaProcess(setup, num_threads, gpus.get(rank))

    @property
    def process_ids(self) -> list[int]:
        """The processes that are running, by rank."""
        return [place.process.process_id for place in self._places.values() if place.process is not None]

    @property
    def waiting(self) -> set[int]:
        """The ranks of replicas that have waited for a node with room for a while."""
        return {rank for rank, place in self._places.items() if place.process is not None and place.process.is_waiting}

    @property
    def is_done(self) -> bool:
        """Whether no process runs, or is to be started."""
        return all(place.process is None and place.due is None for place in self._places.values())

    def find_ended(self) -> list[ReplicaDied]:
        """Replicas that have ended, as soon as their last words must have been heard; and what comes after them. Call this often.

        Those that are due are started again. The coordinator is told about all of this, for frontends that do not see these processes.
        """
        now = time.monotonic()
        if now >= self._next_sign and not self._is_ending:
            self._next_sign = now + NODE_SECONDS
            self._report(NodeAlive(self._node_id, list(self._places)))
        ended: list[ReplicaDied] = []
        for rank, place in list(self._places.items()):
            if place.due is not None and now >= place.due:
                try:
                    self._start_one(rank)
                except OSError as error:  # no memory, no process, no file
                    ended.append(self._note_failed_start(rank, place, error))
            if place.process is not None and place.process.kill_if_silent(self._patience):
                logger.error("%s shows no sign of life: its process is killed.", replica_name(rank, self._max_size))
            if place.process is not None and (end := place.process.poll()):
                place.ended_since = place.ended_since or now
                if now - place.ended_since >= LAST_WORDS_SECONDS:
                    ended.append(self._bury(rank, place, place.process, end))
        for died in ended:
            self._report(died)
        return ended

    def _bury(self, rank: int, place: _Place, process: ReplicaProcess | RayReplica, end: str) -> ReplicaDied:
        """A process has ended: decide whether another is started."""
        place.process, place.ended_since = None, None
        status, now, outlook = process.exit_status, time.monotonic(), "gone"
        has_died = status not in (0, RETURN_STATUS) or not (Note.FAREWELL in process.notes or self._is_ending)
        if (place.is_leaving or place.returns) and process.ready_since is None:
            has_died = False  # it was killed while it loaded the model
        returns, place.returns = status == RETURN_STATUS or place.returns, False
        if place.is_leaving:
            del self._places[rank]
        elif has_died:
            if Note.DEATHS_EXPLAINED in process.notes:
                place.policy.num_short_lives = 0
            lived = None if process.ready_since is None else now - process.ready_since
            outlook = self._plan_restart(rank, place, lived, had_suspect=Note.HAS_SUSPECT in process.notes)
        elif returns and not self._is_ending:
            place.due, outlook = now, "starting"
        process.shutdown(0.0)
        said = f"its process {end}"
        return ReplicaDied(rank, process.incarnation, said, has_died, process.was_killed, place.num_deaths, outlook)

    def _note_failed_start(self, rank: int, place: _Place, error: OSError) -> ReplicaDied:
        """A process could not be started. That counts like one that has died soon."""
        outlook = self._plan_restart(rank, place, None)
        end = f"its process could not be started: {error.strerror}"
        return ReplicaDied(rank, next(self._incarnations), end, True, False, place.num_deaths, outlook)

    def _plan_restart(self, rank: int, place: _Place, lived: float | None, *, had_suspect: bool = False) -> str:
        """A process has died. Returns what follows: "starting", "given up" or "gone". If it had a suspect, that is what its end is blamed on."""
        place.num_deaths += 1
        place.due = None
        if not self._restart or self._is_ending:
            return "gone"
        pause, name = 0.0 if had_suspect else place.policy.next_pause(lived), replica_name(rank, self._max_size)
        if pause is None:
            count = place.policy.num_short_lives
            logger.error("%s died %d times in a row soon after its start: it is given up.", name, count)
            return "given up"
        if pause:
            logger.warning("%s is started again in %.0f s.", name, pause)
        place.due = time.monotonic() + pause
        return "starting"

    def _report(self, report: ReplicaDied | NodeAlive) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the coordinator is gone, or the socket is closed
            self._reports.send(encode(report), zmq.NOBLOCK)

    def scale(self, size: int) -> None:
        """Have the ranks below `size`: start those that are missing, and let others finish what they have, and end. Those begin with rank 0."""
        if self._is_ending:
            return
        now = time.monotonic()
        self._max_size = max(self._max_size, size)
        for rank in range(size):
            place = self._places.get(rank)
            if place is None:
                self._places[rank] = _Place(RestartPolicy(self._parallel.max_replica_deaths), due=now)
            elif place.is_leaving:
                place.is_leaving, place.returns = False, True
        for rank, place in list(self._places.items()):
            if rank >= size and place.process is None:
                del self._places[rank]
            elif rank >= size and place.process is not None and not place.is_leaving:
                place.is_leaving, place.returns = True, False
                if place.process.ready_since is None:
                    place.process.kill()  # it loads the model and reads nothing
                else:
                    place.process.drain()

    def kill(self, rank: int, incarnation: int) -> None:
        """Kill this process of a rank, if it runs here. `find_ended` will tell of it."""
        place = self._places.get(rank)
        if place is not None and place.process is not None and place.process.incarnation == incarnation:
            place.process.kill()

    def drain(self) -> None:
        """Let all finish what they have, and end. None is started any more."""
        self._is_ending = True
        for place in self._places.values():
            place.due = None
            if place.process is not None:
                place.process.drain()

    def shutdown(self, told: Collection[int]) -> None:
        """End all processes. The ones that have been told to end get a few seconds for it."""
        self._is_ending = True
        self._report(NodeAlive(self._node_id, []))
        end = time.monotonic() + GRACE_SECONDS
        for rank, place in self._places.items():
            place.due = None
            if place.process is not None:
                if rank not in told:
                    place.process.kill()  # it loads the model and reads nothing
                place.process.shutdown(max(0.0, end - time.monotonic()))


def divide_gpus(ranks: Sequence[int], world_size: int, visible: list[str]) -> dict[int, str]:
    """Which of the `visible` GPUs each replica of this machine sees, as in CUDA_VISIBLE_DEVICES: one for each of its workers, and others than
    the replicas before it. If there are too few, replicas share them."""
    size = min(world_size, len(visible))
    return {rank: ",".join(visible[(place * size + i) % len(visible)] for i in range(size)) for place, rank in enumerate(ranks)}


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, by the names they have in CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",") if names else [str(index) for index in range(torch.cuda.device_count())]
