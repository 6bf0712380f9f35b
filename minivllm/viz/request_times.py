"""When requests and their tokens arrive: the raw material of every latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minivllm.errors import ConfigError
from minivllm.viz.drawing import WIDTH, add_legend, tidy
from minivllm.viz.palette import INK, NEUTRAL, request_color, tint


class Timestamps(Protocol):
    """A request's raw timestamps, in seconds."""

    @property
    def arrival(self) -> float:
        """When its user sent it."""

    @property
    def started(self) -> float:
        """When its first step began."""

    @property
    def tokens(self) -> tuple[float, ...]:
        """When each of its tokens came."""


def draw_request_times(records: Sequence[Timestamps], names: Sequence[str]) -> Figure:
    """Draw each request from its arrival to its last token; TTFT, ITL and latency are labelled at the last request with two tokens.

    Args:
        records: The requests' timestamps.
        names: One for each.

    Raises:
        ConfigError: A name is missing, or a request has no token.
    """
    if len(names) != len(records) or not all(times.tokens for times in records):
        raise ConfigError(f"There are {len(records)} requests and {len(names)} names: each needs a name, and at least one token.")
    figure = Figure(figsize=(WIDTH, 1.3 + 0.55 * len(records)), layout="constrained")
    axes = figure.add_subplot()
    marked = max((i for i, times in enumerate(records) if len(times.tokens) > 1), default=None)
    for row, times in enumerate(records):
        color = request_color(row)
        first = times.tokens[0]
        axes.barh(
            row, times.started - times.arrival, left=times.arrival, height=0.16, color="white", edgecolor=INK, linewidth=0.6
        )
        axes.barh(
            row,
            first - times.started,
            left=times.started,
            height=0.4,
            color=tint(color, 0.6),
            edgecolor=INK,
            linewidth=0.4,
            hatch="////",
        )
        axes.barh(row, times.tokens[-1] - first, left=first, height=0.4, color=tint(color, 0.35))
        axes.plot(times.arrival, row, "v", color=INK, markersize=7, zorder=4)
        axes.vlines(times.tokens, row - 0.28, row + 0.28, color=color, linewidth=2.5, zorder=3)
        if row == marked:
            _bracket(axes, times.arrival, first, row + 0.45, "TTFT")
            _bracket(axes, times.tokens[0], times.tokens[1], row + 0.45, "ITL")
            _bracket(axes, times.arrival, times.tokens[-1], row + 0.95, "latency (end to end)")
    axes.set(yticks=range(len(records)), ylim=(len(records) + (0.45 if marked is not None else -0.4), -0.6))
    axes.set_yticklabels(names)
    tidy(axes, "time (s)", "")
    axes.set_xlim(left=min((times.arrival for times in records), default=0.0) - 0.01)
    add_legend(
        axes,
        [
            Line2D([], [], marker="v", color=INK, linestyle="none", label="sent by its user"),
            Patch(facecolor="white", edgecolor=INK, linewidth=0.6, label="waits"),
            Patch(facecolor=tint(NEUTRAL, 0.6), edgecolor=INK, linewidth=0.4, hatch="////", label="prompt is computed"),
            Line2D(
                [], [], marker="|", color=NEUTRAL, linestyle="none", markersize=10, markeredgewidth=2.5, label="a token comes"
            ),
        ],
    )
    return figure


def _bracket(axes: Axes, left: float, right: float, y: float, text: str) -> None:
    axes.annotate("", (right, y), (left, y), arrowprops={"arrowstyle": "|-|,widthA=0.2,widthB=0.2", "color": INK, "linewidth": 1})
    axes.text((left + right) / 2, y + 0.06, text, ha="center", va="top", fontsize=8)


def draw_arrivals(arrivals: Mapping[str, Sequence[float]], seconds: float) -> Figure:
    """Draw when requests arrive, a line of ticks for each kind of arrivals.

    Args:
        arrivals: A name for each, and its times in seconds.
        seconds: How much of it to draw.

    Raises:
        ConfigError: There are no arrivals, or no time.
    """
    if not arrivals or not 0 < seconds < math.inf:
        raise ConfigError(
            f"There are {len(arrivals)} kinds of arrivals and {seconds} seconds: give at least one kind, and a time above 0."
        )
    figure = Figure(figsize=(WIDTH, 0.6 + 0.5 * len(arrivals)), layout="constrained")
    axes = figure.add_subplot()
    for row, times in enumerate(arrivals.values()):
        shown = [time for time in times if 0 <= time <= seconds]
        axes.vlines(shown, row - 0.32, row + 0.32, color=request_color(row), linewidth=1.6)
    axes.set(yticks=range(len(arrivals)), ylim=(len(arrivals) - 0.5, -0.5), xlim=(0, seconds))
    axes.set_yticklabels(arrivals)
    tidy(axes, "time (s); each tick is a request that arrives", "")
    return figure
