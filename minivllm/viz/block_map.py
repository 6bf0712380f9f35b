"""The map of the cache in one step: whose the physical blocks are and how full, and beside them the sequences' block tables.

What PagedAttention's figures 3 to 8 show of small examples, for any step of any trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.errors import ConfigError
from minivllm.viz.drawing import (
    Box,
    Labels,
    add_boxes,
    add_legend,
    count_siblings,
    new_figure,
    say,
    sequence_name,
    text_width,
    tidy,
)
from minivllm.viz.palette import INK, NEUTRAL, PALE, STATE_LOOKS, request_colors, tint
from minivllm.viz.spans import find_context_lens, sequence_keys, time_origin

_BAR = 0.36
"""The lower part of a cell, which shows how many of its slots hold tokens."""
_ALLOCATED = 0.72
"""Whiteness of a cell's upper part."""
_MOST_STRIPES = 4
_MOST_ARROWS = 8
_COLUMNS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128)
_ROW_HEIGHT = 9.5
"""The least height of a row of the tables, in points."""


class Block(NamedTuple):
    """A physical block in a step.

    Attributes:
        owners: The sequences that have it in their tables.
        num_tokens: Slots that hold a token.
        num_references: How many tables it counts to be in.
        cached: Whether the prefix cache knows what it holds.
        written: Whether a copy wrote it just before the step: copy-on-write, or a swap.
    """

    owners: tuple[SequenceKey, ...] = ()
    num_tokens: int = 0
    num_references: int = 0
    cached: bool = False
    written: bool = False


def find_blocks(trace: EngineTrace, step: int, host: bool = False) -> list[Block]:
    """All blocks of the device, or of the host, by number, as they are when a step is done.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = _check(trace, step)
    record, lens, size = trace[number], find_context_lens(trace)[number], trace.config.block_size
    owners: dict[int, list[SequenceKey]] = {}
    held: dict[int, int] = {}
    for key, table in (record.swapped_tables if host else record.block_tables).items():
        length = lens[key]
        for place, block in enumerate(table):
            owners.setdefault(block, []).append(key)
            held[block] = max(held.get(block, 0), min(size, max(0, length - place * size)))
    copies = record.blocks_to_swap_out if host else record.blocks_to_copy + record.blocks_to_swap_in
    written = {destination for _, destination in copies}
    cached = set() if host else set(record.cached_blocks)
    counts = {} if host else record.ref_counts
    return [
        Block(
            tuple(owners.get(block, ())),
            held.get(block, 0),
            counts.get(block, len(owners.get(block, ()))),
            block in cached,
            block in written,
        )
        for block in range(trace.config.num_cpu_blocks if host else trace.config.num_gpu_blocks)
    ]


def describe_step(trace: EngineTrace, step: int) -> str:
    """A step in a line: its number, time, kind and size, and what is free.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = _check(trace, step)
    record = trace[number]
    time = record.start - time_origin(trace)
    count, tokens = len(record.scheduled), record.num_tokens
    what = f"{record.phase} of {count} sequence{'s' * (count != 1)}, {tokens} token{'s' * (tokens != 1)}"
    free = f"{record.num_free_blocks} of {trace.config.num_gpu_blocks} blocks free"
    lost = f"{len(record.preempted)} preempted; " if record.preempted else ""
    return f"step {number} of {len(trace)}, at {time:.3f} s: {what}; {lost}{free}"


def draw_block_map(trace: EngineTrace, step: int, title: str = "") -> Figure:
    """The physical blocks as a grid, and the block tables of the sequences beside it.

    Args:
        trace: Of any engine.
        step: Its number; negative ones count from the end.
        title: Stands above the figure. A line about the step, if none is given.

    Returns:
        A figure. Blocks have the colours of their requests; the bar in a block shows how many of its slots hold tokens.
        Blocks that several sequences share have a thick outline and their reference count.

    Raises:
        ConfigError: The trace has no such step.
    """
    _check(trace, step)
    num_rows, _ = _table_limits(trace)
    height = min(max(1.5 + 0.21 * num_rows, 3.4 if trace.config.num_gpu_blocks <= 300 else 4.6), 6.2)
    figure = new_figure(height, title or describe_step(trace, step), left=0.55, right=0.15, top=0.32)
    longest = max((len(sequence_name(key)) for key in sequence_keys(trace)), default=0) + 2
    grid_axes, table_axes = figure.subplots(1, 2, gridspec_kw={"wspace": 0.12 + 0.02 * longest, "width_ratios": (1.05, 1.0)})
    paint_block_map(grid_axes, table_axes, trace, step)
    return figure


def paint_block_map(grid_axes: Axes, table_axes: Axes, trace: EngineTrace, step: int) -> None:
    """Paint what `draw_block_map` draws into two axes of any figure, with a legend in the line above the first.

    The layout depends on the trace and on the size of the axes, not on the step: from step to step nothing moves.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = _check(trace, step)
    colors = request_colors(trace)
    _paint_grid(grid_axes, trace, number, colors)
    _paint_tables(table_axes, trace, number, colors)
    add_legend(grid_axes, _legend(trace))


def _check(trace: EngineTrace, step: int) -> int:
    """The step's number, counted from the beginning."""
    if not -len(trace) <= step < len(trace):
        steps = f"steps 0 to {len(trace) - 1}" if len(trace) else "no steps"
        raise ConfigError(f"There is no step {step} in the trace: it has {steps}.")
    return step % len(trace)


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
    columns = min(_COLUMNS, key=lambda count: abs(np.log(count / ideal)))
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
    cells = _Cells(colors, cell, num_siblings=count_siblings(sequence_keys(trace)))
    for pool, boxes in zip(pools, places, strict=True):
        for i, (block, box) in enumerate(zip(pool, boxes, strict=True)):
            cells.add(str(i), block, trace.config.block_size, box)
    cells.paint(axes)
    copies = trace[step].blocks_to_copy
    for source, destination in copies if len(copies) <= _MOST_ARROWS else ():
        ends = [((box[0] + box[1]) / 2, (box[2] + box[3]) / 2) for box in (places[0][source], places[0][destination])]
        arrow = FancyArrowPatch(
            *ends, arrowstyle="-|>", mutation_scale=12, linewidth=1.8, color="black", connectionstyle="arc3,rad=-0.25", zorder=5
        )
        axes.add_patch(arrow)
    axes.set_xlim(0, columns)
    axes.set_ylim(num_rows, 0)
    tidy(axes, f"+ column (blocks of {trace.config.block_size} tokens)", "block number: row")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    every = max(1, -(-columns // 10))
    axes.set_xticks([i + 0.5 for i in range(0, columns, every)], [str(i) for i in range(0, columns, every)])
    every = max(1, -(-sum(rows) // 12))
    ticks = [(tops[n] + row + 0.5, str(row * columns)) for n in range(len(pools)) for row in range(0, rows[n], every)]
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    if len(pools) > 1:
        axes.text(0.0, tops[1] - 0.08, "host memory:", fontsize=8, color=INK, va="bottom")


class _Cells:
    """Collects what cells are made of, and draws all of it in a few collections."""

    def __init__(self, colors: dict[str, str], cell: tuple[float, float], num_siblings: dict[str, int]) -> None:
        self.colors, self.num_siblings = colors, num_siblings
        self.width, self.height = cell
        self.size = max(4.5, min(8.0, 0.5 * self.height))
        self.with_text = self.height >= 9 and self.width >= 11
        self.boxes: dict[str, list[Box]] = {}
        self.faces: dict[str, list[str]] = {}
        self.texts: list[tuple[float, float, str, str]] = []

    def put(self, layer: str, box: Box, color: str = "none") -> None:
        self.boxes.setdefault(layer, []).append(box)
        self.faces.setdefault(layer, []).append(color)

    def add(self, name: str, block: Block, block_size: int, box: Box) -> None:
        """A cell of the grid."""
        left, right, bottom, top = box
        requests = list(dict.fromkeys(key.request_id for key in block.owners))[:_MOST_STRIPES]
        if requests:
            bar = bottom + (top - bottom) * (_BAR if self.with_text else 1.0)
            end = left + (right - left) * block.num_tokens / block_size
            self.put("allocated", box, tint(self.colors[requests[0]], _ALLOCATED))
            for i, request_id in enumerate(requests):
                color, low, high = self.colors[request_id], i / len(requests), (i + 1) / len(requests)
                if i:  # the first one's tint is below all
                    sides = (left + (right - left) * low, left + (right - left) * high)
                    self.put("allocated stripes", (*sides, bottom, top), tint(color, _ALLOCATED))
                self.put("tokens", (left, end, bottom + (bar - bottom) * low, bottom + (bar - bottom) * high), color)
            self.put("shared" if block.num_references > 1 else "owned", box)
        else:
            self.put("remembered" if block.cached else "free", box, tint(NEUTRAL, 0.75) if block.cached else "white")
        if block.cached and requests:
            corner = min(0.22 * (right - left), 0.4 * abs(bottom - top))
            self.put("corner", (right - corner, right, top + (bottom - top) * 0.22, top), INK)
        if block.written:
            self.put("written", box)
        if self.with_text:
            self._write(name, block, box)

    def _write(self, name: str, block: Block, box: Box) -> None:
        left, right, bottom, top = box
        middle = top + (bottom - top) * (0.5 - _BAR / 2 if block.owners else 0.5)
        margin = 2.0 / self.width
        self.texts.append((left + margin, middle, name, "left"))
        if block.num_references > 1:
            note = f"×{block.num_references}"
        elif block.owners:
            key = block.owners[0]
            note = sequence_name(key, self.num_siblings.get(key.request_id, 1))
        else:
            return
        room = self.width * (right - left) - 6.0 - text_width(name, self.size)
        if text_width(note, self.size) <= room:
            self.texts.append((right - margin, middle, note, "right"))

    def paint(self, axes: Axes) -> None:
        """Draw all layers, from the back to the front."""
        thin = 0.5 if min(self.width, self.height) > 5 else 0.0
        thick = 1.8 if min(self.width, self.height) > 12 else 1.0
        layers = (
            ("free", PALE, max(thin, 0.2), None),
            ("remembered", NEUTRAL, thin, "....."),
            ("swapped", INK, thin, STATE_LOOKS["swapped"].hatch),
            ("allocated", "none", 0.0, None),
            ("allocated stripes", "none", 0.0, None),
            ("tokens", "none", 0.0, None),
            ("owned", INK, thin, None),
            ("corner", "none", 0.0, None),
            ("shared", "black", thick, None),
        )
        for i, (layer, edge, line_width, hatch) in enumerate(layers):
            add_boxes(
                axes,
                self.boxes.get(layer, ()),
                self.faces.get(layer, ()),
                edge=edge,
                line_width=line_width,
                hatch=hatch,
                label=layer,
                zorder=2 + 0.1 * i,
            )
        if "written" in self.boxes:
            add_boxes(axes, self.boxes["written"], "none", edge="white", line_width=thick + 1.4, zorder=3.1)
            add_boxes(
                axes,
                self.boxes["written"],
                "none",
                edge="black",
                line_width=thick + 0.4,
                label="written",
                zorder=3.2,
                dashes=(2.0, 1.2),
            )
        for side, align in (("left", 0.0), ("right", 1.0), ("middle", 0.5)):
            texts = [item for item in self.texts if item[3] == side]
            if texts:
                labels = Labels(axes, [item[:2] for item in texts], [item[2] for item in texts], self.size, align=(align, 0.5))
                axes.add_collection(labels, autolim=False)


# -- block tables ------------------------------------------------------------------------------------------------


def _table_limits(trace: EngineTrace) -> tuple[int, int]:
    """The most rows that tables take in any step, and the most blocks of any table."""
    num_rows = num_blocks = 1
    for record in trace:
        num_rows = max(num_rows, len(record.block_tables) + len(record.swapped_tables))
        for tables in (record.block_tables, record.swapped_tables):
            num_blocks = max(num_blocks, max(map(len, tables.values()), default=0))
    return num_rows, num_blocks


def _paint_tables(axes: Axes, trace: EngineTrace, step: int, colors: dict[str, str]) -> None:
    record, lens, size = trace[step], find_context_lens(trace)[step], trace.config.block_size
    keys = sequence_keys(trace)
    siblings = count_siblings(keys)
    num_rows, num_blocks = _table_limits(trace)
    width, height = _size(axes)
    num_rows = max(min(num_rows, int(height / _ROW_HEIGHT)), 4)
    shown = [key for key in keys if key in record.block_tables or key in record.swapped_tables]
    num_hidden = 0
    if len(shown) > num_rows:
        num_hidden = len(shown) - num_rows + 1
        shown = shown[: num_rows - 1]
    cell = (width / num_blocks, height / num_rows)
    cells = _Cells(colors, cell, siblings)
    cells.size = max(
        4.5, min(8.0, 0.55 * cell[1], (cell[0] - 2.0) / text_width(str(max(trace.config.num_gpu_blocks - 1, 0)), 1.0))
    )
    cells.with_text = cell[0] >= text_width("0", cells.size) * len(str(trace.config.num_gpu_blocks - 1)) + 1.0
    names: list[str] = []
    for row, key in enumerate(shown):
        table = record.block_tables.get(key)
        on_host = table is None
        table = record.swapped_tables[key] if table is None else table
        color, length = colors[key.request_id], min(lens[key], len(table) * size)
        names.append(sequence_name(key, siblings[key.request_id]) + (" (host)" if on_host else ""))
        bottom, top = row + 0.92, row + 0.08
        for place, block in enumerate(table):
            box = (place * size, (place + 1) * size, bottom, top)
            cells.put("swapped" if on_host else "allocated", box, "white" if on_host else tint(color, _ALLOCATED))
            cells.put("shared" if not on_host and record.ref_counts.get(block, 1) > 1 else "owned", box)
            if cells.with_text:
                cells.texts.append(((place + 0.5) * size, row + 0.5 - 0.12, str(block), "middle"))
        if length > 0:
            cells.put("tokens", (0, length, bottom, bottom + (top - bottom) * 0.3), color)
    cells.paint(axes)
    axes.set_xlim(0, num_blocks * size)
    axes.set_ylim(num_rows, 0)
    points = [(-0.012, row + 0.5) for row in range(len(shown))]
    if num_hidden:
        points.append((-0.012, len(shown) + 0.5))
        names.append("…")
        axes.text(0.0, len(shown) + 0.5, f"and {num_hidden} more sequences", fontsize=8, va="center", color=INK)
    labels = Labels(axes, points, names, min(8.0, 0.8 * cell[1]), align=(1.0, 0.5), transform=axes.get_yaxis_transform())
    axes.add_collection(labels, autolim=False)
    tidy(axes, f"place in the sequence (tokens, {size} in a block)", "")
    every = max(1, -(-num_blocks // 8)) * size
    axes.set_xticks(range(0, num_blocks * size + 1, every))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title("block tables (sequence: its blocks)", fontsize=8, color=INK, loc="right", pad=3)
    if not shown:
        say(axes, "no sequence has blocks")


def _legend(trace: EngineTrace) -> list:
    """What the signs mean, those that some step of the trace has."""
    handles: list = [
        Patch(facecolor=NEUTRAL, label="tokens"),
        Patch(facecolor=tint(NEUTRAL, _ALLOCATED), edgecolor=INK, linewidth=0.5, label="allocated"),
        Patch(facecolor="white", edgecolor=PALE, label="free"),
    ]
    if any(record.cached_blocks for record in trace):
        handles.append(
            Patch(facecolor=tint(NEUTRAL, 0.75), edgecolor=NEUTRAL, hatch=".....", linewidth=0.5, label="free, remembered")
        )
        handles.append(Line2D([], [], marker="s", color=INK, linestyle="none", markersize=4, label="remembered"))
    if any(record.ref_counts for record in trace):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.8, label="shared ×n"))
    if any(record.blocks_to_copy or record.blocks_to_swap_in or record.blocks_to_swap_out for record in trace):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.8, linestyle=(0, (1.6, 1.0)), label="copied to"))
    return handles


def _size(axes: Axes) -> tuple[float, float]:
    """Width and height in points."""
    figure = axes.figure
    return axes.bbox.width / figure.dpi * 72, axes.bbox.height / figure.dpi * 72
