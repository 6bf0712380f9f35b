"""Pipeline stages: a batch for each, of disjoint sequences of which none takes more than its share; all else is as with one step at a time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from test_invariants import describe
from test_steps_in_flight import check_all_is_free, check_results, check_trace, flights

from minivllm import SamplingParams
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.scheduler_output import PLACEHOLDER
from minivllm.simulation.engine import make_simulated_engine

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


@pytest.mark.parametrize("enable_chunked_prefill", [False, True])
@pytest.mark.parametrize("length", [1, 2, 100])
def test_newcomers_are_divided_among_the_stages_however_short_they_are(length, enable_chunked_prefill):
    """A first batch for each stage, all of the same size; then the sequences decode, and nobody waits longer than the others."""
    engine = make_simulated_engine(
        pipeline_parallel_size=4, max_num_seqs=64, num_gpu_blocks=4096, enable_chunked_prefill=enable_chunked_prefill
    )
    for i in range(64):
        engine.add_request(str(i), [1] * length, SamplingParams(max_tokens=10, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert [len(step.scheduled) for step in engine.trace] == [16] * 40


def test_a_prompt_of_one_token_does_not_wait_for_those_that_decode():
    engine = make_simulated_engine(pipeline_parallel_size=2, max_num_seqs=8, enable_chunked_prefill=True)
    for i in range(6):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(20):
        engine.step()
    engine.add_request("short", [1], SamplingParams(max_tokens=1))
    finished = [output.request_id for _ in range(6) for output in engine.step() if output.finished]
    assert finished == ["short"]
