"""Queue lengths and cache usage over time."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minivllm.engine.trace import EngineTrace, StepRecord
from minivllm.viz.drawing import add_legend, new_figure, say, tidy
from minivllm.viz.palette import INK, REQUEST_COLORS
from minivllm.viz.spans import step_times

_QUEUES = (
    ("running", "num_running", REQUEST_COLORS[0], "-", 2.0),
    ("waiting", "num_waiting", REQUEST_COLORS[5], "--", 1.5),
    ("swapped out", "num_swapped", REQUEST_COLORS[2], ":", 2.0),
)
"""Name, field of a step, colour, and a line style that distinguishes the three without colour."""
_MODES = {"recompute": ("v", "preemption by recompute"), "swap": ("s", "preemption by swap")}


def draw_curves(trace: EngineTrace, title: str = "") -> Figure:
    """Draw the sequences in each queue above the blocks in use, with a mark for each preemption.

    Args:
        trace: Of any engine.
        title: Above the figure.
    """
    figure = new_figure(4.4, title, left=0.75, top=0.3)
    axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"hspace": 0.25})
    paint_curves(axes[0], axes[1], trace)
    axes[0].set_xlabel("")
    axes[0].tick_params(labelbottom=False)
    return figure


def paint_curves(queue_axes: Axes, cache_axes: Axes, trace: EngineTrace) -> None:
    """Paint what `draw_curves` draws into two given axes, with a legend above each."""
    stays = step_times(trace)
    times, holders = _with_pauses(trace, stays)
    handles = []
    for name, field, color, line_style, line_width in _QUEUES:
        counts = [0 if step is None else getattr(step, field) for step in holders]
        if name == "swapped out" and not any(counts):
            continue
        handles += queue_axes.step(
            times, counts, where="post", color=color, linestyle=line_style, linewidth=line_width, label=name
        )
    tidy(queue_axes, "time (s)", "sequences\n(number)")
    queue_axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    queue_axes.set_ylim(bottom=0)
    add_legend(queue_axes, handles)

    num_blocks = trace.config.num_gpu_blocks
    shares = [0.0 if step is None else 100.0 * (1.0 - step.num_free_blocks / max(num_blocks, 1)) for step in holders]
    handles = cache_axes.step(times, shares, where="post", color=INK, linewidth=1.5, label="blocks in use")
    for mode, (marker, label) in _MODES.items():
        marks = [time for (time, _), step in zip(stays, trace, strict=True) if any(item.mode == mode for item in step.preempted)]
        if marks:
            handles += cache_axes.plot(
                marks,
                [107.0] * len(marks),
                marker,
                color=REQUEST_COLORS[5],
                markeredgecolor="black",
                markeredgewidth=0.7,
                markersize=6,
                clip_on=False,
                label=label,
                zorder=3,
            )
    tidy(cache_axes, "time (s)", f"blocks in use\n(% of {num_blocks})")
    cache_axes.set_ylim(0, 112)
    cache_axes.set_yticks(range(0, 101, 25))
    add_legend(cache_axes, handles)
    for axes in (queue_axes, cache_axes):
        axes.set_xlim(0.0, times[-1] if times and times[-1] > 0 else 1.0)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        if not times:
            say(axes, "no step")


def _with_pauses(trace: EngineTrace, stays: list[tuple[float, float]]) -> tuple[list[float], list[StepRecord | None]]:
    """The times at which curves change, each with the step in effect from then on, or None while the engine is idle."""
    times: list[float] = []
    holders: list[StepRecord | None] = []
    for number, (start, end) in enumerate(stays):
        times.append(start)
        holders.append(trace[number])
        if number + 1 == len(stays) or end < stays[number + 1][0]:
            times.append(end)
            holders.append(None if number + 1 < len(stays) else trace[number])
    return times, holders
