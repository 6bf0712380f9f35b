"""Batches and caches with a row for each text: what fills a row, and what is padding, waiting or reserved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minivllm.viz.drawing import add_boxes, add_legend, new_figure, tidy
from minivllm.viz.palette import INK, PALE

LOOKS: dict[str, tuple[str, str | None]] = {
    "prompt": ("#0072B2", None),
    "answer": ("#E69F00", None),
    "padding": ("#FFFFFF", "xxxxx"),
    "done, and waiting": ("#FFFFFF", "....."),
    "reserved, never used": ("#FFFFFF", "/////"),
    "in use": ("#0072B2", None),
    "new in this step": ("#E69F00", None),
    "reserved": ("#FFFFFF", "/////"),
    "weights": ("#555555", None),
    "largest step": ("#E69F00", "....."),
    "KV cache": ("#56B4E9", None),
    "left free": ("#FFFFFF", "/////"),
    "a text": ("#E69F00", None),
    "free": ("#FFFFFF", None),
    "too little for one more": ("#FFFFFF", "/////"),
}
"""What can fill part of a row: its colour and hatch, distinguishable in grey too."""
_LEAST_HEIGHT = 0.05
_MOST_OUTLINES = 150
"""With more parts than this, outlines are omitted, as they would hide the parts."""


def draw_rows(
    rows: Sequence[Sequence[tuple[str, float]]], x_label: str, y_label: str, title: str = "", names: Sequence[str] = ()
) -> Figure:
    """A bar for each row, cut into parts.

    Args:
        rows: For each row, from the top, its parts from left to right: what fills it (a key of `LOOKS`) and how long it is.
        x_label: The meaning of a part's length, with its unit.
        y_label: The meaning of a row.
        title: Above the figure.
        names: Of the rows; their numbers if empty.
    """
    figure = new_figure(
        max(1.5, 0.9 + 0.27 * len(rows)), title, left=max(0.75, 0.3 + 0.08 * max(map(len, names), default=0)), top=0.35
    )
    axes = figure.subplots()
    longest = max((sum(length for _, length in row) for row in rows), default=1)
    kinds = [kind for kind in LOOKS if any(kind == other for row in rows for other, _ in row)]
    for kind in kinds:
        boxes = []
        for number, row in enumerate(rows):
            left = 0.0
            for other, length in row:
                if other == kind and length:
                    boxes.append((left, left + length, number + 0.42, number - 0.42))
                left += length
        width = 0.5 if len(boxes) <= _MOST_OUTLINES else 0.0
        add_boxes(axes, boxes, LOOKS[kind][0], edge=INK, line_width=width, hatch=LOOKS[kind][1], label=kind)
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)))
    axes.set_yticklabels(names or [str(number) for number in range(len(rows))])
    tidy(axes, x_label, y_label)
    _add_legend(axes, kinds)
    return figure


def draw_slots(
    steps: Sequence[Mapping[int, int]], num_rows: int, max_len: int, title: str = "", begun: Sequence[Collection[int]] = ()
) -> Figure:
    """How full the rows of a contiguous cache are, step by step. A row with a single token shows a line.

    Args:
        steps: For each step, the tokens in the cache by row; free rows are missing.
        num_rows: Rows of the cache.
        max_len: Slots of a row.
        title: Above the figure.
        begun: For each step, the rows in which a new text began: a dark line marks where a row went to the next text.
    """
    figure = new_figure(0.8 + 0.62 * num_rows, title, left=0.75, top=0.35)
    axes = figure.subplots()
    for row in range(num_rows):
        boxes = [
            (number, number + 1, row + 0.9 - max(0.8 * lengths[row] / max_len, _LEAST_HEIGHT), row + 0.9)
            for number, lengths in enumerate(steps)
            if lengths.get(row)
        ]
        add_boxes(axes, [(0, len(steps), row + 0.1, row + 0.9)], LOOKS["reserved"][0], edge=PALE, line_width=0.5, hatch="/////", label="reserved")  # fmt: skip
        add_boxes(axes, boxes, LOOKS["in use"][0], label="in use", zorder=3)
        handed_on = [number for number, rows in enumerate(begun) if number and row in rows]
        axes.vlines(handed_on, row + 0.1, row + 0.9, color=INK, linewidth=1.5, zorder=4)
    axes.set(xlim=(0, max(len(steps), 1)), ylim=(num_rows, 0), yticks=[row + 0.5 for row in range(num_rows)])
    axes.set_yticklabels([str(row) for row in range(num_rows)])
    tidy(axes, "step", f"row of the cache ({max_len} slots each)")
    lines = [Line2D([], [], color=INK, linewidth=1.5, label="handed on")] if begun else []
    _add_legend(axes, ["in use", "reserved"], *lines)
    return figure


def _add_legend(axes: Axes, kinds: Sequence[str], *others: Line2D) -> None:
    patches = [Patch(facecolor=LOOKS[kind][0], hatch=LOOKS[kind][1], edgecolor=INK, linewidth=0.5, label=kind) for kind in kinds]
    add_legend(axes, [*patches, *others])
