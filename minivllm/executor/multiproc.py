"""Several workers, each in a process of its own with a part of the model.

    EngineCore ─► MultiProcExecutor ──┬── one queue in shared memory ──► WorkerProc 0 ──► result of the step
                                      └──────────────────────────────► WorkerProc 1 …
                                                                           ▲ │
                                                                           └─┴ all-reduce

All workers get the same message and compute the same step, each with its part of the weights and the cache; rank 0 samples and
answers. A worker that ends, is stopped, or fails alone takes the executor down, because its part of the cache is lost. Mirrors
`vllm/v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import logging
import pickle
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from minivllm import errors
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.errors import DistributedError, WorkerError
from minivllm.executor.base import Executor
from minivllm.executor.processes import check_classes
from minivllm.executor.worker_messages import (
    Answer,
    Call,
    CallResult,
    Failed,
    RequestLedger,
    StepResult,
    ToWorker,
    WorkerLog,
    encode,
)
from minivllm.executor.worker_processes import CHECK_SECONDS, GRACE_SECONDS, WorkerProcesses
from minivllm.scheduler_output import ExecuteModelRequest, RankTiming, SequenceOutput

SECONDS_FOR_OTHERS = 0.8
"""After a worker has failed, how long the others have to become ready for another step. If they do, only that step is lost."""


class MultiProcExecutor(Executor):
    """Hands every step to workers in other processes, which load the model in the background.

    Raises:
        ConfigError: A configured class cannot be imported by workers.
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
        self.world_size = world_size
        self._ledger = RequestLedger(2 * scheduler_config.max_num_seqs)
        self._number = 0
        self._is_settled = True
        """Whether all answers to the last message have arrived; False after Ctrl-C during the wait."""
        self._is_timed = False
        self._timing: list[RankTiming] = []
        self._logged: dict[str, int] = {}
        """Texts logged during a step or call, and the rank that logged each first."""
        check_classes(*configs)
        self._workers = WorkerProcesses(pickle.dumps(configs), world_size)
        self._finalizer = weakref.finalize(self, self._workers.stop)

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the model. Called automatically before they are first used.

        Raises:
            ConfigError, ModelLoadError: A worker cannot use the configuration or the model; the message names its rank.
            EngineDeadError: A worker ended before it was ready.
        """
        if not self._workers.are_ready:
            self._receive(0, range(self.world_size))
            self._workers.are_ready = True

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """As many blocks as fit on every rank, since each holds a part of every block."""
        found = self.collective_rpc("determine_num_available_blocks")
        return min(on_device for on_device, _ in found), min(on_host for _, on_host in found)

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.collective_rpc("initialize_cache", num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        """Run a step.

        Raises:
            MinivllmError: A worker failed, and all are ready for the next step. As for `collective_rpc`.
            EngineDeadError: A worker has died, or failed while others wait for it.
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
        """Call a method on every worker. Arguments and results, by rank, are plain values.

        Raises:
            MinivllmError: What a worker raised, with its rank; other errors as a `WorkerError`.
            EngineDeadError: A worker has died.
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
        """The workers' process ids, by rank."""
        return [process.pid for process in self._workers.processes]

    def _next_number(self) -> int:
        """The number of the next message, once all ranks have finished the last one."""
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
                elif isinstance(message, Failed):  # another rank, in a step that rank 0 has finished
                    self._workers.raise_failure(self._describe(rank, message))
            if failed := {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}:
                self._raise(failed, is_step)
        self._is_settled = True
        return [answers[rank] for rank in sorted(wanted)]

    def _raise(self, failed: dict[int, Failed], is_step: bool) -> NoReturn:
        """Raise the failure: of one step or call if all ranks have left it, else of the engine."""
        if ended := self._workers.find_ended():  # the other ranks may have noticed it first
            self._workers.raise_failure(ended)
        rank, first = min(failed.items(), key=lambda item: (item[1].error_type == DistributedError.__name__, item[0]))
        if not self._workers.are_ready or first.error_type == DistributedError.__name__ or not self._settle(has_failed=True):
            self._workers.fail(self._describe(rank, first))
            if is_step:
                self.check_health()
        kind = getattr(errors, first.error_type, None)
        if kind is None:
            raise WorkerError(f"Rank {rank}: {first.error_type}: {first.message}")
        raise kind(f"Rank {rank}: {first.message}")

    def _settle(self, has_failed: bool = False) -> bool:
        """Wait until all ranks are ready for another message. False if some are not, soon after one has failed.

        A rank that fails alone leaves the others waiting in a collective operation that it has not entered.
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
        """Answers that have arrived or arrive soon, each with its rank."""
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
        """Log a text of several ranks once; below warnings, only those of rank 0."""
        first = self._logged.setdefault(message.text, rank)
        if first == rank and (rank == 0 or message.level >= logging.WARNING):
            message.log("" if rank == 0 else f"Rank {rank}: ")
