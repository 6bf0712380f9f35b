"""Figures that compare policies: curves over a setting, the work in each step, and the waiting times of requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minivllm.bench.trace_summary import request_latencies
from minivllm.engine.trace import EngineTrace
from minivllm.viz.drawing import WIDTH
from minivllm.viz.latency import LINE_STYLES
from minivllm.viz.palette import REQUEST_COLORS

Lines = Mapping[str, Sequence[float]]
_LINE_COLORS = (REQUEST_COLORS[0], REQUEST_COLORS[5], REQUEST_COLORS[2])
_ACTIONS = {"decode": REQUEST_COLORS[0], "prefill": REQUEST_COLORS[1]}


def draw_panels(
    x: Sequence[float], panels: Mapping[str, Sequence[float] | Lines], x_label: str, *, log: bool | Collection[str] = False
) -> Figure:
    """Draw quantities over a setting, a panel for each.

    Args:
        x: The setting's values, all positive. Their axis is logarithmic.
        panels: By name and unit of the quantity, its values, or several lines of values by name.
        x_label: Name and unit of the setting.
        log: Whether the value axis is logarithmic too, or for which panels; if not, it starts at 0.
    """
    figure = Figure(figsize=(min(WIDTH, 5.0 * len(panels)), 2.9), layout="constrained")
    for axes, (label, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        lines = values if isinstance(values, Mapping) else {"": values}
        for i, (name, line) in enumerate(lines.items()):
            axes.plot(x, line, marker="os^"[i % 3], color=_LINE_COLORS[i % 3], linestyle=LINE_STYLES[i % 3], label=name)
        axes.set_xscale("log")
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.minorticks_off()
        if log is True or (log and label in log):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label, fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    return figure


def draw_step_tokens(traces: Mapping[str, EngineTrace], start: float, end: float) -> Figure:
    """Draw the prefill and decode tokens of each step: a panel per trace, on a shared time axis.

    Args:
        traces: A name for each trace.
        start, end: The time range to draw, in seconds of the engine's clock.

    Returns:
        A figure. A step is a dash for each kind of token it computed, as long as the step took. The axis of tokens is logarithmic,
        so nothing is stacked or filled.
    """
    figure = Figure(figsize=(WIDTH, 0.5 + 1.7 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        shown = [step for step in trace if start <= step.start and step.end <= end]
        for action, color in _ACTIONS.items():
            tokens = [sum(part.num_tokens for part in step.scheduled if part.action == action) for step in shown]
            dashes = [(step.start, step.end, count) for step, count in zip(shown, tokens, strict=True) if count]
            if dashes:
                begins, ends, counts = zip(*dashes, strict=True)
                axes.hlines(counts, begins, ends, color=color, linewidth=4)
                axes.plot(
                    begins, counts, "|", color="white", markersize=7, markeredgewidth=0.8
                )  # where one step ends and the next begins
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("tokens in the step", fontsize=9)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_ylim(bottom=1)
        axes.set_xlim(start, end)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("time (s); each dash is a step, as long as it took", fontsize=9)
    handles = [Line2D([], [], color=color, linewidth=4, label=f"{action} tokens") for action, color in _ACTIONS.items()]
    all_axes[0].legend(handles=handles, fontsize=8, frameon=False, loc="upper right")
    return figure


def draw_waits(
    traces: Mapping[str, EngineTrace], marked: Mapping[str, Collection[str]] | None = None, mark: str = "marked"
) -> Figure:
    """Draw each request's time to first token, in order of arrival: a panel per trace.

    Args:
        traces: A name for each trace.
        marked: Ids of requests to mark, by the name of the trace.
        mark: What the legend calls them.
    """
    rows = -(-len(traces) // 2)
    figure = Figure(figsize=(WIDTH, 0.5 + 1.7 * rows), layout="constrained")
    all_axes = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=False):
        waits = {item.request_id: item.ttft for item in request_latencies(trace)}
        axes.bar(range(len(waits)), list(waits.values()), width=0.9, color=REQUEST_COLORS[0])
        points = [(i, wait) for i, (request_id, wait) in enumerate(waits.items()) if request_id in (marked or {}).get(name, ())]
        if points:
            look = {"color": REQUEST_COLORS[5], "markersize": 4, "markeredgecolor": "white", "zorder": 3, "label": mark}
            axes.plot(*zip(*points, strict=True), "D", **look)
            axes.legend(frameon=False, fontsize=9, loc="upper right")
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("request, in the order of arrival", fontsize=9)
    figure.supylabel("time to first token (s)", fontsize=9)
    return figure
