"""Quiet steps that are applied together give what single steps give: to every user, to the router, and in the cache."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.summary import Goals, RunSummary
from minivllm.bench.workloads import WorkloadRequest
from minivllm.data_parallel.routing import ROUTERS, LoadPublisher, make_router
from minivllm.executor.simulated import CostModel, VirtualClock
from minivllm.simulation import events
from minivllm.simulation.engine import make_simulated_engine
from minivllm.simulation.events import ExactTimes, SimulatedReplica, Tally, run_requests


class NotesChanges(LoadPublisher):
    """Notes when which load is another one than before."""

    def __init__(self, now):
        super().__init__(now)
        self.changes = []

    def report(self, replica, load, now):
        if self.loads.get(replica) != load:
            self.changes.append((now, replica, load))
        super().report(replica, load, now)


def run(requests, num_replicas, routing, options, may_skip):
    """All that a simulation tells and leaves behind, and how many calls of `EngineCore.step` it took."""
    start, queue = events.start_of(requests)
    engines = [make_simulated_engine(clock=VirtualClock(start), trace=False, **options) for _ in range(num_replicas)]
    replicas, calls = [SimulatedReplica(engine) for engine in engines], []
    for replica in replicas:
        replica._can_skip = replica._can_skip and may_skip
        step = replica.core.step
        replica.core.step = lambda step=step: calls.append(None) or step()
    summary = RunSummary()
    tally = Tally(summary, ExactTimes, Goals(ttft=500), num_replicas)
    publisher = NotesChanges(start)
    with mock.patch.object(events, "LoadPublisher", lambda now: publisher):
        run_requests(queue, replicas, make_router(routing, max_num_seqs=options["max_num_seqs"]), tally)
    cores = [replica.core for replica in replicas]
    itl = tally.itl.distribution()
    left = {
        "summary": summary,
        "loads": publisher.changes,
        "itl percentiles": itl[1:],
        "requests": (tally.requests, tally.request_seconds, tally.num_cached_tokens),
        "busy": [replica.busy_seconds for replica in replicas],
        "clocks": [replica.clock.now for replica in replicas],
        "steps": [(core.num_steps, core.num_preemptions, core.outputs.num_generated_tokens) for core in cores],
        "blocks": [(core.block_manager.get_free_blocks(), core.block_manager.gpu_allocator._block_of) for core in cores],
    }
    return left, itl.mean, len(calls)


@st.composite
def workloads(draw):
    """Requests that share beginnings, and often come at the same time, or when a step ends."""
    now, requests = 0.0, []
    for number in range(draw(st.integers(1, 60))):
        now += draw(st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.033, 0.071, 0.3, 7.77]))
        prompt_len, shared = draw(st.integers(1, 40)), draw(st.integers(0, 40))
        prompt = [*range(min(shared, prompt_len)), *(1000 * number + i for i in range(prompt_len - min(shared, prompt_len)))]
        requests.append(WorkloadRequest(prompt, draw(st.integers(1, 40)), now))
    return requests


@st.composite
def engines(draw):
    """Options of an engine on which each of these requests fits, some with too few blocks for all."""
    block_size = draw(st.sampled_from([1, 2, 3, 8, 16]))
    costs = draw(st.sampled_from([
        CostModel(fixed=0.25),
        CostModel(fixed=0.0),
        CostModel(fixed=0.01, per_prefill_token=0.002, per_decode_seq=0.003, per_context_token=1e-5),
        CostModel(fixed=0.02, decode_curve=((1, 0.0), (4, 0.01), (6, 0.05))),
        CostModel(fixed=0.0, decode_curve=((1, 0.5), (2, 0.0), (3, 0.25))),
    ]))  # fmt: skip
    options = {
        "cost_model": costs,
        "block_size": block_size,
        "num_gpu_blocks": -(-80 // block_size) + draw(st.integers(0, 200)) // block_size,
        "max_num_seqs": draw(st.integers(1, 8)),
        "vocab_size": draw(st.sampled_from([50, 50_000])),
        "enable_prefix_caching": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
    }
    if draw(st.booleans()):
        options |= {"preemption_mode": "swap", "num_cpu_blocks": draw(st.integers(0, 100))}
    if draw(st.booleans()):
        options |= {"enable_chunked_prefill": True, "max_num_batched_tokens": draw(st.integers(8, 64))}
    return options


@given(workloads(), st.integers(1, 3), st.sampled_from(sorted(ROUTERS)), engines())
def test_the_result_is_that_of_single_steps(requests, num_replicas, routing, options):
    skipping, itl, _ = run(requests, num_replicas, routing, options, may_skip=True)
    stepping, exact_itl, _ = run(requests, num_replicas, routing, options, may_skip=False)
    for name, value in stepping.items():
        assert repr(skipping[name]) == repr(value), name  # as text: some are nan
    assert itl == pytest.approx(exact_itl, rel=1e-9, nan_ok=True)


def test_a_run_ends_before_steps_that_were_cut_would_have_ended():
    """Two sequences take no time together, and one alone a second a step."""
    requests = [WorkloadRequest([1] * 4, 12, 0.0), WorkloadRequest([2] * 4, 12, 2.5)]
    options = {"cost_model": CostModel(fixed=0.0, decode_curve=((1, 1.0), (2, 0.0))), "max_num_seqs": 2}
    skipping, *_ = run(requests, 1, "round-robin", options, may_skip=True)
    stepping, *_ = run(requests, 1, "round-robin", options, may_skip=False)
    assert repr(skipping) == repr(stepping) and skipping["summary"].completed == 2


def test_most_steps_are_quiet():
    requests = [WorkloadRequest([number] * 30, 100, number * 0.5) for number in range(40)]
    options = {"cost_model": CostModel(fixed=0.02), "max_num_seqs": 4}
    left, _, num_calls = run(requests, 2, "least-loaded", options, may_skip=True)
    num_steps = sum(steps for steps, *_ in left["steps"])
    assert num_steps > 1000
    assert num_calls < num_steps / 10


@pytest.mark.parametrize("options", [
    {"scheduler": "static"},
    {"num_speculative_tokens": 2},
    {"async_scheduling": True},
    {"policy": "priority"},
], ids=str)  # fmt: skip
def test_other_schedulers_take_each_step(options):
    engine = make_simulated_engine(trace=False, **options)
    assert not events.can_skip_steps(engine.core)
    assert events.can_skip_steps(make_simulated_engine(trace=False).core)
    assert not events.can_skip_steps(make_simulated_engine(trace=True).core)
