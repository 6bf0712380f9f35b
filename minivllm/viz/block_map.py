"""The map of the KV cache in one step: the physical blocks with their owners and contents, next to the sequences' block tables.

Like figures 3 to 8 of the PagedAttention paper, for any step of any trace.
"""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.patheffects import withStroke

from minivllm.engine.trace import EngineTrace
from minivllm.scheduler_output import FREED_BLOCK
from minivllm.viz.blocks import describe_step, find_blocks, step_number, table_limits
from minivllm.viz.cells import ALLOCATED, DOTS, Cells, host_look
from minivllm.viz.drawing import (
    WIDTH,
    Labels,
    add_legend,
    label_places,
    new_figure,
    say,
    sequence_names,
    text_width,
    tidy,
)
from minivllm.viz.palette import INK, NEUTRAL, PALE, request_colors, tint
from minivllm.viz.spans import find_context_lens, sequence_keys

_HOST = " (host)"
_MOST_ARROWS = 8
_COLUMNS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128)
_ROUND_COLUMNS = (5, 10, 20, 50, 100)
_ROW_HEIGHT = 9.5
"""Minimum height of a row of the tables, in points."""


def draw_block_map(trace: EngineTrace, step: int, title: str = "") -> Figure:
    """Draw the physical blocks as a grid, and the sequences' block tables next to it.

    Args:
        trace: Of any engine.
        step: Its number; negative numbers count from the end.
        title: Above the figure. Defaults to a description of the step.

    Returns:
        A figure. Blocks have the colours of their requests; the bar in a block shows how many of its slots hold tokens.
        Blocks that several sequences share have a thick outline and their reference count.

    Raises:
        ConfigError: The trace has no such step.
    """
    step_number(trace, step)
    num_rows, _ = table_limits(trace)
    height = min(max(1.5 + 0.21 * num_rows, 3.4 if trace.config.num_gpu_blocks <= 300 else 4.6), 6.2)
    figure = new_figure(height, title or describe_step(trace, step), left=0.65, right=0.15, top=0.32)
    between = 0.45 + label_width(trace) / 72
    grid_axes, table_axes = figure.subplots(
        1, 2, gridspec_kw={"wspace": 2 * between / (WIDTH - 0.8 - between), "width_ratios": (1.05, 1.0)}
    )
    paint_block_map(grid_axes, table_axes, trace, step)
    return figure


def paint_block_map(grid_axes: Axes, table_axes: Axes, trace: EngineTrace, step: int) -> None:
    """Paint what `draw_block_map` draws into two given axes, with a legend above the first.

    The layout depends on the trace and the size of the axes, not on the step, so nothing moves from step to step.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = step_number(trace, step)
    colors = request_colors(trace)
    _paint_grid(grid_axes, trace, number, colors)
    _paint_tables(table_axes, trace, number, colors)
    add_legend(grid_axes, _legend(trace))


# -- physical blocks ---------------------------------------------------------------------------------------------


def _paint_grid(axes: Axes, trace: EngineTrace, step: int, colors: dict[str, str]) -> None:
    pools = [find_blocks(trace, step)]
    if any(record.swapped_tables for record in trace):
        pools.append(find_blocks(trace, step, host=True))
    width, height = _size(axes)
    num_blocks = sum(map(len, pools))
    if num_blocks == 0:
        say(axes, "no block")
        return
    ideal = (num_blocks * width / height / 1.5) ** 0.5
    columns = min(_COLUMNS, key=lambda count: abs(math.log(count / ideal)) - 0.12 * (count in _ROUND_COLUMNS))
    rows = [-(-len(pool) // columns) for pool in pools]
    num_rows = sum(rows) + 0.9 * (len(pools) - 1)
    cell = (width / columns, height / num_rows)
    gap = 0.06 if min(cell) > 8 else 0.0
    tops = [0.0, rows[0] + 0.9]
    places = [
        [
            (i % columns + gap, i % columns + 1 - gap, tops[n] + i // columns + 1 - gap, tops[n] + i // columns + gap)
            for i in range(len(pool))
        ]
        for n, pool in enumerate(pools)
    ]
    longest = str(max(map(len, pools)) - 1)
    cells = Cells(colors, *cell, longest)
    names = sequence_names(sequence_keys(trace))
    with_names = all(cells.fits(longest, name) for name in names.values())
    for n, pool in enumerate(pools):
        for i, block in enumerate(pool):
            name = names[block.owners[0]] if block.owners and with_names else ""
            cells.add(str(i), name, block, trace.config.block_size, places[n][i], on_host=n > 0)
    cells.paint(axes)
    copies = trace[step].blocks_to_copy
    for source, destination in copies if len(copies) <= _MOST_ARROWS else ():
        ends = [((box[0] + box[1]) / 2, 0.85 * box[2] + 0.15 * box[3]) for box in (places[0][source], places[0][destination])]
        arrow = FancyArrowPatch(
            *ends,
            arrowstyle="-|>",
            mutation_scale=12,
            linewidth=1.8,
            color="black",
            connectionstyle="arc3,rad=0.3",
            path_effects=[withStroke(linewidth=4, foreground="white")],
            zorder=5,
        )
        axes.add_patch(arrow)
    axes.set_xlim(0, columns)
    axes.set_ylim(num_rows, 0)
    tidy(axes, f"column (blocks of {trace.config.block_size} tokens)", "block = row + column")
    axes.spines[:].set_visible(False)
    every = max(1, -(-columns // 10))
    label_places(axes, "x", [(i + 0.5, str(i)) for i in range(0, columns, every)])
    every = max(1, -(-sum(rows) // 12))
    label_places(
        axes, "y", [(tops[n] + row + 0.5, str(row * columns)) for n in range(len(pools)) for row in range(0, rows[n], every)]
    )
    if len(pools) > 1:
        axes.text(0.0, tops[1] - 0.08, "host memory:", fontsize=8, color=INK, va="bottom")


# -- block tables ------------------------------------------------------------------------------------------------


def _paint_tables(axes: Axes, trace: EngineTrace, step: int, colors: dict[str, str]) -> None:
    record, lens, size = trace[step], find_context_lens(trace)[step], trace.config.block_size
    keys = sequence_keys(trace)
    names = sequence_names(keys)
    num_rows, num_blocks = table_limits(trace)
    width, height = _size(axes)
    num_rows = max(min(num_rows, int(height / _ROW_HEIGHT)), 4)
    shown = [key for key in keys if key in record.block_tables or key in record.swapped_tables]
    num_hidden = 0
    if len(shown) > num_rows:
        num_hidden = len(shown) - num_rows + 1
        shown = shown[: num_rows - 1]
    cell = (width / num_blocks, height / num_rows)
    cells = Cells(colors, *cell, str(max(trace.config.num_gpu_blocks, trace.config.num_cpu_blocks, 1) - 1))
    labels: list[str] = []
    for row, key in enumerate(shown):
        table = record.block_tables.get(key)
        on_host = table is None
        table = record.swapped_tables[key] if table is None else table
        tokens, whiteness = host_look(on_host)
        color, length = colors[key.request_id], min(lens[key], len(table) * size)
        labels.append(names[key] + (_HOST if on_host else ""))
        bottom, top = row + 0.92, row + 0.08
        num_freed = table.count(FREED_BLOCK)  # behind a sliding window
        for place, block in enumerate(table[num_freed:], start=num_freed):
            box = (place * size, (place + 1) * size, bottom, top)
            cells.put("allocated", box, tint(color, whiteness))
            cells.put("shared" if not on_host and record.ref_counts.get(block, 1) > 1 else "owned", box)
            cells.write((place + 0.5) * size, row + 0.38, str(block), "middle")
        if length > 0:
            cells.put(tokens, (num_freed * size, length, bottom, bottom + (top - bottom) * 0.3), color)
    cells.paint(axes)
    axes.set_xlim(0, num_blocks * size * 1.004)  # with the outline of the last block
    axes.set_ylim(num_rows, 0)
    points = [(-0.012, row + 0.5) for row in range(len(shown))]
    if num_hidden:
        points.append((-0.012, len(shown) + 0.5))
        labels.append("…")
        axes.text(0.0, len(shown) + 0.5, f"and {num_hidden} more sequences", fontsize=8, va="center", color=INK)
    axes.add_collection(
        Labels(axes, points, labels, min(8.0, 0.8 * cell[1]), align=(1.0, 0.5), transform=axes.get_yaxis_transform()),
        autolim=False,
    )
    tidy(axes, f"position in the sequence (tokens, {size} per block)", "block tables of the sequences")
    every = max(1, -(-num_blocks // 8)) * size
    axes.set_xticks(range(0, num_blocks * size + 1, every))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.yaxis.labelpad = 8 + label_width(trace)
    if not shown:
        say(axes, "no sequence has blocks")


def label_width(trace: EngineTrace) -> float:
    """The width of the longest label of a table in any step, in points."""
    suffix = _HOST if any(record.swapped_tables for record in trace) else ""
    return max((text_width(name + suffix, 8.0) for name in sequence_names(sequence_keys(trace)).values()), default=0.0)


def _legend(trace: EngineTrace) -> list:
    """Legend entries for what appears anywhere in the trace."""
    handles: list = [
        Patch(facecolor=NEUTRAL, label="tokens"),
        Patch(facecolor=tint(NEUTRAL, ALLOCATED), edgecolor=INK, linewidth=0.5, label="allocated"),
        Patch(facecolor="white", edgecolor=PALE, label="free"),
    ]
    if any(record.cached_blocks for record in trace):
        handles.append(Patch(facecolor=tint(NEUTRAL, 0.75), edgecolor=NEUTRAL, hatch=DOTS, linewidth=0.5, label="free, cached"))
        handles.append(Line2D([], [], color=INK, linewidth=2.5, label="cached"))
    if any(record.swapped_tables for record in trace):
        handles.append(Patch(facecolor=NEUTRAL, edgecolor=INK, hatch=DOTS, linewidth=0.5, label="on the host"))
    if any(record.ref_counts for record in trace):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.8, label="shared ×n"))
    if any(record.blocks_to_copy or record.blocks_to_swap_in or record.blocks_to_swap_out for record in trace):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.8, linestyle=(0, (1.6, 1.0)), label="copied to"))
    return handles


def _size(axes: Axes) -> tuple[float, float]:
    """Width and height in points."""
    figure = axes.figure
    return axes.bbox.width / figure.dpi * 72, axes.bbox.height / figure.dpi * 72
