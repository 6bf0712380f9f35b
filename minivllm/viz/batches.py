"""The composition of each step: the tokens computed, and the sequences in it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace import EngineTrace, StepRecord
from minivllm.viz.drawing import Box, add_bars, add_legend, look_patch, new_figure, say, tidy
from minivllm.viz.palette import NEUTRAL, STATE_LOOKS, request_colors
from minivllm.viz.spans import running_states

_MOST_PARTS = 2500
"""With more parts than this, bars are not split by request: the parts would be too small to see, and slow to draw."""
_MOST_BARS = 120
"""With more bars than this, no gap is left between them."""
_ACTIONS = ("prefill", "decode", "rejected")


def draw_batches(trace: EngineTrace, title: str = "") -> Figure:
    """The composition of the batch, step by step: tokens computed above, sequences below.

    Args:
        trace: Of any engine.
        title: Above the figure.

    Returns:
        A figure. Prefill is light and hatched, decode solid, rejected drafts cross-hatched. In a short trace tokens have the colours
        of their requests. Running sequences that a step does not compute are "stalled". Dashed lines are the scheduler's limits,
        shown if the steps come near them.
    """
    figure = new_figure(4.4, title, left=0.75, top=0.3)
    axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"hspace": 0.25})
    paint_batches(axes[0], axes[1], trace)
    axes[0].set_xlabel("")
    axes[0].tick_params(labelbottom=False)
    return figure


def paint_batches(tokens_axes: Axes, sequences_axes: Axes, trace: EngineTrace) -> None:
    """Paint what `draw_batches` draws into two given axes, with a legend above each."""
    _paint_tokens(tokens_axes, trace)
    _paint_sequences(sequences_axes, trace)
    for axes, label in ((tokens_axes, "tokens computed\n(per step)"), (sequences_axes, "sequences\n(per step)")):
        tidy(axes, "step (number)", label)
        axes.set_xlim(-0.6, max(len(trace), 1) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if not len(trace):
            say(axes, "no step")


def _widths(trace: EngineTrace) -> tuple[float, float]:
    """Half of a bar's width, in steps, and its outline's width, in points: in a long trace the bars touch."""
    return (0.4, 0.6) if len(trace) <= _MOST_BARS else (0.5, 0.2)


def _parts(step: StepRecord) -> list[tuple[str, str, int]]:
    """(request, action, tokens) of a step's bar from the bottom up: first decodes, then prefills."""
    parts: list[tuple[str, str, int]] = []
    for item in sorted(step.scheduled, key=lambda item: item.action):
        num_rejected = item.num_drafts - item.num_accepted
        parts.append((item.request_id, item.action, item.num_tokens - num_rejected))
        if num_rejected:
            parts.append((item.request_id, "rejected", num_rejected))
    return parts


def _paint_tokens(axes: Axes, trace: EngineTrace) -> None:
    colors = request_colors(trace)
    by_request = sum(len(step.scheduled) for step in trace) <= _MOST_PARTS
    half, line_width = _widths(trace)
    boxes: dict[str, list[Box]] = {action: [] for action in _ACTIONS}
    box_colors: dict[str, list[str]] = {action: [] for action in _ACTIONS}
    highest = 1
    for number, step in enumerate(trace):
        parts = _parts(step)
        if not by_request:
            totals = {
                action: sum(count for _, part, count in parts if part == action) for action in ("decode", "rejected", "prefill")
            }
            parts = [("", action, total) for action, total in totals.items() if total]
        bottom = 0
        for request_id, action, count in parts:
            boxes[action].append((number - half, number + half, bottom, bottom + count))
            box_colors[action].append(colors[request_id] if by_request else NEUTRAL)
            bottom += count
        highest = max(highest, bottom)
    for action in _ACTIONS:
        add_bars(axes, STATE_LOOKS[action], boxes[action], box_colors[action], label=action, line_width=line_width)
    _limit(axes, trace, "max_num_batched_tokens", highest)
    axes.set_ylim(0, 1.08 * highest)
    add_legend(axes, [look_patch(STATE_LOOKS[action]) for action in _ACTIONS if boxes[action]])


def _paint_sequences(axes: Axes, trace: EngineTrace) -> None:
    half, line_width = _widths(trace)
    order = ("decode", "prefill", "stalled")
    boxes: dict[str, list[Box]] = {state: [] for state in order}
    highest = 1
    for number, step in enumerate(trace):
        states = list(running_states(step).values())
        bottom = 0
        for state in order:
            count = states.count(state)
            if count:
                boxes[state].append((number - half, number + half, bottom, bottom + count))
            bottom += count
        highest = max(highest, bottom)
    for state in order:
        add_bars(axes, STATE_LOOKS[state], boxes[state], NEUTRAL, label=state, line_width=line_width)
    _limit(axes, trace, "max_num_seqs", highest)
    axes.set_ylim(0, 1.15 * highest)
    if boxes["stalled"]:
        add_legend(axes, [look_patch(STATE_LOOKS["stalled"])])


def _limit(axes: Axes, trace: EngineTrace, name: str, highest: float) -> None:
    """Draw a dashed line at a limit of the scheduler, if the steps come near it."""
    limit = trace.config.scheduler_config.get(name)
    if limit is not None and limit <= 1.15 * highest:
        axes.axhline(limit, color="black", linewidth=1, linestyle="--")
        axes.annotate(
            name, (1.0, limit), (0, 1.5), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", fontsize=7
        )
