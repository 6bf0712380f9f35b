"""When requests are sent to a server: at scheduled times (an open loop), or as soon as others have finished (a closed loop).

An open loop is what a service faces: its users come whether it keeps up or not. A closed loop is a fixed number of users, each waiting
for an answer before asking again: it measures a server at constant concurrency. vLLM's `benchmarks/serve.py` calls them `--request-rate`
and `--max-concurrency`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from minivllm.bench.workloads import WorkloadRequest, arrival_times
from minivllm.errors import ConfigError

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
