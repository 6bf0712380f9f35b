"""One worker, in this process. Mirrors `vllm/v1/executor/uniproc_executor.py`."""

from __future__ import annotations

from typing import Any

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.executor.base import Executor, PendingStep
from minivllm.scheduler_output import ExecuteModelRequest, Masks, SequenceOutput
from minivllm.worker.worker import Worker


class UniProcExecutor(Executor):
    """Hands every step to a worker in this process."""

    in_process = True

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        worker_config: WorkerConfig,
    ) -> None:
        self.max_concurrent_batches = 2 if scheduler_config.async_scheduling else 1
        self.worker = Worker(model_config, cache_config, scheduler_config, worker_config)
        self.worker.load_model()

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self.worker.determine_num_available_blocks()

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.worker.initialize_cache(num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        return self.worker.execute_model(request)

    def launch_model(self, request: ExecuteModelRequest) -> None:
        """Begin a step: a GPU computes it in the background, a CPU here and now."""
        if self.max_concurrent_batches == 1:
            super().launch_model(request)
        else:
            self.worker.launch_model(request)

    def sample_tokens(self, masks: Masks) -> PendingStep:
        return super().sample_tokens(masks) if self.max_concurrent_batches == 1 else self.worker.sample_tokens(masks)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]
