"""Figures for planning: the load of a trace over time, measured steps beside their prices, plans by price and wait, and an autoscaler's day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from minivllm.viz.drawing import WIDTH, tidy
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS

if TYPE_CHECKING:
    from minivllm.course.lessons.lesson_15.days import Day


def draw_loads(traces: Mapping[str, Sequence[float]], window: float, y_label: str) -> Figure:
    """The load of traces over time, a panel for each, with its mean and the p99 of its windows.

    Args:
        traces: By name, the load in each window.
        window: Its length in seconds.
        y_label: What the load is, with its unit.
    """
    figure = Figure(figsize=(WIDTH, 0.5 + 1.8 * len(traces)), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(len(traces), 1, squeeze=False)[:, 0], traces.items(), strict=True):
        times = [number * window / 60 for number in range(len(values))]
        axes.bar(times, values, width=window / 60, align="edge", color=REQUEST_COLORS[4], linewidth=0)
        mean, busy = sum(values) / len(values), sorted(values)[-(-99 * len(values) // 100) - 1]
        for height, label, style in ((mean, "mean", "-"), (busy, "p99 of the windows", "--")):
            axes.axhline(height, color=INK, linewidth=1.2, linestyle=style, label=f"{label}: {height:,.0f}")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlim(0, len(values) * window / 60)
        tidy(axes, "minutes", y_label)
        axes.legend(fontsize=8, frameon=True, facecolor="white", framealpha=0.85, edgecolor="none", loc="upper right", ncols=2)
        axes.set_ylim(0, max(values) * 1.25)
    return figure


def draw_fit(groups: Mapping[str, Sequence[tuple[float, float]]], dropped: Sequence[tuple[float, float]] = ()) -> Figure:
    """Steps as measured, over what they should take: on the diagonal they agree.

    Args:
        groups: By name, pairs of the predicted and the measured seconds of a step.
        dropped: Such pairs of the steps that the fit left out, drawn hollow.
    """
    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    axes = figure.subplots()
    everything = [1000 * seconds for points in (*groups.values(), dropped) for pair in points for seconds in pair]
    ends = [min(everything) / 1.15, max(everything) * 1.15]
    axes.plot(ends, ends, color=INK, linewidth=1, label="as predicted")
    for number, (name, points) in enumerate(groups.items()):
        color, marker = REQUEST_COLORS[number], "os^x"[number % 4]
        predicted, measured = ([1000 * pair[i] for pair in points] for i in (0, 1))
        axes.scatter(predicted, measured, s=14, color=color, marker=marker, alpha=0.6, linewidth=0.8, label=name)
    if dropped:
        predicted, measured = ([1000 * pair[i] for pair in dropped] for i in (0, 1))
        axes.scatter(predicted, measured, s=14, facecolors="none", edgecolors=INK, linewidth=0.7, label="left out of the fit")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
    tidy(axes, "predicted (ms)", "measured (ms)")
    axes.tick_params(which="minor", labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    return figure


def draw_front(plans: Mapping[str, Sequence[tuple[float, float]]], goal: float | None = None, unit: str = "$ an hour") -> Figure:
    """Plans by price and wait, and the front: the plans that no other plan beats in both.

    Args:
        plans: By the kind of machine, pairs of the price and the wait in seconds.
        goal: The longest wait that is promised, in seconds. What waits longer is shaded.
        unit: Of the price, and what is in it.
    """
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(plans.items()):
        axes.scatter(
            [price for price, _ in points],
            [wait for _, wait in points],
            color=REQUEST_COLORS[number],
            marker="os^D"[number % 4],
            s=26,
            label=name,
        )
    front: list[tuple[float, float]] = []
    for price, wait in sorted(point for points in plans.values() for point in points):
        if not front or wait < front[-1][1]:
            front.append((price, wait))
    axes.step(
        [price for price, _ in front],
        [wait for _, wait in front],
        where="post",
        color=INK,
        linewidth=1.2,
        label="nothing cheaper is as fast",
    )
    axes.set_yscale("log")
    if goal is not None:
        axes.axhline(goal, color=INK, linewidth=0.8, linestyle="--", zorder=0, label=f"goal: {goal:g} s at most")
        top = axes.get_ylim()[1]
        axes.axhspan(goal, top, color=PALE, alpha=0.25, linewidth=0, zorder=0)
        axes.set_ylim(top=top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axes.set_xlim(left=0)
    tidy(axes, f"price of the fleet ({unit})", "TTFT p99 (s)")
    axes.tick_params(which="minor", labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    return figure


def draw_day(days: Mapping[str, Day], per_replica: float) -> Figure:
    """The replicas that were ready over a day, over what the traffic took: a panel for each autoscaler.

    Args:
        days: By the autoscaler's name.
        per_replica: Requests a second that a replica shall answer.
    """
    figure = Figure(figsize=(WIDTH, 0.4 + 1.9 * len(days)), layout="constrained")
    all_axes = figure.subplots(len(days), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, day) in zip(all_axes, days.items(), strict=True):
        hours = [moment / 3600 for moment in day.times]
        axes.fill_between(hours, [rate / per_replica for rate in day.rates], color=PALE, linewidth=0, label="needed")
        axes.step(hours, day.ready, where="post", color=REQUEST_COLORS[0], linewidth=1.3, label="ready")
        said = f"{name}: {day.late:.1%} late, {day.flaps} {'flap' if day.flaps == 1 else 'flaps'}, {day.replica_hours:,.0f} replica-hours"
        axes.set_title(said, loc="left", fontsize=10)
        axes.set_xlim(0, 24)
        axes.xaxis.set_major_locator(MultipleLocator(3))
        tidy(axes, "", "replicas")
    all_axes[0].set_ylim(bottom=0)  # after all lines: it ends the search for the shared axis's limits
    all_axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    all_axes[-1].set_xlabel("hour of the day", fontsize=9)
    return figure
