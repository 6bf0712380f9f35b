"""Several workers on a Ray cluster, perhaps on several machines.

Only where the workers run, and how messages reach them, differs from `MultiProcExecutor`. Ranks are in the order of their nodes: this process's
first. On CPUs, ranks of a node share memory, and others talk over gloo; GPUs use NCCL. Mirrors `vllm/v1/executor/ray_executor.py`.
"""

from __future__ import annotations

from minivllm.config import ParallelConfig, WorkerConfig
from minivllm.executor.multiproc import MultiProcExecutor
from minivllm.executor.ray_workers import RayWorkers
from minivllm.executor.workers import Workers


class RayExecutor(MultiProcExecutor):
    """Hands every step to actors.

    Raises:
        ConfigError: As for `MultiProcExecutor`; or Ray is not installed, there is no cluster, or it has no room.
        EngineDeadError: An actor could not be started.
    """

    def _start_workers(self, configs: bytes, parallel_config: ParallelConfig, worker_config: WorkerConfig) -> Workers:
        return RayWorkers(configs, parallel_config, worker_config.device)

    def wait_until_ready(self) -> None:
        super().wait_until_ready()
        assert isinstance(self._workers, RayWorkers)
        self._workers.inbox.wait_for_workers(self._workers.check)
