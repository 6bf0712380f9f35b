"""Simulated traffic for routers of one's own: `simulate_replicas` with any router, and what it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.summary import Goals, LatencyHistogram
from minivllm.bench.workloads import WorkloadRequest
from minivllm.executor.simulated import CostModel, VirtualClock
from minivllm.simulation.engine import ReplicaRun, make_simulated_engine
from minivllm.simulation.events import SimulatedReplica, Tally, run_requests, start_of

GPU = CostModel(fixed=0.012, per_prefill_step=0.002, per_prefill_token=4e-5, per_decode_seq=1e-4, per_context_token=2e-7)
"""Steps such as those of a model of 8 billion parameters on one large GPU, rounded: 12 ms, and 25,000 tokens of prompts a second."""


@dataclass
class Watched:
    """A router that notes what it chooses. All else is the router's."""

    router: Any
    choices: list[int] = field(default_factory=list)

    def route(self, prompt_token_ids: Sequence[int], *options: Any) -> int:
        """As the router's."""
        self.choices.append(self.router.route(prompt_token_ids, *options))
        return self.choices[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


def run_router(
    router: Any,
    requests: Sequence[WorkloadRequest],
    num_replicas: int,
    *,
    name: str = "",
    goals: Goals | None = None,
    **options: Any,
) -> tuple[ReplicaRun, list[int]]:
    """Let a router send requests to simulated replicas.

    Args:
        router: With `open`, `route`, `update` and `finish`, as a `Router` has them.
        requests: In the order of arrival.
        name: The router's, for figures.
        goals: What a request must meet to count for goodput.
        **options: Of each replica, as for `make_simulated_engine`.

    Returns:
        The results, and the replica that was chosen for each request.
    """
    start, queue = start_of(requests)
    watched = Watched(router)
    replicas = [
        SimulatedReplica(make_simulated_engine(clock=VirtualClock(start), trace=False, **options)) for _ in range(num_replicas)
    ]
    run = ReplicaRun(routing=name or type(router).__name__, num_replicas=num_replicas)
    tally = Tally(run, LatencyHistogram, goals, num_replicas)
    run_requests(queue, replicas, watched, tally)  # type: ignore[arg-type]
    run.itl, run.requests = tally.itl.distribution(), tally.requests
    run.prefix_hit_rate = tally.num_cached_tokens / run.prompt_tokens
    run.mean_in_flight = [run.per_second(seconds) for seconds in tally.request_seconds]
    return run, watched.choices
