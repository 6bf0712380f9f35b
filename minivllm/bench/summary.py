"""The results of a run: throughput, goodput, and how long its users waited. Every benchmark, the simulator and the figures use them;
`trace_summary.py` computes them from a trace.

The terms are those of vLLM's `benchmarks/serve.py`: TTFT is the time to first token, ITL the inter-token latency, TPOT the time per
output token after the first. A request with several sequences (n > 1) has one TTFT and the ITLs of each sequence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from minivllm.engine.trace import EngineTrace


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` percent of the values do not exceed.

    Raises:
        ValueError: There are no values.
    """
    if not len(values):
        raise ValueError("There is no percentile of no values.")
    return sorted(values)[max(0, math.ceil(percent * len(values) / 100) - 1)]


class Distribution(NamedTuple):
    """Mean and nearest-rank percentiles of times in seconds; nan if there were none."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """The distribution of these values."""
        ordered = sorted(values)
        if not ordered:
            return cls(*[math.nan] * 4)
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, percent) for percent in (50, 95, 99)))


NOT_MEASURED = Distribution.of(())


class LatencyHistogram:
    """The distribution of any number of times in constant memory: the mean is exact, percentiles to 1 percent."""

    _BINS_PER_E = 1 / math.log(1.01)
    _SHORTEST = 1e-6

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        """By bin: bin i ends at 1.01 to the power of i seconds."""
        self._sum = 0.0
        self._latest = (math.nan, 0)
        """The latest time and its bin."""

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, which was measured `count` times: the sequences of a batch have the same ITL."""
        latest, number = self._latest
        if seconds != latest:
            number = math.ceil(math.log(max(seconds, self._SHORTEST)) * self._BINS_PER_E)
            self._latest = seconds, number
        self._counts[number] += count
        self._sum += seconds * count

    def distribution(self) -> Distribution:
        """The distribution of what was counted."""
        total = self._counts.total()
        if not total:
            return NOT_MEASURED
        ranks = [max(1, math.ceil(percent * total / 100)) for percent in (50, 95, 99)]
        found, count = [], 0
        for number in sorted(self._counts):
            count += self._counts[number]
            while len(found) < len(ranks) and count >= ranks[len(found)]:
                found.append(math.exp((number - 0.5) / self._BINS_PER_E))
        return Distribution(self._sum / total, *found)


# -- requests --------------------------------------------------------------------------------------------------------


def time_per_output_token(ttft: float, latency: float, num_tokens: int) -> float | None:
    """TPOT: mean seconds per output token after the first; None if there was only one token."""
    return (latency - ttft) / (num_tokens - 1) if num_tokens > 1 else None


@dataclass(frozen=True)
class RequestLatency:
    """The latencies of an engine's completed request, in seconds. Seen from a server's client, they are a `ServedRequest`.

    Attributes:
        request_id: The request.
        ttft: From its arrival to its first token.
        latency: From its arrival to its last token (end to end).
        itls: From one output of a sequence to its next, for each sequence in turn. Tokens that come together (speculative decoding) are
            one output, so no ITL is 0.
        num_tokens: Tokens of its longest sequence.
        prompt_tokens, output_tokens: Tokens of its prompt, and of all its sequences.
    """

    request_id: str
    ttft: float
    latency: float
    itls: tuple[float, ...]
    num_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; tokens that come together count one by one."""
        return time_per_output_token(self.ttft, self.latency, self.num_tokens)


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


@dataclass(frozen=True)
class Goals:
    """What a request must meet to count for goodput, in milliseconds; None is no goal.

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

    def are_met_by(self, request: RequestLatency | ServedRequest) -> bool:
        """Whether a completed request meets all goals.

        A request with one output token has no TPOT to miss. The TTFT of one without any token is its latency: its user waited that long.
        """
        ttft = request.latency if request.ttft is None else request.ttft
        pairs = ((self.ttft, ttft), (self.tpot, request.tpot), (self.e2e, request.latency))
        return all(goal is None or time is None or time * 1e3 <= goal for goal, time in pairs)

    def describe(self) -> str:
        """In words; empty if there are no goals."""
        names = (("TTFT", self.ttft), ("TPOT", self.tpot), ("end to end", self.e2e))
        return ", ".join(f"{name} up to {goal:g} ms" for name, goal in names if goal is not None)


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RunSummary:
    """The results of a run. Times are in seconds; distributions are over the completed requests.

    Attributes:
        num_requests, completed: All requests, and those that finished by themselves; the others failed, were aborted, or are unfinished.
        prompt_tokens, output_tokens: Of the completed requests, unless a subclass says otherwise.
        seconds: From the first arrival to the end.
        ttft, itl, tpot, latency: Of a `RequestLatency`, or of a `ServedRequest`.
        goodput: Completed requests per second that met all goals; None if there were no goals.
    """

    num_requests: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    ttft: Distribution = NOT_MEASURED
    itl: Distribution = NOT_MEASURED
    tpot: Distribution = NOT_MEASURED
    latency: Distribution = NOT_MEASURED
    goodput: float | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestLatency | ServedRequest],
        seconds: float,
        *,
        num_requests: int | None = None,
        goals: Goals | None = None,
        **more: Any,
    ) -> Self:
        """The summary of a run from its completed requests and its duration.

        `num_requests` counts the others, too (default: there were none). Without goals there is no goodput. `more`: fields of a subclass.
        """
        summary = cls(
            num_requests=len(requests) if num_requests is None else num_requests,
            completed=len(requests),
            prompt_tokens=sum(request.prompt_tokens for request in requests),
            output_tokens=sum(request.output_tokens for request in requests),
            seconds=seconds,
            ttft=Distribution.of(request.ttft for request in requests if request.ttft is not None),
            itl=Distribution.of(gap for request in requests for gap in request.itls),
            tpot=Distribution.of(request.tpot for request in requests if request.tpot is not None),
            latency=Distribution.of(request.latency for request in requests),
            **more,
        )
        if goals is not None and goals != Goals():
            summary.goodput = summary.per_second(sum(map(goals.are_met_by, requests)))
        return summary

    def per_second(self, count: float) -> float:
        """A rate over the whole run; 0 for a run that took no time."""
        return count / self.seconds if self.seconds > 0 else 0.0

    @property
    def requests_per_second(self) -> float:
        """Completed requests per second."""
        return self.per_second(self.completed)

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput in output tokens."""
        return self.per_second(self.output_tokens)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Throughput in prompt tokens."""
        return self.per_second(self.prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain data: distributions in milliseconds, None where nothing was measured; the rates too; not the trace."""
        content: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Distribution):
                times = {name: time * 1e3 for name, time in value._asdict().items()}
                content[f"{item.name}_ms"] = None if math.isnan(value.mean) else times
            elif item.name != "trace":
                content[item.name] = value
        rates = ("requests_per_second", "prompt_tokens_per_second", "output_tokens_per_second")
        return content | {name: getattr(self, name) for name in rates}


@dataclass(kw_only=True)
class EngineRun(RunSummary):
    """The results of an engine's run, with its steps.

    `prompt_tokens` and `output_tokens` count all requests, completed or not.

    Attributes:
        scheduler: The policy, or the scheduler's class.
        workload: Name of the workload.
        num_steps, busy_seconds: The engine's steps, and how long they took.
        num_preemptions: How often a sequence lost its blocks.
        mean_running, mean_cache_use: Running sequences, and the fraction of the KV cache in use, averaged over `busy_seconds`.
        peak_cache_use: The largest fraction of the KV cache in use.
        trace: The run, step by step, if it was recorded.
    """

    scheduler: str = ""
    workload: str = ""
    num_steps: int = 0
    busy_seconds: float = 0.0
    num_preemptions: int = 0
    mean_running: float = 0.0
    mean_cache_use: float = 0.0
    peak_cache_use: float = 0.0
    trace: EngineTrace | None = field(default=None, repr=False, compare=False)

    def add_step(self, seconds: float, num_running: int, cache_use: float, num_preemptions: int) -> None:
        """Count a step, with the state while it ran."""
        self.num_steps += 1
        self.busy_seconds += seconds
        self.num_preemptions += num_preemptions
        self.peak_cache_use = max(self.peak_cache_use, cache_use)
        if seconds:
            self.mean_running += (num_running - self.mean_running) * seconds / self.busy_seconds
            self.mean_cache_use += (cache_use - self.mean_cache_use) * seconds / self.busy_seconds

    def __str__(self) -> str:
        preemptions = "1 preemption" if self.num_preemptions == 1 else f"{self.num_preemptions} preemptions"
        return (
            f"{self.completed} requests in {self.seconds:.1f} s · {self.output_tokens_per_second:.0f} tokens/s · means: first token "
            f"{self.ttft.mean:.2f} s, latency {self.latency.mean:.2f} s · {preemptions}"
        )
