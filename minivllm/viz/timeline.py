"""Who held which place in the batch, and when: static and continuous batching beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace import EngineTrace
from minivllm.viz.palette import ink_on, request_color


@dataclass(frozen=True)
class Stay:
    """A request's stay in the batch: its place, and the times at which it was prefilled and then decoded, in seconds."""

    request_id: str
    place: int
    start: float
    decode_start: float
    end: float


def find_stays(trace: EngineTrace) -> list[Stay]:
    """The stays that a trace tells of, from each request's first step to its last. Each takes the lowest free place."""
    first: dict[str, float] = {}
    decode_start: dict[str, float] = {}
    last: dict[str, float] = {}
    origin = trace[0].start if len(trace) else 0.0
    for step in trace:
        for part in step.scheduled:
            request_id = part.request_id
            first.setdefault(request_id, step.start - origin)
            if part.action == "prefill":
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


def draw_timelines(traces: dict[str, EngineTrace], title: str = "") -> Figure:
    """Places in the batch over time, one panel for each trace, all on one time axis.

    Args:
        traces: A name for each trace, such as "static" and "continuous".
        title: Stands above the figure.

    Returns:
        A figure. The light end of a bar is the prefill, the full colour the decoding; white is a place that stands empty.
    """
    figure = Figure(figsize=(9, 1.2 + 2.4 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        stays = find_stays(trace)
        numbers = {request_id: i for i, request_id in enumerate(sorted({s.request_id for s in stays}, key=_natural))}
        num_places = 1 + max(stay.place for stay in stays)
        end = max(stay.end for stay in stays)
        for stay in stays:
            color = request_color(numbers[stay.request_id])
            axis.barh(stay.place, stay.end - stay.start, left=stay.start, height=0.86, color=color)
            axis.barh(stay.place, stay.decode_start - stay.start, left=stay.start, height=0.86, color="white", alpha=0.55)
            if stay.end - stay.decode_start > 0.02 * end:
                middle = (stay.decode_start + stay.end) / 2
                axis.text(middle, stay.place, stay.request_id, ha="center", va="center", fontsize=6.5, color=ink_on(color))
        busy = sum(stay.end - stay.start for stay in stays) / (num_places * end)
        axis.axvline(end, color="black", linewidth=1, linestyle="--")
        axis.set_title(f"{name}: {len(stays)} requests in {end:.1f} s, {busy:.0%} of the places taken", loc="left", fontsize=10)
        axis.set_ylabel("place in the batch")
        axis.set_ylim(num_places - 0.5, -0.5)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time (s)")
    axes[-1].set_xlim(left=0)
    figure.suptitle(title, fontsize=11)
    return figure


def _natural(request_id: str) -> tuple[int, str]:
    """Sorts "2" before "10"."""
    return (int(request_id), "") if request_id.isdecimal() else (0, request_id)
