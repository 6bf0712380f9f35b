"""Ranks as threads of one process: the same layers, workers and sums as with processes, and quick to start."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine
from minivllm.executor.base import Executor, PendingStep
from minivllm.scheduler_output import ExecuteModelRequest, Masks, SequenceOutput
from minivllm.worker.worker import Worker


class Meeting:
    """Where the ranks of a group meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
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
        return list(pool.map(function, *arguments))


class ThreadExecutor(Executor):
    """As `MultiProcExecutor`, with threads."""

    def __init__(self, config: EngineConfig, world_size: int) -> None:
        configs = (config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
        groups = make_groups(world_size) if world_size > 1 else [SingleRank()]
        self.workers = [Worker(*configs, group) for group in groups]
        self.max_concurrent_batches = 2 if config.scheduler_config.async_scheduling else 1
        for worker in self.workers:  # one after the other: torch's default dtype is one for all threads
            worker.load_model()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return on_all_ranks(lambda worker: getattr(worker, method)(*args), self.workers)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        on_device, on_host = zip(*self.collective_rpc("determine_num_available_blocks"), strict=True)
        return min(on_device), min(on_host)

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.collective_rpc("initialize_cache", num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        return self.collective_rpc("execute_model", request)[0]

    def launch_model(self, request: ExecuteModelRequest) -> None:
        if self.max_concurrent_batches == 1:
            super().launch_model(request)
        else:
            self.collective_rpc("launch_model", request)

    def sample_tokens(self, masks: Masks) -> PendingStep:
        if self.max_concurrent_batches == 1:
            return super().sample_tokens(masks)
        pending: PendingStep = self.collective_rpc("sample_tokens", masks)[0]
        return pending


def engine_on_threads(args: Any, world_size: int) -> LLMEngine:
    """An engine whose ranks are threads; one rank is a worker as it always is. `args` are `EngineArgs`."""
    config = EngineConfig.from_engine_args(args)
    executor = ThreadExecutor(config, world_size)
    configs = (config.model_config, config.cache_config, config.scheduler_config)
    return LLMEngine.from_executor(
        *configs, executor, config.load_tokenizer(), scheduler_cls=config.scheduler_cls,
        block_space_manager_cls=config.block_space_manager_cls, seed=args.seed,
    )  # fmt: skip
