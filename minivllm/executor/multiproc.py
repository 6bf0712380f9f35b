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

LOOK_SECONDS = 0.2
"""How often the workers are looked after."""
LOOKS_UNTIL_STOPPED = 4
"""A worker that is stopped (SIGSTOP) at so many looks in a row is given up. Fewer, and Ctrl-Z could look like that."""
SECONDS_FOR_OTHERS = 0.8
"""How long to wait, when a worker has failed, until all are ready for another step: if they are, only that one has failed."""
GRACE_SECONDS = 2.0
"""How long a worker may take to end when told to."""


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
        self._is_timed = False
        self._timing: list[RankTiming] = []
        self._logged: set[str] = set()
        self._workers = WorkerProcesses(pickle_for_process(configs, plugins), world_size)
        self._finalizer = weakref.finalize(self, self._workers.stop)
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the model. Called by itself before their first work.

        Raises:
            ConfigError, ModelLoadError: A worker cannot use the configuration or the model; the message names its rank.
            EngineDeadError: A worker ended before it was ready.
        """
        if not self._is_ready:
            self._is_ready = True
            self._receive(0, range(self.world_size))

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
        self._number += 1
        self._send(self._ledger.to_step(self._number, request, self._is_timed))
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
        self._number += 1
        self._send(Call(self._number, method, list(args)))
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

    def _send(self, message: ToWorker) -> None:
        self.check_health()
        try:
            self._workers.inbox.write(encode(message))
        except DistributedError:
            self._workers.raise_failure("A worker has ended.")

    def _receive(self, number: int, ranks: Iterable[int], is_step: bool = False) -> list[Answer]:
        """Wait for the answers of these ranks to a message."""
        wanted, answers = set(ranks), dict[int, Answer]()
        while not wanted <= answers.keys():
            for rank, message in self._read():
                if message.number == number:
                    answers[rank] = message
                elif isinstance(message, Failed):  # in a step that the others, or at least rank 0, have finished
                    self._workers.raise_failure(self._describe(rank, message))
                # else the answer to a step that Ctrl-C has interrupted
            if failed := {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}:
                self._raise(failed, is_step)
        return [answers[rank] for rank in sorted(wanted)]

    def _raise(self, failed: dict[int, Failed], is_step: bool) -> NoReturn:
        """Raise what has failed: one step or call, if all ranks are out of it, else the engine."""
        self._workers.look()
        rank, first = min(failed.items(), key=lambda item: (item[1].error_type == DistributedError.__name__, item[0]))
        if first.error_type == DistributedError.__name__ or not self._all_answer():
            self._workers.fail(self._describe(rank, first))
            if is_step:
                self.check_health()
        kind = getattr(errors, first.error_type, None)
        if kind is None:
            raise WorkerError(f"Rank {rank}: {first.error_type}: {first.message}")
        raise kind(f"Rank {rank}: {first.message}")

    def _all_answer(self) -> bool:
        """Whether all ranks are ready for another message soon. A rank that has failed alone leaves the others waiting in an operation
        that it has not entered; if none waits, none has entered an operation that another has not."""
        self._number += 1
        self._send(Call(self._number, "check_health", []))
        missing, deadline = set(range(self.world_size)), time.monotonic() + SECONDS_FOR_OTHERS
        while missing and time.monotonic() < deadline:
            missing -= {rank for rank, message in self._read() if message.number == self._number}
        return not missing

    def _read(self) -> list[tuple[int, Answer]]:
        """Answers that have come, or come soon, each with its rank."""
        answers: list[tuple[int, Answer]] = []
        for rank, message in self._workers.read(LOOK_SECONDS):
            if isinstance(message, WorkerLog):
                self._log(rank, message)
            else:
                answers.append((rank, message))
        return answers

    def _describe(self, rank: int, failure: Failed) -> str:
        kind = "" if failure.error_type == DistributedError.__name__ else f"{failure.error_type}: "
        return f"Rank {rank} of {self.world_size} failed: {kind}{failure.message}"

    def _log(self, rank: int, message: WorkerLog) -> None:
        """What all ranks say is said once, and what is no warning by rank 0 alone."""
        if message.text not in self._logged and (rank == 0 or message.level >= logging.WARNING):
            self._logged.add(message.text)
            text = message.text if rank == 0 else f"Rank {rank}: {message.text}"
            logging.getLogger(message.logger).log(message.level, "%s", text)


class WorkerProcesses:
    """The processes of the workers, the queues to and from them, and a thread that looks after them.

    The thread also starts them: Linux, asked to kill a worker when its parent ends, means the thread that started it.

    Args:
        configs: Pickled.
        world_size: How many workers.

    Attributes:
        processes: By rank.
        inbox: What all workers read.
        failure: Why they have been ended, if they have.
        on_failure: Called when a worker is found gone.
    """

    def __init__(self, configs: bytes, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._stopping, started = threading.Event(), threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(configs, started), name="minivllm workers", daemon=True)
        self._thread.start()
        started.wait()
        if self._start_error is not None:
            raise self._start_error

    def check(self) -> None:
        """Raise an EngineDeadError if the workers have been ended."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def read(self, timeout: float) -> list[tuple[int, FromWorker]]:
        """Messages of workers, each with its rank; none if there are none within `timeout` seconds.

        Raises:
            EngineDeadError: A worker has ended.
        """
        self.check()
        poll = select.poll()
        ranks = {reader.bell: rank for rank, reader in enumerate(self._outboxes)}
        for bell in ranks:
            poll.register(bell, select.POLLIN)
        messages = []
        for bell, _ in poll.poll(1000 * timeout):
            try:
                data = self._outboxes[ranks[bell]].read(0)
            except EOFError:
                self.raise_failure(self._describe_end(ranks[bell]))
            if data is not None:
                messages.append((ranks[bell], decode_from_worker(data)))
        return messages

    def look(self) -> None:
        """Raise an EngineDeadError if a worker has ended, which the others may have noticed first."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.raise_failure(self._describe_end(rank))

    def raise_failure(self, failure: str) -> NoReturn:
        """End the workers, for this reason unless there is one already, and raise it."""
        self.fail(failure)
        raise EngineDeadError(self.failure)

    def fail(self, failure: str) -> None:
        """End the workers, for this reason unless there is one already."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self._stopping.set()
        self._kill()
        self.on_failure()

    def stop(self) -> None:
        """End the workers: they read that there are no more messages. Safe to call again."""
        if self.failure is None:
            self.failure = "The engine was shut down."
        self._stopping.set()
        self.inbox.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for outbox in self._outboxes:
            outbox.close()

    def _run(self, configs: bytes, started: threading.Event) -> None:
        """The thread."""
        try:
            self._start(configs)
        except BaseException as error:
            self._start_error = error
            self._kill()
            return
        finally:
            started.set()
        num_looks_stopped = [0] * self.world_size
        while not self._stopping.wait(LOOK_SECONDS):
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    self.fail(self._describe_end(rank))
                    return
                num_looks_stopped[rank] = num_looks_stopped[rank] + 1 if _is_stopped(process.pid) else 0
                if num_looks_stopped[rank] == LOOKS_UNTIL_STOPPED:
                    self.fail(f"{self._name(rank)} was stopped (SIGSTOP).")
                    return

    def _start(self, configs: bytes) -> None:
        num_threads = max(1, torch.get_num_threads() // self.world_size)
        inbox = QueueEnds.create(self.world_size)
        self.inbox = QueueWriter(inbox.memory, [ring for _, ring in inbox.bells])
        self._outboxes: list[QueueReader] = []
        group_memory, group_port = create_group_memory(self.world_size), _free_port()
        try:
            for rank in range(self.world_size):
                outbox = QueueEnds.create(1)
                (answers, answer), (wait, _) = outbox.bells[0], inbox.bells[rank]
                inherited = (group_memory, inbox.memory, wait, outbox.memory, answer)
                process = start_python("minivllm.executor.worker_proc", num_threads, inherited)
                self.processes.append(process)
                self._outboxes.append(QueueReader(outbox.memory, answers))
                outbox.close(but=(answers,))
                setup = WorkerSetup(
                    configs, rank, self.world_size, os.getpid(), group_memory, group_port, (inbox.memory, wait),
                    (outbox.memory, answer), sys.path, logging.getLogger().getEffectiveLevel(),
                )  # fmt: skip
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed below
                    process.stdin.write(msgspec.json.encode(setup) + b"\n")
                    process.stdin.close()
        finally:
            inbox.close(but=tuple(ring for _, ring in inbox.bells))
            os.close(group_memory)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

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
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
