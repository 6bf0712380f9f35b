"""Starting, monitoring and stopping the processes of several workers, for `MultiProcExecutor`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import psutil
import torch

from minivllm.config import ParallelConfig
from minivllm.distributed.meeting import Meeting
from minivllm.distributed.message_queue import QueueEnds, QueueReader, QueueWriter
from minivllm.distributed.shared_memory import create_group_memory, create_pipeline_memory
from minivllm.executor.processes import describe_exit, may_come_from_outside, start_python
from minivllm.executor.worker_messages import FromWorker, WorkerProcessSetup, decode_from_worker
from minivllm.executor.workers import CHECK_SECONDS, GRACE_SECONDS, Workers

CHECKS_UNTIL_STOPPED = 3
"""A worker found stopped (SIGSTOP) in this many checks in a row is given up; a debugger may stop it for a moment."""


class WorkerProcesses(Workers):
    """The processes of the workers, the queues to and from them, and a thread that monitors them.

    The thread also starts them, because Linux kills a worker when the thread that started it ends (PR_SET_PDEATHSIG).

    Args:
        configs: The pickled configs.
        parallel_config: How many workers there are, and how they are grouped.

    Attributes:
        processes: By rank.
    """

    inbox: QueueWriter

    def __init__(self, configs: bytes, parallel_config: ParallelConfig) -> None:
        super().__init__(parallel_config)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._outboxes: list[QueueReader] = []
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(configs, started), name="minivllm workers", daemon=True)
        self._thread.start()
        try:
            started.wait()
        except BaseException:  # Ctrl-C
            self.fail("The start was interrupted.")
            started.wait()  # the thread starts no more workers
            self.stop()
            raise
        if self.failure is not None:
            self.stop()
            self.check()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def read(self, timeout: float, handle: Callable[[int, FromWorker], None]) -> None:
        self.check()
        if not self._read_now(handle):
            poll = select.poll()
            for outbox in self._outboxes:
                poll.register(outbox.bell, select.POLLIN)
            poll.poll(1000 * timeout)
            self._read_now(handle)

    def _read_now(self, handle: Callable[[int, FromWorker], None]) -> bool:
        """Hand over one message of each worker that has sent any. Whether one has."""
        has_read = False
        for rank, outbox in enumerate(self._outboxes):
            try:
                data = outbox.peek(0)
            except EOFError:
                self.raise_failure(self._describe_end(rank))
            if data is not None:
                handle(rank, decode_from_worker(data))
                outbox.advance()
                has_read = True
        return has_read

    def _find_ended(self) -> str | None:
        return next((self._describe_end(rank) for rank, process in enumerate(self.processes) if process.poll() is not None), None)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _end(self) -> None:
        """Close the workers' queue. Those still loading the model do not read it, and are killed."""
        if hasattr(self, "inbox"):
            self.inbox.close()
        if self.are_ready:
            self._wait()
        self._kill()
        self._wait()
        for outbox in self._outboxes:
            outbox.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        if all(process.poll() is not None for process in self.processes):
            self._ended.set()

    def _run(self, configs: bytes, started: threading.Event) -> None:
        try:
            self._start(configs)
        except Exception as error:  # too many open files, or processes
            self.fail(f"The workers could not be started: {error}.")
            return
        finally:
            started.set()
        try:
            self._monitor()
        except Exception as error:
            self.fail(f"The workers cannot be monitored any more: {type(error).__name__}: {error}")
        for process in self.processes:  # they would be killed if this thread ended first
            process.wait()

    def _monitor(self) -> None:
        num_stopped = [0] * self.world_size
        while not self._stopping.wait(CHECK_SECONDS):
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    self.fail(self._describe_end(rank))
                    return
                num_stopped[rank] = num_stopped[rank] + 1 if _is_stopped(process.pid) else 0
                if num_stopped[rank] == CHECKS_UNTIL_STOPPED:
                    self.was_killed |= self.failure is None
                    self.fail(f"{self._name(rank)} was stopped (SIGSTOP).")
                    return

    def _start(self, configs: bytes) -> None:
        num_threads = max(1, torch.get_num_threads() // self.world_size)
        with contextlib.ExitStack() as ours:  # closed here once the workers have inherited it
            port, memories = free_port(), self._create_memories(ours)
            inbox = QueueEnds.create(self.world_size)
            rings = [ring for _, ring in inbox.bells]
            with inbox.closed_on_error():
                self.inbox = QueueWriter(inbox.memory, rings)
            ours.callback(inbox.close, but=rings)
            for rank in range(self.world_size):
                if self._stopping.is_set():  # the start was interrupted
                    break
                outbox = QueueEnds.create(1)
                (answers, answer), (wait, _) = outbox.bells[0], inbox.bells[rank]
                with outbox.closed_on_error():
                    self._outboxes.append(QueueReader(outbox.memory, answers))
                ours.callback(outbox.close, but=[answers])
                shared = memories[rank]
                inherited = (*(memory for memory in shared if memory >= 0), inbox.memory, wait, outbox.memory, answer)
                setup = WorkerProcessSetup(
                    configs, rank, self.world_size, *shared, Meeting(f"127.0.0.1:{port}"), logging.getLogger().getEffectiveLevel(),
                    parent=os.getpid(), inbox=(inbox.memory, wait), outbox=(outbox.memory, answer),
                )  # fmt: skip
                process = start_python("minivllm.executor.worker_proc", setup, num_threads, inherited)
                self.processes.append(process)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        if self._stopping.is_set():
            self._kill()

    def _create_memories(self, ours: contextlib.ExitStack) -> list[tuple[int, int]]:
        """Of each rank, the memory that it shares with its stage, and the one with those at the same place in theirs; -1 if there is one stage."""

        def create(function: Callable[[int], int], num_ranks: int) -> int:
            memory = function(num_ranks)
            ours.callback(os.close, memory)
            return memory

        tp_size, num_stages = self._parallel_config.tensor_parallel_size, self._parallel_config.pipeline_parallel_size
        of_stages = [create(create_group_memory, tp_size) for _ in range(num_stages)]
        across = [create(create_pipeline_memory, num_stages) if num_stages > 1 else -1 for _ in range(tp_size)]
        return [(of_stages[rank // tp_size], across[rank % tp_size]) for rank in range(self.world_size)]

    def _name(self, rank: int) -> str:
        return self.name(rank, process=str(self.processes[rank].pid))

    def _describe_end(self, rank: int) -> str:
        try:
            status = self.processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{self._name(rank)} has closed its end of the queue."
        self.was_killed |= self.failure is None and may_come_from_outside(status)  # else it was we who killed it
        return f"{self._name(rank)} {describe_exit(status)}."


def _is_stopped(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):
        return False


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
