"""A whole run in one picture: its numbers, its requests over time, and its queues over time."""

from __future__ import annotations

from matplotlib.figure import Figure

from minivllm.bench.trace_summary import summarize_trace
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.viz.curves import paint_curves
from minivllm.viz.drawing import WIDTH
from minivllm.viz.timeline import paint_requests


def draw_run(trace: EngineTrace) -> Figure:
    """A whole run: its numbers, the requests over time, and the queues over time. The knobs redraw this picture.

    Raises:
        ConfigError: No request of the trace has finished.
    """
    summary = summarize_trace(trace)
    if not summary.completed:
        raise ConfigError("No request of this trace has finished, so there is nothing to summarize.")
    figure = Figure(figsize=(WIDTH, 6.0))
    figure.text(0.02, 0.98, str(summary), fontsize=9.5, weight="bold", va="top")
    requests, queues, cache = (
        figure.add_axes((0.085, bottom, 0.895, height)) for bottom, height in ((0.475, 0.405), (0.275, 0.115), (0.075, 0.115))
    )
    paint_requests(requests, trace)
    paint_curves(queues, cache, trace)
    for axes in (requests, queues):
        axes.set_xlabel("")
    return figure
