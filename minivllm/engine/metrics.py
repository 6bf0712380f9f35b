"""SKELETON"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.outputs import RequestOutput


@dataclass(frozen=True)
class EngineStats:
    """What the engine was doing after a step.

    Attributes:
        num_running, num_waiting, num_swapped: Sequences in each queue.
        num_used_blocks, num_gpu_blocks: Device blocks that are referenced, and all there are.
        num_steps: Steps since the engine began.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_used_blocks: int = 0
    num_gpu_blocks: int = 0
    num_steps: int = 0

    @property
    def cache_usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_gpu_blocks if self.num_gpu_blocks else 0.0


class Metrics:
    """Prometheus metrics with vLLM's names and meanings (minivllm: instead of vllm:), in a registry of its own.

    `AsyncLLMEngine.metrics` is one; it is fed by the engine. The API server exposes `render()` at /metrics.
    """

    content_type: str

    def render(self) -> bytes: ...
