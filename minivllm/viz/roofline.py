"""The roofline: how fast a kernel is, beside how fast a machine lets it be.

A kernel that does few operations for each byte that it moves cannot be faster than the memory, and one that does many not faster than
the arithmetic. The two limits make a roof, and a kernel stands somewhere below it (Williams, Waterman, Patterson 2009).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from minivllm.errors import ConfigError
from minivllm.viz.palette import REQUEST_COLORS

MARKERS = "osD^vP"
_LABEL_SIZE = 8
_COLUMN = 10
"""Kernels whose intensities are nearer than this, in points, have their labels in one column."""
_ASIDE = (8, -8, 26, -26, 60, -60)
_UP = (0, *(sign * 6 * i for i in range(1, 10) for sign in (-1, 1)))
"""Where a column of labels may stand, in points from where it would like to: the first that is free."""


class RooflinePoint(NamedTuple):
    """A kernel that was measured.

    Attributes:
        name: Written beside it.
        flops: Floating-point operations that it does; a multiplication with its addition is two.
        bytes: Bytes that it must move between memory and processor.
        seconds: What it took.
        series: Points of a series are drawn alike, and named together.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    series: str = ""

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations per second that were reached."""
        return self.flops / self.seconds

    def attainable(self, peak_flops: float, bandwidth: float) -> float:
        """Operations per second that a machine could reach at best, with so many operations for each byte."""
        return min(peak_flops, self.intensity * bandwidth)


def draw_roofline(points: Sequence[RooflinePoint], peak_flops: float, bandwidth: float, title: str = "") -> Figure:
    """Kernels under the roof of a machine, on logarithmic axes. Each has its name and its percentage of what is attainable.

    Args:
        points: The kernels.
        peak_flops: Floating-point operations per second of the machine.
        bandwidth: Bytes per second of its memory. A kernel whose data stay in a cache can come out above the roof.
        title: Stands above the figure.

    Raises:
        ConfigError: There are no points, or a number is not positive and finite.
    """
    if not points:
        raise ConfigError("A roofline needs at least one point.")
    for name, numbers in [("the machine", (peak_flops, bandwidth)), *((p.name, (p.flops, p.bytes, p.seconds)) for p in points)]:
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ConfigError(f"The numbers of {name} are {numbers}, but a roofline is of positive finite ones.")
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot()
    ridge = peak_flops / bandwidth
    left, right = min(ridge, *(p.intensity for p in points)) / 2, max(ridge, *(p.intensity for p in points)) * 4
    bottom = min(left * bandwidth, *(p.rate for p in points)) / 2
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, max(peak_flops, *(p.rate for p in points)) * 2))
    axes.plot([left, ridge, right], [left * bandwidth, peak_flops, peak_flops], color="black", linewidth=1.8, zorder=2)
    axes.plot([ridge, ridge], [bottom, peak_flops], color="#555555", linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for i, series in enumerate(dict.fromkeys(point.series for point in points)):
        of_series = [point for point in points if point.series == series]
        axes.plot(
            [p.intensity for p in of_series], [p.rate for p in of_series], MARKERS[i % len(MARKERS)], label=series, zorder=3,
            color=REQUEST_COLORS[(0, 5, 2, 3, 4, 6)[i % 6]], markersize=7, markeredgecolor="black", markeredgewidth=0.7,
        )  # fmt: skip
    axes.set_xlabel("arithmetic intensity (operations per byte moved)")
    axes.set_ylabel("speed (GFLOP/s)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:,g}")
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(point.series for point in points):
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_title(title, fontsize=11)
    figure.draw_without_rendering()  # labels are placed in pixels, so these must be known
    _write_limits(axes, ridge, peak_flops, bandwidth, (left, right, bottom))
    _write_labels(axes, points, peak_flops, bandwidth)
    figure.set_layout_engine("none")
    return figure


def _write_limits(axes: Axes, ridge: float, peak: float, bandwidth: float, ends: tuple[float, float, float]) -> None:
    left, right, bottom = ends
    offset = {"textcoords": "offset points", "fontsize": 9}
    axes.annotate(f"arithmetic: {_gigas(peak)} GFLOP/s", (right, peak), (-4, 5), ha="right", **offset)
    (x0, y0), (x1, y1) = axes.transData.transform([(left, left * bandwidth), (ridge, peak)])
    axes.annotate(
        f"memory: {_gigas(bandwidth)} GB/s", (left, left * bandwidth), (14, 20), va="bottom",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor", **offset,
    )  # fmt: skip
    text = f"ridge: {ridge:.3g}\noperations per byte"
    axes.annotate(text, (ridge, bottom), (5, 5), textcoords="offset points", fontsize=8, color="#555555", va="bottom")
    text = "%: of the speed that the roof allows"
    axes.text(0.995, 0.1, text, ha="right", va="bottom", fontsize=8, color="#555555", transform=axes.transAxes)


def _write_labels(axes: Axes, points: Sequence[RooflinePoint], peak: float, bandwidth: float) -> None:
    """A label beside each point, in columns where many stand above each other, with a line to it where it had to move away."""
    to_pixels, scale = axes.transData.transform, axes.figure.dpi / 72
    places = {id(point): to_pixels((point.intensity, point.rate)) / scale for point in points}
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places.values()]
    columns: list[list[RooflinePoint]] = []
    for point in sorted(points, key=lambda point: point.intensity):
        if columns and places[id(point)][0] - places[id(columns[-1][-1])][0] < _COLUMN:
            columns[-1].append(point)
        else:
            columns.append([point])
    height = 1.25 * _LABEL_SIZE
    for column in sorted(columns, key=len, reverse=True):
        column.sort(key=lambda point: -point.rate)
        texts = [f"{point.name}, {point.rate / point.attainable(peak, bandwidth):.0%}" for point in column]
        width = 0.6 * _LABEL_SIZE * max(map(len, texts))
        lines = _spread([float(places[id(point)][1]) for point in column], height)
        x = float(places[id(column[0])][0])
        moved = any(abs(line - places[id(point)][1]) > height / 2 for line, point in zip(lines, column, strict=True))
        for dx, dy in itertools.product(_ASIDE[2 if moved else 0 :], _UP):  # lines to labels need some length
            left = x + dx if dx > 0 else x + dx - width
            boxes = [Bbox.from_bounds(left, line + dy - height / 2, width, height) for line in lines]
            if all(_is_free(axes, box, taken, peak, bandwidth) for box in boxes):
                break
        taken += boxes
        for point, text, line in zip(column, texts, lines, strict=True):
            shift = line + dy - places[id(point)][1]
            arrow = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4, "relpos": (dx < 0, 0.5)}
            axes.annotate(
                text, (point.intensity, point.rate), (dx, shift), textcoords="offset points", ha="left" if dx > 0 else "right",
                va="center", fontsize=_LABEL_SIZE, arrowprops=arrow if abs(dx) > 8 or abs(shift) > height / 2 else None, zorder=4,
            )  # fmt: skip


def _spread(heights: list[float], gap: float) -> list[float]:
    """Falling heights, moved as little as makes them at least a gap apart."""
    groups: list[list[float]] = []
    """Of heights that touch each other; each group is centred on its mean."""
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _middle(groups[-2]) - _middle(groups[-1]) < gap * (len(groups[-2]) + len(groups[-1])) / 2:
            last = groups.pop()
            groups[-1] += last
    return [_middle(group) + gap * ((len(group) - 1) / 2 - i) for group in groups for i in range(len(group))]


def _middle(group: list[float]) -> float:
    return sum(group) / len(group)


def _is_free(axes: Axes, box: Bbox, taken: list[Bbox], peak: float, bandwidth: float) -> bool:
    """Whether a label, in points, would lie on nothing: no other, not the roof, not the edge of the axes."""
    scale = axes.figure.dpi / 72
    corners = box.corners() * scale
    inside = all(axes.bbox.contains(x, y) for x, y in corners)
    sides = {rate < min(peak, intensity * bandwidth) for intensity, rate in axes.transData.inverted().transform(corners)}
    return inside and len(sides) == 1 and not any(box.overlaps(other) for other in taken)


def _gigas(value: float) -> str:
    return f"{value / 1e9:,.3g}" if value < 1e12 else f"{value / 1e9:,.0f}"
