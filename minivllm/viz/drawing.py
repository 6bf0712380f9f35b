"""Drawing helpers shared by the figures: many boxes or texts at once, uncluttered axes, legends above the axes.

A `PolyCollection` draws a thousand boxes in the time of ten patches, fast enough for a figure to follow a slider.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Affine2D, ScaledTranslation, Transform

from minivllm.engine.trace import SequenceKey
from minivllm.viz.palette import INK, NEUTRAL, Look, tint

Box = tuple[float, float, float, float]
"""Left, right, bottom, top."""

WIDTH = 9.0
"""Width of a figure in inches: the width of a notebook page."""
_LONGEST_NAME = 12


def add_boxes(
    axes: Axes,
    boxes: Sequence[Box],
    colors: Sequence[str] | str,
    *,
    edge: str = "none",
    line_width: float = 0.0,
    hatch: str | None = None,
    label: str = "",
    zorder: float = 2.0,
    dashes: tuple[float, float] | None = None,
) -> None:
    """Draw boxes as one collection.

    Args:
        axes: Where to draw. Their limits are not changed.
        boxes: In data units.
        colors: One per box, or one for all.
        edge: Colour of outlines and hatches.
        line_width: Of the outlines, in points.
        hatch: A matplotlib hatch pattern.
        label: The collection's name in `axes.collections`.
        zorder: Higher is nearer.
        dashes: Lengths of the outlines' dashes and gaps; None is a solid line.
    """
    if not len(boxes):
        return
    corners = np.asarray(boxes, dtype=float)[:, [0, 2, 0, 3, 1, 3, 1, 2]].reshape(-1, 4, 2)
    collection = PolyCollection(
        corners,
        facecolors=colors,
        edgecolors=edge,
        linewidths=line_width,
        linestyles="-" if dashes is None else (0, dashes),
        label=label,
        zorder=zorder,
        antialiased=line_width > 0,
    )
    axes.add_collection(collection, autolim=False)
    if hatch:  # as a single path, because hatching each path is slow
        path = Path.make_compound_path_from_polys(corners)
        pattern = PathCollection([path], facecolors="none", edgecolors=edge, linewidths=0, hatch=hatch, zorder=zorder + 0.01)
        axes.add_collection(pattern, autolim=False)


def add_bars(
    axes: Axes, look: Look, boxes: Sequence[Box], colors: Sequence[str] | str, label: str, line_width: float = 0.6
) -> None:
    """Draw boxes with the look of a state."""
    if isinstance(colors, str):
        colors = [colors] * len(boxes)
    add_boxes(
        axes,
        boxes,
        [tint(color, look.whiteness) for color in colors],
        edge=INK if look.outlined else "none",
        line_width=line_width if look.outlined else 0.0,
        hatch=look.hatch,
        label=label,
    )


class Labels(PathCollection):
    """Short texts as one collection, ten times as fast as separate `Text` artists.

    Args:
        axes: Where they belong. Add them with `axes.add_collection(labels, autolim=False)`.
        points: The place of each text, in data units (or those of `transform`).
        texts: One per point.
        size: In points.
        colors: One per text, or one for all.
        align: (horizontal, vertical): which part of the text, from 0 (left, bottom) to 1, is at its point.
        transform: Of the points; None means data units.
    """

    def __init__(
        self,
        axes: Axes,
        points: Sequence[tuple[float, float]],
        texts: Sequence[str],
        size: float,
        colors: Sequence[str] | str = INK,
        align: tuple[float, float] = (0.5, 0.5),
        transform: Transform | None = None,
    ) -> None:
        self.points, self.texts = list(points), list(texts)
        paths = [_text_path(text, size, *align) for text in texts]
        super().__init__(
            paths,
            offsets=np.asarray(self.points, dtype=float).reshape(-1, 2),
            offset_transform=transform or axes.transData,
            facecolors=colors,
            linewidths=0,
            zorder=4,
            clip_on=False,
        )
        figure = axes.get_figure()
        if figure is not None:
            self.set_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)


@lru_cache(maxsize=8192)
def _text_path(text: str, size: float, horizontal: float, vertical: float) -> Path:
    """The outlines of a text's letters, in points, aligned by baseline, so that descenders do not move a text up."""
    font = FontProperties(size=size)
    corners, codes = text_to_path.get_text_path(font, text, ismath=False)
    if not len(corners):
        return Path(np.zeros((1, 2)))
    scale = size / text_to_path.FONT_SCALE
    corners = np.asarray(corners) * scale
    width = corners[:, 0].max()
    return Path(corners - (horizontal * width, vertical * 0.73 * size), codes)


def text_width(text: str, size: float) -> float:
    """The width of a text drawn by `Labels`, in points."""
    return float(_text_path(text, size, 0.0, 0.0).vertices[:, 0].max())


def look_patch(look: Look, color: str = NEUTRAL) -> Patch:
    """A legend entry for a state."""
    edge = INK if look.outlined else "none"
    return Patch(facecolor=tint(color, look.whiteness), edgecolor=edge, linewidth=0.6, hatch=look.hatch, label=look.label)


def add_legend(axes: Axes, handles: Sequence[Artist], columns: int = 0, y: float = 1.0, x: float = 0.0) -> None:
    """Add a legend in a row above the axes. It begins at `x`, in widths of the axes: 0 is where they begin."""
    if not handles:
        return
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(x, y),
        ncols=columns or len(handles),
        fontsize=8,
        frameon=False,
        borderaxespad=0.2,
        borderpad=0.1,
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.0,
    )


def tidy(axes: Axes, x_label: str, y_label: str) -> None:
    """Label the axes and remove the top and right spines."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def label_places(axes: Axes, side: str, places: Sequence[tuple[float, str]], size: float = 8.0) -> None:
    """Label places along an axis ("x" or "y"), ten times as fast as ticks."""
    points, texts = [place for place, _ in places], [text for _, text in places]
    gap = 4.0
    if side == "x":
        axes.set_xticks([])
        axes.xaxis.labelpad = gap + size + 3.0
        below = axes.get_xaxis_transform() + ScaledTranslation(0.0, -gap / 72, axes.figure.dpi_scale_trans)
        labels = Labels(axes, [(point, 0.0) for point in points], texts, size, align=(0.5, 1.0), transform=below)
    else:
        axes.set_yticks([])
        axes.yaxis.labelpad = 2 * gap + max((text_width(text, size) for text in texts), default=0.0)
        beside = axes.get_yaxis_transform() + ScaledTranslation(-gap / 72, 0.0, axes.figure.dpi_scale_trans)
        labels = Labels(axes, [(0.0, point) for point in points], texts, size, align=(1.0, 0.5), transform=beside)
    axes.add_collection(labels, autolim=False)


def say(axes: Axes, text: str) -> None:
    """Write a text in the middle of empty axes."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color=INK)


def new_figure(
    height: float, title: str, *, left: float = 0.7, right: float = 0.2, top: float = 0.5, bottom: float = 0.5
) -> Figure:
    """A figure as wide as a notebook page, with margins in inches. A fixed layout: constrained layout is too slow for widgets."""
    figure = Figure(figsize=(WIDTH, height))
    if title:
        top += 0.25
        figure.suptitle(title, fontsize=11, y=1.0 - 0.08 / height, va="top")
    figure.subplots_adjust(left=left / WIDTH, right=1.0 - right / WIDTH, top=1.0 - top / height, bottom=bottom / height)
    return figure


def short_name(request_id: str) -> str:
    """A request's id, with the middle elided if it is long."""
    if len(request_id) <= _LONGEST_NAME:
        return request_id
    return f"{request_id[: _LONGEST_NAME // 2]}…{request_id[-_LONGEST_NAME // 2 + 1 :]}"


def sequence_names(keys: Sequence[SequenceKey]) -> dict[SequenceKey, str]:
    """The short request id of each sequence, with the sequence's index if the request has several."""
    siblings = count_siblings(keys)
    return {key: short_name(key.request_id) + (f"/{key.index}" if siblings[key.request_id] > 1 else "") for key in keys}


def count_siblings(keys: Sequence[SequenceKey]) -> dict[str, int]:
    """How many sequences each request has."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[key.request_id] = max(counts.get(key.request_id, 0), key.index + 1)
    return counts
