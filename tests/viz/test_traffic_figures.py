"""Figures of lesson 11: what is drawn are the numbers that were given."""

from __future__ import annotations

from minivllm.viz.traffic import draw_knee, draw_lateness, draw_life, draw_steps


def test_each_lateness_is_a_line_and_the_worst_is_named():
    figure = draw_lateness({"a": [(0.1, 3.0), (0.2, 70.5)], "b": [(0.1, 1.0)]})
    first, second = figure.axes
    assert [segment[1].tolist() for segment in first.collections[0].get_segments()] == [[0.1, 3.0], [0.2, 70.5]]
    assert first.get_title("left") == "a: at most 70.5 ms late" and first.get_ylim() == second.get_ylim()


def test_each_part_of_a_life_is_a_bar_in_the_colour_of_its_place():
    [axes] = draw_life([("read", "loop", 0.001), ("step", "core", 0.05), ("send", "loop", 0.002)]).axes
    bars = {round(bar.get_y() + bar.get_height() / 2): bar for bar in axes.patches}
    assert [bars[row].get_width() for row in range(3)] == [1.0, 50.0, 2.0]
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["read", "step", "send"]


def test_a_value_stays_until_the_next():
    [axes] = draw_steps({"x": [(0.0, 1), (2.0, 5)]}, "blocks").axes
    [line] = axes.lines
    assert line.get_drawstyle() == "steps-post" and line.get_xydata().tolist() == [[0.0, 1.0], [2.0, 5.0]]


def test_waits_are_in_milliseconds_and_the_capacity_is_where_it_was_predicted():
    [axes] = draw_knee([5, 20], {"first": [0.03, 0.7]}, 18.0).axes
    assert axes.lines[0].get_ydata().tolist() == [30.0, 700.0] and axes.lines[1].get_xdata() == [18.0, 18.0]


def test_what_was_answered_is_drawn_beside_the_waits():
    waits, beside = draw_knee([5, 20], {"first": [0.03, 0.7]}, 18.0, {"answered": [5.0, 17.0], "goodput": [5.0, 2.0]}).axes
    assert len(waits.lines) == 2
    assert [line.get_ydata().tolist() for line in beside.lines[:2]] == [[5.0, 17.0], [5.0, 2.0]]
    assert beside.lines[2].get_xdata() == [18.0, 18.0]
