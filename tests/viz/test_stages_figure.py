"""The figure of pipeline stages, and the simulated stages that it shows."""

from __future__ import annotations

import itertools

import pytest

from minivllm import SamplingParams, Scheduler
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.pipeline_scheduler import PipelineScheduler, choose_scheduler
from minivllm.errors import ConfigError
from minivllm.simulation.engine import make_simulated_engine
from minivllm.simulation.replay import replay
from minivllm.viz.pipeline import draw_bubbles, stage_utilisation


def record(num_stages: int, num_requests: int, **options):
    """Requests of four tokens; a step takes a device of one stage six seconds."""
    engine = make_simulated_engine(cost_model=lambda work: 6.0, pipeline_parallel_size=num_stages, **options)
    for i in range(num_requests):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return engine


def test_a_batch_passes_through_the_stages_and_the_next_one_follows_it():
    trace = record(2, 2).trace
    assert len(trace) == 8  # two batches of one sequence
    for step in trace:
        assert step.ranks[0].end == step.ranks[1].start
        assert step.ranks[1].end == step.end == step.ranks[0].start + 6.0
    for before, after in itertools.pairwise(trace):
        assert all(one.end == other.start for one, other in zip(before.ranks, after.ranks, strict=True)), "a bubble"
    assert stage_utilisation(trace) == [pytest.approx(8 / 9)] * 2
    assert [axes.get_title(loc="left") for axes in draw_bubbles({"run": trace}, num_steps=8).axes] == [
        "run: stages busy 89%, 89%"
    ]


def test_one_sequence_keeps_one_stage_busy():
    trace = record(3, 1).trace
    assert len(trace) == 4 and trace[-1].end == 24.0
    assert stage_utilisation(trace) == [pytest.approx(1 / 3)] * 3


@pytest.mark.parametrize(("scheduler", "most"), [(Scheduler, 3), (PipelineScheduler, 3), (AsyncScheduler, 1)])
def test_schedulers_not_made_for_stages_run_one_step_at_a_time(scheduler, most):
    """A placeholder would stand for a token that only the last stage has."""
    engine = record(3, 5, scheduler=scheduler)
    assert engine.core.max_concurrent_batches == most
    assert all(len(record.output_token_ids[0]) == 4 for record in engine.trace.requests.values())


def test_what_is_chosen_for_a_config():
    engines = [record(2, 1), record(1, 1), record(1, 1, async_scheduling=True)]
    assert [type(engine.scheduler) for engine in engines] == [PipelineScheduler, Scheduler, AsyncScheduler]
    assert [choose_scheduler(engine.core.scheduler_config) for engine in engines] == [
        type(engine.scheduler) for engine in engines
    ]


def test_a_trace_says_what_ran_and_is_not_replayed():
    assert record(1, 1, async_scheduling=True).trace.config.scheduler_config["async_scheduling"]
    engine = record(1, 1)
    engine.core.use_scheduler(AsyncScheduler)
    assert not engine.start_trace().config.scheduler_config["async_scheduling"]  # its executor takes one step at a time
    with pytest.raises(ConfigError, match="several steps in flight, which cannot be replayed"):
        replay(record(2, 1).trace)


def test_there_must_be_stages_and_enough_steps():
    with pytest.raises(ConfigError, match="record a trace with pipeline_parallel_size=2"):
        draw_bubbles({"run": record(1, 1).trace}, num_steps=2)
    with pytest.raises(ConfigError, match="has 4 steps, but steps 1 to 4"):
        draw_bubbles({"run": record(2, 1).trace}, first=1, num_steps=4)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 0, but must be"):
        record(0, 1)
