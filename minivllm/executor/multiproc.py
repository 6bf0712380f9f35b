"""Several workers, each in a process of its own with a part of the model.

    EngineCore ─► MultiProcExecutor ──┬── one queue in shared memory ──► WorkerProc 0 ──► result of the step
                                      └──────────────────────────────► WorkerProc 1 …
                                                                           ▲ │
                                                                           └─┴ all-reduce

All workers get the same message and compute the same step, each with its part of the weights and the cache; rank 0 samples. With pipeline
stages the ranks of the first come first, and the first rank of the last stage samples. Several steps may be in flight: with asynchronous scheduling,
or one in each stage. A worker that ends, is stopped, or fails where others wait for it takes the executor down, because its part of the cache is
lost. Mirrors `vllm/v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from minivllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from minivllm.executor.base import Executor, PendingStep
from minivllm.executor.processes import check_classes
from minivllm.executor.worker_answers import Sent, WorkerAnswers
from minivllm.executor.worker_messages import Call, CallResult, RequestLedger, StepMasks, StepResult
from minivllm.executor.worker_processes import WorkerProcesses
from minivllm.executor.workers import Workers
from minivllm.scheduler_output import ExecuteModelRequest, Masks, RankTiming, SequenceOutput


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
        parallel_config: ParallelConfig,
    ) -> None:
        configs = (model_config, cache_config, scheduler_config, worker_config, parallel_config)
        self.world_size, num_stages = parallel_config.world_size, parallel_config.pipeline_parallel_size
        self.answering_rank = parallel_config.tensor_parallel_size * (num_stages - 1)
        self.max_concurrent_batches = max(num_stages, 2 if scheduler_config.async_scheduling else 1)
        self._ledger = RequestLedger(2 * scheduler_config.max_num_seqs)
        self._is_timed = False
        self._timing: list[RankTiming] = []
        self._begun: Sent | None = None
        """The step between `launch_model` and `sample_tokens`."""
        self._awaits_masks = False
        """Whether the workers wait for the masks of that step."""
        check_classes(*configs)
        self._workers = self._start_workers(pickle.dumps(configs), parallel_config, worker_config)
        self._answers = WorkerAnswers(self._workers)
        self._finalizer = weakref.finalize(self, self._workers.stop)

    def _start_workers(self, configs: bytes, parallel_config: ParallelConfig, worker_config: WorkerConfig) -> Workers:
        return WorkerProcesses(configs, parallel_config)

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the model. Called automatically before they are first used.

        Raises:
            ConfigError, ModelLoadError: A worker cannot use the configuration or the model; the message names its rank.
            EngineDeadError: A worker ended before it was ready.
        """
        if not self._workers.are_ready:
            self._answers.wait_for_start()
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
        return self._receive(self._send(request))

    def launch_model(self, request: ExecuteModelRequest) -> None:
        """Begin a step. With only one in flight it begins when its results are asked for."""
        if self.max_concurrent_batches == 1:
            super().launch_model(request)
            return
        self._awaits_masks = any(seq.request.sampling_params.structured_outputs and seq.num_samples for seq in request.sequences)
        self._begun = self._send(request, self._awaits_masks)

    def sample_tokens(self, masks: Masks) -> PendingStep:
        if self.max_concurrent_batches == 1:
            return super().sample_tokens(masks)
        sent, self._begun = self._begun, None
        assert sent is not None, "sample_tokens follows launch_model"
        if self._awaits_masks:
            self._answers.send_masks(StepMasks(sent.number, masks))
        return partial(self._receive, sent)

    def _send(self, request: ExecuteModelRequest, masks_follow: bool = False) -> Sent:
        return self._answers.send(self._ledger.to_step(self._answers.next_number(), request, self._is_timed, masks_follow))

    def _receive(self, sent: Sent) -> list[SequenceOutput]:
        """Wait for the results of a step, which may be timed."""
        results = self._answers.receive(sent, range(self.world_size) if sent.is_timed else [self.answering_rank])
        steps = [result for result in results if isinstance(result, StepResult)]
        self._timing = [step.timing for step in steps if step.timing is not None]
        return steps[self.answering_rank if sent.is_timed else 0].outputs

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
        sent = self._answers.send(Call(self._answers.next_number(), method, list(args)))
        results = self._answers.receive(sent, range(self.world_size))
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
        return self._workers.process_ids
