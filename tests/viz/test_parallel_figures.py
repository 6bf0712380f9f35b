"""The figures of work divided among devices: the numbers, ranks, messages and idle times that they are given are what they show."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
import numpy as np
from matplotlib.colors import to_hex

from minivllm.viz.palette import REQUEST_COLORS, tint
from minivllm.viz.parallel import (
    Matrix,
    Transfer,
    draw_equations,
    draw_fit,
    draw_limits,
    draw_pipeline,
    draw_step_times,
    draw_transfers,
)


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def labels(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_matrices_show_their_numbers_in_the_colours_of_their_ranks():
    columns = Matrix("W", [[1, 2], [3, 4], [5, 6]], [0, 1])
    rows = Matrix("W", [[1, 2], [3, 4]], [0, 1], by="rows")
    colors = [tint(color, 0.45) for color in REQUEST_COLORS[:2]]
    assert [columns.color(2, column) for column in (0, 1)] == colors == [rows.color(row, 1) for row in (0, 1)]
    figure = draw_equations([[Matrix("x", [[7, 8]]), "×", columns], [rows, "=", rows]])
    shown = [text for drawn in figure.axes[0].collections for text in getattr(drawn, "texts", ())]
    assert shown == ["7", "8", "1", "2", "3", "4", "5", "6", *"1234", *"1234"]
    assert labels(figure) == ["rank 0", "rank 1"]


def test_a_figure_without_ranks_has_no_legend():
    assert draw_equations([[Matrix("x", [[1]])]]).axes[0].get_legend() is None


def test_transfers_count_rounds_and_what_the_busiest_sends():
    ring = [Transfer(k, rank, (rank + 1) % 3, 10) for k in range(4) for rank in range(3)]
    figure = draw_transfers({"direct": [Transfer(0, 0, 1, 30)], "ring": ring}, 30)
    assert titles(figure) == [
        "direct\n1 round; the busiest sends 1 tensors",
        "ring\n4 rounds; the busiest sends 1.33 tensors",
    ]


def test_a_fit_is_the_line_it_is_said_to_be():
    figure = draw_fit([1e3, 1e6], [2e-6, 1e-4], 2e-6, 1e10)
    line, measured = figure.axes[0].lines[0], figure.axes[0].lines[-1]
    assert np.allclose(line.get_ydata()[[0, -1]], [2.1, 102])
    assert np.allclose(measured.get_ydata(), [2, 100])


def test_a_pipeline_is_idle_while_it_fills_and_empties():
    assert titles(draw_pipeline(4, (1, 4, 16))) == ["1 batch: 75% idle", "4 batches: 43% idle", "16 batches: 16% idle"]
    boxes = draw_pipeline(2, (3,)).axes[0].collections[0].get_paths()
    assert sorted((path.vertices[:, 0].min(), path.vertices[:, 1].mean().round()) for path in boxes) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 1),
    ]


def test_step_times_have_one_colour_for_each_number_of_ranks():
    figure = draw_step_times([1, 2], {"2 ranks": [0.02, 0.03]}, {"1 rank": [0.04, 0.05], "2 ranks": [0.021, 0.029]})
    assert labels(figure) == ["1 rank, measured", "2 ranks, predicted", "2 ranks, measured"]
    one, predicted, measured = figure.axes[0].lines
    assert to_hex(predicted.get_color()) == to_hex(measured.get_color()) != to_hex(one.get_color())
    assert np.allclose(one.get_ydata(), [40, 50])


def test_limits_below_zero_are_seen_and_each_wire_is_named():
    axes = draw_limits([1, 2, 4], [-20, 5, 130], [10, 200]).axes[0]
    assert np.allclose(axes.lines[-1].get_ydata(), [-20, 5, 130])
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] < -20
    assert [(text.get_text(), text.xy[1]) for text in axes.texts] == [("10 µs", 10), ("200 µs", 200)]
