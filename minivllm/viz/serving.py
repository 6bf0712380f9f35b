"""What the users of a server waited, and when each of them came and went, from the times that a load generator noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from minivllm.viz.drawing import Box, add_bars, add_legend, look_patch, tidy
from minivllm.viz.latency import line_of, paint_waits
from minivllm.viz.palette import STATE_LOOKS, Look

WAITING = Look("until the first token", whiteness=0.45, height=0.3)
ANSWERED = Look("until the last", height=STATE_LOOKS["decode"].height)
WHOLE = Look("not streamed: until the answer", whiteness=0.45, height=0.6)
FAILED = Look("failed", whiteness=1.0, height=0.6, hatch="xxxxx", outlined=True)


class RequestTimes(NamedTuple):
    """When things happened to a request. Times in seconds.

    Attributes:
        start: When it was sent, since the first one was.
        ttft: From then to its first token; None if none came, or if that is not known.
        itls: Between a piece of its answer and the next one.
        end: When it ended, since the first request was sent.
        failed: Whether it failed; its waits are left out of the distributions.
    """

    start: float
    ttft: float | None
    itls: tuple[float, ...]
    end: float
    failed: bool = False


def draw_serving(runs: Mapping[str, Sequence[RequestTimes]], title: str = "") -> Figure:
    """The distributions of TTFT, ITL and end-to-end latency, a line for each run, and below all requests of each run over time.

    A point (x, y) of a distribution says that the share y of all waits was no longer than x.

    Args:
        runs: A name for each run, such as "static" and "continuous", at least one.
        title: Stands above the figure.
    """
    figure = Figure(figsize=(9, 3.9 + 2.4 * len(runs)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    grid = figure.add_gridspec(2 + len(runs), 3, height_ratios=(2.8, 0.3 + 0.2 * len(runs), *[2.0] * len(runs)))
    answered = [[request for request in requests if not request.failed] for requests in runs.values()]
    panels = {
        "time to first token (TTFT)": [[item.ttft for item in items if item.ttft is not None] for items in answered],
        "between tokens (ITL)": [[gap for item in items for gap in item.itls] for items in answered],
        "end-to-end latency": [[item.end - item.start for item in items] for items in answered],
    }
    for number, (name, seconds) in enumerate(panels.items()):
        curves = figure.add_subplot(grid[0, number])
        paint_waits(curves, figure.add_subplot(grid[1, number]), name, seconds)
        if number == 0:
            curves.set_ylabel("share of all, no longer than this")
    longest = max((request.end for requests in runs.values() for request in requests), default=0.0)
    for number, (name, requests) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[2 + number, :])
        _paint_requests(axes, requests, line_of(number))
        axes.set_title(name, loc="right", fontsize=9)
        axes.set_xlim(0, longest or 1.0)
    labels = [f"{name}: {_count(requests)}" for name, requests in runs.items()]
    figure.legend(
        [line_of(number) for number in range(len(runs))], labels, loc="outside upper center", frameon=False, fontsize=9,
        handlelength=3, title=title, title_fontsize=11,
    )  # fmt: skip
    return figure


def _paint_requests(axes: Axes, requests: Sequence[RequestTimes], line: Line2D) -> None:
    """A lane for each request, the earliest above."""
    boxes: dict[Look, list[Box]] = {WAITING: [], ANSWERED: [], WHOLE: [], FAILED: []}
    for lane, request in enumerate(sorted(requests, key=lambda request: request.start)):
        first = None if request.ttft is None else request.start + request.ttft
        if request.failed:
            parts = [(FAILED, request.start, request.end)]
        elif first is None:
            parts = [(WHOLE, request.start, request.end)]
        else:
            parts = [(WAITING, request.start, first), (ANSWERED, first, request.end)]
        for look, start, end in parts:
            boxes[look].append((start, end, lane - look.height / 2, lane + look.height / 2))
    color = str(line.get_color())
    for look, of_look in boxes.items():
        add_bars(axes, look, of_look, color, look.label, line_width=0.4)
    add_legend(axes, [look_patch(look, color) for look, of_look in boxes.items() if of_look])
    tidy(axes, "time (s)", "requests")
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _count(requests: Sequence[RequestTimes]) -> str:
    """How many requests are shown, and how many failed."""
    failed = sum(request.failed for request in requests)
    text = f"{len(requests)} request{'' if len(requests) == 1 else 's'}"
    return f"{text} ({failed} failed)" if failed else text
