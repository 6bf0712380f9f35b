"""When the device and the host are busy: one after the other, or side by side with asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.viz.drawing import WIDTH
from minivllm.viz.palette import NEUTRAL, REQUEST_COLORS

Spans = list[tuple[float, float]]
"""Starts and ends, in seconds of the engine's clock."""


def device_spans(trace: EngineTrace) -> Spans:
    """When the device computed each step: from its launch, or the end of the step before, until its results were there.

    Where the host asks for results late, the device may have finished earlier.
    """
    spans: Spans = []
    for step in trace:
        launched = step.start if step.launched is None else step.launched
        spans.append((max(launched, spans[-1][1]) if spans else launched, step.end))
    return spans


def host_spans(trace: EngineTrace) -> Spans:
    """When the host worked: all the time from the first step's scheduling but its waits for results."""
    spans: Spans = []
    since = trace[0].start if len(trace) else 0.0
    for step in trace:
        spans.append((since, step.end if step.awaited is None else step.awaited))
        since = step.end
    return spans


def draw_overlap(traces: Mapping[str, EngineTrace], first: int = 0, num_steps: int = 8) -> Figure:
    """Draw when device and host were busy: a panel for each run, with the same time axis.

    Args:
        traces: A name for each run.
        first: The first step to draw.
        num_steps: Number of steps to draw.

    Raises:
        ConfigError: A run has not that many steps.
    """
    figure = Figure(figsize=(WIDTH, 0.5 + 1.3 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        if len(trace) < first + num_steps:
            raise ConfigError(f"{name} has {len(trace)} steps, fewer than first + num_steps = {first + num_steps}.")
        device, host = (spans(trace)[first : first + num_steps] for spans in (device_spans, host_spans))
        origin = min(device[0][0], host[0][0])
        busy, duration = sum(end - start for start, end in device), device[-1][1] - origin
        for row, spans in enumerate((host, device)):
            for number, (start, end) in enumerate(spans):
                color = NEUTRAL if row == 0 else REQUEST_COLORS[number % 2]
                bar = (1000 * (start - origin), 1000 * (end - start))
                axes.broken_barh([bar], (row - 0.38, 0.76), color=color, edgecolor="white", linewidth=0.8)
        axes.set_yticks([0, 1], ["host", "device"], fontsize=9)
        axes.set_title(
            f"{name}: {1000 * duration / num_steps:,.1f} ms per step, device busy {busy / duration:.0%}", loc="left", fontsize=10
        )
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("time (ms); a bar on the device is a step", fontsize=9)
    all_axes[-1].set_xlim(left=0)
    return figure
