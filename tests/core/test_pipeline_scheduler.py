"""Pipeline stages: a batch for each, of disjoint sequences of which none takes more than its share; all else is as with one step at a time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from test_invariants import describe
from test_steps_in_flight import check_all_is_free, check_results, check_trace, flights

from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.scheduler_output import PLACEHOLDER

pytestmark = pytest.mark.slow
stages = st.sampled_from([1, 2, 2, 3])


def run(flight, num_stages, observe=None):
    arguments = flight.arguments | {"pipeline_parallel_size": num_stages}
    return dataclasses.replace(flight, arguments=arguments).run(num_stages, PipelineScheduler, observe)


def check_step(executor, output):
    """No placeholder, no sequence in two steps that sample, and no more than its share."""
    for item in output.scheduled:
        assert PLACEHOLDER not in item.to_data().token_ids
        assert not item.seq.num_placeholders
    num_stages = executor.config.pipeline_parallel_size
    num_decodes = len(output.scheduled) - output.num_prefills
    others = [seq for seq in executor.scheduler.running if seq.num_uncomputed_tokens <= 1]
    most = len(others) + len(executor.scheduler.swapped) + len(output.preempted)
    assert num_decodes <= -(-most // num_stages)


@given(flights(), stages)
def test_all_that_a_request_gets_is_the_same(flight, num_stages):
    engine, executor, results = run(flight, num_stages, check_step)
    describe(executor)
    event(f"most in flight: {executor.most_in_flight}")
    assert executor.most_in_flight <= num_stages
    expected = flight.expected()
    check_results(results, expected)
    assert all(result.error in (None, "aborted", expected[name].error) for name, result in results.items())
    check_all_is_free(engine)
    check_trace(engine.trace, results)


@given(flights(with_failures=True), stages)
def test_a_failing_step_ends_its_own_requests_only(flight, num_stages):
    engine, _, results = run(flight, num_stages)
    failed = {name for name, result in results.items() if result.error and "planned failure" in result.error}
    event(f"failed: {bool(failed)}")
    check_results(results, flight.expected())
    check_all_is_free(engine)
