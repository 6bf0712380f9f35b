"""The figures of rows show the parts that they are given."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from minivllm.viz.rows import LOOKS, draw_rows, draw_slots


def lines_of(axes):
    found = [collection for collection in axes.collections if isinstance(collection, LineCollection)]
    return [segment.tolist() for collection in found for segment in collection.get_segments()]


def boxes_of(axes, label):
    """The boxes of one kind, as (left, right) and the row's number."""
    found = [collection for collection in axes.collections if collection.get_label() == label]
    paths = [path for collection in found for path in collection.get_paths()]
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max(), round(float(path.vertices[:-1, 1].mean()))) for path in paths]


def test_parts_of_a_row_follow_each_other():
    figure = draw_rows([[("padding", 2), ("prompt", 3)], [("prompt", 4), ("answer", 0)]], "columns", "text", names=["a", "b"])
    [axes] = figure.axes
    assert boxes_of(axes, "padding") == [(0, 2, 0)]
    assert boxes_of(axes, "prompt") == [(2, 5, 0), (0, 4, 1)]
    assert boxes_of(axes, "answer") == []
    assert axes.get_xlim() == (0, 5)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("columns", "text")


def test_what_is_in_no_row_is_not_in_the_legend():
    figure = draw_rows([[("prompt", 3)], [("answer", 2)]], "columns", "text")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["prompt", "answer"]


def test_looks_that_occur_together_differ_without_colour():
    together = [
        ("prompt", "answer", "padding", "done, and waiting", "reserved, never used"),
        ("in use", "new in this step", "reserved"),
    ]
    together += [("weights", "a text", "too little for one more"), ("a text", "free")]
    for kinds in together:
        grey = {
            kind: 255 * sum(part * weight for part, weight in zip(to_rgb(LOOKS[kind][0]), (0.3, 0.59, 0.11), strict=True))
            for kind in kinds
        }
        looks = sorted((LOOKS[kind][1] or "", grey[kind]) for kind in kinds)
        for (hatch, one), (other_hatch, other) in pairwise(looks):
            assert hatch != other_hatch or abs(one - other) > 40, kinds


def test_slots_fill_up_step_by_step():
    figure = draw_slots([{0: 4}, {0: 5, 1: 2}, {1: 3}], num_rows=2, max_len=10)
    [axes] = figure.axes
    assert [(left, right) for left, right, _ in boxes_of(axes, "in use")] == [(0, 1), (1, 2), (1, 2), (2, 3)]
    assert len(boxes_of(axes, "reserved")) == 2
    assert axes.get_xlim() == (0, 3)
    assert not lines_of(axes)


def test_a_line_shows_where_a_row_was_handed_on():
    figure = draw_slots(
        [{0: 4, 1: 4}, {0: 5, 1: 5}, {0: 5}, {0: 6, 1: 3}], num_rows=2, max_len=10, begun=[{0, 1}, set(), {0}, {1}]
    )
    assert lines_of(figure.axes[0]) == [[[2, 0.1], [2, 0.9]], [[3, 1.1], [3, 1.9]]]


def test_a_run_without_steps_is_drawn_too():
    assert draw_slots([], num_rows=1, max_len=4).axes[0].get_xlim() == (0, 1)
