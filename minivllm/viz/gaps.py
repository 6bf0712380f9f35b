"""The time between tokens, over time: where everyone's text stalls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.figure import Figure

from minivllm.bench.trace_summary import output_times, time_origin
from minivllm.engine.trace import EngineTrace
from minivllm.viz.drawing import WIDTH
from minivllm.viz.palette import request_colors


def draw_gaps(traces: Mapping[str, EngineTrace], *, leave_out: tuple[str, ...] = ()) -> Figure:
    """Draw each inter-token latency at the moment its token arrived: a panel for each run, with the same axes.

    Args:
        traces: A name for each run.
        leave_out: Ids of requests to leave out.
    """
    figure = Figure(figsize=(WIDTH, 0.5 + 1.7 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        origin, colors, longest = time_origin(trace), request_colors(trace), 0.0
        for key, times in output_times(trace).items():
            if key.request_id in leave_out or len(times) < 2:
                continue
            gaps = [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]
            longest = max(longest, *gaps)
            axes.vlines([time - origin for time in times[1:]], 0, gaps, color=colors[key.request_id], linewidth=1.2, alpha=0.8)
        axes.set_title(f"{name}: the longest gap is {longest:,.0f} ms", loc="left", fontsize=10)
        axes.set_ylabel("ITL (ms)", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].set_xlim(left=0)
    all_axes[-1].set_xlabel("time (s); each line is a step in which tokens came", fontsize=9)
    return figure
