"""Two ways of batching, side by side and moment by moment: which request has which seat, which wait, and which seats are empty for no reason."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.bench.trace_summary import is_complete, output_times, time_origin
from minivllm.config import check_at_least
from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.errors import ConfigError
from minivllm.viz.drawing import WIDTH, add_boxes
from minivllm.viz.notebook import to_png
from minivllm.viz.palette import INK, PALE, ink_on, request_colors, tint
from minivllm.viz.player import make_player
from minivllm.viz.timeline import Stay, find_stays

if TYPE_CHECKING:
    from ipywidgets import VBox

_MOST_SQUARES = 40
"""Waiting requests beyond this are only counted."""


@dataclass(frozen=True)
class _Runner:
    """A request of a run, in seconds since the run began.

    Attributes:
        request_id: Its id.
        arrival: When it came.
        stay: Its stay in the batch; None if it never ran.
        end: When it ended, if it did.
        answered: Whether it ended with an answer, not aborted.
        tokens: When its tokens came.
    """

    request_id: str
    arrival: float
    stay: Stay | None
    end: float
    answered: bool
    tokens: tuple[float, ...]


def play_race(traces: Mapping[str, EngineTrace], num_moments: int = 80, moment: int = 0) -> VBox:
    """Controls above the picture of a moment, the same for all runs. `draw_race(traces, seconds)` draws any of them as a figure.

    Args:
        traces: A name for each run. One sequence per request.
        num_moments: How many pictures, evenly spaced over the longest run.
        moment: The first one shown.

    Raises:
        WidgetError: ipywidgets is not installed.
        ConfigError: There is no run, one of them has no step, or num_moments is less than 1.
    """
    check_at_least("num_moments", num_moments, 1)
    end = _end_of(traces)
    png = lru_cache(maxsize=num_moments)(lambda number: to_png(draw_race(traces, end * number / max(1, num_moments - 1))))
    sentence = f"A player of {num_moments} moments; `draw_race(traces, seconds)` draws any of them as a figure."
    return make_player(num_moments, png, moment, sentence, "There is only one moment:", name="moment")


def draw_race(traces: Mapping[str, EngineTrace], seconds: float) -> Figure:
    """Draw a moment of some runs: a panel for each.

    A row is a seat in the batch. Its bar is as long as the answer of the request in it, and filled as far as the answer has
    progressed. A hatched seat is empty although requests wait. Below are the waiting requests, a square for each.

    Args:
        traces: A name for each run. One sequence per request.
        seconds: Since the first request arrived.

    Raises:
        ConfigError: There is no run, or one of them has no step.
    """
    _end_of(traces)
    if not math.isfinite(seconds):
        raise ConfigError(f"seconds is {seconds}, but must be a moment.")
    runners = {name: _find_runners(trace) for name, trace in traces.items()}
    seats = {name: 1 + max(runner.stay.place for runner in found if runner.stay) for name, found in runners.items()}
    num_seats, longest = max(seats.values()), max(1, *(len(runner.tokens) for found in runners.values() for runner in found))
    figure = Figure(figsize=(WIDTH, 1.15 + 0.27 * num_seats), layout="constrained")
    for axes, (name, trace) in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces.items(), strict=True):
        _paint(axes, name, runners[name], request_colors(trace), seconds, (seats[name], num_seats), longest)
    handles = [
        Patch(facecolor=tint(INK, 0.3), label="tokens so far"),
        Patch(facecolor=tint(INK, 0.85), label="tokens to come"),
        Patch(facecolor="white", edgecolor=INK, hatch="/////", linewidth=0.5, label="empty, though requests wait"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _end_of(traces: Mapping[str, EngineTrace]) -> float:
    """When the longest run ends, in seconds since its own beginning."""
    ends = [trace[-1].end - time_origin(trace) for trace in traces.values() if len(trace)]
    if not ends or len(ends) < len(traces):
        raise ConfigError("A race needs runs that have steps.")
    return max(ends)


def _find_runners(trace: EngineTrace) -> list[_Runner]:
    times, origin = output_times(trace), time_origin(trace)
    shift = trace[0].start - origin  # a stay's times begin with the first step
    stays = {stay.request_id: stay for stay in find_stays(trace)}
    found = []
    for request_id, request in trace.requests.items():
        stay = stays.get(request_id)
        if stay is not None:
            stay = Stay(request_id, stay.place, stay.start + shift, stay.decode_start + shift, stay.end + shift)
        end = math.inf if request.finished_time is None else request.finished_time - origin
        tokens = tuple(time - origin for time in times.get(SequenceKey(request_id, 0), []))
        found.append(_Runner(request_id, request.arrival_time - origin, stay, end, is_complete(request), tokens))
    return found


def _paint(
    axes: Axes,
    name: str,
    runners: list[_Runner],
    colors: Mapping[str, str],
    seconds: float,
    seats: tuple[int, int],
    longest: int,
) -> None:
    own_seats, num_seats = seats
    seated = [
        (runner, runner.stay)
        for runner in runners
        if runner.stay and runner.stay.start <= seconds < min(runner.stay.end, runner.end)
    ]
    waiting = [
        runner
        for runner in runners
        if runner.arrival <= seconds < runner.end and (runner.stay is None or seconds < runner.stay.start)
    ]
    num_done = sum(runner.answered and runner.end <= seconds for runner in runners)
    taken = {stay.place for _, stay in seated}
    for runner, stay in seated:
        place, color = stay.place, colors[runner.request_id]
        done = bisect_right(runner.tokens, seconds)
        add_boxes(axes, [(0, len(runner.tokens), place + 0.4, place - 0.4)], tint(color, 0.75))
        add_boxes(axes, [(0, done, place + 0.4, place - 0.4)], color)
        ink = ink_on(color) if done > 0.08 * longest else "black"
        axes.text(0.01 * longest, place, runner.request_id, va="center", fontsize=7.5, color=ink)
    empty = [(0, longest, place + 0.4, place - 0.4) for place in range(own_seats) if place not in taken]
    if waiting:
        add_boxes(axes, empty, "white", edge=INK, line_width=0.5, hatch="/////")
    else:
        add_boxes(axes, empty, "white", edge=PALE, line_width=0.5)
    width = longest / _MOST_SQUARES
    squares = waiting[:_MOST_SQUARES]
    boxes = [(i * width, (i + 0.85) * width, num_seats + 0.95, num_seats + 0.45) for i in range(len(squares))]
    add_boxes(axes, boxes, [colors[runner.request_id] for runner in squares])
    axes.set(xlim=(0, longest), ylim=(num_seats + 1.1, -0.6))
    axes.set_yticks([*range(num_seats), num_seats + 0.7], [*map(str, range(num_seats)), f"{len(waiting)} wait"])
    axes.set_title(f"{name}: {num_done} of {len(runners)} answered after {seconds:.2f} s", loc="left", fontsize=10)
    axes.set_xlabel("tokens of the answer", fontsize=9)
    axes.set_ylabel("seat in the batch", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
