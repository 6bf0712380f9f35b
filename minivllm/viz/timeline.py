"""Requests over time: the state of each (`draw_requests`), and its seat in the batch (`draw_timelines`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace
from minivllm.viz.drawing import (
    Box,
    Labels,
    add_bars,
    add_legend,
    count_siblings,
    look_patch,
    new_figure,
    say,
    short_name,
    tidy,
)
from minivllm.viz.palette import NUM_COLORS, STATE_LOOKS, ink_on, request_color, request_colors
from minivllm.viz.spans import STATES, find_spans, sequence_keys

_MOST_NAMED_ROWS = 64


@dataclass(frozen=True)
class Stay:
    """A request's stay in the batch: its slot, and when its prefill and its decoding began and ended, in seconds."""

    request_id: str
    place: int
    start: float
    decode_start: float
    end: float


def find_stays(trace: EngineTrace) -> list[Stay]:
    """The stay of each request in the batch, from its first step to its last. Each takes the lowest free seat."""
    first: dict[str, float] = {}
    decode_start: dict[str, float] = {}
    decoding: set[str] = set()
    last: dict[str, float] = {}
    origin = trace[0].start if len(trace) else 0.0
    for step in trace:
        for part in step.scheduled:
            request_id = part.request_id
            first.setdefault(request_id, step.start - origin)
            if part.action == "decode":
                decoding.add(request_id)
            elif request_id not in decoding:  # recomputation after preemption is shown by draw_requests
                decode_start[request_id] = step.end - origin
            last[request_id] = step.end - origin
    stays: list[Stay] = []
    free_from: list[float] = []
    for request_id, start in sorted(first.items(), key=lambda item: item[1]):
        place = next((i for i, end in enumerate(free_from) if end <= start + 1e-9), len(free_from))
        if place == len(free_from):
            free_from.append(0.0)
        free_from[place] = last[request_id]
        stays.append(Stay(request_id, place, start, decode_start.get(request_id, start), last[request_id]))
    return stays


def draw_timelines(traces: dict[str, EngineTrace], title: str = "", *, share: bool = True) -> Figure:
    """Draw the seats of the batch over time, one panel per trace, on a shared time axis.

    Args:
        traces: A name for each trace, such as "static" and "continuous".
        title: Above the figure.
        share: Show above each panel the share of seats taken.

    Returns:
        A figure. The light start of a bar is prefill, the full colour decode; white is an empty seat. A request has the same colour in all
        panels; it is its colour in other figures, unless a neighbour has that too.
    """
    all_stays = {name: find_stays(trace) for name, trace in traces.items()}
    colors = _colors_apart(traces, all_stays)
    figure = Figure(figsize=(9, 1.2 + 2.4 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, traces, strict=True):
        stays = all_stays[name]
        num_places = 1 + max((stay.place for stay in stays), default=0)
        end = max((stay.end for stay in stays), default=0.0)
        for stay in stays:
            color = colors[stay.request_id]
            axis.barh(stay.place, stay.end - stay.start, left=stay.start, height=0.86, color=color)
            axis.barh(stay.place, stay.decode_start - stay.start, left=stay.start, height=0.86, color="white", alpha=0.55)
            if stay.end - stay.decode_start > 0.02 * end:
                middle = (stay.decode_start + stay.end) / 2
                axis.text(middle, stay.place, stay.request_id, ha="center", va="center", fontsize=6.5, color=ink_on(color))
        busy = sum(stay.end - stay.start for stay in stays) / (num_places * end) if stays else 0.0
        axis.axvline(end, color="black", linewidth=1, linestyle="--")
        text = f"{name}: {len(stays)} requests in {end:.1f} s" + (f", {busy:.0%} of the seats taken" if share else "")
        axis.set_title(text, loc="left", fontsize=10)
        axis.set_ylabel("seat in the batch")
        axis.set_ylim(num_places - 0.5, -0.5)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time (s)")
    axes[-1].set_xlim(left=0)
    figure.suptitle(title, fontsize=11)
    return figure


def _colors_apart(traces: Mapping[str, EngineTrace], all_stays: Mapping[str, list[Stay]]) -> dict[str, str]:
    """A colour for each request, so that bars that touch in a panel have different colours, as far as there are enough."""
    usual: dict[str, str] = {}
    for trace in traces.values():
        usual = request_colors(trace) | usual
    neighbours: dict[str, set[str]] = {request_id: set() for request_id in usual}
    for stays in all_stays.values():
        for one, other in find_neighbours(stays):
            neighbours[one].add(other)
            neighbours[other].add(one)
    colors: dict[str, str] = {}
    choice = [request_color(number) for number in range(NUM_COLORS)]
    for request_id, color in usual.items():
        taken = {colors[other] for other in neighbours[request_id] if other in colors}
        colors[request_id] = next((free for free in (color, *choice) if free not in taken), color)
    return colors


def find_neighbours(stays: list[Stay]) -> list[tuple[str, str]]:
    """The pairs of requests whose bars touch: one after the other in a seat, or at the same time in neighbouring seats."""
    places: dict[int, list[Stay]] = {}
    for stay in sorted(stays, key=lambda stay: stay.start):
        places.setdefault(stay.place, []).append(stay)
    pairs = []
    for place, row in places.items():
        pairs += [(before.request_id, after.request_id) for before, after in pairwise(row)]
        below, i = places.get(place + 1, []), 0
        for stay in row:
            while i < len(below) and below[i].end <= stay.start:
                i += 1
            for other in below[i:]:
                if other.start >= stay.end:
                    break
                pairs.append((stay.request_id, other.request_id))
    return pairs


def draw_requests(trace: EngineTrace, title: str = "") -> Figure:
    """Draw the state of each request over time, one row per request in order of arrival.

    Args:
        trace: Of any engine.
        title: Above the figure.

    Returns:
        A figure. Requests have the same colours as in other figures of the trace; states differ in height, lightness and hatching.
        The sequences of one request (`n` > 1) are stacked in its row. A cross marks a request that was aborted or failed.
    """
    keys = sequence_keys(trace)
    siblings = count_siblings(keys)
    num_rows = sum(max(1.0, count / 2) for count in siblings.values())
    longest = max((len(short_name(key.request_id)) for key in keys), default=0) if len(siblings) <= _MOST_NAMED_ROWS else 3
    height = min(0.95 + (0.2 if num_rows <= 30 else 0.13) * max(num_rows, 4), 9.0)
    figure = new_figure(height, title, left=0.4 + 0.075 * longest, top=0.3)
    paint_requests(figure.add_subplot(), trace)
    return figure


def paint_requests(axes: Axes, trace: EngineTrace) -> None:
    """Paint what `draw_requests` draws into given axes, with its legend above."""
    spans, colors = find_spans(trace), request_colors(trace)
    siblings = dict.fromkeys(colors, 1) | count_siblings(sequence_keys(trace))
    tops: dict[str, float] = {}
    top = 0.0
    for request_id in colors:
        tops[request_id] = top
        top += max(1.0, siblings[request_id] / 2)
    origin = time_origin(trace)
    boxes: dict[str, list[Box]] = {state: [] for state in STATES}
    box_colors: dict[str, list[str]] = {state: [] for state in STATES}
    for request_id, index, state, start, end in spans:
        count = siblings[request_id]
        lane = max(1.0, count / 2) / count
        middle = tops[request_id] + lane * (index + 0.5)
        half = lane * STATE_LOOKS[state].height / 2
        boxes[state].append((start - origin, end - origin, middle + half, middle - half))
        box_colors[state].append(colors[request_id])
    for state in STATES:
        add_bars(axes, STATE_LOOKS[state], boxes[state], box_colors[state], label=state)
    tidy(axes, "time (s)", "request")
    handles: list = [look_patch(STATE_LOOKS[state]) for state in STATES if boxes[state]]
    lost = [
        (request.finished_time - origin, tops[request.request_id] + max(1.0, siblings[request.request_id] / 2) / 2)
        for request in trace.requests.values()
        if request.finished_time is not None and {"abort", "error"} & set(request.finish_reasons)
    ]
    if lost:
        axes.plot(
            *zip(*lost, strict=True),
            "X",
            color="black",
            markeredgecolor="white",
            markersize=7,
            clip_on=False,
            label="aborted or failed",
        )
        handles.append(Line2D([], [], marker="X", color="black", linestyle="none", markersize=6, label="aborted or failed"))
    end = max((span.end for span in spans), default=origin) - origin
    axes.set_xlim(0.0, 1.01 * end or 1.0)
    axes.set_ylim(max(top, 1.0), 0.0)
    if len(tops) <= _MOST_NAMED_ROWS:
        middles = [tops[request_id] + max(1.0, siblings[request_id] / 2) / 2 for request_id in tops]
        names = [short_name(request_id) for request_id in tops]
        points = [(-0.006, middle) for middle in middles]
        size = 8.0 if len(tops) <= 30 else 6.5
        height = axes.bbox.height / axes.figure.dpi * 72
        every = max(1, ceil(1.1 * size * len(tops) / height))  # low axes have no room for every name
        axes.add_collection(
            Labels(axes, points[::every], names[::every], size, align=(1.0, 0.5), transform=axes.get_yaxis_transform()),
            autolim=False,
        )
        axes.set_yticks([])
        axes.yaxis.labelpad = 8 + 0.62 * size * max((len(name) for name in names), default=0)
    else:
        axes.set_ylabel("requests in the order of arrival (number)", fontsize=9)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    if not spans:
        say(axes, "no request")
    add_legend(axes, handles)
