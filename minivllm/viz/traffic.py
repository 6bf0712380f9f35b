"""What happens around the engine: an event loop that is held up, a request's life, slow readers, hang-ups, and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from minivllm.viz.drawing import WIDTH, tidy
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS

Points = Sequence[tuple[float, float]]
"""Pairs of a time in seconds and a value, in order of time."""


def draw_lateness(runs: Mapping[str, Points]) -> Figure:
    """How late a timer went off that should have done so every few milliseconds: a panel for each run, with the same axes.

    Args:
        runs: A name for each run; its values are in milliseconds.
    """
    figure = Figure(figsize=(WIDTH, 0.6 + 1.35 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, points) in zip(panels, runs.items(), strict=True):
        axes.vlines([time for time, _ in points], 0, [late for _, late in points], color=REQUEST_COLORS[0], linewidth=1.5)
        axes.set_title(f"{name}: at most {max(late for _, late in points):,.1f} ms late", loc="left", fontsize=10)
        tidy(axes, "", "late (ms)")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    panels[-1].set_xlabel("time (s)", fontsize=9)
    return figure


def draw_life(parts: Sequence[tuple[str, str, float]]) -> Figure:
    """The parts of a request's life, from the top, by how long each took, on a logarithmic axis.

    Args:
        parts: What it is, where it happens, and how long it takes, in seconds.
    """
    places = list(dict.fromkeys(place for _, place, _ in parts))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.32 * len(parts)), layout="constrained")
    axes = figure.subplots()
    shortest = min(seconds for _, _, seconds in parts) * 1000
    for place in places:
        rows = [(number, 1000 * seconds) for number, (_, other, seconds) in enumerate(parts) if other == place]
        color = REQUEST_COLORS[places.index(place)]
        axes.barh(
            [row for row, _ in rows],
            [length for _, length in rows],
            color=color,
            height=0.7,
            edgecolor=INK,
            linewidth=0.5,
            label=place,
        )
        for row, length in rows:
            axes.annotate(
                f"{length:,.3g} ms", (length, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
            )
    axes.set(xscale="log", ylim=(len(parts) - 0.5, -0.5), yticks=range(len(parts)))
    axes.set_xlim(shortest / 3, max(seconds for _, _, seconds in parts) * 4000)
    axes.set_yticklabels([name for name, _, _ in parts])
    tidy(axes, "time it takes (ms)", "")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(places), fontsize=8, frameon=False)
    return figure


def draw_steps(curves: Mapping[str, Points], y_label: str) -> Figure:
    """Values that change at moments and stay until the next: a line for each curve.

    Args:
        curves: A name for each curve.
        y_label: What the values are, with their unit.
    """
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    dashes = ("solid", (0, (5, 2)), (0, (1, 1.5)))
    for number, (name, points) in enumerate(curves.items()):
        times, values = zip(*points, strict=True)
        axes.step(
            times, values, where="post", color=REQUEST_COLORS[number], linestyle=dashes[number % 3], linewidth=1.8, label=name
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    tidy(axes, "time (s)", y_label)
    axes.legend(fontsize=8, frameon=False)
    return figure


def draw_knee(
    rates: Sequence[float],
    waits: Mapping[str, Sequence[float]],
    capacity: float,
    answered: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """How long users wait, by how many come: a line for each kind of wait, on a logarithmic axis.

    Args:
        rates: Requests per second.
        waits: For each kind, its seconds at each rate.
        capacity: The rate that was predicted as the most the engine can serve.
        answered: Requests per second that were answered at each rate, such as all and those that met their goals: a panel beside it.
    """
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes, *beside = figure.subplots(1, 1 if answered is None else 2, squeeze=False)[0]
    for number, (name, seconds) in enumerate(waits.items()):
        marker, color = "os^"[number % 3], REQUEST_COLORS[number]
        axes.plot(rates, [1000 * second for second in seconds], color=color, marker=marker, linewidth=1.8, label=name)
    axes.axvline(capacity, color=PALE, linewidth=6, alpha=0.6, label="predicted capacity", zorder=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    tidy(axes, "offered load (requests per second)", "wait (ms)")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    for other in beside:
        assert answered is not None
        for number, (name, values) in enumerate(answered.items()):
            look = {"marker": "os^"[number % 3], "color": REQUEST_COLORS[len(waits) + number], "linewidth": 1.8}
            other.plot(rates, values, label=name, **look)
        other.axvline(capacity, color=PALE, linewidth=6, alpha=0.6, zorder=0)
        other.set_xlim(left=0)
        other.set_ylim(bottom=0)
        tidy(other, "offered load (requests per second)", "requests per second")
        other.legend(fontsize=8, frameon=False, loc="upper left")
    return figure
