"""One worker, in this process. Mirrors `vllm/v1/executor/uniproc_executor.py`."""

from __future__ import annotations

from minivllm.core.scheduler import SchedulerOutput, SequenceOutput
from minivllm.executor.base import Executor
from minivllm.worker.worker import Worker


class UniProcExecutor(Executor):
    """Hands every step to a worker that lives here."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        worker.load_model()

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self.worker.determine_num_available_blocks()

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.worker.initialize_cache(num_gpu_blocks, num_cpu_blocks)

    def execute_model(self, output: SchedulerOutput) -> list[SequenceOutput]:
        return self.worker.execute_model(output)
