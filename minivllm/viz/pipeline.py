"""What pipeline stages do, and their bubbles: the time in which a stage waits for a batch."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.scheduler_output import RankTiming
from minivllm.viz.drawing import WIDTH
from minivllm.viz.palette import REQUEST_COLORS

NARROWEST = 0.02
"""The narrowest bar, as a share of the axis, that has a number in it."""


def stage_utilisation(trace: EngineTrace, first: int = 0, num_steps: int | None = None) -> list[float]:
    """The share of the time in which each stage computes, from the first stage's start of a step to the last one's end of another.

    Args:
        trace: Of an engine with several stages, or other ranks.
        first, num_steps: The steps that count, all by default.

    Raises:
        ConfigError: There are no such steps, or one worker has run them.
    """
    ranks = _ranks(trace, first, num_steps)
    start, end = min(rank.start for rank in ranks[0]), max(rank.end for rank in ranks[-1])
    return [sum(_busy(step[stage]) for step in ranks) / (end - start) for stage in range(len(ranks[0]))]


def draw_bubbles(traces: Mapping[str, EngineTrace], first: int = 0, num_steps: int = 12) -> Figure:
    """Draw which batch each stage computes when: a panel for each run, all as long as the shortest. The gaps are bubbles, and communication.

    A bar has the color of its batch, as long as there are as many batches as stages, and the number of sequences in it.

    Args:
        traces: A name for each run, of an engine with several stages.
        first: The first step to draw.
        num_steps: How many.

    Raises:
        ConfigError: A run has not that many steps, or only one stage.
    """
    most = max(len(_ranks(trace, first, num_steps)[0]) for trace in traces.values())
    figure = Figure(figsize=(WIDTH, 0.7 + (0.45 + 0.36 * most) * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    duration = min(_duration(_ranks(trace, first, num_steps)) for trace in traces.values())
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        _draw_run(axes, trace, first, num_steps, duration)
        shares = ", ".join(f"{share:.0%}" for share in stage_utilisation(trace, first, num_steps))
        axes.set_title(f"{name}: stages busy {shares}", loc="left", fontsize=10)
    all_axes[-1].set_xlabel("time (ms); a bar is a batch with so many sequences", fontsize=9)
    return figure


def _draw_run(axes: Axes, trace: EngineTrace, first: int, num_steps: int, duration: float) -> None:
    ranks = _ranks(trace, first, num_steps)
    origin, num_stages = min(rank.start for rank in ranks[0]), len(ranks[0])
    for number, step in enumerate(ranks):
        count = len(trace[first + number].scheduled)
        color = REQUEST_COLORS[(first + number) % num_stages % len(REQUEST_COLORS)]
        for stage, rank in enumerate(step):
            bars = [(1000 * (start - origin), 1000 * (end - start)) for start, end in _computing(rank)]
            axes.broken_barh(bars, (stage - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.8)
            start, width = max(bars, key=lambda bar: bar[1])
            if width > NARROWEST * 1000 * duration and start + width / 2 < 1000 * duration:
                axes.text(start + width / 2, stage, str(count), ha="center", va="center", fontsize=8, color="white")
    axes.set(xlim=(0, 1000 * duration), ylim=(num_stages - 0.5, -0.5), yticks=range(num_stages))
    axes.set_yticklabels([f"stage {stage}" for stage in range(num_stages)], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _ranks(trace: EngineTrace, first: int, num_steps: int | None) -> list[list[RankTiming]]:
    """How each stage, by its first rank, spent each of these steps; or each rank, if there is one stage."""
    last = len(trace) if num_steps is None else first + num_steps
    if not 0 <= first < last <= len(trace):
        raise ConfigError(f"The run has {len(trace)} steps, but steps {first} to {last - 1} were asked for.")
    ranks = [trace[number].ranks for number in range(first, last)]
    if not all(ranks):
        raise ConfigError("The run has steps of one worker: record a trace with pipeline_parallel_size=2 or more.")
    num_stages = trace.config.scheduler_config.get("pipeline_parallel_size", 1)
    ranks_per_stage = len(ranks[0]) // num_stages if num_stages > 1 else 1
    return [step[::ranks_per_stage] for step in ranks]


def _computing(rank: RankTiming) -> list[tuple[float, float]]:
    """When a rank computed, between its communication."""
    moments = [rank.start, *(moment for span in rank.communication for moment in span), rank.end]
    return list(zip(moments[::2], moments[1::2], strict=True))


def _busy(rank: RankTiming) -> float:
    return rank.end - rank.start - rank.communication_seconds


def _duration(ranks: list[list[RankTiming]]) -> float:
    return max(rank.end for rank in ranks[-1]) - min(rank.start for rank in ranks[0])
