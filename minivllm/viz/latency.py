"""What each user waits for: the first token, the next ones, and the last. Times of requests, read from a trace and drawn.

The words are those of vLLM's `benchmarks/serve.py`. TTFT is the time to the first token, ITL the inter-token latency, TPOT the time per
output token after the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minivllm.engine.trace import EngineTrace, RequestRecord, SequenceKey, StepRecord
from minivllm.viz.palette import REQUEST_COLORS

PERCENTILES = {50: "o", 95: "s", 99: "D"}
"""Those that are written, each with the shape of its mark on the curve."""
LONG_TAIL = 15
"""The axis is logarithmic if the longest wait is so many times the median: most of the curve would be a line on the left else."""
LINE_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


class RequestLatency(NamedTuple):
    """What a request had to wait. Times in seconds.

    Attributes:
        request_id: The request.
        ttft: From its arrival to its first token.
        latency: From its arrival to its last token (end to end).
        itls: Between an output and the next one of the same sequence, for all of its sequences one after another. Tokens that come
            at one moment, as speculative decoding gives them, are one output: no time of 0 is among them, as in vLLM's benchmark.
        num_tokens: Tokens of its longest sequence.
    """

    request_id: str
    ttft: float
    latency: float
    itls: tuple[float, ...]
    num_tokens: int

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first, `(latency - ttft) / (num_tokens - 1)`; None if there is one token only.

        Every token counts here, also where several came at one moment.
        """
        return (self.latency - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def request_latencies(trace: EngineTrace) -> list[RequestLatency]:
    """The times of all requests that came to their end, in the order of arrival.

    Requests that are unfinished, were given up or failed are left out: what they would have waited is not known. Of a request that
    was older than the trace, the ITLs are those that the trace has seen.
    """
    moments = output_times(trace)
    result = []
    for request in trace.requests.values():
        if not is_complete(request):
            continue
        itls = tuple(
            later - earlier
            for index in range(len(request.output_token_ids))
            for earlier, later in itertools.pairwise(moments.get(SequenceKey(request.request_id, index), []))
        )
        ttft, latency = request.first_token_time - request.arrival_time, request.finished_time - request.arrival_time
        result.append(RequestLatency(request.request_id, ttft, latency, itls, max(map(len, request.output_token_ids))))
    return result


def is_complete(request: RequestRecord) -> bool:
    """Whether all of a request's sequences came to an end of their own ("stop" or "length")."""
    reasons = request.finish_reasons
    has_times = request.first_token_time is not None and request.finished_time is not None
    return has_times and bool(reasons) and all(reason in ("stop", "length") for reason in reasons)


def output_times(trace: EngineTrace) -> dict[SequenceKey, list[float]]:
    """The moments, seconds of the engine's clock, at which each sequence won tokens: one or, with speculation, several at once."""
    moments: dict[SequenceKey, list[float]] = {}
    for step in trace:
        for key, _ in won_tokens(trace, step):
            moments.setdefault(key, []).append(step.end)
    return moments


def won_tokens(trace: EngineTrace, step: StepRecord) -> Iterator[tuple[SequenceKey, int]]:
    """Each sequence that got tokens of a step, and how many. The step that completes a prompt gives one to each sibling too."""
    for part in step.scheduled:
        if part.num_new_tokens == 0:
            continue
        yield part.key, part.num_new_tokens
        request = trace.requests.get(part.request_id)
        if request is not None and part.context_len == request.num_prompt_tokens:
            for index in range(1, request.params.get("n", 1)):
                yield SequenceKey(part.request_id, index), 1


def draw_latencies(traces: dict[str, EngineTrace], title: str = "") -> Figure:
    """The distributions of TTFT, ITL and end-to-end latency, a line for each trace.

    A point (x, y) of a line says that the share y of all waits was no longer than x. The 50th, 95th and 99th percentiles (nearest rank)
    are marked on the lines and written below.

    Args:
        traces: A name for each trace, such as "static" and "continuous".
        title: Above the figure.
    """
    latencies = {name: request_latencies(trace) for name, trace in traces.items()}
    panels = {
        "time to first token (TTFT)": {name: [item.ttft for item in items] for name, items in latencies.items()},
        "between tokens (ITL)": {name: [itl for item in items for itl in item.itls] for name, items in latencies.items()},
        "end-to-end latency": {name: [item.latency for item in items] for name, items in latencies.items()},
    }
    figure = Figure(figsize=(9, 3.9 + 0.4 * len(traces)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    heights = (3.0, 0.2 + 0.2 * len(traces))
    rows = figure.subplots(2, len(panels), height_ratios=heights, squeeze=False)
    for number, (name, values) in enumerate(panels.items()):
        paint_waits(rows[0, number], rows[1, number], name, list(values.values()))
    rows[0, 0].set_ylabel("share of all, no longer than this")
    lines = [line_of(i) for i in range(len(traces))]
    labels = [f"{name}: {_count(trace, len(latencies[name]))}" for name, trace in traces.items()]
    figure.legend(
        lines, labels, loc="outside upper center", frameon=False, fontsize=9, handlelength=3, title=title, title_fontsize=11
    )
    return figure


def paint_waits(curve_axes: Axes, text_axes: Axes, name: str, seconds: Sequence[Sequence[float]]) -> None:
    """Paint the distribution of a kind of wait into axes of any figure, a line for each run, and write its percentiles below.

    Args:
        curve_axes, text_axes: One below the other.
        name: Of what is waited for.
        seconds: The waits of each run.
    """
    scale, unit = _unit([value for of_run in seconds for value in of_run])
    scaled = [np.sort(np.asarray(of_run)) * scale for of_run in seconds]
    _draw_distributions(curve_axes, scaled, f"{name}, {unit}")
    _write_percentiles(text_axes, scaled, unit)


def _draw_distributions(axes: Axes, values: list[np.ndarray], label: str) -> None:
    for i, ordered in enumerate(values):
        if not len(ordered):
            continue
        shares = np.arange(len(ordered) + 1) / len(ordered)
        style = line_of(i)
        axes.plot(
            np.concatenate(([ordered[0]], ordered)), shares, drawstyle="steps-post", color=style.get_color(),
            linestyle=style.get_linestyle(), linewidth=1.8,
        )  # fmt: skip
        for percent, marker in PERCENTILES.items():
            axes.plot(
                percentile(ordered, percent), percent / 100, marker, color=style.get_color(), markersize=5, markeredgecolor="black",
                markeredgewidth=0.6, clip_on=False, zorder=3,
            )  # fmt: skip
    if not any(map(len, values)):
        axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes, color="#555555")
    everything = np.concatenate(values) if values else np.zeros(0)
    if len(everything) and everything.min() > 0 and everything.max() > LONG_TAIL * percentile(everything, 50):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        label += " (log)"
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _write_percentiles(axes: Axes, values: list[np.ndarray], unit: str) -> None:
    """A table below a panel: the marks and their percentiles, and a line for each trace."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(values) - 0.5, 0.5)
    places = {percent: 0.4 + 0.27 * i for i, percent in enumerate(PERCENTILES)}
    for percent, marker in PERCENTILES.items():
        axes.plot(places[percent] - 0.14, 0, marker, color="white", markersize=5, markeredgecolor="black", markeredgewidth=0.8)
        axes.text(places[percent], 0, f"p{percent}", ha="right", va="center", fontsize=8, color="#555555")
    for i, ordered in enumerate(values):
        style = line_of(i)
        axes.plot([0, 0.13], [-1 - i] * 2, color=style.get_color(), linestyle=style.get_linestyle(), linewidth=1.8)
        for percent, place in places.items():
            text = _number(percentile(ordered, percent)) if len(ordered) else "–"
            axes.text(place, -1 - i, text, ha="right", va="center", fontsize=8)


def line_of(number: int) -> Line2D:
    """How the line of a run looks, told apart by colour and, without colours, by its dashes."""
    color = REQUEST_COLORS[(0, 5, 2, 3, 6)[number % 5]]
    return Line2D([], [], color=color, linestyle=LINE_STYLES[number % len(LINE_STYLES)], linewidth=1.8)


def _unit(seconds: Sequence[float]) -> tuple[float, str]:
    """Milliseconds where nothing takes a second, or where most is far below one."""
    return (1.0, "s") if max(seconds, default=0.0) >= 1 and percentile(seconds, 50) >= 0.1 else (1e3, "ms")


def _number(value: float) -> str:
    """With three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _count(trace: EngineTrace, num_complete: int) -> str:
    """How many requests are shown, and how many are not."""
    left_out = len(trace.requests) - num_complete
    text = f"{num_complete} request{'' if num_complete == 1 else 's'}"
    return f"{text} ({left_out} unfinished, aborted or failed left out)" if left_out else text


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed (nearest rank).

    Raises:
        ValueError: There are no values.
    """
    if not len(values):
        raise ValueError("There is no percentile of no values.")
    return float(np.percentile(values, percent, method="inverted_cdf"))
