"""A whole run in one picture: who waited and ran when, how full the queues were, and what it came to in numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from matplotlib.figure import Figure

from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.viz.curves import paint_curves
from minivllm.viz.drawing import WIDTH
from minivllm.viz.latency import is_complete
from minivllm.viz.timeline import paint_requests


@dataclass(frozen=True)
class RunSummary:
    """What a run came to. Times are means over the requests that ended, in seconds.

    Attributes:
        num_requests: Requests that ended, those that were aborted left out.
        seconds: From the first arrival to the end of the last step.
        tokens_per_second: Output tokens of these requests, in that time.
        first_token: From arrival to the first token.
        latency: From arrival to the last token.
        num_preemptions: How often a sequence lost its blocks.
    """

    num_requests: int
    seconds: float
    tokens_per_second: float
    first_token: float
    latency: float
    num_preemptions: int

    def __str__(self) -> str:
        preemptions = "1 preemption" if self.num_preemptions == 1 else f"{self.num_preemptions} preemptions"
        return (
            f"{self.num_requests} requests in {self.seconds:.1f} s · {self.tokens_per_second:.0f} tokens/s · means: first token "
            f"{self.first_token:.2f} s, latency {self.latency:.2f} s · {preemptions}"
        )


def summarize(trace: EngineTrace) -> RunSummary:
    """The numbers of a run.

    Raises:
        ConfigError: No request has ended in it.
    """
    ended = [request for request in trace.requests.values() if is_complete(request)]
    if not ended:
        raise ConfigError("In this trace no request comes to its end, so there is nothing to sum up.")
    seconds = trace[-1].end - min(request.arrival_time for request in trace.requests.values())
    num_tokens = sum(len(tokens) for request in ended for tokens in request.output_token_ids)
    return RunSummary(
        num_requests=len(ended),
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        first_token=statistics.mean(request.first_token_time - request.arrival_time for request in ended),
        latency=statistics.mean(request.finished_time - request.arrival_time for request in ended),
        num_preemptions=sum(len(step.preempted) for step in trace),
    )


def draw_run(trace: EngineTrace) -> Figure:
    """A whole run: its numbers, the requests over time, and the queues over time. The picture that the knobs change.

    Raises:
        ConfigError: No request has ended in it.
    """
    figure = Figure(figsize=(WIDTH, 6.0))
    figure.text(0.02, 0.98, str(summarize(trace)), fontsize=9.5, weight="bold", va="top")
    requests, queues, cache = (
        figure.add_axes((0.085, bottom, 0.895, height)) for bottom, height in ((0.475, 0.405), (0.275, 0.115), (0.075, 0.115))
    )
    paint_requests(requests, trace)
    paint_curves(queues, cache, trace)
    for axes in (requests, queues):
        axes.set_xlabel("")
    return figure
