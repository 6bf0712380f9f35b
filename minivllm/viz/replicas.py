"""Replicas behind a router: who is there, who waits for whom, where requests go, and streams that outlive the process that computes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from minivllm.viz.drawing import WIDTH
from minivllm.viz.engine_map import LAYERS
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS, request_color, tint

_TALKS, _DECIDES, _COMPUTES = LAYERS.values()
_SMALL = {"fontsize": 8, "color": INK, "ha": "center", "va": "center"}


def draw_service(num_replicas: int = 2, on_cluster: bool = False) -> Figure:
    """An API server, the coordinator, and replicas with three threads each: their queues, and what goes between them.

    With `on_cluster`, each replica is on a machine of its own, a node of a Ray cluster, beside the actor that has started it.
    """
    row = 1.95 if on_cluster else 1.35
    figure = Figure(figsize=(WIDTH, 1.5 + row * num_replicas), layout="constrained")
    axes = figure.add_subplot()
    top = row * num_replicas
    axes.set_xlim(-0.1, 11.7)
    axes.set_ylim(-1.3 if on_cluster else -1.1, top + 0.1)
    axes.axis("off")
    _box(axes, 0.1, 0.1, 2.5, top - 0.2, _TALKS, "API server")
    middle = top / 2
    _box(axes, 0.3, middle - 0.05, 2.1, 0.62, _TALKS, "router\nwho gets it?", small=True)
    _box(axes, 0.3, middle - 0.85, 2.1, 0.62, _TALKS, "requests in flight\nprompt, tokens so far", small=True)
    for number in range(num_replicas):
        y = top - row * (number + 1) + (row - 1.35)
        _draw_replica(axes, y, number, middle)
        if on_cluster:
            _draw_actor(axes, y, number)
    _box(axes, 5.0, -1.05, 2.6, 0.6, _DECIDES, "coordinator\nthe loads of all replicas", small=True)
    axes.annotate("", (7.65, -0.72), (10.9, row - 1.05), arrowprops=_arrow(_DECIDES, "--", "arc3,rad=-0.35"))
    axes.annotate("", (1.35, 0.07), (4.95, -0.75), arrowprops=_arrow(_DECIDES, "--", "arc3,rad=-0.25"))
    axes.text(9.9, -0.9, "loads of each replica,\nwhen they change", **{**_SMALL, "ha": "left"})
    axes.text(0.9, -0.9, "loads, at most every 0.1 s", **{**_SMALL, "ha": "left"})
    return figure


def _draw_actor(axes: Axes, y: float, number: int) -> None:
    """A machine around a replica, and the Ray actor there, which the API server has asked to start it."""
    node = FancyBboxPatch(
        (3.95, y - 0.48), 7.7, 1.8, "round,pad=0,rounding_size=0.1", fc="none", ec=PALE, linewidth=1.5, linestyle=(0, (4, 2))
    )
    axes.add_patch(node)
    axes.text(11.5, y - 0.24, f"node {number + 1}", **{**_SMALL, "ha": "right"})
    _box(axes, 4.2, y - 0.4, 3.4, 0.34, _DECIDES, "Ray actor: starts it, tells how it fares", small=True)
    axes.annotate("", (2.62, y - 0.23), (4.18, y - 0.23), arrowprops=_arrow(PALE, ":") | {"arrowstyle": "<|-|>"})


def _draw_replica(axes: Axes, y: float, number: int, middle: float) -> None:
    """A replica in its process: input thread, queue, main thread, queue, output thread."""
    _box(axes, 4.2, y + 0.1, 7.3, 1.15, _COMPUTES, f"replica {number}", pale=True)
    for x, width, label in (
        (4.35, 1.5, "input thread\nbytes → message"),
        (6.75, 2.2, "main thread\nengine core: step by step"),
        (9.85, 1.5, "output thread\nmessage → bytes"),
    ):
        _box(axes, x, y + 0.32, width, 0.58, _COMPUTES, label, small=True)
    for x in (5.95, 9.05):
        for i in range(3):
            axes.add_patch(
                FancyBboxPatch((x + 0.24 * i, y + 0.48), 0.18, 0.26, "round,pad=0,rounding_size=0.03", fc="white", ec=PALE)
            )
    axes.annotate("", (4.35, y + 0.61), (2.62, middle + 0.2), arrowprops=_arrow(INK))
    axes.plot((10.6, 10.6, 4.2), (y + 0.3, y + 0.19, y + 0.19), color=REQUEST_COLORS[5], linewidth=1.2)
    axes.annotate("", (2.62, middle - 0.45), (4.2, y + 0.19), arrowprops=_arrow(REQUEST_COLORS[5]))
    if number == 0:
        axes.text(3.35, y + 0.95, "requests", **_SMALL)
        axes.text(2.98, middle - 1.0, "tokens", **{**_SMALL, "color": REQUEST_COLORS[5]})


def _arrow(color: str, style: str = "-", way: str = "arc3") -> dict[str, object]:
    return {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "linestyle": style, "connectionstyle": way}


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    label: str,
    *,
    small: bool = False,
    pale: bool = False,
) -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, "round,pad=0,rounding_size=0.08", fc=tint(color, 0.93 if pale else 1.0), ec=color, linewidth=1.5
    )
    axes.add_patch(shape)
    if small:
        axes.text(x + width / 2, y + height / 2, label, **_SMALL, linespacing=1.3)
    else:
        axes.text(x + 0.12, y + height - 0.06, label, fontsize=10, weight="bold", color=color, va="top")


# -- threads ---------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Notes what each thread does, and when: `with watch("main thread", "step 1"): ...`.

    Attributes:
        spans: (row, number of the message, begin, end), in seconds since it was made.
    """

    spans: list[tuple[str, int, float, float]] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def __call__(self, row: str, number: int) -> Iterator[None]:
        """Note what the block does, in a row."""
        begin = time.perf_counter() - self.start
        yield
        with self._lock:
            self.spans.append((row, number, begin, time.perf_counter() - self.start))

    @property
    def seconds(self) -> float:
        """When the last thing ended."""
        return max(end for *_, end in self.spans)


def draw_threads(watches: Mapping[str, Watch], rows: Sequence[str]) -> Figure:
    """Draw who works when: a panel for each way, a row for each kind of work, and a colour for each round. Where a row is empty, it waits."""
    figure = Figure(figsize=(WIDTH, 0.7 + len(watches) * (0.5 + 0.32 * len(rows))), layout="constrained")
    all_axes = figure.subplots(len(watches), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, watch) in zip(all_axes, watches.items(), strict=True):
        for row, number, begin, end in watch.spans:
            axes.barh(
                len(rows) - 1 - rows.index(row),
                1000 * (end - begin),
                left=1000 * begin,
                height=0.7,
                color=request_color(number),
                edgecolor="white",
                linewidth=0.5,
            )
        axes.set_yticks(range(len(rows)), reversed(rows), fontsize=8)
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlim(0)
    all_axes[-1].set_xlabel("time (ms); a colour is one round", fontsize=9)
    return figure


# -- choices ---------------------------------------------------------------------------------------------------------


def draw_choices(times: Sequence[float], choices: Mapping[str, Sequence[int]], num_replicas: int, *, until: float) -> Figure:
    """Draw where each request goes, one panel for each router.

    Args:
        times: When each request arrives, in seconds.
        choices: By router: the replica of each request.
        until: Where the time axis ends.
    """
    figure = Figure(figsize=(WIDTH, 0.7 + len(choices) * (0.4 + 0.16 * num_replicas)), layout="constrained")
    all_axes = figure.subplots(len(choices), 1, sharex=True, squeeze=False)[:, 0]
    for i, (axes, (name, chosen)) in enumerate(zip(all_axes, choices.items(), strict=True)):
        shown = [(when - times[0], replica) for when, replica in zip(times, chosen, strict=True) if when - times[0] <= until]
        axes.plot(*zip(*shown, strict=True), "o", markersize=4, color=REQUEST_COLORS[(5, 0, 2)[i % 3]], clip_on=False)
        axes.set_ylim(num_replicas - 0.5, -0.5)
        axes.set_yticks(
            range(num_replicas), [str(number) if number % 2 == 0 else "" for number in range(num_replicas)], fontsize=8
        )
        axes.set_ylabel("replica", fontsize=9)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlim(0, until)
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("time (s); each dot is a request", fontsize=9)
    return figure


# -- streams ---------------------------------------------------------------------------------------------------------


def draw_streams(
    events: Sequence[tuple[float, str]], killed: float, moved: Collection[str], *, before: float = 0.6, after: float = 1.2
) -> Figure:
    """Draw the tokens of streams around the moment in which a replica is killed.

    Args:
        events: (when, which stream), in seconds.
        killed: When it was killed.
        moved: The streams that it had.
        before, after: How many seconds to show; more where a stream pauses for longer.
    """
    names = sorted({name for _, name in events}, key=lambda name: (name in moved, name))
    pause = tint(PALE, 0.4)
    figure = Figure(figsize=(WIDTH, 0.9 + 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for row, name in enumerate(names):
        times = [when - killed for when, other in events if other == name]
        color = request_color(int(name.lstrip("r")))
        gaps = list(pairwise([0.0, *(t for t in times if t > 0)]))  # the first may end with a token that was on its way
        if name in moved and gaps:
            widest = max(end - begin for begin, end in gaps)
            following = next(end for begin, end in gaps if end - begin > widest / 2)
            after = max(after, following + 0.3)
            axes.barh(row, following, height=0.62, color=pause, zorder=1)
        axes.plot(times, [row] * len(times), "|", color=color, markersize=11, markeredgewidth=1.6, zorder=2)
    axes.axvline(0, color=INK, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.text(0.012, len(names) - 0.35, "SIGKILL", fontsize=8, color=INK, va="bottom")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(-0.6, len(names) + 0.15)
    axes.set_xlim(-before, after)
    axes.set_xlabel("time since the kill (s); each stroke is a token", fontsize=9)
    axes.set_ylabel("stream", fontsize=9)
    label = "its replica is dead: the prompt and the output so far are computed again elsewhere"
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1.16)}
    axes.legend(handles=[Patch(color=pause, label=label)], fontsize=8, frameon=False, **place)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
