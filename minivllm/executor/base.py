"""The line between deciding and computing: above it the engine core; below it one worker, several, or a simulation.

Only plain data crosses it. Mirrors `vllm/v1/executor/abstract.py`.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from minivllm.scheduler_output import ExecuteModelRequest, Masks, RankTiming, SequenceOutput, apply_masks

PendingStep = Callable[[], list[SequenceOutput]]
"""A step that was launched. Calling it waits for the results."""


def fail_later(error: Exception) -> PendingStep:
    """A step that failed while it was launched: the error is raised when its turn comes. Until then it must keep no tensor of the step alive."""
    traceback.clear_frames(error.__traceback__)
    return partial(_raise, error)


def _raise(error: Exception) -> NoReturn:
    raise error


class Executor(ABC):
    """Runs the scheduler's steps."""

    in_process = False
    """Whether the model runs in this process."""
    max_concurrent_batches = 1
    """How many steps may be in flight: launched, and not collected yet."""
    _launched: ExecuteModelRequest | None = None

    @abstractmethod
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """How many cache blocks fit: on the device, and in the swap space on the host."""

    @abstractmethod
    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate the KV cache."""

    @abstractmethod
    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        """Run a step: one output for each of `request.sequences`, in the same order."""

    def launch_model(self, request: ExecuteModelRequest) -> None:
        """Begin a step, after those launched before: the forward pass. `sample_tokens` must follow.

        While a device is busy with it, the scheduler computes the masks of structured outputs. vLLM's name is `execute_model(..., non_block=True)`.
        Here nothing is computed before the results are asked for, which is as good where only one step is in flight.
        """
        self._launched = request

    def sample_tokens(self, masks: Masks) -> PendingStep:
        """Go on with the step that was launched last: sample, under these masks.

        The request's block tables may change once this returns. A failure is raised by the function that is returned.
        """
        request, self._launched = self._launched, None
        assert request is not None, "sample_tokens follows launch_model"
        apply_masks(request.sequences, masks)
        return partial(self.execute_model, request)

    def record_timing(self, on: bool) -> None:
        """Whether to record how each of several workers spends a step, for `take_timing`."""

    def take_timing(self) -> list[RankTiming]:
        """How each of several workers spent the last step, by rank; empty without `record_timing`, or with one worker."""
        return []

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker. Returns their results, by rank; empty without workers."""
        return []

    def check_health(self) -> None:
        """Raise an EngineDeadError if a worker has died."""

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have a function called, in another thread, when a worker is found dead."""

    def shutdown(self) -> None:
        """Stop the workers. Safe to call again."""
