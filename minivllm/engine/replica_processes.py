"""The processes of data-parallel replicas on this node, and of their coordinator: started here, and ended with this process."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import weakref

import msgspec
import torch

from minivllm.engine.core_handle import GRACE_SECONDS, end_process
from minivllm.engine.dp_coordinator import CoordinatorSetup
from minivllm.engine.dp_engine_core_proc import ReplicaSetup
from minivllm.engine.dp_messages import NodeWelcome
from minivllm.executor.processes import describe_exit, start_python


class ReplicaProcess:
    """A replica of the model in a process.

    Args:
        config: Pickled.
        engine_index: Its rank.
        addresses: Where it connects to.
        num_threads: Threads that it computes with.
        socket_folder: As for `ReplicaSetup`.
    """

    def __init__(
        self, config: bytes, engine_index: int, addresses: NodeWelcome, num_threads: int, socket_folder: str = ""
    ) -> None:
        self.engine_index = engine_index
        self._process = start_python("minivllm.engine.dp_engine_core_proc", num_threads)
        log_level = logging.getLogger().getEffectiveLevel()
        _write(self._process, ReplicaSetup(config, engine_index, addresses, socket_folder, sys.path, log_level))
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


class CoordinatorProcess:
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


def threads_per_replica(num_replicas: int) -> int:
    """This node's processors, or the threads that the user has set, divided among its replicas; one at least."""
    return max(1, torch.get_num_threads() // num_replicas)


def _write(process: subprocess.Popen[bytes], setup: msgspec.Struct) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed soon
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        process.stdin.flush()
