"""The figures that compare policies show the numbers of their traces."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from minivllm.bench.workloads import WorkloadRequest
from minivllm.simulation.engine import simulate
from minivllm.viz.latency import request_latencies
from minivllm.viz.palette import request_colors
from minivllm.viz.policies import draw_panels, draw_step_tokens, draw_waits
from minivllm.viz.timeline import Stay, draw_timelines, find_neighbours, find_stays


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


@pytest.fixture(scope="module")
def runs():
    """Ninety requests, every fifth of them long, with eight places under two policies: some would touch one of the same colour."""
    requests = [WorkloadRequest([i] * 20, 5 + 60 * (i % 5 == 0) + i % 3, 0.02 * i) for i in range(90)]
    return {name: simulate(requests, scheduler=name, max_num_seqs=8).trace for name in ("static", "continuous")}


def colors_in(axes, stays):
    """The colour of each request's bar; each is drawn in its colour, and then its prefill lighter."""
    return {stay.request_id: to_hex(bar.get_facecolor()) for stay, bar in zip(stays, axes.patches[::2], strict=True)}


def test_requests_whose_bars_touch_have_different_colours(runs):
    usual = request_colors(runs["continuous"])
    assert any(usual[one] == usual[other] for one, other in find_neighbours(find_stays(runs["continuous"])))
    for axes, trace in zip(draw_timelines(runs).axes, runs.values(), strict=True):
        stays = find_stays(trace)
        colors, pairs = colors_in(axes, stays), find_neighbours(stays)
        assert len(pairs) > 100
        assert [pair for pair in pairs if colors[pair[0]] == colors[pair[1]]] == []


def test_a_request_has_one_colour_in_all_panels(runs):
    one, other = (
        colors_in(axes, find_stays(trace)) for axes, trace in zip(draw_timelines(runs).axes, runs.values(), strict=True)
    )
    assert one == other


def test_bars_touch_after_one_another_and_side_by_side():
    stays = [Stay("a", 0, 0, 0, 2), Stay("b", 0, 2, 2, 4), Stay("c", 1, 1, 1, 3), Stay("d", 2, 0, 0, 1), Stay("e", 1, 4, 4, 5)]
    assert {frozenset(pair) for pair in find_neighbours(stays)} == {frozenset(pair) for pair in ("ab", "ac", "bc", "ce")}


def dashes_of(axes):
    """(start, end, tokens) of each dash: first those of decodes, then those of prefills."""
    return [[(*segment[:, 0], segment[0, 1]) for segment in lines.get_segments()] for lines in axes.collections]


def test_a_step_is_a_dash_for_each_kind_of_tokens_as_long_as_it_took(trace):
    figure = draw_step_tokens({"run": trace}, trace[0].start, trace[-1].end)
    expected = [
        [
            (step.start, step.end, count)
            for step in trace
            if (count := sum(part.num_tokens for part in step.scheduled if part.action == action))
        ]
        for action in ("decode", "prefill")
    ]
    assert dashes_of(figure.axes[0]) == expected


def test_nothing_is_filled_or_stacked_where_the_axis_is_logarithmic(trace):
    axes = draw_step_tokens({"run": trace}, trace[0].start, trace[-1].end).axes[0]
    assert axes.get_yscale() == "log"
    assert len(axes.patches) == 0


def test_steps_outside_the_stretch_are_left_out(trace):
    figure = draw_step_tokens({"run": trace}, trace[1].start, trace[2].end)
    assert sum(len(dashes) for dashes in dashes_of(figure.axes[0])) == 2


def test_waits_are_the_times_to_the_first_token_and_some_are_marked(trace):
    figure = draw_waits({"run": trace}, {"run": {"1", "3"}})
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [item.ttft for item in request_latencies(trace)]
    assert list(axes.lines[0].get_xdata()) == [1, 3]
