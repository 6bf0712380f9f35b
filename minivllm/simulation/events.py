"""The loop of a simulation: requests arrive at one engine core or at several, which compute at the same time.

Events happen in order of time: requests arrive, steps end, and the coordinator publishes loads as `DPCoordinatorProc` does. A step's
outputs are known when it ends, not before. `QuietSteps` are one event.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from minivllm.bench.summary import Distribution, Goals, LatencyHistogram, RequestLatency, RunSummary
from minivllm.bench.workloads import WorkloadRequest
from minivllm.data_parallel.routing import LoadPublisher, Router
from minivllm.engine.core_messages import EngineCoreOutputs, ReplicaLoad
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.executor.simulated import VirtualClock
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.quiet_steps import QuietSteps, can_skip_steps


def start_of(requests: Iterable[WorkloadRequest]) -> tuple[float, Iterator[WorkloadRequest]]:
    """When the first request arrives, and all of them; checked, as they are taken, to have finite, ascending arrival times."""
    queue = _in_order(requests)
    first = next(queue, None)
    if first is None:
        raise ConfigError("There are no requests to simulate.")
    return first.arrival_time, chain([first], queue)


def _in_order(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    last = -math.inf
    for number, request in enumerate(requests):
        if not math.isfinite(request.arrival_time):
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s: arrival times must be finite.")
        if request.arrival_time < last:
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s, before its predecessor: sort them.")
        last = request.arrival_time
        yield request


class SimulatedReplica:
    """An engine core with a clock of its own, which is at the end of its latest step."""

    def __init__(self, engine: LLMEngine) -> None:
        assert isinstance(engine.clock, VirtualClock)
        self.core, self.clock, self.cache_tokens = engine.core, engine.clock, engine.cache_tokens
        self.outputs: EngineCoreOutputs | None = None
        """Outputs of the step that ends at the clock's time; None if no step is running, or quiet ones are."""
        self.quiet: QuietSteps | None = None
        """The quiet steps that end at the clock's time."""
        self.num_cuts = 0
        """How often quiet steps were cut, so that the clock's time is another."""
        self.busy_seconds = 0.0
        self.load = ReplicaLoad()
        """After the latest step."""
        self._can_skip = can_skip_steps(engine.core)

    def add(self, number: int, request: WorkloadRequest, arrival_time: float) -> None:
        """Add a request; `number` becomes its id."""
        num_tokens = len(request.prompt_token_ids) + request.output_len
        grows, max_model_len = f"Request {number} grows to {num_tokens} tokens, but", self.core.model_config.max_model_len
        if num_tokens > self.cache_tokens + 1:  # the last token is not cached
            raise ConfigError(
                f"{grows} the whole cache holds only {self.cache_tokens}: raise num_gpu_blocks, or make requests shorter."
            )
        if num_tokens > max_model_len:
            raise ConfigError(f"{grows} max_model_len is {max_model_len}: raise it, or make requests shorter.")
        params = _params(request.output_len)
        self.core.add_request(
            EngineCoreRequest(str(number), request.prompt_token_ids, params, num_tokens, seed=number, arrival_time=arrival_time)
        )

    def step(self, may_skip: bool = False) -> None:
        """Compute a step, or several quiet ones if it `may_skip` them. It ends at the clock's time."""
        began = self.clock.now
        self.quiet = QuietSteps.find(self.core, began, self.load.waiting) if may_skip and self._can_skip else None
        if self.quiet is None:
            self.outputs = self.core.step()
            self.load = self.outputs.stats.load
            self.busy_seconds += self.clock.now - began
        else:
            self.clock.now = self.quiet.ends[-1]

    def cut(self, now: float) -> bool:
        """Let what comes now have its effect after the step that is running. Returns whether the clock's time is another."""
        if self.quiet is None or not self.quiet.cut(now):
            return False
        self.clock.now = self.quiet.ends[-1]
        self.num_cuts += 1
        return True

    def take_outputs(self) -> EngineCoreOutputs:
        """The outputs of the step that has ended."""
        assert self.outputs is not None
        outputs, self.outputs = self.outputs, None
        return outputs

    def finish_quiet(self) -> QuietSteps:
        """Apply the quiet steps, which have ended."""
        assert self.quiet is not None
        quiet, self.quiet = self.quiet, None
        last = quiet.began
        for end in quiet.ends:
            self.busy_seconds += end - last
            last = end
        self.load = quiet.apply()
        return quiet


@lru_cache(maxsize=4096)
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


def run_requests(
    requests: Iterator[WorkloadRequest],
    replicas: Sequence[SimulatedReplica],
    router: Router,
    tally: Tally,
    max_concurrency: int | None = None,
    progress_total: int | None = None,
) -> None:
    """Route requests to replicas and run them to completion.

    Args:
        requests: From `start_of`; the replicas' clocks are at the first arrival.
        replicas: At least one, each idle.
        router: Chooses a replica for each request.
        tally: Counts the run.
        max_concurrency: Most unfinished requests; further ones arrive as others finish.
        progress_total: Show progress towards this many requests.
    """
    from tqdm.auto import tqdm  # not at the top: the playground's first step need not wait for it

    for index, replica in enumerate(replicas):
        router.open(index, replica.cache_tokens)
    start = now = replicas[0].clock.now
    coordinator = LoadPublisher(start)
    ends: list[tuple[float, int, int]] = []
    """When each replica that has something to do is to be looked at again: its step ends then, or the next one begins. With the replica's
    `num_cuts`: if it is another by then, the entry does not count."""
    upcoming, number, num_unfinished = next(requests, None), 0, 0
    room, may_skip = (math.inf, True) if max_concurrency is None else (max_concurrency, False)
    bar = tqdm(total=progress_total, unit="request", disable=progress_total is None or sys.stderr is None, dynamic_ncols=True)
    with bar, _rare_collections():
        while upcoming is not None or ends:
            while ends and ends[0][2] != replicas[ends[0][1]].num_cuts:
                heapq.heappop(ends)
            if upcoming is None and not ends:
                break
            arrival = math.inf if upcoming is None or num_unfinished >= room else max(now, upcoming.arrival_time)
            step_end = ends[0][0] if ends else math.inf
            now = min(arrival, step_end)
            while coordinator.due < now:  # nothing has been reported since it was due
                for index, load in coordinator.publish(coordinator.due).items():
                    router.update(index, load)
                coordinator.skip_to(now)
            if upcoming is not None and arrival <= step_end:
                index = router.route(upcoming.prompt_token_ids)
                replica = replicas[index]
                if not replica.core.has_unfinished_requests() and replica.outputs is None:
                    replica.clock.advance_to(now)
                    heapq.heappush(ends, (now, index, replica.num_cuts))
                elif replica.cut(now):
                    heapq.heappush(ends, (replica.clock.now, index, replica.num_cuts))
                replica.add(number, upcoming, upcoming.arrival_time if max_concurrency is None else replica.clock.now)
                tally.add(index, upcoming)
                upcoming, number, num_unfinished = next(requests, None), number + 1, num_unfinished + 1
            else:
                index = ends[0][1]
                replica = replicas[index]
                if replica.outputs is None and replica.quiet is None:
                    replica.step(may_skip)
                else:
                    if replica.quiet is not None:
                        num_finished = tally.take_quiet(index, replica.finish_quiet())
                    else:
                        num_finished = tally.take(index, replica.take_outputs())
                    coordinator.report(index, replica.load, now)
                    num_unfinished -= num_finished
                    bar.update(num_finished)
                    for _ in range(num_finished):
                        router.finish(index)
                if replica.outputs is not None or replica.core.has_unfinished_requests():
                    heapq.heapreplace(ends, (replica.clock.now, index, replica.num_cuts))
                else:
                    heapq.heappop(ends)
    tally.finish(now - start)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Requests and their sequences are cycles, so the garbage collector is needed; but every 700 objects is too often."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class ExactTimes:
    """As `LatencyHistogram`, but exact: 8 bytes for each time."""

    def __init__(self) -> None:
        self._times = array("d")
        self.add = self._times.append

    def distribution(self) -> Distribution:
        """The distribution of what was added."""
        return Distribution.of(self._times)


class Tally:
    """Counts the requests of a run in its summary.

    Attributes:
        itl: The times between a request's tokens.
        requests, request_seconds: Of each replica: how many it got, and the latencies of those that finished, summed up.
        num_cached_tokens: Prompt tokens found in a prefix cache.
    """

    def __init__(
        self, run: RunSummary, times: type[ExactTimes | LatencyHistogram], goals: Goals | None = None, num_replicas: int = 1
    ) -> None:
        self._run, self._goals, self._num_good = run, goals, 0
        self._ttft, self._tpot, self._latency = times(), times(), times()
        self._progress: dict[str, list[Any]] = {}
        """For each unfinished request with tokens: when the latest came, and how many there are."""
        self.itl, self.num_cached_tokens = LatencyHistogram(), 0
        self.requests, self.request_seconds = [0] * num_replicas, [0.0] * num_replicas

    def add(self, replica: int, request: WorkloadRequest) -> None:
        """A request was sent to a replica."""
        self._run.num_requests += 1
        self._run.prompt_tokens += len(request.prompt_token_ids)
        self.requests[replica] += 1

    def take(self, replica: int, outputs: EngineCoreOutputs) -> int:
        """Count a step's outputs. Returns how many requests it finished."""
        now, num_finished = outputs.timestamp, 0
        all_progress, gaps = self._progress, []
        for output in outputs.outputs:
            if output.error is not None:
                raise ConfigError(f"Request {output.request_id} failed. {output.error}")
            num_new = len(output.sequences[0].token_ids)
            progress = all_progress.get(output.request_id)
            if progress is None:
                progress = all_progress[output.request_id] = [now, num_new]
            else:
                gaps.append(now - progress[0])
                progress[0] = now
                progress[1] += num_new
            if output.finished:
                del all_progress[output.request_id]
                self._finish(replica, output.metrics, *progress)
                num_finished += 1
        for gap, count in Counter(gaps).items():
            self.itl.add(gap, count)
        return num_finished

    def take_quiet(self, replica: int, quiet: QuietSteps) -> int:
        """Count the tokens of quiet steps, which have been applied. Returns how many requests they finished."""
        ends, num_finished, all_progress = quiet.ends, 0, self._progress
        first, last, num_steps = ends[0], ends[-1], len(ends)
        before, count = math.nan, 0
        for seq in quiet.sequences:
            progress = all_progress[seq.request.request_id]
            if progress[0] != before:  # all had their latest token at the same time, or nearly all
                if count:
                    self.itl.add(first - before, count)
                before, count = progress[0], 0
            count += 1
            progress[0] = last
            progress[1] += num_steps
            if seq.finished:
                del all_progress[seq.request.request_id]
                self._finish(replica, seq.request.metrics, *progress)
                num_finished += 1
        self.itl.add(first - before, count)
        for start, end in pairwise(ends):
            self.itl.add(end - start, len(quiet.sequences))
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
        self.num_cached_tokens += metrics.num_cached_tokens
        self.request_seconds[replica] += latency
        self._run.completed += 1
        self._run.output_tokens += num_tokens

    def finish(self, seconds: float) -> None:
        """End the run, which took `seconds`."""
        run = self._run
        run.seconds = seconds
        run.ttft, run.tpot, run.latency = (times.distribution() for times in (self._ttft, self._tpot, self._latency))
        if self._goals not in (None, Goals()):
            run.goodput = run.per_second(self._num_good)
