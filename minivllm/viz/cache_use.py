"""How the KV cache is used over time: slots filled, reserved for later tokens, wasted, cached or free."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.engine.trace import EngineTrace, SequenceKey, StepRecord
from minivllm.scheduler_output import FREED_BLOCK
from minivllm.viz.drawing import Box, add_boxes, add_legend, new_figure, say, tidy
from minivllm.viz.palette import INK, NEUTRAL, PALE, REQUEST_COLORS, tint
from minivllm.viz.spans import find_context_lens, step_times


class CacheUse(NamedTuple):
    """The use of the device cache's slots at the end of a step. A slot holds one token; the first five fields add up to all slots.

    Attributes:
        used: Slots with a token of a running sequence. A shared block counts once.
        reserved: Allocated, empty slots that will be filled before the block is freed.
        wasted: Allocated, empty slots that will never be filled.
        cached: Slots of free blocks whose contents are in the prefix cache.
        free: Other slots of free blocks.
        unshared: Slots that would be used if no block were shared.
    """

    used: int
    reserved: int
    wasted: int
    cached: int
    free: int
    unshared: int


def find_cache_use(trace: EngineTrace) -> list[CacheUse]:
    """The use of the cache in each step.

    Later steps show what was reserved and what was wasted. Empty slots of a sequence that is unfinished at the end of the trace count
    as reserved.
    """
    lens = find_context_lens(trace)
    uses: list[CacheUse] = []
    later: dict[tuple[SequenceKey, int], int] = {}
    """How many tokens each partly filled block will eventually hold, by its owner and its index in the owner's table."""
    for number in range(len(trace) - 1, -1, -1):
        step, following = trace[number], trace[number + 1] if number + 1 < len(trace) else None
        use, later = _use_of_step(trace, step, following, lens[number : number + 2], later)
        uses.append(use)
    return uses[::-1]


def _use_of_step(
    trace: EngineTrace,
    step: StepRecord,
    following: StepRecord | None,
    lens: list[dict[SequenceKey, int]],
    later: dict[tuple[SequenceKey, int], int],
) -> tuple[CacheUse, dict[tuple[SequenceKey, int], int]]:
    size = trace.config.block_size
    ended = {(finish.request_id, finish.index) for finish in step.finished}
    now_held: dict[int, int] = {}
    then_held: dict[int, int] = {}
    fills: dict[tuple[SequenceKey, int], int] = {}
    unshared = 0
    for key, table in step.block_tables.items():
        length = min(lens[0][key], len(table) * size)
        unshared += length - size * table.count(FREED_BLOCK)
        next_table = following.block_tables.get(key, ()) if following is not None else ()
        for place in range(length // size, len(table)):
            block = table[place]
            held = then = max(0, length - place * size)
            if following is None:
                then = held if key in ended or _is_over(trace, key) else size
            elif place < len(next_table) and next_table[place] == block:
                then = max(held, later[key, place] if (key, place) in later else min(size, lens[1][key] - place * size))
            fills[key, place] = then
            now_held[block] = max(now_held.get(block, 0), held)
            then_held[block] = max(then_held.get(block, 0), then)
    num_allocated = trace.config.num_gpu_blocks - step.num_free_blocks
    empty = sum(size - held for held in now_held.values())
    wasted = sum(size - held for held in then_held.values())
    cached = 0
    if step.cached_blocks:
        cached = size * len(set(step.cached_blocks).difference(*step.block_tables.values()))
    use = CacheUse(
        used=num_allocated * size - empty,
        reserved=empty - wasted,
        wasted=wasted,
        cached=cached,
        free=step.num_free_blocks * size - cached,
        unshared=unshared,
    )
    return use, fills


def _is_over(trace: EngineTrace, key: SequenceKey) -> bool:
    """Whether a sequence's request is finished by the end of the trace."""
    request = trace.requests.get(key.request_id)
    return request is not None and request.finished_time is not None


_BANDS = (
    ("used", "used", REQUEST_COLORS[0], None),
    ("reserved", "reserved, filled later", tint(REQUEST_COLORS[0], 0.6), "////"),
    ("wasted", "wasted, never filled", "white", "xxxx"),
    ("cached", "cached", tint(NEUTRAL, 0.7), "...."),
    ("free", "free", "white", None),
)
"""Field of `CacheUse`, label, colour and hatch, from bottom to top."""


def draw_cache_use(trace: EngineTrace, title: str = "") -> Figure:
    """Draw the use of the cache's slots over time, with the mean share of each use over all steps.

    Args:
        trace: Of any engine.
        title: Above the figure.

    Returns:
        A figure. A dashed line shows how many slots would be used without sharing blocks, if any are shared.
    """
    figure = new_figure(3.1, title, left=0.95, top=0.32)
    paint_cache_use(figure.add_subplot(), trace)
    return figure


def paint_cache_use(axes: Axes, trace: EngineTrace) -> None:
    """Paint what `draw_cache_use` draws into given axes, with its legend above."""
    uses, times = find_cache_use(trace), step_times(trace)
    num_slots = trace.config.num_gpu_blocks * trace.config.block_size
    stays: list[tuple[float, float, CacheUse]] = []
    for number, (start, end) in enumerate(times):
        stays.append((start, end, uses[number]))
        if number + 1 < len(times) and end < times[number + 1][0]:  # idle: all blocks are free, some of them cached
            cached = len(trace[number].cached_blocks) * trace.config.block_size
            stays.append((end, times[number + 1][0], CacheUse(0, 0, 0, cached, num_slots - cached, 0)))
    total = sum(end - start for start, end, _ in stays) * num_slots
    handles: list = []
    bottoms = [0] * len(stays)
    for field, words, color, hatch in _BANDS:
        tops = [bottom + getattr(use, field) for bottom, (_, _, use) in zip(bottoms, stays, strict=True)]
        bands = zip(stays, bottoms, tops, strict=True)
        boxes: list[Box] = [(start, end, low, high) for (start, end, _), low, high in bands if high > low]
        bottoms = tops
        if not boxes:
            continue
        add_boxes(axes, boxes, color, edge=INK if hatch else "none", hatch=hatch, label=field)
        share = sum((end - start) * (high - low) for start, end, low, high in boxes) / total if total else 0.0
        edge = PALE if field == "free" else INK
        handles.append(Patch(facecolor=color, edgecolor=edge, linewidth=0.6, hatch=hatch, label=f"{words} {share:.1%}"))
    unshared = [use.unshared for _, _, use in stays]
    if any(use.unshared > use.used for use in uses):
        xs = [start for start, _, _ in stays] + [stays[-1][1]]
        handles += axes.step(
            xs, unshared + unshared[-1:], where="post", color="black", linestyle="--", linewidth=1.2, label="if unshared"
        )
    axes.axhline(num_slots, color=INK, linewidth=0.8)
    tidy(axes, "time (s)", "slots of the cache\n(tokens)")
    axes.set_xlim(0.0, stays[-1][1] if stays and stays[-1][1] > 0 else 1.0)
    axes.set_ylim(0, 1.03 * max([num_slots, *unshared, 1]))
    if not uses:
        say(axes, "no step")
    add_legend(axes, handles)
