"""How long users wait for the first token, between tokens, and for the last: distributions of TTFT, ITL and end-to-end latency."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minivllm.bench.summary import percentile
from minivllm.bench.trace_summary import request_latencies
from minivllm.engine.trace import EngineTrace
from minivllm.viz.palette import REQUEST_COLORS

PERCENTILES = {50: "o", 95: "s", 99: "D"}
"""The percentiles shown, each with its marker on the curve."""
LONG_TAIL = 15
"""The axis is logarithmic if the longest wait is more than this many medians: most of the curve would otherwise be squeezed to the left."""
LINE_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def draw_latencies(traces: dict[str, EngineTrace], title: str = "") -> Figure:
    """The distributions of TTFT, ITL and end-to-end latency, a line for each trace.

    At a point (x, y) of a line, the share y of all waits was no longer than x. The 50th, 95th and 99th percentiles (nearest rank) are
    marked on the lines and written below.

    Args:
        traces: A name for each trace, such as "static" and "continuous".
        title: Above the figure.
    """
    latencies = {name: request_latencies(trace) for name, trace in traces.items()}
    panels = {
        "time to first token (TTFT)": {name: [item.ttft for item in items] for name, items in latencies.items()},
        "between tokens (ITL)": {name: [itl for item in items for itl in item.itls] for name, items in latencies.items()},
        "end-to-end latency": {name: [item.latency for item in items] for name, items in latencies.items()},
    }
    figure = Figure(figsize=(9, 3.9 + 0.4 * len(traces)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    heights = (3.0, 0.2 + 0.2 * len(traces))
    rows = figure.subplots(2, len(panels), height_ratios=heights, squeeze=False)
    for number, (name, values) in enumerate(panels.items()):
        paint_waits(rows[0, number], rows[1, number], name, list(values.values()))
    rows[0, 0].set_ylabel("share of all, no longer than this")
    lines = [line_of(i) for i in range(len(traces))]
    labels = [f"{name}: {_count(trace, len(latencies[name]))}" for name, trace in traces.items()]
    figure.legend(
        lines, labels, loc="outside upper center", frameon=False, fontsize=9, handlelength=3, title=title, title_fontsize=11
    )
    return figure


def paint_waits(curve_axes: Axes, text_axes: Axes, name: str, seconds: Sequence[Sequence[float]]) -> None:
    """Paint the distribution of one kind of wait into axes of any figure, a line for each run, with its percentiles below.

    Args:
        curve_axes, text_axes: One below the other.
        name: What users wait for.
        seconds: The waits of each run.
    """
    scale, unit = _unit([value for of_run in seconds for value in of_run])
    scaled = [np.sort(np.asarray(of_run)) * scale for of_run in seconds]
    _draw_distributions(curve_axes, scaled, f"{name}, {unit}")
    _write_percentiles(text_axes, scaled, unit)


def _draw_distributions(axes: Axes, values: list[np.ndarray], label: str) -> None:
    for i, ordered in enumerate(values):
        if not len(ordered):
            continue
        shares = np.arange(len(ordered) + 1) / len(ordered)
        style = line_of(i)
        axes.plot(
            np.concatenate(([ordered[0]], ordered)), shares, drawstyle="steps-post", color=style.get_color(),
            linestyle=style.get_linestyle(), linewidth=1.8,
        )  # fmt: skip
        for percent, marker in PERCENTILES.items():
            axes.plot(
                percentile(ordered, percent), percent / 100, marker, color=style.get_color(), markersize=5, markeredgecolor="black",
                markeredgewidth=0.6, clip_on=False, zorder=3,
            )  # fmt: skip
    if not any(map(len, values)):
        axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes, color="#555555")
    everything = np.concatenate(values) if values else np.zeros(0)
    if len(everything) and everything.min() > 0 and everything.max() > LONG_TAIL * percentile(everything, 50):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        label += " (log)"
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _write_percentiles(axes: Axes, values: list[np.ndarray], unit: str) -> None:
    """A table below a panel: the marks and their percentiles, and a line for each trace."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(values) - 0.5, 0.5)
    places = {percent: 0.4 + 0.27 * i for i, percent in enumerate(PERCENTILES)}
    for percent, marker in PERCENTILES.items():
        axes.plot(places[percent] - 0.14, 0, marker, color="white", markersize=5, markeredgecolor="black", markeredgewidth=0.8)
        axes.text(places[percent], 0, f"p{percent}", ha="right", va="center", fontsize=8, color="#555555")
    for i, ordered in enumerate(values):
        style = line_of(i)
        axes.plot([0, 0.13], [-1 - i] * 2, color=style.get_color(), linestyle=style.get_linestyle(), linewidth=1.8)
        for percent, place in places.items():
            text = _number(percentile(ordered, percent)) if len(ordered) else "–"
            axes.text(place, -1 - i, text, ha="right", va="center", fontsize=8)


def line_of(number: int) -> Line2D:
    """The line style of a run: its own colour and, for print without colours, its own dashes."""
    color = REQUEST_COLORS[(0, 5, 2, 3, 6)[number % 5]]
    return Line2D([], [], color=color, linestyle=LINE_STYLES[number % len(LINE_STYLES)], linewidth=1.8)


def _unit(seconds: Sequence[float]) -> tuple[float, str]:
    """Seconds for long waits, else milliseconds."""
    return (1.0, "s") if max(seconds, default=0.0) >= 1 and percentile(seconds, 50) >= 0.1 else (1e3, "ms")


def _number(value: float) -> str:
    """A number with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _count(trace: EngineTrace, num_complete: int) -> str:
    """How many requests are shown, and how many are left out."""
    left_out = len(trace.requests) - num_complete
    text = f"{num_complete} request{'' if num_complete == 1 else 's'}"
    return f"{text} ({left_out} unfinished, aborted or failed left out)" if left_out else text
