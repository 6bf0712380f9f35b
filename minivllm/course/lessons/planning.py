"""What lesson 15's walkthrough uses before the exercise builds it, and two experiments that the simulator has no option for: replicas that
compute only prompts, and one that dies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from minivllm.bench.summary import Distribution, LatencyHistogram
from minivllm.bench.trace_summary import request_latencies
from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.fleets import FleetGoals, Machine, Plan, Sample, engine_options, run_fleet
from minivllm.course.lessons.lesson_15.days import Observed
from minivllm.course.lessons.lesson_15.fitting import NAMES, Steps, solve, solve_twice
from minivllm.course.lessons.lesson_15.replicas import work_of
from minivllm.data_parallel.routing import make_router
from minivllm.engine.core_messages import EngineCoreOutputs
from minivllm.executor.simulated import CostModel, VirtualClock
from minivllm.simulation.engine import ReplicaRun, make_simulated_engine, simulate
from minivllm.simulation.events import SimulatedReplica, Tally, run_requests, start_of


def fit_steps(steps: Steps) -> CostModel:
    """The four coefficients with the least squares of relative errors, without steps that were interrupted."""
    return CostModel(**dict(zip(NAMES, solve_twice(steps), strict=True)))


def interrupted_steps(steps: Steps, limit: float = 1.5) -> Steps:
    """The steps that `fit_steps` leaves out: those that took `limit` times as long as a fit of all steps says, or longer."""
    first = CostModel(**dict(zip(NAMES, solve(steps), strict=True)))
    return [(work, seconds) for work, seconds in steps if seconds >= limit * first(work)]


def estimate_capacity(machine: Machine, seats: int, sample: Sample) -> float:
    """Requests a second at the most, if all seats are always taken: one over the mean of a request's work."""
    return 1 / statistics.mean(work_of(request, machine, seats) for request in sample.requests)


def fewest_replicas(plan_of: Callable[[int], Plan], goals: FleetGoals, samples: Sequence[Sample], most: int) -> int | None:
    """The fewest replicas, up to `most`, that keep the goals in each sample, by halving the range. None if there is no such number."""
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        if all(goals.are_met_by(run_fleet(plan_of(middle), sample)) for sample in samples):
            high = middle
        else:
            low = middle + 1
    return low if low <= most else None


class Patient:
    """An autoscaler that goes up at once, and down only to the most that was needed within the last half hour."""

    def __init__(self, per_replica: float) -> None:
        self.per_replica = per_replica
        self._recent: list[tuple[float, int]] = []

    def decide(self, observed: Observed) -> int:
        """How many replicas there should be: the current number, if it is within a tenth of what is needed."""
        need, current = observed.rate / self.per_replica, observed.ready + observed.starting
        wanted = current if 0.9 * current <= need <= 1.1 * current else max(1, math.ceil(need))
        self._recent = [pair for pair in self._recent if pair[0] > observed.now - 1800] + [(observed.now, wanted)]
        return max(wanted, min(current, max(number for _, number in self._recent)))


class SeparateRun(NamedTuple):
    """Machines for prompts and machines for tokens.

    Attributes:
        ttft: Times to first token.
        second: Seconds from a request's first token to its second: the transfer of its cache, the wait for a seat, and a step.
        itl: All gaps between tokens, those to the second one included.
    """

    ttft: Distribution
    second: Distribution
    itl: Distribution


class _SecondTokens(Tally):
    """As `Tally`, for requests whose first tokens came from elsewhere at these moments, in the order of arrival: the gap to the second counts."""

    def __init__(self, run: ReplicaRun, first_tokens: Sequence[float]) -> None:
        super().__init__(run, LatencyHistogram, num_replicas=run.num_replicas)
        self._progress = {str(number): [moment, 1] for number, moment in enumerate(first_tokens)}
        self.second: list[float] = []

    def take(self, replica: int, outputs: EngineCoreOutputs) -> int:
        """Count a step's outputs. Returns how many requests it finished."""
        progress = [self._progress[output.request_id] for output in outputs.outputs]
        self.second += [outputs.timestamp - moment for moment, count in progress if count == 1]
        return super().take(replica, outputs)


def run_separate(plan: Plan, sample: Sample, num_prefill: int, transfer: float) -> SeparateRun:
    """Let some machines compute prompts, by turns, and hand each KV cache over to the others, which only decode.

    Args:
        plan: All machines.
        sample: Requests.
        num_prefill: How many machines compute prompts.
        transfer: Seconds for each token of a prompt.
    """
    options, costs = engine_options(plan, sample), plan.machine.costs
    handed_over: list[tuple[float, WorkloadRequest]] = []  # when its first token came, and the rest of it
    ttfts = []
    for number in range(num_prefill):
        own = sample.requests[number::num_prefill]
        trace = simulate([WorkloadRequest(r.prompt_token_ids, 1, r.arrival_time) for r in own], **options).trace
        assert trace is not None
        ttft_of = {latency.request_id: latency.ttft for latency in request_latencies(trace)}
        for index, request in enumerate(own):
            ttft = ttft_of[str(index)]
            assert ttft is not None
            ttfts.append(ttft)
            first = request.arrival_time + ttft
            moment = first + len(request.prompt_token_ids) * transfer
            if request.output_len > 1:
                handed_over.append((first, WorkloadRequest(request.prompt_token_ids, request.output_len - 1, moment)))
    handed_over.sort(key=lambda entry: entry[1].arrival_time)
    options["cost_model"] = CostModel(costs.fixed, per_decode_seq=costs.per_decode_seq, per_context_token=costs.per_context_token)
    start, queue = start_of([request for _, request in handed_over])
    replicas = [
        SimulatedReplica(make_simulated_engine(clock=VirtualClock(start), trace=False, **options))
        for _ in range(plan.num_replicas - num_prefill)
    ]
    run = ReplicaRun(routing="least-loaded", num_replicas=len(replicas))
    tally = _SecondTokens(run, [first for first, _ in handed_over])
    run_requests(queue, replicas, make_router("least-loaded", max_num_seqs=plan.max_num_seqs), tally)
    return SeparateRun(Distribution.of(ttfts), Distribution.of(tally.second), tally.itl.distribution())


def run_with_failure(plan: Plan, sample: Sample, after: float) -> tuple[ReplicaRun, int]:
    """Let a fleet serve a sample, and let one replica die at its first arrival `after` seconds from the beginning.

    The router knows at once. The dead replica's unfinished requests come again, with the tokens that they have as part of their prompts; for
    these the run counts the wait until the next token as a TTFT. The step that the replica was in still counts.

    Returns:
        The run, and how many requests came again.
    """
    start, queue = start_of(sample.requests)
    # A traced engine's steps are simulated one by one, so the dead replica's tokens are known at every moment.
    replicas = [
        SimulatedReplica(make_simulated_engine(clock=VirtualClock(start), trace=number == 0, **engine_options(plan, sample)))
        for number in range(plan.num_replicas)
    ]
    router = make_router("least-loaded", max_num_seqs=plan.max_num_seqs)
    run = ReplicaRun(routing="least-loaded", num_replicas=plan.num_replicas)
    tally, moved = Tally(run, LatencyHistogram, num_replicas=plan.num_replicas), []

    def arrivals() -> Iterator[WorkloadRequest]:
        is_alive = True
        for request in queue:
            yield request
            if is_alive and request.arrival_time >= start + after:
                is_alive = False
                router.close(0)
                core = replicas[0].core
                for unfinished in list(core.scheduler.requests.values()):
                    seq = unfinished.sequences[0]
                    left = unfinished.max_num_tokens - len(seq.token_ids)
                    core.abort_requests([unfinished.request_id])
                    moved.append(unfinished.request_id)
                    yield WorkloadRequest(list(seq.token_ids), left, request.arrival_time)

    run_requests(arrivals(), replicas, router, tally)
    run.itl = tally.itl.distribution()
    run.requests = tally.requests
    return run, len(moved)
