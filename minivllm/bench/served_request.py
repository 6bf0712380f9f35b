"""What a client saw of its requests, one by one, and what that adds up to. The words are those of vLLM's `benchmarks/serve.py`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minivllm.bench.load_generator import Load
from minivllm.bench.offline import percentile
from minivllm.errors import ConfigError

LATE = 0.1
"""Seconds by which a request may be sent after its moment before the load generator is said not to have kept up."""


@dataclass
class ServedRequest:
    """One request, as its client saw it. Times in seconds; `start` and `end` since the first request of the run was sent.

    Attributes:
        prompt_tokens: As the server counted them; those of the workload if it did not say.
        asked_tokens: How many output tokens were asked for.
        lateness: By how much it was sent after its moment (in an open loop), which none of the latencies contains.
        start: When it was sent.
        end: When its answer was complete, or its failure known.
        ttft: From `start` to the first piece of the answer; None if none came, and of an answer that is not streamed.
        itls: Between each piece and the next one. A piece that brings several tokens is one gap, not divided among them, as in
            vLLM's benchmark: it is what the reader waits.
        output_tokens: As the server counted them, or else the number of pieces.
        counted_by: Who counted them: "usage" of the server, or "pieces".
        error: Why it failed, in words that many requests share, such as "status 429"; None if it did not.
        detail: What the server or the connection said of that.
    """

    prompt_tokens: int
    asked_tokens: int
    lateness: float = 0.0
    start: float = 0.0
    end: float = 0.0
    ttft: float | None = None
    itls: list[float] = field(default_factory=list)
    output_tokens: int = 0
    counted_by: str = "pieces"
    error: str | None = None
    detail: str = ""

    @property
    def latency(self) -> float:
        """End to end: from sending the request to the end of its answer, in seconds."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None if there is none, or the first one's time is not known."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """All fields, times rounded to microseconds."""
        return {
            name: [round(gap, 6) for gap in value] if name == "itls" else round(value, 6) if isinstance(value, float) else value
            for name, value in vars(self).items()
        }


class Distribution(NamedTuple):
    """Mean and percentiles (nearest rank) of some times, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Goals:
    """What a request must keep to count for goodput, in milliseconds; None is no goal.

    Raises:
        ConfigError: A goal is not a number above 0.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name, goal in vars(self).items():
            if goal is not None and not 0 < goal < math.inf:
                raise ConfigError(f"The goal for {name} is {goal}, but must be a number of milliseconds above 0.")

    def are_met_by(self, request: ServedRequest) -> bool:
        """Whether a completed request meets all goals.

        One with a single output token has no TPOT to miss. One that ended without any piece is taken to have begun at its end: its
        user waited that long to see that nothing comes.
        """
        if request.error is not None:
            return False
        ttft = request.latency if request.ttft is None else request.ttft
        pairs = ((self.ttft, ttft), (self.tpot, request.tpot), (self.e2e, request.latency))
        return all(goal is None or time is None or time * 1e3 <= goal for goal, time in pairs)

    def describe(self) -> str:
        """In words; empty if there are no goals."""
        names = (("TTFT", self.ttft), ("TPOT", self.tpot), ("end to end", self.e2e))
        return ", ".join(f"{name} up to {goal:g} ms" for name, goal in names if goal is not None)


@dataclass(frozen=True)
class ServingResult:
    """What a run adds up to. Throughput is that of completed requests; distributions are in milliseconds, None if nothing is known.

    Attributes:
        seconds: From the first request's start to the last one's end, whether they failed or not.
        failures: How many failed for each reason.
        goodput: Completed requests per second that met all goals; None without goals.
        peak_concurrency: The most requests that were on their way at one moment.
        asked_rate: Requests per second that an open loop should send; None in a closed loop, and if all are sent at once.
        sent_rate: Requests per second that were sent, over the time from the first to the last; None of less than two.
        max_lateness: Seconds by which the latest request was sent after its moment.
        tokens_counted_by: Who counted the output tokens: "usage", "pieces", or both where requests differ.
        short_answers: Completed requests with fewer output tokens than were asked for.
    """

    num_requests: int
    completed: int
    failures: dict[str, int]
    seconds: float
    requests_per_second: float
    input_tokens: int
    output_tokens: int
    input_tokens_per_second: float
    output_tokens_per_second: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    goodput: float | None
    peak_concurrency: int
    asked_rate: float | None
    sent_rate: float | None
    max_lateness: float
    tokens_counted_by: str
    short_answers: int

    def to_json(self) -> dict[str, Any]:
        """All fields, with the distributions as objects."""
        return {name: value._asdict() if isinstance(value, Distribution) else value for name, value in vars(self).items()}


def summarize(requests: Sequence[ServedRequest], load: Load, goals: Goals) -> ServingResult:
    """What the requests of one run, at least one, add up to."""
    completed = [request for request in requests if request.error is None]
    starts = sorted(request.start for request in requests)
    seconds = max(request.end for request in requests) - starts[0]
    input_tokens = sum(request.prompt_tokens for request in completed)
    output_tokens = sum(request.output_tokens for request in completed)
    good = sum(goals.are_met_by(request) for request in completed)

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return ServingResult(
        num_requests=len(requests),
        completed=len(completed),
        failures=dict(Counter(request.error for request in requests if request.error is not None).most_common()),
        seconds=seconds,
        requests_per_second=per_second(len(completed)),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_second=per_second(input_tokens),
        output_tokens_per_second=per_second(output_tokens),
        ttft=_distribution([request.ttft for request in completed]),
        itl=_distribution([gap for request in completed for gap in request.itls]),
        tpot=_distribution([request.tpot for request in completed]),
        e2e=_distribution([request.latency for request in completed]),
        goodput=per_second(good) if goals != Goals() else None,
        peak_concurrency=peak_concurrency(requests),
        asked_rate=load.request_rate if load.is_open else None,
        sent_rate=(len(starts) - 1) / (starts[-1] - starts[0]) if starts[-1] > starts[0] else None,
        max_lateness=max(request.lateness for request in requests),
        tokens_counted_by=" and ".join(sorted({request.counted_by for request in completed}, reverse=True)),
        short_answers=sum(request.output_tokens < request.asked_tokens for request in completed),
    )


def peak_concurrency(requests: Sequence[ServedRequest]) -> int:
    """The most requests that were on their way at one moment. One that ends when another starts is not counted with it."""
    changes = sorted([(request.start, 1) for request in requests] + [(request.end, -1) for request in requests])
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def _distribution(seconds: Sequence[float | None]) -> Distribution | None:
    times = [time * 1e3 for time in seconds if time is not None]
    return Distribution(statistics.mean(times), *(percentile(times, percent) for percent in (50, 95, 99))) if times else None


def format_table(result: ServingResult, goals: Goals, requests: Sequence[ServedRequest]) -> str:
    """A run as a table of text, with a sentence for each thing that did not go as it should."""
    lines = [
        f"{'requests completed':<22}{result.completed:>10} of {result.num_requests}, in {result.seconds:.2f} s",
        f"{'requests/s':<22}{result.requests_per_second:>10.2f}{_rates(result)}",
        f"{'input tokens/s':<22}{result.input_tokens_per_second:>10.1f}   ({result.input_tokens} tokens)",
        f"{'output tokens/s':<22}{result.output_tokens_per_second:>10.1f}   ({result.output_tokens} tokens)",
        f"{'most at one time':<22}{result.peak_concurrency:>10}",
    ]
    if result.goodput is not None:
        good = sum(goals.are_met_by(request) for request in requests)
        lines.append(f"{'goodput, requests/s':<22}{result.goodput:>10.2f}   ({good} with {goals.describe()})")
    lines += ["", f"{'milliseconds':<32}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}"]
    for name, distribution in (
        ("time to first token (TTFT)", result.ttft),
        ("between tokens (ITL)", result.itl),
        ("per output token (TPOT)", result.tpot),
        ("end to end", result.e2e),
    ):
        cells = [f"{time:>10.1f}" for time in distribution] if distribution else [f"{'–':>10}"] * 4
        lines.append(f"{name:<32}{''.join(cells)}")
    notes = _notes(result, requests)
    return "\n".join([*lines, "", *notes] if notes else lines)


def _rates(result: ServingResult) -> str:
    sent = f"sent {result.sent_rate:.2f}" if result.sent_rate is not None else ""
    asked = f"asked {result.asked_rate:.2f}" if result.asked_rate is not None else ""
    return f"   ({', '.join(filter(None, (asked, sent)))})" if asked else ""


def _notes(result: ServingResult, requests: Sequence[ServedRequest]) -> list[str]:
    notes = []
    for reason, count in result.failures.items():
        detail = next((request.detail for request in requests if request.error == reason and request.detail), "")
        notes.append(f"Failed, {reason}: {count}" + (f", the first with: {detail}" if detail else ""))
    if "pieces" in result.tokens_counted_by:
        notes.append(
            "The server did not count all output tokens: pieces of the stream were counted, which can hold several tokens."
        )
    if result.short_answers:
        notes.append(f"Answers with fewer tokens than were asked for: {result.short_answers}")
    if result.max_lateness > LATE:
        notes.append(
            f"The load generator did not keep up with the rate: it sent requests up to {result.max_lateness:.2f} s late, which no "
            "latency above contains."
        )
    return notes
