"""The roofline model: a kernel's speed against the machine's limits (Williams, Waterman, Patterson 2009).

A kernel that does few operations per byte moved is limited by memory bandwidth, one that does many by arithmetic. The two limits form
a roof, and every kernel is a point below it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import Bbox

from minivllm.errors import ConfigError
from minivllm.viz.palette import REQUEST_COLORS

MARKERS = "osD^vP"
_LABEL_SIZE = 8
_COLUMN = 10
"""Kernels closer than this horizontally, in points, have their labels in one column."""
_ASIDE = (8, -8, 26, -26, 60, -60)
_UP = (0, *(sign * 6 * i for i in range(1, 10) for sign in (-1, 1)))
"""Offsets at which a column of labels may be placed, in points; the first free one is used."""


class RooflinePoint(NamedTuple):
    """A measured kernel.

    Attributes:
        name: Its label.
        flops: Floating-point operations; a fused multiply-add counts as two.
        bytes: Bytes that must move between memory and processor.
        seconds: Time taken.
        series: Points of one series share a marker and a legend entry.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    series: str = ""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations per second achieved."""
        return self.flops / self.seconds

    def attainable(self, peak_flops: float, bandwidth: float) -> float:
        """Operations per second that the machine could reach at this intensity."""
        return min(peak_flops, self.intensity * bandwidth)


def draw_roofline(
    points: Sequence[RooflinePoint],
    peak_flops: float,
    bandwidth: float,
    title: str = "",
    peaks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw kernels below a machine's roof, on logarithmic axes, each with its name and percentage of the attainable speed.

    Args:
        points: The kernels.
        peak_flops: The machine's peak floating-point operations per second.
        bandwidth: Its memory bandwidth in bytes per second. A kernel whose data stay in cache can exceed the roof.
        title: Above the figure.
        peaks: Other peaks than `peak_flops`, for series that compute with another type of numbers. Each is drawn as a roof of its own, and
            percentages are of a point's own roof.

    Raises:
        ConfigError: There are no points, or a number is not positive and finite.
    """
    if not points:
        raise ConfigError("A roofline needs at least one point.")
    peaks = peaks or {}
    for name, numbers in [
        ("the machine", (peak_flops, bandwidth, *peaks.values())),
        *((p.name, (p.flops, p.bytes, p.seconds)) for p in points),
    ]:
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ConfigError(f"The numbers of {name} must be positive and finite, but are {numbers}.")
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot()
    ridge = peak_flops / bandwidth
    intensities = [ridge, *(peak / bandwidth for peak in peaks.values()), *(p.intensity for p in points)]
    left, right = min(intensities) / 2, max(intensities) * 4
    bottom = min(left * bandwidth, *(p.rate for p in points)) / 2
    highest = max(peak_flops, *peaks.values(), *(p.rate for p in points))
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, highest * 2))
    axes.plot([left, ridge, right], [left * bandwidth, peak_flops, peak_flops], color="black", linewidth=1.8, zorder=2)
    axes.plot([ridge, ridge], [bottom, peak_flops], color="#555555", linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for peak in peaks.values():
        begin = min(ridge, peak / bandwidth)
        axes.plot([begin, peak / bandwidth, right], [begin * bandwidth, peak, peak], color="#555555", linewidth=1.4, zorder=2)
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
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(point.series for point in points):
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_title(title, fontsize=11)
    figure.draw_without_rendering()  # labels are placed in pixels, so the layout must be known
    own = next((point.series for point in points if point.series not in peaks), "arithmetic") if peaks else "arithmetic"
    taken = _write_limits(axes, {own: peak_flops, **peaks}, ridge, bandwidth, (left, right, bottom))
    _write_labels(
        axes, points, lambda point: peaks.get(point.series, peak_flops), [peak_flops, *peaks.values()], bandwidth, taken
    )
    figure.set_layout_engine("none")
    return figure


def _write_limits(
    axes: Axes, peaks: Mapping[str, float], ridge: float, bandwidth: float, ends: tuple[float, float, float]
) -> list[Bbox]:
    """Label the roofs, the slope and the ridge. Returns the space that the roofs' labels take, in points."""
    left, right, bottom = ends
    offset = {"textcoords": "offset points", "fontsize": 9}
    labels = [
        axes.annotate(f"{name}: {_gigas(rate)} GFLOP/s", (right, rate), (-4, 5), ha="right", **offset)
        for name, rate in peaks.items()
    ]
    (x0, y0), (x1, y1) = axes.transData.transform([(left, left * bandwidth), (ridge, ridge * bandwidth)])
    axes.annotate(
        f"memory: {_gigas(bandwidth)} GB/s", (left, left * bandwidth), (14, 20), va="bottom",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor", **offset,
    )  # fmt: skip
    text = f"ridge: {ridge:.3g}\noperations per byte"
    axes.annotate(text, (ridge, bottom), (5, 5), textcoords="offset points", fontsize=8, color="#555555", va="bottom")
    text = "%: of the speed that the roof allows"
    axes.text(0.995, 0.1, text, ha="right", va="bottom", fontsize=8, color="#555555", transform=axes.transAxes)
    scale = axes.figure.dpi / 72
    return [Bbox(label.get_window_extent().get_points() / scale) for label in labels]


def _write_labels(
    axes: Axes,
    points: Sequence[RooflinePoint],
    peak_of: Callable[[RooflinePoint], float],
    peaks: Sequence[float],
    bandwidth: float,
    taken: list[Bbox],
) -> None:
    """Label each point, in columns where several are close, with a line where the label had to be moved away."""
    to_pixels, scale = axes.transData.transform, axes.figure.dpi / 72
    places = {id(point): to_pixels((point.intensity, point.rate)) / scale for point in points}
    taken = taken + [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places.values()]
    columns: list[list[RooflinePoint]] = []
    for point in sorted(points, key=lambda point: point.intensity):
        if columns and places[id(point)][0] - places[id(columns[-1][-1])][0] < _COLUMN:
            columns[-1].append(point)
        else:
            columns.append([point])
    height = 1.25 * _LABEL_SIZE
    for column in sorted(columns, key=len, reverse=True):
        column.sort(key=lambda point: -point.rate)
        texts = [f"{point.name}, {point.rate / point.attainable(peak_of(point), bandwidth):.0%}" for point in column]
        width = 0.6 * _LABEL_SIZE * max(map(len, texts))
        lines = _spread([float(places[id(point)][1]) for point in column], height)
        x = float(places[id(column[0])][0])
        moved = any(abs(line - places[id(point)][1]) > height / 2 for line, point in zip(lines, column, strict=True))
        for dx, dy in itertools.product(_ASIDE[2 if moved else 0 :], _UP):  # leave room for the lines
            left = x + dx if dx > 0 else x + dx - width
            boxes = [Bbox.from_bounds(left, line + dy - height / 2, width, height) for line in lines]
            if all(_is_free(axes, box, taken, peaks, bandwidth) for box in boxes):
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
    """Descending heights, moved as little as possible to be at least a gap apart."""
    groups: list[list[float]] = []
    """Runs of heights that would overlap; each is spread around its mean."""
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _middle(groups[-2]) - _middle(groups[-1]) < gap * (len(groups[-2]) + len(groups[-1])) / 2:
            last = groups.pop()
            groups[-1] += last
    return [_middle(group) + gap * ((len(group) - 1) / 2 - i) for group in groups for i in range(len(group))]


def _middle(group: list[float]) -> float:
    return sum(group) / len(group)


def _is_free(axes: Axes, box: Bbox, taken: list[Bbox], peaks: Sequence[float], bandwidth: float) -> bool:
    """Whether a label, in points, would overlap no other label, nor a roof, nor the edge of the axes."""
    scale = axes.figure.dpi / 72
    corners = box.corners() * scale
    inside = all(axes.bbox.contains(x, y) for x, y in corners)
    places = axes.transData.inverted().transform(corners)
    is_on_one_side = all(len({rate < min(peak, intensity * bandwidth) for intensity, rate in places}) == 1 for peak in peaks)
    return inside and is_on_one_side and not any(box.overlaps(other) for other in taken)


def _gigas(value: float) -> str:
    return f"{value / 1e9:,.3g}" if value < 1e12 else f"{value / 1e9:,.0f}"
