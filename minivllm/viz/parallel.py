"""Work divided among several devices: products of small matrices, sums over channels, the time of a sum, and stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from minivllm.viz.drawing import WIDTH, Labels, add_boxes, add_legend, new_figure, tidy
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS, ink_on, tint

_CELL = 0.27
"""The side of a matrix's cell, in inches."""


@dataclass(frozen=True)
class Matrix:
    """A small matrix of whole numbers in a figure.

    Attributes:
        label: Above it.
        numbers: `[rows, columns]`.
        rank: Whose it is, for its colour; None for no colour. Or one for each column, or each row.
        by: Whether several ranks are those of columns or of rows.
    """

    label: str
    numbers: Any
    rank: int | Sequence[int] | None = None
    by: str = "columns"
    cells: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", np.asarray(self.numbers).astype(int))

    def color(self, row: int, column: int) -> str:
        """Of a cell."""
        rank = self.rank
        if isinstance(rank, Sequence):
            rank = rank[column if self.by == "columns" else row]
        return "#FFFFFF" if rank is None else tint(REQUEST_COLORS[rank], 0.45)


def draw_equations(lines: Sequence[Sequence[Matrix | str]]) -> Figure:
    """Draw equations of small matrices, one below the other.

    Args:
        lines: Of each, matrices and the signs between them.
    """
    heights = [max(len(part.cells) for part in line if isinstance(part, Matrix)) * _CELL + 0.42 for line in lines]
    widths = [
        sum(0.35 + part.cells.shape[1] if isinstance(part, Matrix) else 0.7 + 0.42 * len(part) for part in line) for line in lines
    ]
    width = min(WIDTH - 0.2, (0.3 + max(widths)) * _CELL + 1.1)
    figure = Figure(figsize=(width + 0.2, sum(heights) + 0.1))
    axes = figure.add_axes((0.1 / (width + 0.2), 0.0, width / (width + 0.2), 1.0))
    axes.axis("off")
    axes.set(xlim=(0, width / _CELL), ylim=((sum(heights) + 0.1) / _CELL, 0))
    ranks: set[int] = set()
    top = 0.0
    for line, height in zip(lines, heights, strict=True):
        left, middle = 0.3, (top + 0.3 + (height - 0.42) / 2) / _CELL
        for part in line:
            if isinstance(part, str):
                sign = 0.7 + 0.42 * len(part)
                axes.text(left + sign / 2, middle, part, ha="center", va="center", fontsize=11, color=INK)
                left += sign
                continue
            num_rows, num_columns = part.cells.shape
            _draw_matrix(axes, part, left, middle - num_rows / 2)
            shown = [] if part.rank is None else [part.rank] if isinstance(part.rank, int) else part.rank
            ranks |= set(shown)
            left += num_columns + 0.35
        top += height
    if ranks:
        patches = [
            Patch(facecolor=tint(REQUEST_COLORS[rank], 0.45), edgecolor=INK, linewidth=0.5, label=f"rank {rank}")
            for rank in sorted(ranks)
        ]
        axes.legend(handles=patches, loc="upper right", fontsize=8, frameon=False, borderaxespad=0.3)
    return figure


def _draw_matrix(axes: Axes, matrix: Matrix, left: float, top: float) -> None:
    places = [(row, column) for row in range(matrix.cells.shape[0]) for column in range(matrix.cells.shape[1])]
    boxes = [(left + column, left + column + 1, top + row + 1, top + row) for row, column in places]
    add_boxes(axes, boxes, [matrix.color(*place) for place in places], edge=PALE, line_width=0.6)
    centres = [(left + column + 0.5, top + row + 0.5) for row, column in places]
    axes.add_collection(Labels(axes, centres, [str(matrix.cells[place]) for place in places], 8.0), autolim=False)
    axes.text(left + matrix.cells.shape[1] / 2, top - 0.12, matrix.label, ha="center", va="bottom", fontsize=8, color=INK)


@dataclass(frozen=True)
class Transfer:
    """A message between two ranks.

    Attributes:
        round: In which round, from 0.
        source, target: The ranks.
        num_bytes: Its size.
    """

    round: int
    source: int
    target: int
    num_bytes: float


def draw_transfers(ways: Mapping[str, Sequence[Transfer]], num_bytes: float) -> Figure:
    """Draw messages over rounds: a panel for each way, a line for each rank. An arrow is as thick as its message is large.

    Args:
        ways: By name.
        num_bytes: The size of the whole tensor.
    """
    figure = new_figure(2.7, "", left=0.75, top=0.55, bottom=0.5)
    panels = figure.subplots(1, len(ways), squeeze=False)[0]
    num_ranks = 1 + max(rank for way in ways.values() for message in way for rank in (message.source, message.target))
    most_rounds = 1 + max(message.round for way in ways.values() for message in way)
    for axes, (name, messages) in zip(panels, ways.items(), strict=True):
        for rank in range(num_ranks):
            axes.axhline(rank, color=REQUEST_COLORS[rank], linewidth=1.5, zorder=1)
        for message in messages:
            width = 0.7 + 1.6 * message.num_bytes / num_bytes
            axes.annotate(
                "", (message.round + 0.85, message.target), (message.round + 0.15, message.source),
                arrowprops={"arrowstyle": "-|>", "color": REQUEST_COLORS[message.source], "linewidth": width, "shrinkA": 0, "shrinkB": 0},
                zorder=2,
            )  # fmt: skip
        axes.set(xlim=(0, most_rounds), ylim=(num_ranks - 0.6, -0.4), xticks=range(most_rounds + 1), yticks=range(num_ranks))
        axes.set_yticklabels([f"rank {rank}" for rank in range(num_ranks)] if axes is panels[0] else [])
        busiest = max(sum(m.num_bytes for m in messages if rank == m.source) for rank in range(num_ranks)) / num_bytes
        rounds = 1 + max(message.round for message in messages)
        tidy(axes, "rounds", "")
        axes.set_title(
            f"{name}\n{rounds} round{'s' if rounds > 1 else ''}; the busiest sends {busiest:.3g} tensors", fontsize=8.5, color=INK
        )
        axes.tick_params(axis="y", length=0)
    return figure


def draw_fit(sizes: Sequence[float], seconds: Sequence[float], latency: float, bandwidth: float) -> Figure:
    """Draw measured times over message sizes, and the line latency + bytes / bandwidth.

    Args:
        sizes: In bytes.
        seconds: One for each size.
        latency: In seconds.
        bandwidth: In bytes per second.
    """
    figure = new_figure(3.0, "", top=0.3)
    axes = figure.subplots()
    curve = np.geomspace(min(sizes), max(sizes), 60)
    axes.plot(
        curve, 1e6 * (latency + curve / bandwidth), color=REQUEST_COLORS[0], linewidth=1.6, label="latency + bytes / bandwidth"
    )
    axes.axhline(1e6 * latency, color=PALE, linewidth=1.0, linestyle="--", zorder=1)
    axes.plot(
        sizes,
        [1e6 * moment for moment in seconds],
        "o",
        color=REQUEST_COLORS[1],
        markeredgecolor=INK,
        markeredgewidth=0.5,
        label="measured",
    )
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter("")
    axes.text(max(sizes), 1e6 * latency, "latency", fontsize=8, ha="right", va="bottom", color=INK)
    tidy(axes, "bytes of the tensor", "microseconds")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def draw_pipeline(num_stages: int, nums_batches: Sequence[int]) -> Figure:
    """Draw a pipeline's stages over time, a panel for each number of batches that follow each other through it. What is white is idle.

    Args:
        num_stages: Devices, each with some of the layers.
        nums_batches: One for each panel.
    """
    figure = new_figure(0.95 + 0.28 * num_stages, "", left=0.75, top=0.45)
    panels = figure.subplots(1, len(nums_batches), squeeze=False)[0]
    for axes, num_batches in zip(panels, nums_batches, strict=True):
        length = num_stages + num_batches - 1
        boxes = [
            (stage + batch, stage + batch + 1, stage + 0.4, stage - 0.4)
            for stage in range(num_stages)
            for batch in range(num_batches)
        ]
        colors = [REQUEST_COLORS[batch % len(REQUEST_COLORS)] for _ in range(num_stages) for batch in range(num_batches)]
        add_boxes(axes, boxes, colors, edge="#FFFFFF", line_width=0.8)
        if num_batches <= 8:
            places = [((left + right) / 2, (bottom + top) / 2) for left, right, bottom, top in boxes]
            names = [str(batch) for _ in range(num_stages) for batch in range(num_batches)]
            axes.add_collection(Labels(axes, places, names, 8.0, [ink_on(color) for color in colors]), autolim=False)
        axes.set(xlim=(0, length), ylim=(num_stages - 0.5, -0.5), yticks=range(num_stages))
        axes.set_yticklabels([f"stage {stage}" for stage in range(num_stages)] if axes is panels[0] else [])
        idle = (num_stages - 1) / length
        axes.set_title(f"{num_batches} batch{'es' if num_batches > 1 else ''}: {idle:.0%} idle", fontsize=8.5, color=INK)
        tidy(axes, "time (steps of a stage)", "")
        axes.tick_params(axis="y", length=0)
    return figure


def draw_step_times(
    batches: Sequence[int], predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw the time of a step over the batch: predicted as lines, measured as marks, in milliseconds.

    Args:
        batches: Sequences in a step.
        predicted, measured: Seconds for each batch, by the number of ranks in words.
    """
    figure = new_figure(3.2, "", top=0.55)
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys([*measured, *predicted])):
        color = REQUEST_COLORS[(0, 5, 2)[i % 3]]
        if name in predicted:
            heights = [1e3 * moment for moment in predicted[name]]
            axes.plot(batches, heights, color=color, linestyle=("-", "--", ":")[i % 3], linewidth=1.8, label=f"{name}, predicted")
        if name in measured:
            heights = [1e3 * moment for moment in measured[name]]
            axes.plot(
                batches, heights, "os^"[i % 3], color=color, markeredgecolor=INK, markeredgewidth=0.5, label=f"{name}, measured"
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    tidy(axes, "sequences in the batch", "milliseconds per step")
    add_legend(axes, axes.get_legend_handles_labels()[0], columns=3)
    return figure


def draw_limits(batches: Sequence[int], limits: Sequence[float], wires: Sequence[float]) -> Figure:
    """Draw the latency that a sum may have over the batch, and the latencies of some wires as level lines: dividing pays above a line.

    Args:
        batches: Sequences in a step.
        limits: Microseconds for each batch; below 0, dividing does not pay with any wire.
        wires: Microseconds.
    """
    figure = new_figure(3.0, "", right=0.65, top=0.2)
    axes = figure.subplots()
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
    for i, latency in enumerate(wires):
        axes.axhline(latency, color=REQUEST_COLORS[5], linestyle=("--", "-.", ":")[i % 3], linewidth=1.4, zorder=1)
        axes.annotate(f"{latency:g} µs", (1.0, latency), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8, va="center")  # fmt: skip
    axes.plot(batches, limits, "o-", color=REQUEST_COLORS[0], markeredgecolor=INK, markeredgewidth=0.5, linewidth=1.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    tidy(axes, "sequences in the batch", "latency a sum may have (µs)")
    return figure
