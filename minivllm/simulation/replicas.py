"""Many replicas on a virtual clock: real engine cores with `SimulatedExecutor`, and the router of the server in front of them.

Events happen in order of time: requests arrive, steps end, and the coordinator publishes loads as `DPCoordinatorProc` does. A step's
outputs are known when it ends, not before.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import Goals, LatencyHistogram, RequestLatency, RunSummary
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import check_at_least
from minivllm.data_parallel.routing import LoadPublisher, make_router
from minivllm.engine.core_messages import EngineCoreOutputs
from minivllm.errors import ConfigError
from minivllm.executor.simulated import VirtualClock
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import in_order, make_simulated_engine


@dataclass(kw_only=True)
class ReplicaRun(RunSummary):
    """The results of a run of several replicas. Percentiles are exact to 1 percent.

    Attributes:
        routing: The name of the router.
        num_replicas: How many there were.
        prefix_hit_rate: The fraction of prompt tokens found in a prefix cache.
        requests: Each replica's number of requests.
        mean_in_flight: Each replica's unfinished requests, averaged over the run.
        busy: The fraction of the run in which each replica computed.
        num_preemptions: How often a sequence lost its blocks.
    """

    routing: str = ""
    num_replicas: int = 0
    prefix_hit_rate: float = 0.0
    requests: list[int] = field(default_factory=list)
    mean_in_flight: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def imbalance(self) -> float:
        """The load of the busiest replica, in requests in flight, over the mean load; 1 is even."""
        mean = sum(self.mean_in_flight) / len(self.mean_in_flight)
        return max(self.mean_in_flight) / mean if mean else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_json() | {"imbalance": self.imbalance}


def simulate_replicas(
    requests: Iterable[WorkloadRequest],
    num_replicas: int,
    *,
    routing: str = "least-loaded",
    goals: Goals | None = None,
    progress_total: int | None = None,
    **engine_options: Any,
) -> ReplicaRun:
    """Route requests to replicas and run them to completion. A finished request takes no memory.

    Args:
        requests: In the order of arrival.
        num_replicas: How many replicas.
        routing: One of `minivllm.data_parallel.routing.ROUTERS`.
        goals: What a request must meet to count for goodput.
        progress_total: Show progress towards this many requests.
        **engine_options: Of each replica, see `make_simulated_engine`.

    Raises:
        ConfigError: There are no requests, they are not in order, one does not fit, or an option is out of range.
    """
    check_at_least("num_replicas", num_replicas, 1)
    queue = in_order(requests)
    upcoming = next(queue, None)
    if upcoming is None:
        raise ConfigError("There are no requests to simulate.")
    start = upcoming.arrival_time
    replicas = [_Replica(start, engine_options) for _ in range(num_replicas)]
    router = make_router(routing)
    for index, replica in enumerate(replicas):
        router.open(index, replica.cache_tokens)
    coordinator = LoadPublisher(start)
    tally = _Tally(num_replicas, start, goals)
    ends: list[tuple[float, int]] = []
    """When the running steps end, each with its replica."""
    num_added, now = 0, start
    bar = tqdm(total=progress_total, unit="request", disable=progress_total is None, dynamic_ncols=True)
    with bar, _rare_collections():
        while upcoming is not None or ends:
            arrival = math.inf if upcoming is None else upcoming.arrival_time
            step_end = ends[0][0] if ends else math.inf
            now = min(arrival, step_end)
            while coordinator.due < now:  # nothing has been reported since it was due
                for index, load in coordinator.publish(coordinator.due).items():
                    router.update(index, load)
            if upcoming is not None and arrival <= step_end:
                index = router.route(upcoming.prompt_token_ids)
                replica = replicas[index]
                was_idle = not replica.core.has_unfinished_requests() and replica.outputs is None
                replica.add(num_added, upcoming)
                tally.add(index, upcoming)
                num_added += 1
                upcoming = next(queue, None)
                if was_idle:
                    replica.clock.advance_to(now)
                    heapq.heappush(ends, (now, index))  # as if a step ended now: the next one begins
            else:
                _, index = heapq.heappop(ends)
                replica = replicas[index]
                if replica.outputs is not None:
                    coordinator.report(index, replica.outputs.stats.load, now)
                    num_finished = tally.take(index, replica.outputs)
                    bar.update(num_finished)
                    for _ in range(num_finished):
                        router.finish(index)
                if replica.step():
                    heapq.heappush(ends, (replica.clock.now, index))
    run = tally.finish(now)
    run.routing = routing
    run.num_preemptions = sum(replica.core.num_preemptions for replica in replicas)
    run.busy = [replica.busy_seconds / run.seconds if run.seconds else 0.0 for replica in replicas]
    return run


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Requests and their sequences are cycles, so the garbage collector is needed; but every 700 objects is too often."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _Replica:
    """An engine core with a clock of its own, which is at the end of its latest step."""

    def __init__(self, start: float, options: dict[str, Any]) -> None:
        self.clock = VirtualClock(start)
        engine = make_simulated_engine(clock=self.clock, trace=False, **options)
        self.core, self.cache_tokens = engine.core, engine.cache_tokens
        self.outputs: EngineCoreOutputs | None = None
        """Outputs of the step that ends at the clock's time; None if no step is running."""
        self.busy_seconds = 0.0

    def add(self, number: int, request: WorkloadRequest) -> None:
        num_tokens = len(request.prompt_token_ids) + request.output_len
        limit = min(self.cache_tokens + 1, self.core.model_config.max_model_len)  # the last token is not cached
        if num_tokens > limit:
            raise ConfigError(
                f"Request {number} grows to {num_tokens} tokens, but {limit} fit: raise num_gpu_blocks and max_model_len, or make "
                "requests shorter."
            )
        self.core.add_request(
            EngineCoreRequest(
                str(number), request.prompt_token_ids, _params(request.output_len), num_tokens, arrival_time=request.arrival_time
            )
        )

    def step(self) -> bool:
        """Begin the next step, if there is anything to do; the last one has ended."""
        self.outputs = None
        if not self.core.has_unfinished_requests():
            return False
        began = self.clock.now
        self.outputs = self.core.step()
        self.busy_seconds += self.clock.now - began
        return True


@lru_cache(maxsize=4096)
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


class _Tally:
    """Counts a run. Only what is unfinished takes memory."""

    def __init__(self, num_replicas: int, start: float, goals: Goals | None) -> None:
        self._run = ReplicaRun(num_replicas=num_replicas, requests=[0] * num_replicas)
        self._start, self._goals = start, goals
        self._ttft, self._itl, self._tpot, self._latency = (LatencyHistogram() for _ in range(4))
        self._progress: dict[str, tuple[float, int]] = {}
        """For each unfinished request with tokens: when the latest came, and how many there are."""
        self._num_cached_tokens = self._num_good = 0
        self._request_seconds = [0.0] * num_replicas

    def add(self, replica: int, request: WorkloadRequest) -> None:
        """A request was sent to a replica."""
        self._run.num_requests += 1
        self._run.prompt_tokens += len(request.prompt_token_ids)
        self._run.requests[replica] += 1

    def take(self, replica: int, outputs: EngineCoreOutputs) -> int:
        """Count a step's outputs. Returns how many requests it finished."""
        now, num_finished = outputs.timestamp, 0
        for output in outputs.outputs:
            if output.error is not None:
                raise ConfigError(f"Request {output.request_id} failed. {output.error}")
            latest, num_tokens = self._progress.get(output.request_id, (now, 0))
            if num_tokens:
                self._itl.add(now - latest)
            self._progress[output.request_id] = now, num_tokens + len(output.sequences[0].token_ids)
            if output.finished:
                self._finish(replica, output.metrics, *self._progress.pop(output.request_id))
                num_finished += 1
        return num_finished

    def _finish(self, replica: int, metrics: RequestMetrics, now: float, num_tokens: int) -> None:
        assert metrics.time_to_first_token is not None
        ttft, latency = metrics.time_to_first_token, now - metrics.arrival_time
        request = RequestLatency("", ttft, latency, (), num_tokens, 0, num_tokens)
        self._ttft.add(ttft)
        self._latency.add(latency)
        if request.tpot is not None:
            self._tpot.add(request.tpot)
        self._num_good += self._goals is not None and self._goals.are_met_by(request)
        self._num_cached_tokens += metrics.num_cached_tokens
        self._request_seconds[replica] += latency
        self._run.completed += 1
        self._run.output_tokens += num_tokens

    def finish(self, now: float) -> ReplicaRun:
        """The run, which ended now."""
        run = self._run
        run.seconds = now - self._start
        run.ttft, run.itl, run.tpot, run.latency = (
            histogram.distribution() for histogram in (self._ttft, self._itl, self._tpot, self._latency)
        )
        if self._goals not in (None, Goals()):
            run.goodput = run.per_second(self._num_good)
        run.prefix_hit_rate = self._num_cached_tokens / run.prompt_tokens
        run.mean_in_flight = [run.per_second(seconds) for seconds in self._request_seconds]
        return run


def format_replicas(results: list[ReplicaRun]) -> str:
    """A text table of runs."""
    headers = (
        "routing", "requests/s", "goodput", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "prefix hits", "imbalance", "preempted",
    )  # fmt: skip
    rows = [
        (
            run.routing,
            f"{run.requests_per_second:.2f}",
            "-" if run.goodput is None else f"{run.goodput:.2f}",
            *(f"{seconds:.2f}s" for seconds in run.ttft[1:]),
            *(quantity(seconds * 1e3, ".0f", "ms") for seconds in run.itl[1:]),
            f"{run.prefix_hit_rate:.0%}",
            f"{run.imbalance:.2f}",
            run.num_preemptions,
        )
        for run in results
    ]
    return format_table(headers, rows)
