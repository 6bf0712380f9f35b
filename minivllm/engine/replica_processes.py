"""The processes of data-parallel replicas on this node, and of their coordinator: started here, and ended with this process."""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import sys
import time
import weakref
from collections.abc import Collection
from functools import partial

import msgspec
import torch

from minivllm.engine.core_client import CoreSupervisor
from minivllm.engine.core_handle import GRACE_SECONDS, end_process
from minivllm.engine.dp_coordinator import CoordinatorSetup
from minivllm.engine.dp_engine_core_proc import ReplicaSetup
from minivllm.engine.dp_messages import NodeWelcome
from minivllm.engine.dp_sockets import KeyPair
from minivllm.engine.engine_config import EngineConfig
from minivllm.executor.processes import describe_exit, start_python

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.1
"""What a process has sent before it ended has arrived after this time."""


class ReplicaProcess:
    """A replica of the model in a process.

    Args:
        config: Pickled.
        engine_index: Its rank.
        addresses: Where it connects to.
        key: For the sockets.
        num_threads: Threads that it computes with.
        socket_folder: As for `ReplicaSetup`.
    """

    def __init__(
        self,
        config: bytes,
        engine_index: int,
        addresses: NodeWelcome,
        key: KeyPair | None,
        num_threads: int,
        socket_folder: str = "",
    ) -> None:
        self.engine_index = engine_index
        self._process = start_python("minivllm.engine.dp_engine_core_proc", num_threads)
        log_level = logging.getLogger().getEffectiveLevel()
        _write(self._process, ReplicaSetup(config, engine_index, addresses, key, socket_folder, sys.path, log_level))
        self._end = weakref.finalize(self, end_process, self._process)

    @property
    def process_id(self) -> int:
        """The process that computes, or computed."""
        return self._process.pid

    def poll(self) -> str | None:
        """How it ended, in words that follow its name; None while it runs."""
        status = self._process.poll()
        return None if status is None else describe_exit(status)

    def leave(self) -> None:
        """Let it finish what it has, and end."""
        self._process.terminate()

    def shutdown(self) -> None:
        """Wait a little until it has ended, as it was told to; then kill it."""
        if self._end.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
            self._end()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._end()


class DPCoordinator:
    """The coordinator's process.

    Args:
        setup: What it needs to know.
    """

    def __init__(self, setup: CoordinatorSetup) -> None:
        self._process = start_python("minivllm.engine.dp_coordinator", 1)
        _write(self._process, setup)
        self._end = weakref.finalize(self, end_process, self._process)

    @property
    def process_id(self) -> int:
        """The process."""
        return self._process.pid

    def poll(self) -> str | None:
        """As for `ReplicaProcess`."""
        status = self._process.poll()
        return None if status is None else describe_exit(status)

    def shutdown(self) -> None:
        """End it."""
        self._end()


class LocalReplicas:
    """The replicas on this machine.

    Args:
        config: The engine's.
        addresses: Where they connect to.
        key: For their sockets.
        restart: Start another when one dies.
        socket_folder: As for `ReplicaSetup`.
    """

    def __init__(
        self, config: EngineConfig, addresses: NodeWelcome, key: KeyPair | None, *, restart: bool, socket_folder: str = ""
    ) -> None:
        ranks = config.parallel_config.local_ranks
        num_threads = max(1, torch.get_num_threads() // max(1, len(ranks)))  # so that no two replicas need the same processor
        self._start = partial(
            ReplicaProcess, config.to_bytes(), addresses=addresses, key=key, num_threads=num_threads, socket_folder=socket_folder
        )
        self._restart = restart
        self._failed_starts = dict.fromkeys(ranks, 0)
        self.processes: dict[int, ReplicaProcess] = {}
        """Those that run, by rank."""
        self._ended_since: dict[int, float] = {}
        self._ready_since: dict[int, float] = {}
        self._is_shut_down = False
        for index in ranks:
            self.processes[index] = self._start(index)

    @property
    def process_ids(self) -> list[int]:
        """The processes, by rank."""
        return [process.process_id for _, process in sorted(self.processes.items())]

    def find_ended(self) -> tuple[int, str] | None:
        """A replica that has ended a moment ago, so that its last words have been heard; and how. It is forgotten."""
        for index, process in self.processes.items():
            if end := process.poll():
                since = self._ended_since.setdefault(index, time.monotonic())
                if time.monotonic() - since >= LAST_WORDS_SECONDS:
                    self.remove(index)
                    return index, end
        return None

    def note_ready(self, index: int) -> None:
        """A replica has started."""
        self._ready_since[index] = time.monotonic()

    def remove(self, index: int) -> None:
        """A replica has failed: end its process, if that has not ended."""
        self._ended_since.pop(index, None)
        if (process := self.processes.pop(index, None)) is not None:
            process.kill()

    def start_another(self, index: int) -> bool:
        """Start another in place of one that has died. False if that is not wanted, or has failed too often."""
        if not self._restart or self._is_shut_down or index not in self._failed_starts:
            return False
        if time.monotonic() - self._ready_since.pop(index, math.inf) > CoreSupervisor.SHORT_LIFE_SECONDS:
            self._failed_starts[index] = 0
        if self._failed_starts[index] == CoreSupervisor.MAX_FAILED_STARTS:
            logger.error("Replica %d has failed %d times in a row: giving up.", index, CoreSupervisor.MAX_FAILED_STARTS)
            return False
        self._failed_starts[index] += 1
        self.processes[index] = self._start(index)
        return True

    def shutdown(self, told: Collection[int]) -> None:
        """End all: those that have been told to end get a little time for it."""
        self._is_shut_down = True
        for index, process in list(self.processes.items()):
            if index in told:
                process.shutdown()
            else:
                process.kill()  # it loads the model and reads nothing


def _write(process: subprocess.Popen[bytes], setup: msgspec.Struct) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed soon
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        process.stdin.flush()
