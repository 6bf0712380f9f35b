"""The processes of data-parallel replicas on this node, and of their coordinator: started here, and ended with this process."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection
from functools import partial

import msgspec
import torch
import zmq

from minivllm.engine.core_client import CoreSupervisor
from minivllm.engine.core_handle import GRACE_SECONDS, end_process
from minivllm.engine.dp_coordinator import CoordinatorSetup
from minivllm.engine.dp_engine_core_proc import ReplicaSetup
from minivllm.engine.dp_messages import NodeWelcome, ReplicaDied, encode
from minivllm.engine.dp_sockets import KeyPair, Sockets
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.engine_core_proc import RETURN_STATUS
from minivllm.executor.processes import describe_exit, start_python

logger = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 32
"""The longest wait before a replica is started again."""
LAST_WORDS_SECONDS = 0.1
"""What a process has sent before it ended has arrived after this time."""


class ChildProcess:
    """A process that ends with this one, at the latest.

    Args:
        module: What it runs.
        num_threads: Threads that it computes with.
        setup: What it reads at its start.
        descriptors, gpus: As for `start_python`.
    """

    def __init__(
        self,
        module: str,
        num_threads: int,
        setup: msgspec.Struct,
        descriptors: tuple[int, ...] = (),
        gpus: str | None = None,
    ) -> None:
        self._process = start_python(module, num_threads, descriptors, gpus)
        self._end = weakref.finalize(self, end_process, self._process)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed soon
            self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
            self._process.stdin.flush()

    @property
    def process_id(self) -> int:
        """The process."""
        return self._process.pid

    def hang_up(self) -> None:
        """Close its standard input: it exits."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    @property
    def exit_status(self) -> int | None:
        """As in `subprocess`; None while it runs."""
        return self._process.poll()

    def poll(self) -> str | None:
        """How it ended, in words that follow its name; None while it runs."""
        status = self._process.poll()
        return None if status is None else describe_exit(status)


class ReplicaProcess(ChildProcess):
    """A replica of the model in a process.

    Args:
        config: Pickled.
        engine_index: Its rank.
        addresses: Where it connects to.
        key: For the sockets.
        num_threads: Threads that it computes with.
        gpus: As for `start_python`.
        socket_folder: As for `ReplicaSetup`.
    """

    def __init__(
        self,
        config: bytes,
        engine_index: int,
        addresses: NodeWelcome,
        key: KeyPair | None,
        num_threads: int,
        gpus: str | None = None,
        socket_folder: str = "",
    ) -> None:
        log_level = logging.getLogger().getEffectiveLevel()
        setup = ReplicaSetup(
            config=config, engine_index=engine_index, addresses=addresses, key=key, socket_folder=socket_folder, sys_path=sys.path,
            log_level=log_level,
        )  # fmt: skip
        super().__init__("minivllm.engine.dp_engine_core_proc", num_threads, setup, gpus=gpus)

    def leave(self) -> None:
        """Let it finish what it has, and end."""
        self._process.terminate()

    def shutdown(self, grace: float) -> None:
        """Wait some seconds until it has ended, as it was told to; then kill it."""
        if self._end.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
            self._process.kill()
            self._end()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._end()


class DPCoordinator(ChildProcess):
    """The coordinator's process.

    Args:
        setup: What it needs to know.
    """

    def __init__(self, setup: CoordinatorSetup) -> None:
        super().__init__("minivllm.engine.dp_coordinator", 1, setup)

    def shutdown(self) -> None:
        """End it."""
        self._end()


class LocalReplicas:
    """The replicas on this machine.

    Args:
        config: The engine's.
        addresses: Where they connect to.
        sockets: Of this process; theirs have the same key.
        restart: Start another when one dies.
        socket_folder: As for `ReplicaSetup`.
    """

    def __init__(
        self, config: EngineConfig, addresses: NodeWelcome, sockets: Sockets, *, restart: bool, socket_folder: str = ""
    ) -> None:
        self._reports = sockets.connect(zmq.PUSH, addresses.report_address)
        ranks = config.parallel_config.local_ranks
        num_threads = max(1, torch.get_num_threads() // max(1, len(ranks)))  # so that no two replicas need the same processor
        self._start = partial(
            ReplicaProcess,
            config.to_bytes(),
            addresses=addresses,
            key=sockets.key,
            num_threads=num_threads,
            socket_folder=socket_folder,
        )
        self._gpus: dict[int, str] = {}
        if config.worker_config.device != "cpu" and torch.cuda.device_count() > 1:
            self._gpus = divide_gpus(ranks, config.parallel_config.tensor_parallel_size, visible_gpus())
        self._restart, self._max_deaths = restart, config.parallel_config.max_replica_deaths
        self._short_lives = dict.fromkeys(ranks, 0)
        """By rank: how often in a row it has died soon after it was ready, or before."""
        self._due: dict[int, float] = {}
        """When to start another in place of one that has died, in seconds of `time.monotonic`."""
        self.num_deaths = dict.fromkeys(ranks, 0)
        """By rank: how often it has died."""
        self.given_up: set[int] = set()
        """Those that have died too often and are not started again."""
        self.processes: dict[int, ReplicaProcess] = {}
        """Those that run, by rank."""
        self._ended_since: dict[int, float] = {}
        self._ready_since: dict[int, float] = {}
        self._is_shut_down = False
        for index in ranks:
            self._start_one(index)

    def _start_one(self, index: int) -> None:
        self.processes[index] = self._start(index, gpus=self._gpus.get(index))

    @property
    def process_ids(self) -> list[int]:
        """The processes, by rank."""
        return [process.process_id for _, process in sorted(self.processes.items())]

    def find_ended(self) -> ReplicaDied | None:
        """A replica that has ended a moment ago, so that its last words have been heard; and how. It is forgotten.

        The coordinator is told, for frontends that do not see these processes. Those that are due are started again.
        """
        for index in [index for index, due in self._due.items() if time.monotonic() >= due]:
            del self._due[index]
            self._start_one(index)
        for index, process in self.processes.items():
            if end := process.poll():
                since = self._ended_since.setdefault(index, time.monotonic())
                if time.monotonic() - since >= LAST_WORDS_SECONDS:
                    self.remove(index)
                    died = ReplicaDied(index, f"its process {end}", was_killed=process.exit_status == -signal.SIGKILL)
                    if process.exit_status == RETURN_STATUS and not self._is_shut_down:
                        self._due[index] = 0.0
                    with contextlib.suppress(zmq.Again):  # the coordinator is gone
                        self._reports.send(encode(died), zmq.NOBLOCK)
                    return died
        return None

    def kill(self, index: int) -> None:
        """Kill a replica's process, if it is there. `find_ended` will tell of it."""
        if (process := self.processes.get(index)) is not None:
            process.kill()

    def note_ready(self, index: int) -> None:
        """A replica has started."""
        self._ready_since[index] = time.monotonic()

    def remove(self, index: int) -> None:
        """A replica has failed: end its process, if that has not ended."""
        self._ended_since.pop(index, None)
        if (process := self.processes.pop(index, None)) is not None:
            process.kill()

    def start_another(self, index: int) -> None:
        """One has died: another is started in its place, if that is wanted.

        At once if it had lived for a while, else after a pause that doubles with each short life; and not at all after too many of them.
        """
        if self._is_shut_down or index not in self.num_deaths or index in self._due:
            return
        self.num_deaths[index] += 1
        if not self._restart:
            return
        lived = time.monotonic() - self._ready_since.pop(index, math.inf)
        short_lives = self._short_lives[index] = 0 if lived > CoreSupervisor.SHORT_LIFE_SECONDS else self._short_lives[index] + 1
        if short_lives == self._max_deaths:
            self.given_up.add(index)
            logger.error("Replica %d has died %d times in a row, each time soon: it is given up.", index, short_lives)
            return
        pause = min(2 ** (short_lives - 1), MAX_PAUSE_SECONDS) if short_lives else 0
        if pause:
            logger.warning("Replica %d is started again in %d s.", index, pause)
        self._due[index] = time.monotonic() + pause

    def is_coming(self, index: int) -> bool:
        """Whether its process runs, or is to be started."""
        return index in self.processes or index in self._due

    def shutdown(self, told: Collection[int]) -> None:
        """End all: those that have been told to end get a little time for it."""
        self._is_shut_down = True
        self._due.clear()
        end = time.monotonic() + GRACE_SECONDS
        for index, process in list(self.processes.items()):
            if index in told:
                process.shutdown(max(0.0, end - time.monotonic()))
            else:
                process.kill()  # it loads the model and reads nothing


def divide_gpus(ranks: range, tensor_parallel_size: int, visible: list[str]) -> dict[int, str]:
    """Which GPUs each replica of this machine sees, as in CUDA_VISIBLE_DEVICES: as many as it has workers, and others than those before it.
    If there are too few, replicas share them.

    Args:
        ranks: The replicas.
        tensor_parallel_size: Workers of each.
        visible: The GPUs that this process sees.
    """
    size = min(tensor_parallel_size, len(visible))
    return {rank: ",".join(visible[(place * size + i) % len(visible)] for i in range(size)) for place, rank in enumerate(ranks)}


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, by the names they have in CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",") if names else [str(index) for index in range(torch.cuda.device_count())]
