"""Workloads, summaries and pictures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompts import mixed_prompts
from scheduler_cost import format_costs, measure_scheduler

import minivllm
from minivllm.bench.workloads import load_workload, make_workload
from minivllm.engine.trace import EngineTrace, SequenceStep, StepRecord, TraceConfig
from minivllm.errors import ConfigError
from minivllm.viz.engine_map import ARROWS, LAYERS, PARTS, draw_engine_map
from minivllm.viz.palette import REQUEST_COLORS, ink_on
from minivllm.viz.timeline import draw_timelines, find_stays

ROOT = Path(minivllm.__file__).parent


@given(st.integers(1, 60), st.integers(2, 60), st.integers(2, 60), st.integers(0, 1000))
def test_both_distributions_have_the_same_number_of_tokens(count, prompt_len, output_len, seed):
    for distribution in ("uniform", "longtail"):
        workload = make_workload(distribution, count, mean_prompt_len=prompt_len, mean_output_len=output_len, seed=seed)
        assert sum(len(request.prompt_token_ids) for request in workload) == count * prompt_len
        assert sum(request.output_len for request in workload) == count * output_len
        assert all(request.output_len >= 1 and request.prompt_token_ids for request in workload)
        again = make_workload(distribution, count, mean_prompt_len=prompt_len, mean_output_len=output_len, seed=seed)
        assert workload == again


def test_the_long_tail_is_long():
    lengths = [request.output_len for request in make_workload("longtail", 2000, mean_output_len=100)]
    assert statistics.median(lengths) < 70
    assert max(lengths) > 800


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ConfigError, match="'uniform', 'longtail'"):
        make_workload("zipf", 3)


def test_workload_files_are_read_and_broken_ones_refused(tmp_path):
    file = tmp_path / "w.json"
    file.write_text(json.dumps([{"ids": [1, 2], "out": 3}]))
    assert [(r.prompt_token_ids, r.output_len) for r in load_workload(file)] == [([1, 2], 3)]
    for text in ("{", '[{"ids": [1]}]', "3"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not a workload"):
            load_workload(file)


def test_mixed_prompts_go_from_one_token_to_the_longest(tokenizer):
    prompts = mixed_prompts(tokenizer, 40, max_len=300)
    lengths = sorted(map(len, prompts))
    assert (lengths[0], lengths[-1]) == (1, 300)
    assert prompts == mixed_prompts(tokenizer, 40, max_len=300)


def test_the_cost_of_scheduling_is_measured_on_a_full_batch():
    cost = measure_scheduler(16, 50, num_steps=50)
    assert (cost.num_running, cost.num_waiting) == (16, 50)
    assert 0 < cost.decode_median <= cost.decode_p99
    assert format_costs([cost]).split("\n")[-1].split()[:2] == ["16", "50"]


def make_trace() -> EngineTrace:
    def step(start, phase, scheduled):
        parts = [SequenceStep(name, 0, phase, num_tokens, num_tokens) for name, num_tokens in scheduled]
        return StepRecord(start, start + 1, phase, parts, len(parts), 0, 0, 5)

    steps = [
        step(10, "prefill", [("0", 5), ("1", 3)]),
        step(11, "decode", [("0", 1), ("1", 1)]),
        step(12, "prefill", [("2", 1)]),
        step(13, "decode", [("0", 1), ("2", 1)]),
    ]
    return EngineTrace(TraceConfig("model", "Scheduler", "BlockSpaceManager", 16, 10, 0, 0.01, False, 100, 50, {}), steps)


def test_stays_take_the_lowest_free_place():
    stays = {stay.request_id: stay for stay in find_stays(make_trace())}
    assert [(s.place, s.start, s.decode_start, s.end) for s in stays.values()] == [
        (0, 0, 1, 4), (1, 0, 1, 2), (1, 2, 3, 4),
    ]  # fmt: skip


def test_timelines_draw_a_panel_per_trace_with_units():
    figure = draw_timelines({"static": make_trace(), "continuous": make_trace()})
    assert len(figure.axes) == 2
    assert figure.axes[-1].get_xlabel() == "time (s)"
    assert figure.axes[0].get_title(loc="left") == "static: 3 requests in 4.0 s, 100% of the seats taken"


def test_the_map_names_files_and_classes_that_exist():
    for part in PARTS:
        source = (ROOT / part.file).read_text()
        assert part.name in ("API server", "Kernels", "Sampler") or f"class {part.name}" in source or f"{part.name}(" in source
    assert {part.layer for part in PARTS} == set(LAYERS)


@pytest.mark.parametrize("source,target", ARROWS)
def test_the_map_draws_who_calls_whom(source, target):
    """Where a name is not that of a class, what the caller says instead."""
    files = {part.name: (ROOT / part.file).read_text() for part in PARTS}
    instead = {"Llama": "self.model(", "Kernels": "kernels", "Sampler": "sampler", "EngineCoreProc": "CoreHandle"}
    said = instead.get(target, target)
    assert said in files[source]


def test_the_map_lights_the_parts_of_a_lesson():
    lit = {text.get_text() for text in draw_engine_map(7).axes[0].texts if text.get_color() == LAYERS["decides"]}
    assert "Scheduler" in lit
    assert "BlockSpaceManager" not in lit


def test_colours_can_be_written_on():
    assert len(set(REQUEST_COLORS)) == len(REQUEST_COLORS)
    assert {ink_on("#FFFFFF"), ink_on("#000000")} == {"black", "white"}
