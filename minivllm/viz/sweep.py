"""Throughput and latency over the number of concurrent sequences."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.viz.palette import REQUEST_COLORS


def draw_sweep(values: Sequence[int], tokens_per_second: Sequence[float], latencies: Sequence[float], title: str = "") -> Figure:
    """Throughput and mean latency, side by side, against `max_num_seqs` on a logarithmic axis.

    Args:
        values: The values of `max_num_seqs`.
        tokens_per_second: Output tokens per second at each value.
        latencies: Mean seconds from arrival to the last token at each value.
        title: Above the figure.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    left, right = figure.subplots(1, 2)
    _curve(left, values, tokens_per_second, REQUEST_COLORS[0], "throughput (output tokens/s)", "{:.0f}")
    _curve(right, values, latencies, REQUEST_COLORS[5], "mean latency (s)", "{:.1f}")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _curve(axes: Axes, values: Sequence[int], heights: Sequence[float], color: str, label: str, number: str) -> None:
    axes.plot(values, heights, color=color, marker="o", markersize=5, linewidth=2)
    side, shift = ("right", -5) if heights[-1] > heights[0] else ("left", 5)  # away from the curve
    for value, height in zip(values, heights, strict=True):
        axes.annotate(number.format(height), (value, height), (shift, 5), textcoords="offset points", ha=side, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.margins(x=0.09)
    axes.set_ylim(0, 1.15 * max(heights))
    axes.set_xlabel("sequences at once (max_num_seqs)")
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
