"""One step of the engine in one picture: the blocks, the queues, and the batch.

The player (`viz/player.py`) shows these pictures one after another; `draw_step` draws any of them as a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace import EngineTrace, Finish, Preemption, SequenceKey, StepRecord
from minivllm.viz.block_map import label_width, paint_block_map
from minivllm.viz.blocks import describe_step, step_number
from minivllm.viz.drawing import (
    WIDTH,
    Box,
    Labels,
    add_bars,
    add_boxes,
    add_legend,
    look_patch,
    say,
    sequence_names,
    short_name,
    text_width,
    tidy,
)
from minivllm.viz.palette import INK, NEUTRAL, STATE_LOOKS, ink_on, request_colors, tint
from minivllm.viz.spans import sequence_keys

_CHIPS = {"running": 11, "waiting": 11, "swapped": 5}
"""Chips per row of each queue."""
_MOST_ROWS = 3
"""Rows of chips; a figure has as many as the longest queue of its trace needs."""
_ROW_HEIGHT = 0.24
"""Height of a row of chips, and of the line above them, in inches."""
_CHIP_WIDTH = 21.5
"""Width of the narrowest chip, in points."""
_WIDEST = 3
"""Maximum width of a chip, as a multiple of `_CHIP_WIDTH`."""
_CHIP_SIZE = 7.0
"""Font size, in points."""
_FEWEST_COLUMNS = 8
"""Minimum number of columns in the batch, so that one sequence does not fill it."""
_MOST_NAMED = 40
"""With more columns than this, the batch has no room for names."""
_CACHED = 0.85
"""Whiteness of tokens that are already in the cache."""


@dataclass(frozen=True)
class Queues:
    """The sequences in each queue during a step, in scheduling order."""

    running: tuple[SequenceKey, ...]
    waiting: tuple[SequenceKey, ...]
    swapped: tuple[SequenceKey, ...]


def find_queues(trace: EngineTrace, step: int) -> Queues:
    """The queues at a step.

    Running and swapped sequences have a block table in the trace. Others that have arrived or were preempted, and have not finished,
    are waiting, in order of arrival (or of priority).
    """
    record = trace[step]
    known: dict[SequenceKey, None] = {}
    ended: set[SequenceKey] = set()
    aborted: set[str] = set()
    for before in trace.steps[: step + 1]:
        known.update(dict.fromkeys(SequenceKey(request_id) for request_id in before.arrived))
        known.update(dict.fromkeys(_key(item) for item in before.preempted))
        aborted.update(before.aborted)
    for before in trace.steps[:step]:
        ended.update(_key(item) for item in before.finished)
    places = record.block_tables.keys() | record.swapped_tables.keys()
    waiting = [key for key in known if key not in places and key not in ended and key.request_id not in aborted]
    arrivals = {request_id: number for number, request_id in enumerate(trace.requests)}
    by_priority = trace.config.scheduler_config.get("policy") == "priority"

    def order(key: SequenceKey) -> tuple[float, ...]:
        request = trace.requests.get(key.request_id)
        urgency = (request.priority, request.arrival_time) if by_priority and request else ()
        return (*urgency, arrivals.get(key.request_id, 0), key.index)

    return Queues(tuple(record.block_tables), tuple(sorted(waiting, key=order)), tuple(sorted(record.swapped_tables, key=order)))


def draw_step(trace: EngineTrace, step: int) -> Figure:
    """Draw what the player shows at a step: blocks, queues and batch while the model computes.

    Args:
        trace: Of any engine or simulation.
        step: Its number, from 0; negative numbers count from the end.

    Raises:
        ConfigError: There is no such step.
    """
    step, title = step_number(trace, step), describe_step(trace, step)
    names, colors = sequence_names(sequence_keys(trace)), request_colors(trace)
    num_rows = _num_rows(trace, names)
    queues_bottom = 4.1 + _ROW_HEIGHT * (1 + num_rows)
    height = queues_bottom + 1.54
    figure = Figure(figsize=(WIDTH, height))
    figure.text(0.02, 1 - 0.1 / height, title, fontsize=10, weight="bold", va="top")
    figure.text(0.02, 1 - 0.33 / height, _events(trace[step], names), fontsize=8.5, color=INK, va="top")
    table_left = 0.51 + (0.45 + label_width(trace) / 72) / WIDTH
    grid, tables, queues, batch = (
        figure.add_axes((left, 1 - bottom / height, right - left, inches / height))
        for left, right, bottom, inches in (
            (0.06, 0.51, 3.53, 2.65),
            (table_left, 0.985, 3.53, 2.65),
            (0.02, 0.985, queues_bottom, _ROW_HEIGHT * (1 + num_rows)),
            (0.06, 0.985, height - 0.24, 0.95),
        )
    )
    paint_block_map(grid, tables, trace, step)
    _paint_queues(queues, trace, step, names, colors, num_rows)
    _paint_batch(batch, trace[step], names, colors, max(len(record.scheduled) for record in trace))
    return figure


def _chip_width(names: dict[SequenceKey, str]) -> int:
    """The width of every chip, as a multiple of the narrowest."""
    longest = max((text_width(name, _CHIP_SIZE) for name in names.values()), default=0.0)
    return min(max(1, ceil((longest + 5.0) / _CHIP_WIDTH)), _WIDEST)


def _num_rows(trace: EngineTrace, names: dict[SequenceKey, str]) -> int:
    """Rows of chips that the trace's longest queue needs, within bounds."""
    width = _chip_width(names)
    longest = {queue: max(getattr(record, f"num_{queue}") for record in trace) for queue in _CHIPS}
    return min(max(1, *(ceil(count / (_CHIPS[queue] // width)) for queue, count in longest.items())), _MOST_ROWS)


def _paint_queues(
    axes: Axes, trace: EngineTrace, step: int, names: dict[SequenceKey, str], colors: dict[str, str], num_rows: int
) -> None:
    """Paint the three queues as rows of chips; sequences that arrived or moved in this step are outlined."""
    record, queues = trace[step], find_queues(trace, step)
    moved = {_key(item) for items in (record.finished, record.preempted, record.swapped_in) for item in items}
    moved.update(SequenceKey(request_id) for request_id in record.arrived)
    width = _chip_width(names)
    chips, faces, edges, points, texts, inks = [], [], [], [], [], []
    left = 0
    for queue, room_across in _CHIPS.items():
        keys: tuple[SequenceKey, ...] = getattr(queues, queue)
        num_chips = room_across // width
        axes.text(left + 0.08, 0.45, f"{queue}: {len(keys)}", fontsize=9, weight="bold", va="center")
        room = num_rows * num_chips
        shown = keys if len(keys) <= room else keys[: room - 1]
        for i, key in enumerate(shown):
            x, y = left + i % num_chips * width, 1 + i // num_chips
            chips.append(FancyBboxPatch((x + 0.12, y + 0.14), width - 0.24, 0.66, boxstyle="round,pad=0.04,rounding_size=0.12"))
            faces.append(color := colors[key.request_id])
            edges.append("black" if key in moved else color)
            points.append((x + width / 2, y + 0.49))
            texts.append(_shorten(names[key], width * _CHIP_WIDTH - 5.0))
            inks.append(ink_on(color))
        if len(keys) > len(shown):
            axes.text(
                left + (num_chips - 1) * width + 0.1, num_rows + 0.5, f"+{len(keys) - len(shown)}", fontsize=7.5, va="center"
            )
        if not keys:
            axes.text(left + 0.08, 1.4, "empty", fontsize=8, color=INK, va="center")
        left += room_across + 1
    axes.add_collection(PatchCollection(chips, facecolors=faces, edgecolors=edges, linewidths=1.8), autolim=False)
    axes.add_collection(Labels(axes, points, texts, _CHIP_SIZE, inks), autolim=False)
    axes.set_xlim(0, left - 1)
    axes.set_ylim(num_rows + 1, 0)
    axes.axis("off")


def _paint_batch(
    axes: Axes, record: StepRecord, names: dict[SequenceKey, str], colors: dict[str, str], largest_batch: int
) -> None:
    """Paint the batch: a column per sequence, with the tokens computed now on top of those in the cache."""
    parts = record.scheduled
    highest = max((part.context_len for part in parts), default=1)
    cached: list[Box] = []
    points: list[tuple[float, float]] = []
    computed: dict[str, list[Box]] = {"prefill": [], "decode": [], "rejected": []}
    computed_colors: dict[str, list[str]] = {"prefill": [], "decode": [], "rejected": []}
    for i, part in enumerate(parts):
        now = part.num_new_tokens if part.num_drafts else part.num_tokens
        before = part.context_len - now
        top = before + max(now, 0.04 * highest)  # one token above hundreds must remain visible
        cached.append((i - 0.4, i + 0.4, 0, before))
        computed[part.action].append((i - 0.4, i + 0.4, before, top))
        computed_colors[part.action].append(colors[part.request_id])
        if rejected := part.num_drafts - part.num_accepted:
            computed["rejected"].append((i - 0.4, i + 0.4, top, top + max(rejected, 0.04 * highest)))
            computed_colors["rejected"].append(colors[part.request_id])
            top = computed["rejected"][-1][3]
        points.append((i, top + 0.03 * highest))
    add_boxes(axes, cached, [tint(colors[part.request_id], _CACHED) for part in parts], edge=INK, line_width=0.4, label="cached")
    for action, boxes in computed.items():
        add_bars(axes, STATE_LOOKS[action], boxes, computed_colors[action], label=action)
    tidy(axes, "", "tokens")
    num_columns = max(largest_batch, _FEWEST_COLUMNS)
    axes.set_xlim(-0.7, num_columns - 0.3)
    axes.set_ylim(0, 1.28 * highest)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_xticks([])
    if len(parts) <= _MOST_NAMED:
        axes.add_collection(Labels(axes, points, [f"+{part.num_tokens}" for part in parts], 7, align=(0.5, 0.0)), autolim=False)
        room = 0.95 * 72 * WIDTH * axes.get_position().width / num_columns
        places, below = [(i, -0.03 * highest) for i in range(len(parts))], [_shorten(names[part.key], room) for part in parts]
        axes.add_collection(Labels(axes, places, below, 7, align=(0.5, 1.3)), autolim=False)
    handles = [look_patch(STATE_LOOKS[action]) for action in computed if computed[action] or action != "rejected"]
    handles.append(Patch(facecolor=tint(NEUTRAL, _CACHED), edgecolor=INK, linewidth=0.4, label="computed before"))
    add_legend(axes, handles)
    axes.get_legend().set_bbox_to_anchor((0.055, 1.0), transform=axes.transAxes)
    axes.text(-0.043, 1.1, f"batch: {len(parts)}", transform=axes.transAxes, fontsize=9, weight="bold", va="center")
    if not parts:
        say(axes, "nothing scheduled")


def _shorten(name: str, room: float) -> str:
    """Shorten a name to fit, keeping its end, which distinguishes requests."""
    if text_width(name, _CHIP_SIZE) <= room:
        return name
    return next((short for i in range(2, len(name)) if text_width(short := f"…{name[i:]}", _CHIP_SIZE) <= room), "…")


def _some(names: Sequence[str], most: int = 8) -> str:
    """Join names, up to a maximum."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _events(record: StepRecord, names: dict[SequenceKey, str]) -> str:
    """What else happened in the step, in one line."""
    groups = {
        "arrived": [short_name(request_id) for request_id in record.arrived],
        "aborted": [short_name(request_id) for request_id in record.aborted],
        "preempted, to be recomputed": [names[_key(item)] for item in record.preempted if item.mode == "recompute"],
        "preempted, swapped out": [names[_key(item)] for item in record.preempted if item.mode == "swap"],
        "swapped in": [names[key] for key in record.swapped_in],
        "finished": [names[_key(item)] for item in record.finished],
    }
    events = [f"{what}: {_some(who)}" for what, who in groups.items() if who]
    if record.error:
        events.append(f"failed: {record.error}")
    line = " · ".join(events)
    return line if len(line) <= 125 else f"{line[:124]}…"


def _key(item: Preemption | Finish | SequenceKey) -> SequenceKey:
    return SequenceKey(item.request_id, item.index)
