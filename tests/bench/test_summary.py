"""Percentiles, goodput, and what a run adds up to."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viz_traces import TRACES

from minivllm.bench.summary import Distribution, Goals, RequestLatency, RunSummary, percentile
from minivllm.bench.trace_summary import summarize_trace
from minivllm.bench.workloads import generate_requests
from minivllm.simulation.engine import simulate


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentiles_are_the_nearest_rank(values, percent):
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert all(map(math.isnan, Distribution.of([])))


def test_tokens_that_come_together_are_counted_one_by_one():
    request = RequestLatency("r", 0.5, 1.5, (0.25, 0.75), num_tokens=5, prompt_tokens=3, output_tokens=5)
    assert request.tpot == 0.25, "of the four tokens after the first"


def test_a_single_token_has_no_tpot_to_miss():
    request = RequestLatency("r", 0.5, 0.5, (), num_tokens=1, prompt_tokens=3, output_tokens=1)
    assert request.tpot is None
    assert Goals(ttft=500, tpot=1, e2e=500).are_met_by(request)
    assert not Goals(ttft=499).are_met_by(request)


def test_a_worked_example():
    requests = [RequestLatency("a", 1.0, 4.0, (1.0, 2.0), 3, 4, 3), RequestLatency("b", 2.0, 2.0, (), 1, 6, 1)]
    summary = RunSummary.of(requests, 4.0, num_requests=3, goals=Goals(ttft=1500))
    assert (summary.num_requests, summary.completed, summary.prompt_tokens, summary.output_tokens) == (3, 2, 10, 4)
    assert (summary.requests_per_second, summary.output_tokens_per_second, summary.goodput) == (0.5, 1.0, 0.25)
    assert summary.ttft == (1.5, 1.0, 2.0, 2.0) and summary.itl == (1.5, 1.0, 2.0, 2.0)
    assert summary.tpot == (1.5,) * 4 and summary.latency == (3.0, 2.0, 4.0, 4.0)
    assert summary.to_json()["ttft_ms"] == {"mean": 1500, "p50": 1000, "p95": 2000, "p99": 2000}
    assert RunSummary.of(requests, 0.0).output_tokens_per_second == 0.0


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_adds_up_to_what_its_requests_got(name):
    trace = TRACES[name]()
    run = summarize_trace(trace)
    finished = [r for r in trace.requests.values() if r.finish_reasons and set(r.finish_reasons) <= {"stop", "length"}]
    assert (run.num_requests, run.completed) == (len(trace.requests), len(finished))
    assert run.num_steps == len(trace)
    assert run.busy_seconds == pytest.approx(sum(step.end - step.start for step in trace))
    if finished:
        latencies = [request.finished_time - request.arrival_time for request in finished]
        assert run.latency.mean == pytest.approx(statistics.mean(latencies))
        assert run.latency.p95 == percentile(latencies, 95)
    assert run.peak_cache_use == 1 - min(step.num_free_blocks for step in trace) / trace.config.num_gpu_blocks


def test_the_simulator_and_its_trace_come_to_the_same():
    live = simulate(generate_requests(60, arrival_rate=4, seed=3), num_gpu_blocks=120)
    traced = summarize_trace(live.trace)
    for name in ("completed", "prompt_tokens", "output_tokens", "num_steps", "num_preemptions", "peak_cache_use"):
        assert getattr(traced, name) == getattr(live, name), name
    for name in ("seconds", "busy_seconds", "mean_running", "mean_cache_use", "output_tokens_per_second"):
        assert getattr(traced, name) == pytest.approx(getattr(live, name)), name
    for name in ("ttft", "tpot", "latency"):
        assert getattr(live, name) == pytest.approx(getattr(traced, name)), name
    assert traced.itl.mean > 0 and live.to_json()["itl_ms"] is None, "the simulator does not note each token"
