"""Loads a server as its users would, times each request, and summarizes. The terms are those of vLLM's `benchmarks/serve.py`.

Requests are sent at scheduled times (an open loop, `request_rate`) or as soon as others have finished (a closed loop, `concurrency`). An
open loop is what a service faces: its users come whether it keeps up or not. A closed loop is a fixed number of users, each waiting for an
answer before asking again: it measures a server at constant concurrency.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import Goals, RunSummary, ServedRequest
from minivllm.bench.workloads import WorkloadRequest, arrival_times
from minivllm.errors import ConfigError

LATE = 0.1
"""Seconds by which a request may be sent late before the load generator is reported as too slow."""

Send = Callable[[WorkloadRequest, float], Awaitable[None]]
"""Sends a request that is this many seconds late, and waits for its end. Cancelling it cancels the request."""


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Args:
        request_rate: Requests per second on average, with Poisson arrivals; `math.inf` sends all at once.
        concurrency: Instead of a rate: the number of requests in flight, the next sent as soon as one has finished.
        duration: Seconds after which no more requests are sent; None sends all of them.
        grace: Seconds after `duration` for running requests to finish. Then they are cancelled.
        seed: Of the arrivals.

    Raises:
        ConfigError: A number is out of range, or two options exclude each other.
    """

    request_rate: float = math.inf
    concurrency: int | None = None
    duration: float | None = None
    grace: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"The request rate is {self.request_rate}, but must be above 0 requests per second (or inf).")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"The concurrency is {self.concurrency}, but must be at least 1 request.")
        if self.concurrency is not None and math.isfinite(self.request_rate):
            raise ConfigError("A request rate and a concurrency are two kinds of load: give one of them.")
        if self.duration is not None and not self.duration > 0:
            raise ConfigError(f"The duration is {self.duration}, but must be above 0 seconds.")
        if not self.grace >= 0:
            raise ConfigError(f"The grace is {self.grace}, but must be at least 0 seconds.")

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at scheduled times."""
        return self.concurrency is None and math.isfinite(self.request_rate)

    def describe(self) -> str:
        """In words, for the title of a report."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return f"{self.request_rate:g} requests/s (Poisson)" if self.is_open else "all at once"


async def generate_load(send: Send, requests: Iterable[WorkloadRequest], load: Load, interrupted: asyncio.Event) -> None:
    """Send requests, and return when all have finished or were cancelled.

    The requests may be endless if the load has a duration. Setting `interrupted` stops at once and cancels what runs.
    """
    clock = asyncio.get_running_loop().time
    end = None if load.duration is None else clock() + load.duration + load.grace
    started: list[asyncio.Task[None]] = []
    sending = asyncio.create_task(_send_all(send, requests, load, started))
    interruption = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({sending, interruption}, timeout=load.duration, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            await asyncio.wait({sending})
        ending = asyncio.gather(*started, return_exceptions=True)
        remaining = None if end is None else max(0.0, end - clock())
        await asyncio.wait({ending, interruption}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, interruption, *started):
            task.cancel()
        await asyncio.wait({sending, interruption, *started})
    for task in (sending, *started):
        if not task.cancelled():
            task.result()  # raises errors of `requests` and `send` themselves


async def _send_all(send: Send, requests: Iterable[WorkloadRequest], load: Load, started: list[asyncio.Task[None]]) -> None:
    """Start a task for each request at its time."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    times = arrival_times("poisson", load.request_rate, seed=load.seed) if load.is_open else itertools.repeat(0.0)
    places = asyncio.Semaphore(load.concurrency) if load.concurrency is not None else None
    for request, due in zip(requests, times, strict=False):
        if places is not None:
            await places.acquire()
        await asyncio.sleep(begin + due - clock())  # not at all if that is past
        lateness = max(0.0, clock() - begin - due) if load.is_open else 0.0
        task = asyncio.create_task(send(request, lateness))
        started.append(task)
        if places is not None:
            task.add_done_callback(lambda _: places.release())


async def measure_serving(
    client: OpenAIClient,
    model: str,
    requests: Iterable[WorkloadRequest],
    load: Load,
    *,
    num_requests: int | None = None,
    warm_up: Iterable[WorkloadRequest] = (),
    use_tqdm: bool = True,
) -> tuple[list[ServedRequest], bool]:
    """Send requests. Returns the result of each, ordered by start, and whether Ctrl-C stopped the run early.

    The requests may be endless if the load has a duration; `num_requests` is for the progress bar. The warm-up is sent first, all at
    once, unmeasured.

    Raises:
        ConfigError: A request of the warm-up failed.
    """
    await _warm_up(client, model, warm_up)
    interrupted = asyncio.Event()
    served: list[ServedRequest] = []
    with (
        _ctrl_c_sets(interrupted),
        tqdm(
            total=num_requests, desc="served", unit="request", disable=not use_tqdm or sys.stderr is None, dynamic_ncols=True
        ) as bar,
    ):

        async def send(request: WorkloadRequest, lateness: float) -> None:
            served.append(await client.send(request, model, lateness))
            bar.update()

        await generate_load(send, requests, load, interrupted)
    served.sort(key=lambda request: request.start)
    if served:
        origin = served[0].start
        for request in served:
            request.start -= origin
            request.end -= origin
    return served, interrupted.is_set()


async def _warm_up(client: OpenAIClient, model: str, requests: Iterable[WorkloadRequest]) -> None:
    for request in await asyncio.gather(*(client.send(request, model) for request in requests)):
        if request.error is not None:
            raise ConfigError(f"A request of the warm-up failed ({request.error}). {request.detail}".rstrip())


@contextlib.contextmanager
def _ctrl_c_sets(interrupted: asyncio.Event) -> Iterator[None]:
    """Ctrl-C stops the run but not the program, which still has results to print. A second Ctrl-C stops the program."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


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
