"""When requests are sent to a server: at their own moments (an open loop), or as soon as others have ended (a closed loop).

An open loop is what a service meets: its users come whether it keeps up or not. A closed loop is a fixed number of users who each wait
for their answer before they ask again; it shows what a server gives at a steady width. vLLM's `benchmarks/serve.py` calls them
`--request-rate` and `--max-concurrency`.
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
"""Sends a request and waits for its end. The second argument is by how many seconds it is late. Cancelled, it gives the request up."""


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Args:
        request_rate: Requests per second on average, each coming independently of the others (Poisson arrivals); `math.inf` sends all
            at once.
        concurrency: So many requests at a time, the next as soon as one has ended, instead of a rate.
        duration: Seconds after which none is sent any more; None sends all requests.
        grace: Seconds after `duration` in which what runs may end by itself. What is left then is given up.
        seed: Of the arrivals.

    Raises:
        ConfigError: A number is out of range, or two of them do not go together.
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
        """Whether requests have moments at which they should be sent."""
        return self.concurrency is None and math.isfinite(self.request_rate)

    def describe(self) -> str:
        """In words, for the head of a report."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return f"{self.request_rate:g} requests/s (Poisson)" if self.is_open else "all at once"


async def generate_load(send: Send, requests: Iterable[WorkloadRequest], load: Load, interrupted: asyncio.Event) -> None:
    """Send requests as `load` says, and return when each has ended or was given up.

    Args:
        send: Is called for each request, in the order in which they come.
        requests: May be without end if there is a duration.
        load: When to send, and when to stop.
        interrupted: Set it to stop at once; what runs is given up.
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
            task.result()  # raises what was no failure of a request, but a mistake in `requests` or `send`


async def _send_all(send: Send, requests: Iterable[WorkloadRequest], load: Load, started: list[asyncio.Task[None]]) -> None:
    """Start a task for each request when its time has come."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    moments = arrival_times("poisson", load.request_rate, seed=load.seed) if load.is_open else itertools.repeat(0.0)
    places = asyncio.Semaphore(load.concurrency) if load.concurrency is not None else None
    for request, moment in zip(requests, moments, strict=False):
        if places is not None:
            await places.acquire()
        await asyncio.sleep(begin + moment - clock())  # not at all if that is past
        lateness = max(0.0, clock() - begin - moment) if load.is_open else 0.0
        task = asyncio.create_task(send(request, lateness))
        started.append(task)
        if places is not None:
            task.add_done_callback(lambda _: places.release())
