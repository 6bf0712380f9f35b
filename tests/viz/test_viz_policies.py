"""The figures that compare policies show the numbers of their traces."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from minivllm.bench.simulation import simulate
from minivllm.bench.workloads import WorkloadRequest
from minivllm.viz.latency import request_latencies
from minivllm.viz.policies import draw_panels, draw_step_tokens, draw_waits


@pytest.fixture(scope="module")
def trace():
    return simulate([WorkloadRequest([i] * 20, 5, 0.1 * i) for i in range(6)], max_num_seqs=2).trace


def test_panels_have_a_line_for_each_name_and_a_tick_for_each_value():
    figure = draw_panels((1, 2, 4), {"time (s)": [3, 2, 1], "tokens": {"a": [1, 2, 3], "b": [2, 4, 6]}}, "places (number)")
    single, double = figure.axes
    assert [len(axes.lines) for axes in figure.axes] == [1, 2]
    assert [text.get_text() for text in single.get_xticklabels()] == ["1", "2", "4"]
    assert (single.get_ylabel(), single.get_xlabel()) == ("time (s)", "places (number)")
    assert list(double.lines[1].get_ydata()) == [2, 4, 6]
    assert single.get_ylim()[0] == 0


def test_steps_are_bars_as_wide_as_they_took_with_prefill_upon_decode(trace):
    figure = draw_step_tokens({"run": trace}, trace[0].start, trace[-1].end)
    bars = figure.axes[0].patches
    assert len(bars) == 2 * len(trace)
    heights = [a.get_height() + b.get_height() for a, b in zip(bars, bars[len(trace) :], strict=False)]
    assert heights == [step.num_tokens for step in trace]
    assert bars[0].get_width() == pytest.approx(trace[0].end - trace[0].start)


def test_steps_outside_the_stretch_are_left_out(trace):
    figure = draw_step_tokens({"run": trace}, trace[1].start, trace[2].end)
    assert len(figure.axes[0].patches) == 4


def test_waits_are_the_times_to_the_first_token_and_some_are_marked(trace):
    figure = draw_waits({"run": trace}, {"run": {"1", "3"}})
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [item.ttft for item in request_latencies(trace)]
    assert list(axes.lines[0].get_xdata()) == [1, 3]
