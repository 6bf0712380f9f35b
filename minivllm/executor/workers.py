"""Several workers, wherever they run: what `WorkerAnswers` and an executor need of them."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Protocol

from minivllm.config import ParallelConfig
from minivllm.errors import EngineDeadError, WorkerKilledError
from minivllm.executor.worker_messages import FromWorker

CHECK_SECONDS = 0.2
"""How often the workers are checked."""
GRACE_SECONDS = 2.0
"""How long a worker has to end."""


class Inbox(Protocol):
    """Where messages to all workers are written: a `QueueWriter`, or sockets."""

    def write(self, message: bytes, while_full: Callable[[], object] | None = None) -> None:
        """As `QueueWriter.write`."""

    def set_mark(self, mark: int) -> None:
        """As `QueueWriter.set_mark`."""


class Workers(ABC):
    """The workers of a model, and what watches them.

    Args:
        parallel_config: How many there are, and how they are grouped.

    Attributes:
        are_ready: Whether all have loaded the model.
        inbox: What is written there reaches all workers, in order.
        failure: Why they were ended, if they were.
        was_killed: Whether that is because one was killed by SIGKILL or the like, or stopped: perhaps from outside.
        on_failure: Called when a worker is found dead.
    """

    inbox: Inbox
    seconds_until_seen = 0.0
    """How long after the end of a worker `find_ended` may not know of it yet, while others of its group do."""

    def __init__(self, parallel_config: ParallelConfig) -> None:
        self.world_size, self._parallel_config = parallel_config.world_size, parallel_config
        self.are_ready = False
        self.failure: str | None = None
        self.was_killed = False
        self.on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._stopping, self._ended = threading.Event(), threading.Event()

    @property
    @abstractmethod
    def process_ids(self) -> list[int]:
        """By rank."""

    @abstractmethod
    def read(self, timeout: float, handle: Callable[[int, FromWorker], None]) -> None:
        """Hand over messages of workers, each with its rank. Waits up to `timeout` seconds for the first.

        After Ctrl-C in `handle` the next call hands the same message over again, so that none is lost.

        Raises:
            EngineDeadError: A worker has ended.
        """

    def stop(self) -> None:
        """End the workers. Called once."""
        if os.getpid() != self._owner:  # a forked process has copies of all this
            return
        if self.failure is None:
            self.failure = "The engine was shut down."
        self._stopping.set()
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Have them end, and give back what they share with this process."""

    @abstractmethod
    def _find_ended(self) -> str | None:
        """How a worker ended, if one has."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all, without waiting until they have ended."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait until all have ended, but not for long: one may hang in a driver. Sets `_ended`."""

    def check(self) -> None:
        """Raise an EngineDeadError if the workers were ended, once they are gone, or if they belong to another process."""
        if os.getpid() != self._owner:
            raise EngineDeadError(
                f"The workers belong to process {self._owner}, from which this one was forked, and would mix up the two: make an engine here."
            )
        if self.failure is not None:
            self._ended.wait(GRACE_SECONDS)
            raise (WorkerKilledError if self.was_killed else EngineDeadError)(self.failure)

    def find_ended(self, timeout: float = 0.0) -> str | None:
        """How a worker ended, if one does within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if (end := self._find_ended()) or time.monotonic() >= deadline:
                return end
            time.sleep(0.01)

    def raise_failure(self, failure: str) -> NoReturn:
        """End the workers and raise the reason: this one, or an earlier one."""
        self.fail(failure)
        self.check()
        raise AssertionError

    def fail(self, failure: str) -> None:
        """End the workers, for this reason unless there is an earlier one."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self._stopping.set()
        self._kill()
        self.on_failure()
        self._wait()

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._parallel_config.tensor_parallel_size

    def name(self, rank: int, *, of_all: bool = True, process: str | None = None) -> str:
        """A rank in words: with how many there are, its stage if there are several, and its process if given."""
        details = [f"stage {self.stage_of(rank)}"] if self._parallel_config.pipeline_parallel_size > 1 else []
        details += [] if process is None else [f"process {process}"]
        return f"Rank {rank}" + f" of {self.world_size}" * of_all + (f" ({', '.join(details)})" if details else "")
