"""Figures of lesson 15: what is drawn are the numbers that were given."""

from __future__ import annotations

from minivllm.course.lessons.lesson_15.days import Day
from minivllm.viz.planning import draw_day, draw_fit, draw_front, draw_loads


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_p99_of_the_windows_is_the_nearest_rank():
    [axes] = draw_loads({"a": [float(n) for n in range(1, 201)]}, 10, "tokens/s").axes
    assert [bar.get_height() for bar in axes.patches] == [float(n) for n in range(1, 201)]
    assert labels_of(axes) == ["mean: 100", "p99 of the windows: 198"]


def test_steps_that_were_left_out_are_hollow():
    [axes] = draw_fit({"decodes": [(0.01, 0.011)]}, [(0.02, 0.09)]).axes
    kept, dropped = axes.collections
    assert kept.get_offsets().tolist() == [[10.0, 11.0]] and dropped.get_offsets().tolist() == [[20.0, 90.0]]
    assert len(kept.get_facecolors()) == 1 and len(dropped.get_facecolors()) == 0
    assert axes.get_ylim()[1] > 90
    assert labels_of(draw_fit({"decodes": [(0.01, 0.011)]}).axes[0]) == ["as predicted", "decodes"]


def test_the_front_has_what_nothing_cheaper_beats_and_the_goal_is_a_line():
    [axes] = draw_front({"a": [(1.0, 0.9), (2.0, 0.2)], "b": [(3.0, 0.5), (4.0, 0.1)]}, goal=0.3).axes
    front, goal = axes.lines
    assert front.get_xydata().tolist() == [[1.0, 0.9], [2.0, 0.2], [4.0, 0.1]]
    assert set(goal.get_ydata()) == {0.3} and goal.get_linewidth() < 1
    [band] = axes.patches
    assert band.get_bbox().y0 == 0.3 and band.get_bbox().y1 == axes.get_ylim()[1]


def test_the_days_have_one_scale():
    day = {"times": [0.0, 15.0], "rates": [8.0, 8.0], "waits": [0.0, 0.0], "late": 0.02, "replica_hours": 5.0}
    few, many = draw_day({"few": Day(**day, ready=[2, 3], flaps=1), "many": Day(**day, ready=[2, 90])}, 4.0).axes
    assert few.get_ylim() == many.get_ylim() and many.get_ylim()[1] > 90
    assert few.get_title("left") == "few: 2.0% late, 1 flap, 5 replica-hours"
    assert few.lines[0].get_ydata().tolist() == [2, 3]
