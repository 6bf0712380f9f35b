"""How long the users of a server waited, and when each request ran, as a load generator measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.viz.drawing import Box, add_bars, add_legend, look_patch, tidy
from minivllm.viz.latency import line_of, paint_waits
from minivllm.viz.palette import INK, Look

WAITING = Look("until the first token", whiteness=0.6, height=0.8)
ANSWERED = Look("until the last", height=0.8)
WHOLE = Look("not streamed: until the answer", whiteness=0.45, height=0.8)


class TimedRequest(Protocol):
    """The times of a request in seconds, as in `minivllm.bench.summary.ServedRequest`.

    Attributes:
        start: When it was sent, counted from the first request.
        ttft: From `start` to its first token; None if no token came, or its time is not known.
        itls: From each piece of its answer to the next.
        end: When it ended, counted from the first request.
        error: Why it failed, None if it did not. Failed requests are left out of the distributions.
    """

    start: float
    ttft: float | None
    itls: Sequence[float]
    end: float
    error: str | None


def draw_serving(runs: Mapping[str, Sequence[TimedRequest]], title: str = "") -> Figure:
    """The distributions of TTFT, ITL and end-to-end latency, a line for each run, and below them all requests over time.

    All runs share one time axis, so that a run that takes ten times as long looks ten times as long.
    At a point (x, y) of a distribution, the share y of all waits was no longer than x.

    Args:
        runs: A name for each run, such as "static" and "continuous", at least one.
        title: Above the figure.
    """
    lanes = 1.8 if len(runs) == 1 else 0.55
    figure = Figure(figsize=(9, 2.75 + (0.37 + lanes) * len(runs)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.02)
    grid = figure.add_gridspec(2 + len(runs), 3, height_ratios=(1.4, 0.15 + 0.17 * len(runs), *[lanes] * len(runs)))
    answered = [[request for request in requests if request.error is None] for requests in runs.values()]
    panels = {
        "time to first token (TTFT)": [[item.ttft for item in items if item.ttft is not None] for items in answered],
        "between tokens (ITL)": [[gap for item in items for gap in item.itls] for items in answered],
        "end-to-end latency": [[item.end - item.start for item in items] for items in answered],
    }
    for number, (name, seconds) in enumerate(panels.items()):
        curves = figure.add_subplot(grid[0, number])
        paint_waits(curves, figure.add_subplot(grid[1, number]), name, seconds)
        if number == 0:
            curves.set_ylabel("share no longer than this", fontsize=9)
    durations = [max((request.end for request in requests), default=0.0) for requests in runs.values()]
    for number, ((name, requests), duration) in enumerate(zip(runs.items(), durations, strict=True)):
        axes = figure.add_subplot(grid[2 + number, :])
        _paint_requests(axes, requests, str(line_of(number).get_color()), with_legend=number == 0)
        axes.set_title(f"{name}: {duration:.1f} s in all", loc="right", fontsize=9, pad=2)
        axes.set_xlim(0, max(durations) or 1.0)
        if number < len(runs) - 1:
            axes.set_xlabel("")
            axes.set_xticklabels([])
    labels = [f"{name}: {_count(requests)}" for name, requests in runs.items()]
    figure.legend(
        [line_of(number) for number in range(len(runs))], labels, loc="outside upper center", frameon=False, fontsize=9,
        handlelength=3, title=title, title_fontsize=11, ncols=len(runs),
    )  # fmt: skip
    return figure


def _paint_requests(axes: Axes, requests: Sequence[TimedRequest], color: str, with_legend: bool) -> None:
    """A lane for each request, the earliest above."""
    boxes: dict[Look, list[Box]] = {WAITING: [], ANSWERED: [], WHOLE: []}
    failures = []
    for lane, request in enumerate(sorted(requests, key=lambda request: request.start)):
        first = request.end if request.ttft is None else request.start + request.ttft
        before = WHOLE if request.ttft is None and request.error is None else WAITING
        for look, start, end in ((before, request.start, first), (ANSWERED, first, request.end)):
            if end > start:
                boxes[look].append((start, end, lane - look.height / 2, lane + look.height / 2))
        if request.error is not None:
            failures.append((request.end, lane))
    for look, of_look in boxes.items():
        add_bars(axes, look, of_look, color, look.label)
    handles: list[Artist] = [look_patch(look) for look, of_look in boxes.items() if of_look]
    if failures:
        ends, lanes = zip(*failures, strict=True)
        handles += axes.plot(ends, lanes, "x", color=INK, markersize=5, label="failed", clip_on=False, zorder=4)
    if with_legend or failures:
        add_legend(axes, handles)
    tidy(axes, "time (s)", "requests")
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))


def _count(requests: Sequence[TimedRequest]) -> str:
    """How many requests are shown, and how many failed."""
    failed = sum(request.error is not None for request in requests)
    text = f"{len(requests)} request{'' if len(requests) == 1 else 's'}"
    return f"{text} ({failed} failed)" if failed else text
