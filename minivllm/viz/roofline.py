"""The roofline: how fast a kernel is, beside how fast a machine lets it be.

A kernel that does few operations for each byte that it moves cannot be faster than the memory, and one that does many not faster than
the arithmetic. The two limits make a roof, and a kernel stands somewhere below it (Williams, Waterman, Patterson 2009).
"""

from __future__ import annotations

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
_PLACES = [(dx, dy) for dy in (0, -11, 11, -22, 22, -33, 33, -44, -55, -66, -77, -88) for dx in (8, 22, 40)]
"""Where a label may stand, in points from its kernel: as near as there is room."""


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
    above = {"xytext": (0, 5), "textcoords": "offset points", "fontsize": 9}
    axes.annotate(f"arithmetic: {_gigas(peak)} GFLOP/s", (right, peak), ha="right", **above)
    middle = math.sqrt(left * ridge)
    (x0, y0), (x1, y1) = axes.transData.transform([(left, left * bandwidth), (ridge, peak)])
    axes.annotate(
        f"memory: {_gigas(bandwidth)} GB/s", (middle, middle * bandwidth), ha="center", va="bottom",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor", **above,
    )  # fmt: skip
    text = f"ridge: {ridge:.3g}\noperations per byte"
    axes.annotate(text, (ridge, bottom), (5, 5), textcoords="offset points", fontsize=8, color="#555555", va="bottom")


def _write_labels(axes: Axes, points: Sequence[RooflinePoint], peak: float, bandwidth: float) -> None:
    """A label right of each point, as near as it finds room, with a line to it where it had to move away."""
    to_pixels, per_point = axes.transData.transform, axes.figure.dpi / 72
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in to_pixels([(p.intensity, p.rate) for p in points])]
    for point in sorted(points, key=lambda p: (-p.rate, p.intensity)):
        x, y = to_pixels((point.intensity, point.rate))
        text = f"{point.name}, {point.rate / point.attainable(peak, bandwidth):.0%}"
        width, height = 0.55 * _LABEL_SIZE * len(text) * per_point, 1.2 * _LABEL_SIZE * per_point
        for dx, dy in _PLACES:
            box = Bbox.from_bounds(x + dx * per_point, y + dy * per_point - height / 2, width, height)
            if not any(box.overlaps(other) for other in taken) and _is_below_roof(axes, box, peak, bandwidth):
                break
        taken.append(box)
        moved = abs(dy) > 11 or dx > 8
        axes.annotate(
            text, (point.intensity, point.rate), (dx, dy), textcoords="offset points", va="center", fontsize=_LABEL_SIZE, zorder=4,
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkB": 4, "shrinkA": 0} if moved else None,
        )  # fmt: skip


def _is_below_roof(axes: Axes, box: Bbox, peak: float, bandwidth: float) -> bool:
    """Whether a label crosses neither the roof nor the edge of the axes."""
    inside = axes.transData.inverted().transform(box.corners())
    visible = all(axes.bbox.y0 <= y <= axes.bbox.y1 and x <= axes.bbox.x1 for x, y in box.corners())
    sides = {rate < min(peak, intensity * bandwidth) for intensity, rate in inside}
    return visible and len(sides) == 1


def _gigas(value: float) -> str:
    return f"{value / 1e9:,.3g}" if value < 1e12 else f"{value / 1e9:,.0f}"
