"""Ranks as threads of one process: the same layers, workers and sums as with processes, and quick to start."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ParallelConfig
from minivllm.core.scheduler import Scheduler
from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.distributed.partition import Stage
from minivllm.distributed.pipeline import IntermediateTensors, PipelineGroup
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine
from minivllm.executor.base import Executor, PendingStep
from minivllm.scheduler_output import ExecuteModelRequest, Masks, SequenceOutput
from minivllm.worker.worker import Worker

SECONDS = 600.0
"""How long ranks wait for each other: one may be compiling kernels on a busy machine."""


class Meeting:
    """Where the ranks of a group meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=SECONDS)
        self.parts: list[Any] = [None] * world_size


class ThreadGroup(GroupCoordinator):
    """One rank. `calls` notes what it was asked for."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, len(meeting.parts))
        self._meeting = meeting
        self.calls: list[tuple[str, int]] = []

    def _all_reduce(self, x: Tensor) -> None:
        parts = self._exchange("all_reduce", x.float())
        assert len({part.shape for part in parts}) == 1
        x.copy_(torch.stack(parts).sum(dim=0))

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        parts = self._exchange("gather", x.reshape(-1))
        assert [len(part) for part in parts] == list(sizes)
        return parts

    def _broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._exchange("broadcast", x)[src])

    def _exchange(self, kind: str, x: Tensor) -> list[Tensor]:
        self.calls.append((kind, x.numel()))
        self._meeting.parts[self.rank] = (kind, x.clone())
        self._meeting.barrier.wait()
        kinds, parts = zip(*self._meeting.parts, strict=True)
        self._meeting.barrier.wait()
        assert set(kinds) == {kind}
        return list(parts)


def make_groups(world_size: int) -> list[ThreadGroup]:
    """A group, as each of its ranks sees it."""
    meeting = Meeting(world_size)
    return [ThreadGroup(meeting, rank) for rank in range(world_size)]


def on_all_ranks(function: Any, *arguments: Sequence[Any]) -> list[Any]:
    """Call a function for each rank at the same time, with its arguments."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        calls = [pool.submit(function, *of_rank) for of_rank in zip(*arguments, strict=True)]
    return [call.result() for call in calls]


class ThreadPipeline(PipelineGroup):
    """One rank of a pipeline. `sent` notes the shapes of what it sent. Threads of one process share `pipes`, a queue for each rank's successor."""

    def __init__(self, stage: Stage, ranks: tuple[int, ...], pipes: list[queue.Queue[Any]]) -> None:
        super().__init__(stage, ranks)
        self._pipes = pipes
        self.sent: list[dict[str, tuple[int, ...]]] = []

    def send(self, tensors: IntermediateTensors) -> None:
        self.sent.append({name: tuple(x.shape) for name, x in tensors.tensors.items()})
        super().send(tensors)

    def _send_bytes(self, data: bytes) -> None:
        self._pipes[self.rank].put(data)

    def _recv_bytes(self) -> bytes:
        return self._pipes[self.rank - 1].get(timeout=SECONDS)

    def _send_tensors(self, tensors: list[Tensor]) -> None:
        self._pipes[self.rank].put([x.clone() for x in tensors])

    def _recv_tensors(self, tensors: list[Tensor]) -> None:
        for x, sent in zip(tensors, self._pipes[self.rank - 1].get(timeout=SECONDS), strict=True):
            x.copy_(sent)


def make_pipelines(parallel_config: ParallelConfig) -> list[PipelineGroup]:
    """The pipeline of each rank, in the order of the ranks."""
    tp_size, pp_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    pipes: list[list[queue.Queue[Any]]] = [[queue.Queue() for _ in range(pp_size)] for _ in range(tp_size)]
    partition = parallel_config.layer_partition
    return [
        ThreadPipeline(Stage(stage, pp_size, partition), tuple(range(tp_rank, tp_size * pp_size, tp_size)), pipes[tp_rank])
        for stage in range(pp_size)
        for tp_rank in range(tp_size)
    ]


class ThreadExecutor(Executor):
    """As `MultiProcExecutor`, with threads: one for each rank, which runs the steps in flight one after the other."""

    def __init__(self, config: EngineConfig, num_in_flight: int = 1) -> None:
        configs = (config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
        size, num_stages = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
        groups = [group for _ in range(num_stages) for group in (make_groups(size) if size > 1 else [SingleRank()])]
        pipelines = make_pipelines(config.parallel_config)
        self.workers = [Worker(*configs, *links) for links in zip(groups, pipelines, strict=True)]
        self.answering_rank = size * (num_stages - 1)
        self.max_concurrent_batches = max(num_in_flight, 2 if config.scheduler_config.async_scheduling else 1)
        for worker in self.workers:  # one after the other: torch's default dtype is one for all threads
            worker.load_model()
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self._launches: list[Future[Any]] = []

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        calls = self._submit(method, *args)
        wait(calls)
        return [call.result() for call in calls]

    def determine_num_available_blocks(self) -> tuple[int, int]:
        on_device, on_host = zip(*self.collective_rpc("determine_num_available_blocks"), strict=True)
        return min(on_device), min(on_host)

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.collective_rpc("initialize_cache", num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        return self.collective_rpc("execute_model", request)[self.answering_rank]

    def launch_model(self, request: ExecuteModelRequest) -> None:
        if self.max_concurrent_batches == 1:
            super().launch_model(request)
        else:  # a copy, as its tables change
            request = copy.deepcopy(request, {id(seq.request): seq.request for seq in request.sequences})
            self._launches = self._submit("launch_model", request)

    def sample_tokens(self, masks: Masks) -> PendingStep:
        if self.max_concurrent_batches == 1:
            return super().sample_tokens(masks)
        launches, samples = self._launches, self._submit("sample_tokens", masks)

        def collect() -> list[SequenceOutput]:
            wait(launches + samples)
            for launch in launches:
                launch.result()
            outputs: list[SequenceOutput] = samples[self.answering_rank].result()()
            return outputs

        return collect

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def _submit(self, method: str, *args: Any) -> list[Future[Any]]:
        return [thread.submit(getattr(worker, method), *args) for thread, worker in zip(self._threads, self.workers, strict=True)]


def engine_on_threads(args: Any, world_size: int = 1, num_stages: int = 1, num_in_flight: int = 1) -> LLMEngine:
    """An engine whose ranks are threads, `world_size` of each stage; one rank is a worker as it always is. `args` are `EngineArgs`. With one step in
    flight, batches are those of an engine without stages.
    """
    args = replace(args, tensor_parallel_size=world_size, pipeline_parallel_size=num_stages)
    config = EngineConfig.from_engine_args(args)
    executor = ThreadExecutor(config, num_in_flight)
    configs = (config.model_config, config.cache_config, config.scheduler_config)
    scheduler_cls = config.scheduler_cls if num_in_flight > 1 or num_stages == 1 else args.scheduler_cls or Scheduler
    return LLMEngine.from_executor(
        *configs, executor, config.load_tokenizer(), scheduler_cls=scheduler_cls,
        block_space_manager_cls=config.block_space_manager_cls, seed=args.seed,
    )  # fmt: skip
