"""Several workers, each in a process of its own with a part of the model.

    EngineCore ─► MultiProcExecutor ──┬── one queue in shared memory ──► WorkerProc 0 ──► result of the step
                                      └──────────────────────────────► WorkerProc 1 …
                                                                           ▲ │
                                                                           └─┴ all-reduce

All workers get the same message and compute the same step, each with its part of the weights and of the cache; rank 0 samples, and answers.
A worker that ends, is stopped, or fails alone takes the executor with it: its part of the cache is lost. Mirrors
`vllm/v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec
import psutil
import torch

from minivllm import errors
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.distributed.message_queue import QueueEnds, QueueReader, QueueWriter
from minivllm.distributed.shared_memory import create_group_memory
from minivllm.errors import DistributedError, EngineDeadError, WorkerError
from minivllm.executor.base import Executor
from minivllm.executor.processes import describe_exit, pickle_for_process, start_python
from minivllm.executor.worker_messages import (
    Answer,
    Call,
    CallResult,
    Failed,
    FromWorker,
    RequestLedger,
    StepResult,
    ToWorker,
    WorkerLog,
    WorkerSetup,
    decode_from_worker,
    encode,
)
from minivllm.scheduler_output import ExecuteModelRequest, RankTiming, SequenceOutput

CHECK_SECONDS = 0.2
"""How often the workers are checked."""
CHECKS_UNTIL_STOPPED = 3
"""A worker that is stopped (SIGSTOP) at so many checks in a row is given up: once alone, and a debugger may have looked at it."""
SECONDS_FOR_OTHERS = 0.8
"""How long to wait, when a worker has failed, until all are ready for another step: if they are, only that one has failed."""
GRACE_SECONDS = 2.0
"""How long a worker may take to end."""


class MultiProcExecutor(Executor):
    """Hands every step to workers in other processes, which load the model while this one does something else.

    Args:
        model_config, cache_config, scheduler_config, worker_config: As for a worker.
        world_size: How many workers.

    Raises:
        ConfigError: There is a class that workers cannot import.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        worker_config: WorkerConfig,
        world_size: int,
    ) -> None:
        configs = (model_config, cache_config, scheduler_config, worker_config)
        plugins = {
            "attention_backend": worker_config.attention_backend,
            "sampler_cls": worker_config.sampler_cls,
            "the registered model class": model_config.model_cls,
        }
        self.world_size = world_size
        self._ledger = RequestLedger(2 * scheduler_config.max_num_seqs)
        self._number = 0
        self._is_settled = True
        """Whether all answers to the last message have come: they have not if Ctrl-C has interrupted the wait."""
        self._is_timed = False
        self._timing: list[RankTiming] = []
        self._logged: dict[str, int] = {}
        """What ranks have logged during a step or call, and which of them said it first."""
        self._workers = WorkerProcesses(pickle_for_process(configs, plugins), world_size)
        self._finalizer = weakref.finalize(self, self._workers.stop)
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the model. Called automatically before they are first used.

        Raises:
            ConfigError, ModelLoadError: A worker cannot use the configuration or the model; the message names its rank.
            EngineDeadError: A worker ended before it was ready.
        """
        if not self._is_ready:
            self._receive(0, range(self.world_size))
            self._is_ready = self._workers.are_ready = True

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """As many blocks as fit at every rank: a block has a part at each."""
        found = self.collective_rpc("determine_num_available_blocks")
        return min(on_device for on_device, _ in found), min(on_host for _, on_host in found)

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.collective_rpc("initialize_cache", num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        """Run a step.

        Raises:
            MinivllmError: A worker failed, and all are ready for the next step. As for `collective_rpc`.
            EngineDeadError: A worker is gone, or failed while others wait for it.
        """
        self._send(self._ledger.to_step(self._next_number(), request, self._is_timed))
        results = self._receive(self._number, range(self.world_size if self._is_timed else 1), is_step=True)
        steps = [result for result in results if isinstance(result, StepResult)]
        self._timing = [step.timing for step in steps if step.timing is not None]
        return steps[0].outputs

    def record_timing(self, on: bool) -> None:
        self._is_timed = on

    def take_timing(self) -> list[RankTiming]:
        timing, self._timing = self._timing, []
        return timing

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker, with plain values. Returns what they return, by rank, as plain values.

        Raises:
            MinivllmError: What a worker raised, with its rank; a `WorkerError` for errors of other kinds.
            EngineDeadError: A worker is gone.
        """
        self.wait_until_ready()
        self._send(Call(self._next_number(), method, list(args)))
        results = self._receive(self._number, range(self.world_size))
        return [result.value for result in results if isinstance(result, CallResult)]

    def check_health(self) -> None:
        self._workers.check()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self._workers.on_failure = callback
        if self._workers.failure is not None:
            callback()

    def shutdown(self) -> None:
        self._finalizer()

    @property
    def process_ids(self) -> list[int]:
        """The workers' processes, by rank."""
        return [process.pid for process in self._workers.processes]

    def _next_number(self) -> int:
        """The number of the next message, when all ranks have finished with the last one."""
        if not self._is_settled and not self._settle():
            self._workers.raise_failure("The workers did not recover from a step that was interrupted.")
        self._number += 1
        self._logged.clear()
        return self._number

    def _send(self, message: ToWorker) -> None:
        self.check_health()
        self._is_settled = False
        try:
            self._workers.inbox.write(encode(message))
        except DistributedError:
            self._workers.raise_failure(self._workers.find_ended(GRACE_SECONDS) or "A worker has closed its end of the queue.")

    def _receive(self, number: int, ranks: Iterable[int], is_step: bool = False) -> list[Answer]:
        """Wait for the answers of these ranks to a message."""
        wanted, answers = set(ranks), dict[int, Answer]()
        while not wanted <= answers.keys():
            for rank, message in self._read():
                if message.number == number:
                    answers[rank] = message
                elif isinstance(message, Failed):  # in a step that rank 0 has finished
                    self._workers.raise_failure(self._describe(rank, message))
            if failed := {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}:
                self._raise(failed, is_step)
        self._is_settled = True
        return [answers[rank] for rank in sorted(wanted)]

    def _raise(self, failed: dict[int, Failed], is_step: bool) -> NoReturn:
        """Raise what has failed: one step or call, if all ranks are out of it, else the engine."""
        if ended := self._workers.find_ended():  # which the other ranks may have noticed first
            self._workers.raise_failure(ended)
        rank, first = min(failed.items(), key=lambda item: (item[1].error_type == DistributedError.__name__, item[0]))
        is_start = not self._is_ready and first.number == 0
        if is_start or first.error_type == DistributedError.__name__ or not self._settle(has_failed=True):
            self._workers.fail(self._describe(rank, first))
            if is_step:
                self.check_health()
        kind = getattr(errors, first.error_type, None)
        if kind is None:
            raise WorkerError(f"Rank {rank}: {first.error_type}: {first.message}")
        raise kind(f"Rank {rank}: {first.message}")

    def _settle(self, has_failed: bool = False) -> bool:
        """Wait until all ranks are ready for another message. False if that does not happen soon after one of them has failed.

        A rank that has failed alone leaves the others waiting in an operation that it has not entered. If none waits, none has entered
        an operation that another has not.
        """
        self._number += 1
        self._send(Call(self._number, "check_health", []))
        missing = set(range(self.world_size))
        give_up = time.monotonic() + SECONDS_FOR_OTHERS if has_failed else float("inf")
        while missing:
            if time.monotonic() > give_up:
                return False
            for rank, message in self._read():
                if message.number == self._number:
                    missing.discard(rank)
                elif isinstance(message, Failed):
                    give_up = min(give_up, time.monotonic() + SECONDS_FOR_OTHERS)
        self._is_settled = True
        return True

    def _read(self) -> list[tuple[int, Answer]]:
        """Answers that have come, or come soon, each with its rank."""
        answers: list[tuple[int, Answer]] = []
        for rank, message in self._workers.read(CHECK_SECONDS):
            if isinstance(message, WorkerLog):
                self._log(rank, message)
            else:
                answers.append((rank, message))
        return answers

    def _describe(self, rank: int, failure: Failed) -> str:
        kind = "" if failure.error_type == DistributedError.__name__ else f"{failure.error_type}: "
        return f"Rank {rank} of {self.world_size} failed: {kind}{failure.message}"

    def _log(self, rank: int, message: WorkerLog) -> None:
        """What several ranks say is logged once, and what is no warning for rank 0 alone."""
        first = self._logged.setdefault(message.text, rank)
        if first == rank and (rank == 0 or message.level >= logging.WARNING):
            text = message.text if rank == 0 else f"Rank {rank}: {message.text}"
            logging.getLogger(message.logger).log(message.level, "%s", text)


class WorkerProcesses:
    """The processes of the workers, the queues to and from them, and a thread that monitors them.

    The thread also starts them: Linux, asked to kill a worker when its parent ends, means the thread that started it.

    Args:
        configs: Pickled.
        world_size: How many workers.

    Attributes:
        processes: By rank.
        are_ready: Whether they have loaded the model.
        inbox: What all workers read.
        failure: Why they have been ended, if they have.
        on_failure: Called when a worker is found gone.
    """

    def __init__(self, configs: bytes, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.are_ready = False
        self.inbox: QueueWriter
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._outboxes: list[QueueReader] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._stopping, self._ended, started = threading.Event(), threading.Event(), threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(configs, started), name="minivllm workers", daemon=True)
        self._thread.start()
        try:
            started.wait()
        except BaseException:  # Ctrl-C
            self.fail("The start was interrupted.")
            started.wait()  # the thread starts no more
            self.stop()
            raise
        if self._start_error is not None:
            self.stop()
            raise EngineDeadError(f"The workers could not be started: {self._start_error}.") from self._start_error

    def check(self) -> None:
        """Raise an EngineDeadError if the workers have been ended, when they have; or if they belong to another process."""
        if os.getpid() != self._owner:
            raise EngineDeadError(
                f"The workers belong to process {self._owner}, from which this one was forked, and would mix up the two: make an engine here."
            )
        if self.failure is not None:
            self._ended.wait(GRACE_SECONDS)
            raise EngineDeadError(self.failure)

    def read(self, timeout: float) -> list[tuple[int, FromWorker]]:
        """Messages of workers, each with its rank; none if there are none within `timeout` seconds.

        Raises:
            EngineDeadError: A worker has ended.
        """
        self.check()
        poll = select.poll()
        for outbox in self._outboxes:
            poll.register(outbox.bell, select.POLLIN)
        has_message = any(outbox.has_message() for outbox in self._outboxes)
        ready = {bell for bell, _ in poll.poll(0 if has_message else 1000 * timeout)}
        messages = []
        for rank, outbox in enumerate(self._outboxes):
            if outbox.bell in ready or outbox.has_message():
                try:
                    data = outbox.read(0)
                except EOFError:
                    self.raise_failure(self._describe_end(rank))
                if data is not None:
                    messages.append((rank, decode_from_worker(data)))
        return messages

    def find_ended(self, timeout: float = 0.0) -> str | None:
        """How a worker has ended, if one has, or does within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    return self._describe_end(rank)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def raise_failure(self, failure: str) -> NoReturn:
        """End the workers, for this reason unless there is one already, and raise it."""
        self.fail(failure)
        self.check()
        raise AssertionError

    def fail(self, failure: str) -> None:
        """End the workers, for this reason unless there is one already."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self._stopping.set()
        for process in self.processes:
            process.kill()
        self.on_failure()
        self._wait()

    def stop(self) -> None:
        """End the workers: they read that there are no more messages. Those that load the model do not read, and are killed. Called once."""
        if os.getpid() != self._owner:  # a forked process, which has copies of all this
            return
        if self.failure is None:
            self.failure = "The engine was shut down."
        self._stopping.set()
        if hasattr(self, "inbox"):
            self.inbox.close()
        if self.are_ready:
            self._wait()
        for process in self.processes:
            process.kill()
        self._wait()
        for outbox in self._outboxes:
            outbox.close()

    def _wait(self) -> None:
        """Until all have ended; not for long, because one may hang in a driver."""
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        if all(process.poll() is not None for process in self.processes):
            self._ended.set()

    def _run(self, configs: bytes, started: threading.Event) -> None:
        """The thread."""
        try:
            self._start(configs)
        except Exception as error:
            self._start_error = error
            self.fail(f"The workers could not be started: {error}")
            return
        finally:
            started.set()
        try:
            self._monitor()
        except Exception as error:
            self.fail(f"The workers cannot be monitored any more: {type(error).__name__}: {error}")
        for process in self.processes:  # which would be killed if this thread ended first
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
                    self.fail(f"{self._name(rank)} was stopped (SIGSTOP).")
                    return

    def _start(self, configs: bytes) -> None:
        num_threads = max(1, torch.get_num_threads() // self.world_size)
        with contextlib.ExitStack() as ours:  # what only the workers need, once they have inherited it
            group_port, group_memory = _free_port(), create_group_memory(self.world_size)
            ours.callback(os.close, group_memory)
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
                inherited = (group_memory, inbox.memory, wait, outbox.memory, answer)
                process = start_python("minivllm.executor.worker_main", num_threads, inherited)
                self.processes.append(process)
                setup = WorkerSetup(
                    configs, rank, self.world_size, os.getpid(), group_memory, group_port, (inbox.memory, wait),
                    (outbox.memory, answer), sys.path, logging.getLogger().getEffectiveLevel(),
                )  # fmt: skip
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed soon
                    process.stdin.write(msgspec.json.encode(setup) + b"\n")
                    process.stdin.close()
        if self._stopping.is_set():
            for process in self.processes:
                process.kill()

    def _name(self, rank: int) -> str:
        return f"Rank {rank} of {self.world_size} (process {self.processes[rank].pid})"

    def _describe_end(self, rank: int) -> str:
        try:
            status = self.processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{self._name(rank)} has closed its end of the queue."
        return f"{self._name(rank)} {describe_exit(status)}."


def _is_stopped(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
