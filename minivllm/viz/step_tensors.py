"""A step as the model takes it: a column for each new token, and a row for each sequence's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.errors import ConfigError
from minivllm.viz.drawing import add_boxes, new_figure
from minivllm.viz.palette import INK, PALE, request_color, tint

if TYPE_CHECKING:
    from minivllm.worker.model_input import ModelInput

MOST_TOKENS = 40
"""A figure with more columns would be illegible."""
_MOST_BLOCKS = 16
_TABLE_LEFT = 4
"""Where the block tables begin, in columns."""


def draw_step_tensors(inputs: ModelInput, names: Sequence[str]) -> Figure:
    """The tensors of a step: above, those with an entry for each new token; below, those with one for each sequence.

    Args:
        inputs: As `ModelRunner.prepare_inputs` makes them, of at most `MOST_TOKENS` tokens.
        names: Of the sequences, in order; their colours are those of their numbers.

    Raises:
        ConfigError: There are no tokens, or too many, or not one name for each sequence.
    """
    metadata = inputs.metadata
    starts = metadata.query_start_loc.tolist()
    if len(names) != len(starts) - 1:
        raise ConfigError(f"The step has {len(starts) - 1} sequences, but there are {len(names)} names: give one for each.")
    if not names or not starts[-1]:
        raise ConfigError("The step has no tokens to draw.")
    if starts[-1] > MOST_TOKENS:
        raise ConfigError(f"The step has {starts[-1]} tokens, and a figure has room for {MOST_TOKENS}: draw a smaller step.")
    owners = [seq for seq in range(len(names)) for _ in range(starts[seq], starts[seq + 1])]
    tables = [row[:_MOST_BLOCKS] for row in metadata.block_tables.tolist()]
    width = max(len(owners), _TABLE_LEFT + max(map(len, tables)), 12)
    figure = new_figure(2.75 + 0.34 * len(names), "", left=1.5, right=0.15, top=0.3, bottom=0.15)
    axes = figure.subplots()
    axes.set(xlim=(0, width), ylim=(7.6 + 1.15 * len(names), -0.9))
    axes.axis("off")
    rows = {
        "input_ids": inputs.input_ids.tolist(),
        "positions": inputs.positions.tolist(),
        "slot_mapping": metadata.slot_mapping.tolist(),
    }
    for seq, name in enumerate(names):
        axes.text(
            (starts[seq] + starts[seq + 1]) / 2, -0.45, name, ha="center", va="center", fontsize=9, weight="bold", color=INK
        )
    for y, (name, numbers) in enumerate(rows.items()):
        _write_name(axes, y * 1.15, name)
        _draw_cells(axes, 0, y * 1.15, numbers, owners, width)
    y = 3 * 1.15
    _write_name(axes, y, "logits of")
    for row in inputs.sampled_rows:
        axes.annotate(
            "", (row + 0.5, y + 0.05), (row + 0.5, y + 0.75), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5}
        )
    _draw_starts(axes, starts, 4.5)
    top = 6.5
    axes.text(1.5, top - 0.1, "context_lens", ha="center", va="bottom", fontsize=8, color=INK, family="monospace")
    axes.text(_TABLE_LEFT, top - 0.1, "block_tables", ha="left", va="bottom", fontsize=8, color=INK, family="monospace")
    for seq, (name, table, length) in enumerate(zip(names, tables, metadata.context_lens.tolist(), strict=True)):
        y = top + 1.15 * seq
        _write_name(axes, y, name, "bold")
        _draw_cells(axes, 1, y, [length], [seq], width)
        _draw_cells(axes, _TABLE_LEFT, y, table, [seq] * len(table), width)
    return figure


def _write_name(axes: Axes, y: float, name: str, weight: str = "normal") -> None:
    family = "sans-serif" if weight == "bold" else "monospace"
    axes.text(-0.25, y + 0.5, name, ha="right", va="center", fontsize=9, color=INK, family=family, weight=weight, clip_on=False)


def _draw_starts(axes: Axes, starts: list[int], y: float) -> None:
    """`query_start_loc`, each number at the edge before which a sequence begins."""
    _write_name(axes, y - 0.15, "query_start_loc")
    for number in starts:
        axes.plot((number, number), (y - 0.25, y + 0.1), color=INK, linewidth=1, clip_on=False)
        axes.text(number, y + 0.15, str(number), ha="center", va="top", fontsize=8, color=INK)


def _draw_cells(axes: Axes, left: float, y: float, numbers: list[int], owners: list[int], width: float) -> None:
    boxes = [(left + i, left + i + 1, y + 1, y) for i in range(len(numbers))]
    add_boxes(axes, boxes, [tint(request_color(owner), 0.6) for owner in owners], edge=PALE, line_width=0.8)
    size = min(8.0, 0.85 * 7.5 * 72 / width / (0.62 * max(len(str(number)) for number in numbers)))
    for i, number in enumerate(numbers):
        axes.text(left + i + 0.5, y + 0.5, str(number), ha="center", va="center", fontsize=size, color="black")
