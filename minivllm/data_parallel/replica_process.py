"""The process of one data-parallel replica, as whoever starts it sees it."""

from __future__ import annotations

import contextlib
import os
import time
import weakref

import msgspec

from minivllm.data_parallel.engine_core_proc import Note, ReplicaSetup
from minivllm.executor.processes import ChildProcess, may_come_from_outside


class ReplicaProcess(ChildProcess):
    """A replica of the model in a process.

    Attributes:
        incarnation: Tells it from the processes that had its rank before, and have it after it: a later one has a larger number, and so has
            one of a node that got the rank later, whatever the time is there.
        ready_since: When it was ready, in seconds of `time.monotonic`, as far as `poll` has noticed; None before.
        notes: What it has written into its pipe, as far as `poll` has noticed.
    """

    def __init__(self, setup: ReplicaSetup, num_threads: int, gpus: str | None = None) -> None:
        self.incarnation = setup.incarnation
        self._pipe, theirs = os.pipe()
        self._close = weakref.finalize(self, os.close, self._pipe)
        setup = msgspec.structs.replace(setup, notes_descriptor=theirs)
        try:
            super().__init__("minivllm.data_parallel.engine_core_proc", setup, num_threads, (theirs,), gpus)
        finally:
            os.close(theirs)
        os.set_blocking(self._pipe, False)
        self.ready_since: float | None = None
        self.notes: set[Note] = set()

    @property
    def was_killed(self) -> bool:
        """Whether it, or a worker of it, was killed by SIGKILL or the like, and not by `kill`."""
        from_outside = may_come_from_outside(self.exit_status or 0) and not self._is_killed_here
        return from_outside or Note.WORKER_KILLED in self.notes

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a place: on this machine none does."""
        return False

    def poll(self) -> str | None:
        """As for `ChildProcess`; reads its notes, too: all of them, once it has ended."""
        end = super().poll()
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self._pipe, 4096):
                self.notes.update(Note(bytes([byte])) for byte in set(written))
        if self.ready_since is None and Note.READY in self.notes:
            self.ready_since = time.monotonic()
        return end

    def drain(self) -> None:
        """Let it finish what it has, and end."""
        self._process.terminate()

    def shutdown(self, grace: float = 0.0) -> None:
        """Wait some seconds until it has ended, as it was told to; then kill it."""
        if self._end.alive:
            self.wait(grace)
            self._process.kill()
            self._end()
        self._close()
