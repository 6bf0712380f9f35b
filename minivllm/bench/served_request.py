"""Requests as a client saw them, and the summary of a run, in the terms of vLLM's `benchmarks/serve.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.load_generator import Load
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import Goals, RunSummary, time_per_output_token

LATE = 0.1
"""Seconds by which a request may be sent late before the load generator is reported as too slow."""


@dataclass
class ServedRequest:
    """One request, as its client saw it. Times in seconds; `start` and `end` since the first request of the run was sent.

    Attributes:
        prompt_tokens: As the server counted them; those of the workload if it did not say.
        asked_tokens: How many output tokens were asked for.
        lateness: How late it was sent in an open loop; no latency includes this.
        start: When it was sent.
        end: When its answer was complete, or its failure known.
        ttft: From `start` to the first piece of the answer; None if none came, or if the answer was not streamed.
        itls: From each piece to the next. As in vLLM's benchmark, a piece with several tokens counts once: the reader waits once.
        output_tokens: As the server counted them, or else the number of pieces.
        counted_by: Who counted them: "usage" of the server, or "pieces".
        error: Why it failed, in words that many requests share, such as "status 429"; None if it did not.
        detail: What the server or the connection said about it.
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
        if self.ttft is None:
            return None
        return time_per_output_token(self.ttft, self.latency, self.output_tokens)

    def to_json(self) -> dict[str, Any]:
        """All fields, times rounded to microseconds."""
        return {
            name: [round(gap, 6) for gap in value] if name == "itls" else round(value, 6) if isinstance(value, float) else value
            for name, value in vars(self).items()
        }


@dataclass(kw_only=True)
class ServingResult(RunSummary):
    """The results of a run, seen from the client. Tokens are those of the completed requests.

    `seconds` is from the first request's start to the last one's end, failed requests included.

    Attributes:
        failures: How many requests failed, by reason.
        peak_concurrency: The most requests in flight at one moment.
        asked_rate: Requests per second that an open loop should send; None in a closed loop, or if all are sent at once.
        sent_rate: Requests per second that were sent, from the first to the last; None for less than two.
        max_lateness: Seconds by which the latest request was sent after its scheduled time.
        tokens_counted_by: Who counted the output tokens: "usage", "pieces", or both where requests differ.
        short_answers: Completed requests with fewer output tokens than were asked for.
    """

    failures: dict[str, int]
    peak_concurrency: int
    asked_rate: float | None
    sent_rate: float | None
    max_lateness: float
    tokens_counted_by: str
    short_answers: int


def summarize(requests: Sequence[ServedRequest], load: Load, goals: Goals) -> ServingResult:
    """Summarize the requests of a run; there is at least one."""
    completed = [request for request in requests if request.error is None]
    starts = sorted(request.start for request in requests)
    return ServingResult.of(
        completed,
        max(request.end for request in requests) - starts[0],
        num_requests=len(requests),
        goals=goals,
        failures=dict(Counter(request.error for request in requests if request.error is not None).most_common()),
        peak_concurrency=peak_concurrency(requests),
        asked_rate=load.request_rate if load.is_open else None,
        sent_rate=(len(starts) - 1) / (starts[-1] - starts[0]) if starts[-1] > starts[0] else None,
        max_lateness=max(request.lateness for request in requests),
        tokens_counted_by=" and ".join(sorted({request.counted_by for request in completed}, reverse=True)),
        short_answers=sum(request.output_tokens < request.asked_tokens for request in completed),
    )


def peak_concurrency(requests: Sequence[ServedRequest]) -> int:
    """The most requests in flight at one moment. A request that ends when another starts is not counted with it."""
    changes = sorted([(request.start, 1) for request in requests] + [(request.end, -1) for request in requests])
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def format_serving(result: ServingResult, goals: Goals, requests: Sequence[ServedRequest]) -> str:
    """A run as text: rates, a table of latencies, and a sentence for each thing that went wrong."""
    lines = [
        f"{'requests completed':<22}{result.completed:>10} of {result.num_requests}, in {result.seconds:.2f} s",
        f"{'requests/s':<22}{result.requests_per_second:>10.2f}{_rates(result)}",
        f"{'input tokens/s':<22}{result.prompt_tokens_per_second:>10.1f}   ({result.prompt_tokens} tokens)",
        f"{'output tokens/s':<22}{result.output_tokens_per_second:>10.1f}   ({result.output_tokens} tokens)",
        f"{'most at one time':<22}{result.peak_concurrency:>10}",
    ]
    if result.goodput is not None:
        good = sum(request.error is None and goals.are_met_by(request) for request in requests)
        lines.append(f"{'goodput, requests/s':<22}{result.goodput:>10.2f}   ({good} with {goals.describe()})")
    rows = [
        (name, *(quantity(time * 1e3) for time in distribution))
        for name, distribution in (
            ("time to first token (TTFT)", result.ttft),
            ("between tokens (ITL)", result.itl),
            ("per output token (TPOT)", result.tpot),
            ("end to end", result.latency),
        )
    ]
    lines += ["", format_table(("milliseconds", "mean", "p50", "p95", "p99"), rows)]
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
