"""What users wait, read from traces; and kernels under a roof."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import kernel_points, peaks
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from shadow import ShadowExecutor, set_clock, shadow_engine

from minivllm.bench.summary import percentile
from minivllm.bench.trace_summary import request_latencies
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ExecuteModelRequest, SequenceOutput
from minivllm.viz.latency import draw_latencies
from minivllm.viz.roofline import RooflinePoint, draw_roofline

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_2026-11-21.json"


def timed_engine(*args: int, seconds: float = 0.25, **options: object) -> tuple[LLMEngine, ShadowExecutor]:
    """A shadow engine on a virtual clock: a step takes `seconds`, and as much again for every eight of its tokens."""
    engine, executor = shadow_engine(*args, **options)
    now = [100.0]
    set_clock(engine, lambda: now[0])
    execute = executor.execute_model

    def execute_and_wait(request: ExecuteModelRequest) -> list[SequenceOutput]:
        now[0] += seconds * (1 + sum(seq.num_tokens for seq in request.sequences) / 8)
        return execute(request)

    executor.execute_model = execute_and_wait
    return engine, executor


def drive(engine: LLMEngine, requests: list[tuple[float, int, int, int]]) -> tuple[EngineTrace, dict[str, dict[str, object]]]:
    """Run (arrival, prompt length, max_tokens, n) and note, apart from any trace, when the user got what."""
    trace = engine.start_trace()
    start = engine.clock()
    seen: dict[str, dict[str, object]] = {}
    pending = sorted((start + arrival, i, *rest) for i, (arrival, *rest) in enumerate(requests))
    for arrival, i, prompt_len, max_tokens, n in pending:
        params = SamplingParams(temperature=i % 2, max_tokens=max_tokens, n=n, seed=i)
        engine.add_request(f"r{i}", [1 + (i + j) % 7 for j in range(prompt_len)], params, arrival_time=arrival)
        seen[f"r{i}"] = {"arrival": arrival, "lengths": {}, "moments": {}, "end": None}
    while engine.has_unfinished_requests():
        for output in engine.step():
            note(seen[output.request_id], output, engine.clock())
    return trace, seen


def note(notes: dict, output: RequestOutput, now: float) -> None:
    for completion in output.outputs:
        if len(completion.token_ids) > notes["lengths"].get(completion.index, 0):
            notes["lengths"][completion.index] = len(completion.token_ids)
            notes["moments"].setdefault(completion.index, []).append(now)
    if output.finished:
        notes["end"] = now


def test_a_small_example_by_hand():
    engine, _ = timed_engine(20)
    trace, _ = drive(engine, [(0.0, 8, 3, 1)])
    (latency,) = request_latencies(trace)
    decode = 0.25 * (1 + 1 / 8)
    assert latency.ttft == pytest.approx(0.5)
    assert latency.itls == pytest.approx([decode, decode])
    assert latency.latency == pytest.approx(0.5 + 2 * decode)
    assert latency.num_tokens == 3
    assert latency.tpot == pytest.approx(decode)


REQUESTS = st.lists(
    st.tuples(st.floats(-5, 0), st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=7
)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(REQUESTS, st.integers(24, 40), st.booleans(), st.sampled_from(["recompute", "swap"]), st.integers(0, 3))
def test_the_waits_are_those_that_the_users_saw(requests, num_blocks, chunked, mode, drafts):
    engine, _ = timed_engine(
        num_blocks, 40, enable_chunked_prefill=chunked, preemption_mode=mode, num_speculative_tokens=drafts, max_num_seqs=5,
        max_num_batched_tokens=64,
    )  # fmt: skip
    trace, seen = drive(engine, requests)
    latencies = request_latencies(EngineTrace.from_json(json.loads(json.dumps(trace.to_json()))))
    assert [latency.request_id for latency in latencies] == list(trace.requests)
    for latency in latencies:
        notes = seen[latency.request_id]
        moments = notes["moments"]
        assert latency.ttft == min(times[0] for times in moments.values()) - notes["arrival"]
        assert latency.latency == notes["end"] - notes["arrival"]
        gaps = [b - a for index in sorted(moments) for a, b in itertools.pairwise(moments[index])]
        assert list(latency.itls) == gaps
        assert all(gap > 0 for gap in latency.itls)
        assert latency.num_tokens == max(notes["lengths"].values())
        if latency.num_tokens == 1:
            assert latency.tpot is None
        elif len(moments) == 1:
            assert latency.tpot == pytest.approx(statistics.mean(latency.itls) * len(latency.itls) / (latency.num_tokens - 1))


def test_several_tokens_at_one_moment_are_one_output():
    engine, _ = timed_engine(100, num_speculative_tokens=4)
    trace, _ = drive(engine, [(0.0, 20, 60, 1)])
    assert sum(part.num_accepted for step in trace for part in step.scheduled) > 5
    (latency,) = request_latencies(trace)
    assert len(latency.itls) < latency.num_tokens - 1
    assert sum(latency.itls) == pytest.approx(latency.latency - latency.ttft)


def test_what_did_not_come_to_its_end_is_left_out_and_said():
    engine, executor = timed_engine(100, max_num_seqs=1)
    trace = engine.start_trace()
    for name in ("finished", "failed", "aborted", "unfinished"):
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    executor.fail_at = {5}
    for _ in range(6):
        engine.step()
    engine.abort_request("aborted")
    engine.step()
    assert [latency.request_id for latency in request_latencies(trace)] == ["finished"]
    legend = draw_latencies({"a run": trace}).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["a run: 1 request (3 unfinished, aborted or failed left out)"]


def test_a_request_older_than_the_trace_keeps_its_times():
    engine, _ = timed_engine(100)
    engine.add_request("old", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), arrival_time=90.0)
    engine.step()
    first = engine.clock()
    for _ in range(2):
        engine.step()
    trace = engine.start_trace()
    while engine.has_unfinished_requests():
        engine.step()
    (latency,) = request_latencies(trace)
    assert (latency.ttft, latency.latency) == (first - 90.0, engine.clock() - 90.0)
    assert len(latency.itls) == 4, "of the five tokens that the trace saw"


def two_traces() -> dict[str, EngineTrace]:
    return {
        name: drive(timed_engine(40, seconds=seconds)[0], [(0.0, 5, 9, 1), (-1.0, 9, 3, 2), (-2.0, 3, 12, 1)])[0]
        for name, seconds in (("slow", 0.25), ("fast", 0.04))
    }


def test_the_figure_shows_the_shares_and_writes_the_percentiles():
    traces = two_traces()
    figure = draw_latencies(traces, "A title")
    panels, tables = figure.axes[:3], figure.axes[3:]
    assert [axes.get_xlabel() for axes in panels] == [
        "time to first token (TTFT), s", "between tokens (ITL), ms", "end-to-end latency, s",
    ]  # fmt: skip
    for number, name in enumerate(traces):
        values = sorted(item.latency for item in request_latencies(traces[name]))
        line = [line for line in panels[2].lines if len(line.get_xdata()) > 1][number]
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert y <= np.mean([value <= x for value in values]) + 1e-9
        assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (values[-1], 1.0)
        written = [float(text.get_text()) for text in tables[2].texts[3 + 3 * number : 6 + 3 * number]]
        assert written == pytest.approx([percentile(values, percent) for percent in (50, 95, 99)], rel=5e-3)
    styles = [line.get_linestyle() for line in panels[0].lines if len(line.get_xdata()) > 1]
    assert len(set(styles)) == 2, "told apart without colours"


def test_a_long_tail_gets_a_logarithmic_axis():
    engine, executor = timed_engine(100, seconds=0.01)
    execute = executor.execute_model
    tick = engine.clock
    late = [0.0]
    set_clock(engine, lambda: tick() + late[0])

    def stumble(request: ExecuteModelRequest) -> list[SequenceOutput]:
        late[0] += 3.0 if executor.num_steps == 8 else 0.0
        return execute(request)

    executor.execute_model = stumble
    trace, _ = drive(engine, [(0.0, 8, 20, 1)])
    panels = draw_latencies({"stumbling": trace}).axes[:3]
    assert [axes.get_xscale() for axes in panels] == ["linear", "log", "linear"]
    assert panels[1].get_xlabel() == "between tokens (ITL), ms (log)"


def test_a_trace_in_which_nothing_ended_is_drawn_too():
    trace = shadow_engine(20)[0].start_trace()
    texts = [text.get_text() for text in draw_latencies({"empty": trace}).axes[0].texts]
    assert texts == ["nothing to show"]


# -- roofline ----------------------------------------------------------------------------------------------------


@given(st.floats(1, 1e15), st.floats(1, 1e15), st.floats(1e-9, 1e3), st.floats(1e6, 1e15), st.floats(1e6, 1e13))
def test_nothing_is_attained_sooner_than_its_bytes_and_operations_take(flops, size, seconds, peak, bandwidth):
    point = RooflinePoint("p", flops, size, seconds)
    at_best = max(flops / peak, size / bandwidth)
    assert point.rate / point.attainable(peak, bandwidth) == pytest.approx(at_best / seconds)


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_roofline_has_the_roof_the_ridge_and_a_percentage_for_each_point():
    points = [RooflinePoint("half", 100e9, 100e9, 2.0), RooflinePoint("whole", 1600e9, 10e9, 2.0)]
    figure = draw_roofline(points, peak_flops=800e9, bandwidth=100e9, title="A machine")
    roof, ridge = figure.axes[0].lines[:2]
    assert list(roof.get_ydata())[1:] == [800e9, 800e9]
    assert set(ridge.get_xdata()) == {8.0}
    assert {"half, 50%", "whole, 100%", "memory: 100 GB/s", "arithmetic: 800 GFLOP/s"} <= set(texts_of(figure))
    assert "operations per byte" in figure.axes[0].get_xlabel()
    assert figure.axes[0].get_ylabel() == "speed (GFLOP/s)"


def test_numbers_of_another_type_have_a_roof_of_their_own():
    points = [
        RooflinePoint("single", 400e9, 10e9, 1.0, "float32"),
        RooflinePoint("half", 800e9, 10e9, 1.0, "bfloat16"),
        RooflinePoint("slow", 16e9, 1e9, 1.0, "bfloat16"),
    ]
    figure = draw_roofline(points, peak_flops=800e9, bandwidth=100e9, peaks={"bfloat16": 1600e9})
    expected = {"single, 50%", "half, 50%", "slow, 1%", "float32: 800 GFLOP/s", "bfloat16: 1,600 GFLOP/s"}
    assert expected <= set(texts_of(figure))
    assert list(figure.axes[0].lines[2].get_ydata()) == [800e9, 1600e9, 1600e9]
    with pytest.raises(ConfigError, match="The numbers of the machine"):
        draw_roofline(points, 800e9, 100e9, peaks={"bfloat16": 0.0})


@pytest.mark.parametrize("flops,size,seconds", [(0, 1, 1), (1, -1, 1), (1, 1, math.nan)])
def test_a_roofline_refuses_what_is_not_a_measurement(flops, size, seconds):
    with pytest.raises(ConfigError, match="The numbers of p must be positive and finite"):
        draw_roofline([RooflinePoint("p", flops, size, seconds)], 1e9, 1e9)
    with pytest.raises(ConfigError, match="at least one point"):
        draw_roofline([], 1e9, 1e9)


def test_points_are_what_was_measured():
    results = json.loads(RESULTS.read_text())
    points = {(point.series.split()[0], point.name): point for point in kernel_points(results)}
    assert len(points) == len(results["linear"]["minivllm"]) + len(results["attention"])
    step = points["linear", "16 rows"]
    num_weights = 30 * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536) + 49152 * 576
    assert step.flops == 2 * 16 * num_weights
    assert 4 * num_weights < step.bytes < 4.2 * num_weights
    assert step.seconds == results["linear"]["minivllm"]["16"] / 1e3
    for row in results["attention"]:
        point = points["decode", f"{row['sequences']} × {row['context']:,}"]
        assert point.bytes / point.seconds == pytest.approx(row["reads"] * 1e9)
        assert point.intensity == 1.5, "three query heads share a key of four bytes a number: 2 × 3 / 4"
    assert peaks(results) == (results["floor"]["gigaflops"] * 1e9, results["floor"]["read_gigabytes_per_second"] * 1e9)


def test_a_machine_without_packed_products_shows_those_of_torch():
    results = json.loads(RESULTS.read_text())
    del results["linear"]["minivllm"]
    assert "(F.linear)" in kernel_points(results)[0].series


def test_results_of_something_else_are_refused():
    results = json.loads(RESULTS.read_text())
    for broken in ({}, [], {"linear": {}, "attention": []}, results | {"attention": [{"sequences": 1}]}):
        with pytest.raises(ConfigError, match="not results of `benchmarks/cpu_kernels.py`"):
            kernel_points(broken)
    with pytest.raises(ConfigError, match="not measured"):
        kernel_points(results, ways=("minivllm int8",))
    with pytest.raises(ConfigError, match="not results"):
        peaks({"floor": None})


def label_boxes(figure: Figure) -> dict[str, Bbox]:
    """Where the labels of the points are, by their texts."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for text in figure.axes[0].texts:
        if isinstance(text, Annotation):
            text.update_positions(renderer)
    labels = [text for text in figure.axes[0].texts if text.get_text().endswith("%")]
    return {text.get_text(): Text.get_window_extent(text, renderer) for text in labels}


def overlapping(boxes: Collection[Bbox]) -> list[tuple[Bbox, Bbox]]:
    return [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_labels_of_the_measured_kernels_do_not_overlap():
    results = json.loads(RESULTS.read_text())
    points = kernel_points(results)
    boxes = label_boxes(draw_roofline(points, *peaks(results))).values()
    assert len(boxes) == 14
    assert overlapping(boxes) == []


def test_labels_of_almost_equal_points_stand_above_each_other_in_order():
    points = [RooflinePoint(f"{number}", 100e9, 100e9, 2.0 + number / 100) for number in range(5)]
    boxes = label_boxes(draw_roofline(points, peak_flops=800e9, bandwidth=100e9))
    assert [text[0] for text in boxes] == [*"01234"]
    assert sorted(boxes.values(), key=lambda box: -box.y0) == list(boxes.values())
    assert overlapping(boxes.values()) == []
