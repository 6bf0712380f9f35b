"""How routers compare: waiting times, what prefix caches spare, and how evenly replicas are loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from minivllm.viz.drawing import WIDTH
from minivllm.viz.palette import INK, REQUEST_COLORS

if TYPE_CHECKING:
    from minivllm.simulation.engine import ReplicaRun

_PERCENTILES = ("p50", "p95", "p99")
_ROUTINGS = ("round-robin", "least-loaded", "prefix-aware")
"""Each has its own color in all figures."""


def draw_routing(runs: Sequence[ReplicaRun]) -> Figure:
    """Draw runs of the same requests with different routers.

    Returns:
        A figure of three panels: percentiles of the time to first token; the part of the prompt tokens found in prefix caches, if any was;
        and the load of each replica, the busiest first.
    """
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    has_hits = any(run.prefix_hit_rate for run in runs)
    times, *middle, loads = figure.subplots(1, 2 + has_hits, width_ratios=(3, 2, 3) if has_hits else (1, 1))
    width = 0.8 / len(runs)
    others = [run.routing for run in runs if run.routing not in _ROUTINGS]
    colors = {name: REQUEST_COLORS[i % len(REQUEST_COLORS)] for i, name in enumerate([*_ROUTINGS, *others])}
    for i, run in enumerate(runs):
        color = colors[run.routing]
        offsets = [group + (i - (len(runs) - 1) / 2) * width for group in range(len(_PERCENTILES))]
        times.bar(offsets, [getattr(run.ttft, name) for name in _PERCENTILES], width * 0.92, color=color, label=run.routing)
        for hits in middle:
            hits.bar_label(hits.bar([i], [100 * run.prefix_hit_rate], 0.7, color=color), fmt="%.0f %%", fontsize=8, color=INK)
        ordered = sorted(run.mean_in_flight, reverse=True)
        loads.plot(
            range(1, len(ordered) + 1), ordered, color=color, marker="os^"[i % 3] if len(ordered) <= 32 else "", markersize=4
        )
    times.set_xticks(range(len(_PERCENTILES)), _PERCENTILES)
    times.set_ylabel("time to first token (s)", fontsize=9)
    times.legend(fontsize=8, frameon=False)
    for hits in middle:
        hits.set_xticks(range(len(runs)), [re.sub("-|(?<=[a-z])(?=Router)", "\n", run.routing) for run in runs], fontsize=8)
        hits.set_ylabel("prompt tokens found in a cache (%)", fontsize=9)
        hits.set_ylim(0, 1.15 * max(100 * run.prefix_hit_rate for run in runs))
    loads.set_xlabel("replica, the busiest first", fontsize=9)
    loads.set_ylabel("requests in flight, on average", fontsize=9)
    loads.set_ylim(bottom=0)
    if len(runs[0].mean_in_flight) <= 10:
        loads.set_xticks(range(1, len(runs[0].mean_in_flight) + 1))
    for axes in (times, *middle, loads):
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
