"""How a kernel walks a paged cache: the blocks it visits, in order, and what the tiles of a ragged prefill read and skip.

Both are drawn from launches that `record_accesses` has recorded, for any kernel whose cache is `[num_blocks, block_size, num_kv_heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minivllm.errors import ConfigError
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import Launch, Program, name_programs
from minivllm.viz.drawing import add_boxes, add_legend, new_figure, say, tidy
from minivllm.viz.notebook import import_widgets, to_png
from minivllm.viz.palette import INK, PALE, ink_on, request_color, tint
from minivllm.viz.player import make_player

if TYPE_CHECKING:
    from ipywidgets import VBox

_BLOCKS_IN_ROW = 8
_ROW_HEIGHT, _GAP = 0.62, 0.6
_PAST_WHITENESS = 0.62
_MOST_TITLES = 4
"""Sequences of a prefill whose panels have whole titles."""
_HATCHES = (None, "/////", ".....", "xxxxx")
"""Of the sequences, so that they differ in grey, too."""
_TILE_LOOKS: dict[int, tuple[str, str | None]] = {1: ("#0072B2", None), 2: ("#F3D9A4", "xxxxx"), 0: ("#FFFFFF", None)}
_TILE_NAMES = {1: "a score that counts", 2: "read, but masked", 0: "not read"}


def find_walk(
    launch: Launch, tensor: str = "key_cache_ptr", program: Program | None = None
) -> list[tuple[Program, int, list[int]]]:
    """The loads from a cache, in order: who, which block, and which slots of it.

    Args:
        launch: From `record_accesses`.
        tensor: The kernel's name for the cache.
        program: Of this program only; None: of all.

    Raises:
        ConfigError: The kernel has no such tensor, or it is no paged cache.
    """
    number = next((i for i, argument in enumerate(launch.tensors) if argument.name == tensor), None)
    if number is None:
        raise ConfigError(f"The kernel has no tensor {tensor!r}, only {', '.join(argument.name for argument in launch.tensors)}.")
    shape = launch.tensors[number].shape
    if len(shape) != 4:
        raise ConfigError(
            f"{tensor} has shape {list(shape)}, but a paged cache is [num_blocks, block_size, num_kv_heads, head_dim]."
        )
    visits: list[tuple[Program, int, list[int]]] = []
    for access in launch.accesses:
        if access.tensor == number and access.kind == "load" and program in (None, access.program):
            elements = access.elements[access.elements >= 0]
            blocks, offsets = np.unravel_index(elements, shape)[:2]
            for block in dict.fromkeys(blocks.tolist()):
                visits.append((access.program, block, sorted(set(offsets[blocks == block].tolist()))))
    return visits


def draw_walk(
    launch: Launch, step: int | None = None, tensor: str = "key_cache_ptr", program: Program | None = None, title: str = ""
) -> Figure:
    """Draw the blocks of a cache, and in which order a kernel's programs read them. Unread slots stay white.

    Colours are sequences (axis 0 of the grid). Numbers say which block of its sequence it is, from 0 on, in the order in which they are read. A block that
    several sequences share has a stripe for each.

    Args:
        launch: Of a kernel with a sequence for each place on axis 0 of its grid.
        step: The number of a visit, counted from the end if negative: it is framed, and earlier ones are pale. None draws all alike.
        tensor, program: See `find_walk`.
        title: Above the figure.

    Raises:
        ConfigError: There is no such step; see also `find_walk`.
    """
    visits = find_walk(launch, tensor, program)
    if step is not None and not -len(visits) <= step < len(visits):
        raise ConfigError(f"There is no step {step}: the walk has {len(visits)}." if visits else f"Nothing was read of {tensor}.")
    num_blocks, block_size = next(argument.shape for argument in launch.tensors if argument.name == tensor)[:2]
    num_rows = max(1, -(-num_blocks // _BLOCKS_IN_ROW))
    current = None if step is None else step % len(visits)
    heading = (
        title
        or f"{launch.kernel}: {len({block for _, block, _ in visits})} of {num_blocks} blocks are read, {len(visits)} visits"
    )
    if current is not None:
        who, block, slots = visits[current]
        heading += f"\nvisit {current + 1}: {name_programs([who], launch.grid).lower()} reads {len(slots)} of {block_size} slots of block {block}"
    above = 0.3 if current is None else 0.5
    figure = new_figure(above + 0.4 + _ROW_HEIGHT * num_rows, heading, left=0.2, top=above, bottom=0.1)
    axes = figure.subplots()
    width = block_size + _GAP * max(1, block_size / 4)
    axes.set(xlim=(-0.3, _BLOCKS_IN_ROW * width), ylim=(num_rows, -0.05))
    axes.axis("off")
    _paint_blocks(axes, num_blocks, block_size, width)
    shown = visits if current is None else visits[: current + 1]
    _paint_visits(axes, shown, current, block_size, width)
    add_legend(axes, _walk_legend(visits, current is not None))
    return figure


def show_walk(
    launch: Callable[..., Any], *args: Any, tensor: str = "key_cache_ptr", program: Program | None = None, **kwargs: Any
) -> VBox:
    """Launch a kernel in Triton's interpreter, and go through the blocks that it visits, one by one.

    Args:
        launch: A kernel with its grid, or any function that launches one kernel.
        args, kwargs: Its arguments.
        tensor, program: See `find_walk`.

    Returns:
        A box for the notebook to show; step 0 is the whole walk.

    Raises:
        WidgetError: ipywidgets is not installed.
        KernelError: Triton is not installed.
        ConfigError: No kernel was launched; see also `find_walk`.
    """
    import_widgets()
    with record_accesses() as launches:
        launch(*args, **kwargs)
    if not launches:
        raise ConfigError("No Triton kernel was launched.")
    recorded = launches[-1]
    visits = find_walk(recorded, tensor, program)

    @lru_cache(maxsize=200)
    def draw(number: int) -> bytes:
        return to_png(draw_walk(recorded, number - 1 if number else None, tensor, program))

    box = make_player(len(visits) + 1, draw, 0, f"{len(visits)} visits; `draw_walk(box.launch)` draws them as a figure.")
    box.launch = recorded
    return box


def _place(block: int, width: float) -> tuple[float, float]:
    return block % _BLOCKS_IN_ROW * width, float(block // _BLOCKS_IN_ROW)


def _paint_blocks(axes: Axes, num_blocks: int, block_size: int, width: float) -> None:
    slots = []
    for block in range(num_blocks):
        left, top = _place(block, width)
        slots += [(left + slot, left + slot + 1, top + 0.3, top + 0.9) for slot in range(block_size)]
        axes.text(left, top + 0.25, f"{block}", fontsize=7, color=INK, va="bottom")
    add_boxes(axes, slots, "white", edge=PALE, line_width=0.6, label="slots")


def _paint_visits(
    axes: Axes, visits: Sequence[tuple[Program, int, list[int]]], current: int | None, block_size: int, width: float
) -> None:
    """Each block has a stripe for every sequence that reads it, with the block's place in the sequence."""
    places: dict[int, dict[int, int]] = {}
    readers: dict[int, list[int]] = {}
    for program, block, _ in visits:
        order = places.setdefault(program[0], {})
        order.setdefault(block, len(order))
        if program[0] not in readers.setdefault(block, []):
            readers[block].append(program[0])
    named: set[tuple[int, int]] = set()
    for number, (program, block, slots) in enumerate(visits):
        seq, stripe = program[0], 0.6 / len(readers[block])
        left, top = _place(block, width)
        top += 0.3 + stripe * readers[block].index(seq)
        color = request_color(seq)
        if current is not None and number != current:
            color = tint(color, _PAST_WHITENESS)
        boxes = [(left + slot, left + slot + 1, top, top + stripe) for slot in slots]
        hatch = _HATCHES[seq % len(_HATCHES)]
        add_boxes(axes, boxes, color, edge="white", line_width=0.6, hatch=hatch, label=f"sequence {seq}", zorder=3)
        if (seq, block) not in named or number == current:
            named.add((seq, block))
            box = {"facecolor": color, "edgecolor": "none", "pad": 0.8}
            x, size = left + (slots[0] + slots[-1] + 1) / 2, 8 if stripe > 0.25 else 6
            text = f"{places[seq][block]}"
            axes.text(x, top + stripe / 2, text, fontsize=size, ha="center", va="center", color=ink_on(color), bbox=box, zorder=5)
        if number == current:
            frame = [(left, left + block_size, top, top + stripe)]
            add_boxes(axes, frame, "none", edge=INK, line_width=2.0, label="now", zorder=6)


def _walk_legend(visits: Sequence[tuple[Program, int, list[int]]], moving: bool) -> list[Artist]:
    sequences = sorted({program[0] for program, _, _ in visits})
    handles: list[Artist] = [
        Patch(facecolor=request_color(seq), edgecolor="white", hatch=_HATCHES[seq % len(_HATCHES)], label=f"sequence {seq}")
        for seq in sequences[:6]
    ]
    if len(sequences) > 6:
        handles.append(Patch(facecolor="none", edgecolor="none", label=f"and {len(sequences) - 6} more"))
    handles.append(Patch(facecolor="white", edgecolor=PALE, label="not read"))
    if moving:
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=2.0, label="now"))
    return handles


def find_tiles(
    launch: Launch,
    block_tables: Any,
    context_lens: Any,
    query_start_loc: Any,
    tensor: str = "key_cache_ptr",
    output: str = "output_ptr",
) -> tuple[list[np.ndarray], set[int]]:
    """What a prefill kernel reads for each new token.

    A token's programs are the ones that store something in its row of the output; what they load from the cache, they load for it.

    Args:
        launch: From `record_accesses`.
        block_tables, context_lens, query_start_loc: What the kernel was given.
        tensor, output: The kernel's names for the cache, and for its result, `[num_tokens, ...]`.

    Returns:
        For each sequence `[new tokens, context_len]`: 1 where the position was read and the token may see it, 2 where it was read and the token may not see
        it, so that its score is masked, 0 where it was not read. And the rows that begin a tile: different programs compute them than the row before.

    Raises:
        ConfigError: The kernel has no such tensors.
    """
    visits = find_walk(launch, tensor)
    block_size = next(argument.shape for argument in launch.tensors if argument.name == tensor)[1]
    number = next((i for i, argument in enumerate(launch.tensors) if argument.name == output), None)
    if number is None:
        raise ConfigError(f"The kernel has no tensor {output!r}, only {', '.join(argument.name for argument in launch.tensors)}.")
    row_size = max(1, int(np.prod(launch.tensors[number].shape[1:])))
    read: dict[Program, set[int]] = {}
    for program, block, offsets in visits:
        read.setdefault(program, set()).update(block * block_size + offset for offset in offsets)
    programs: dict[int, set[Program]] = {}
    for access in launch.accesses:
        if access.tensor == number and access.kind != "load":
            for row in set((access.elements[access.elements >= 0] // row_size).tolist()):
                programs.setdefault(row, set()).add(access.program)
    starts = [int(start) for start in query_start_loc]
    grids = []
    for seq, context_len in enumerate(int(length) for length in context_lens):
        grid = np.zeros((starts[seq + 1] - starts[seq], context_len), np.int8)
        positions = range(context_len)
        slots = [int(block_tables[seq][position // block_size]) * block_size + position % block_size for position in positions]
        for i, row in enumerate(range(starts[seq], starts[seq + 1])):
            seen: set[int] = set().union(*(read.get(program, set()) for program in programs.get(row, ())))
            for position in positions:
                if slots[position] in seen:
                    grid[i, position] = 1 if position <= context_len - len(grid) + i else 2
        grids.append(grid)
    return grids, {row for row in programs if programs[row] != programs.get(row - 1)}


def draw_tiles(
    launch: Launch,
    block_tables: Any,
    context_lens: Any,
    query_start_loc: Any,
    tensor: str = "key_cache_ptr",
    output: str = "output_ptr",
    title: str = "",
) -> Figure:
    """Draw what a ragged prefill computes: for each sequence, its new tokens against the positions of its context.

    Args:
        launch, block_tables, context_lens, query_start_loc, tensor, output: See `find_tiles`.
        title: Above the figure.
    """
    grids, first_rows = find_tiles(launch, block_tables, context_lens, query_start_loc, tensor, output)
    seen, masked = (sum(int((grid == state).sum()) for grid in grids) for state in (1, 2))
    heading = title or f"{launch.kernel}: {seen} scores count, {masked} more are of keys that were read, and masked"
    tallest = max((len(grid) for grid in grids), default=1)
    figure = new_figure(1.4 + max(1.0, 0.13 * tallest), heading, left=0.6, top=0.75, bottom=0.5)
    if not grids:
        axes = figure.subplots()
        axes.axis("off")
        say(axes, "No sequences.")
        return figure
    widest = max(grid.shape[1] for grid in grids)
    panels = figure.subplots(1, len(grids), squeeze=False, width_ratios=[max(grid.shape[1], widest // 3, 8) for grid in grids])[0]
    for seq, (axes, grid) in enumerate(zip(panels, grids, strict=True)):
        start, (count, length) = int(query_start_loc[seq]), grid.shape
        for state, (color, hatch) in _TILE_LOOKS.items():
            boxes = [(column, column + 1, row, row + 1) for row, column in np.argwhere(grid == state).tolist()]
            add_boxes(axes, boxes, color, edge=PALE, line_width=0.4, hatch=hatch, label=_TILE_NAMES[state])
        axes.hlines([row - start for row in first_rows if start < row < start + count], 0, length, color=INK, linewidth=1.6)
        axes.set(xlim=(0, max(length, 1)), ylim=(tallest, 0))
        few = len(grids) <= _MOST_TITLES
        axes.set_title(f"sequence {seq}: {count} new of {length}" if few else f"{seq}", fontsize=8.5, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        rows = sorted({start, start + count - 1}) if count else []
        axes.set_yticks([row - start + 0.5 for row in rows])
        axes.set_yticklabels([str(row) for row in rows])
        tidy(axes, "position", "row of the batch" if seq == 0 else "")
    handles: list[Artist] = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.5, hatch=hatch, label=_TILE_NAMES[state])
        for state, (color, hatch) in _TILE_LOOKS.items()
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.6, label="a tile ends"))
    add_legend(panels[0], handles, y=1.0 + 0.22 / max(1.0, 0.13 * tallest))
    return figure
