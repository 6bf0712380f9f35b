"""All replicas at a glance, for the live page: their queues, their blocks, and their rate."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from minivllm.engine.core_messages import SchedulerStats
from minivllm.engine.trace import StepRecord

COUNTS = ("num_running", "num_waiting", "num_swapped", "num_used_blocks")
"""Fields of the scheduler's statistics that the page shows."""
RATE_SECONDS = 2.0
"""A rate is the mean over so long."""


@dataclasses.dataclass
class ReplicaView:
    """Takes the steps of all replicas, and reports how each is doing.

    Args:
        clock: Gives the time, in seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _generated: dict[int, deque[tuple[float, int]]] = dataclasses.field(default_factory=dict)
    """Of each replica: when it generated how many tokens."""

    def take(self, rank: int, step: StepRecord) -> None:
        """A replica has made a step."""
        num_tokens = sum(item.num_new_tokens for item in step.scheduled)
        self._generated.setdefault(rank, deque()).append((self.clock(), num_tokens))
        self._forget_old(rank)

    def report(self, states: dict[int, str], stats: dict[int, SchedulerStats], blocks: dict[int, int]) -> list[dict[str, Any]]:
        """Each replica in order, as JSON-ready data.

        Args:
            states: As `AsyncLLMEngine.replica_states`.
            stats: As `AsyncLLMEngine.stats_by_engine`.
            blocks: As `AsyncLLMEngine.replica_blocks`.
        """
        return [
            {"rank": rank, "state": state, "num_gpu_blocks": blocks.get(rank, 0)}
            | {count: getattr(known, count) for count in COUNTS}
            | {"tokens_per_second": self._rate(rank)}
            for rank, state in sorted(states.items())
            for known in [stats.get(rank, SchedulerStats())]
        ]

    def _rate(self, rank: int) -> float:
        self._forget_old(rank)
        return sum(num_tokens for _, num_tokens in self._generated.get(rank, ())) / RATE_SECONDS

    def _forget_old(self, rank: int) -> None:
        generated, oldest = self._generated.get(rank, deque()), self.clock() - RATE_SECONDS
        while generated and generated[0][0] < oldest:
            generated.popleft()
