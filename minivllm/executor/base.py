"""What the engine asks of whoever computes: a real model here, several workers, or a simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from minivllm.scheduler_output import SchedulerOutput, SequenceOutput


class Executor(ABC):
    """Computes the scheduler's steps. Mirrors `vllm/v1/executor/abstract.py`."""

    @abstractmethod
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """How many cache blocks fit on the device and in the swap space."""

    @abstractmethod
    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate so many."""

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> list[SequenceOutput]:
        """Compute a step: one output for each of `output.scheduled`, in the same order."""
