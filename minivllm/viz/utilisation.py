"""How many of a batch's seats are taken, over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from minivllm.bench.trace_summary import time_origin
from minivllm.config import check_at_least
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.viz.drawing import WIDTH
from minivllm.viz.palette import REQUEST_COLORS


def draw_utilisation(traces: Mapping[str, EngineTrace], num_seats: int) -> Figure:
    """Draw the share of seats taken by running requests, over time: a panel for each run, with its average over that run.

    Args:
        traces: A name for each run.
        num_seats: The total number of seats, `max_num_seqs` of the largest batch.

    Raises:
        ConfigError: There is no run, or more sequences ran at once than there are seats.
    """
    check_at_least("num_seats", num_seats, 1)
    most = max((step.num_running for trace in traces.values() for step in trace), default=0)
    if not traces or most > num_seats:
        raise ConfigError(
            f"{most} sequences ran at once in {len(traces)} runs: give at least one run, and num_seats of at least that."
        )
    figure = Figure(figsize=(WIDTH, 0.5 + 1.25 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        origin = time_origin(trace)
        edges, shares = [0.0], [0.0]
        for number, step in enumerate(trace):
            pauses = number + 1 == len(trace) or trace.is_idle_after(number)
            edges += [step.start - origin, (step.end if pauses else trace[number + 1].start) - origin]
            shares += [step.num_running / num_seats, 0.0]
        end = edges[-1]
        mean = float(np.dot(np.diff([*edges, end]), shares)) / end if end else 0.0
        axes.fill_between(edges, shares, step="post", color=REQUEST_COLORS[0], linewidth=0)
        axes.plot([0, end], [mean, mean], color=REQUEST_COLORS[5], linewidth=1.5, linestyle="--")
        axes.set_title(f"{name}: {mean:.0%} of the seats taken, on average over {end:.1f} s", loc="left", fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 0.5, 1.0])
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("time (s)", fontsize=9)
    all_axes[-1].set_xlim(left=0)
    figure.supylabel("seats taken", fontsize=9)
    return figure
