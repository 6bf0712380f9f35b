"""The picture of what a server's users waited."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from minivllm.bench.summary import ServedRequest
from minivllm.viz.serving import ANSWERED, WAITING, WHOLE, draw_serving

ANSWERED_ONE = ServedRequest(4, 3, start=1.0, end=4.0, ttft=1.0, itls=[0.5, 1.5], output_tokens=3)
FAILED_ONE = ServedRequest(4, 3, start=0.0, end=0.5, error="status 429")
WHOLE_ONE = ServedRequest(4, 3, start=2.0, end=3.0, output_tokens=3)


def boxes(axes, label: str) -> list[tuple[float, float]]:
    """Left and right of the boxes of a look."""
    [collection] = [collection for collection in axes.collections if collection.get_label() == label]
    corners = [path.vertices for path in collection.get_paths()]
    return [(corner[:, 0].min(), corner[:, 0].max()) for corner in corners]


def test_each_request_is_a_lane_that_shows_when_its_first_token_came():
    figure = draw_serving({"poisson": [ANSWERED_ONE, FAILED_ONE, WHOLE_ONE]}, "a server")
    lanes = figure.axes[-1]
    assert lanes.get_title(loc="right") == "poisson: 4.0 s in all" and lanes.get_xlabel() == "time (s)"
    assert boxes(lanes, WAITING.label) == [(0.0, 0.5), (1.0, 2.0)]
    assert boxes(lanes, ANSWERED.label) == [(2.0, 4.0)]
    assert boxes(lanes, WHOLE.label) == [(2.0, 3.0)]
    [failures] = [line for line in lanes.lines if line.get_label() == "failed"]
    assert failures.get_xydata().tolist() == [[0.5, 0]]


def test_waits_of_failed_requests_are_left_out():
    figure = draw_serving({"poisson": [ANSWERED_ONE, FAILED_ONE]})
    latency = figure.axes[4]
    assert latency.get_xlabel() == "end-to-end latency, s"
    assert set(np.concatenate([line.get_xdata() for line in latency.lines])) == {3.0}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["poisson: 2 requests (1 failed)"]


@pytest.mark.parametrize("requests", [[], [FAILED_ONE], [WHOLE_ONE]])
def test_runs_with_little_to_show_are_drawn_too(requests):
    figure = draw_serving({"one": requests, "other": [ANSWERED_ONE]})
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 8, "three kinds of waits with their percentiles, and the lanes of two runs"
