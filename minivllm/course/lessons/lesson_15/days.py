"""A service's day, second by second without requests of its own: arrivals flow in, replicas that are ready let them flow out."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TICK = 15.0
"""Seconds from one decision to the next."""
STARTUP = 180.0
"""Seconds until a new replica is ready: a machine is found, weights are loaded, caches are warmed."""
LATE = 2.0
"""A request that waits longer than these seconds in a queue is late."""


class Observed(NamedTuple):
    """What an autoscaler sees.

    Attributes:
        now: Seconds since midnight.
        rate: Requests that arrived in the last minute, a second.
        p99: The p99 of the waits of the last ten minutes, in seconds.
        ready, starting: Replicas that answer, and those that will.
    """

    now: float
    rate: float
    p99: float
    ready: int
    starting: int


@dataclass
class Day:
    """What became of a day.

    Attributes:
        times, rates, ready, waits: In each tick: the moment, requests a second, replicas that answered, the wait in seconds.
        flaps: How often replicas were started within 15 minutes after some had been stopped: once at most for each stop.
        late: The share of requests that waited longer than `LATE`.
        replica_hours: What is paid for: replicas that start cost as much as those that answer.
    """

    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    flaps: int = 0
    late: float = 0.0
    replica_hours: float = 0.0


def day_rates(rng: random.Random, peak: float, burst: float = 1.0) -> list[float]:
    """Requests a second in each tick of a day: a quiet night, a busy afternoon, noise, and perhaps a burst of half an hour."""
    begin, rates, noise = rng.uniform(9, 15) * 3600, [], 0.0
    for number in range(int(24 * 3600 / TICK)):
        now = number * TICK
        noise = 0.8 * noise + rng.gauss(0, 0.07)
        shape = 0.55 - 0.45 * math.cos((now / 3600 - 3) / 24 * 2 * math.pi)
        rise = min(1.0, max(0.0, (now - begin) / 600)) if now < begin + 1800 else 0.0
        rates.append(max(0.0, peak * shape * (1 + noise) * (1 + (burst - 1) * rise)))
    return rates


def run_day(scaler: Any, rates: list[float], capacity: float, start: int) -> Day:
    """Let an autoscaler decide every `TICK` seconds.

    Args:
        scaler: `decide(observed)` returns how many replicas there shall be, those that start included.
        rates: Of `day_rates`.
        capacity: Requests a second that a replica answers at most.
        start: Replicas that are ready at midnight.
    """
    day, ready, queue, late, total = Day(), start, 0.0, 0.0, 0.0
    starting: list[float] = []  # when each is ready
    stopped = -math.inf
    recent, waits = deque(maxlen=int(60 / TICK)), deque(maxlen=int(600 / TICK))  # type: ignore[var-annotated]
    for number, rate in enumerate(rates):
        now = number * TICK
        ready += sum(moment <= now for moment in starting)
        starting = [moment for moment in starting if moment > now]
        queue = max(0.0, queue + (rate - ready * capacity) * TICK)
        wait = queue / (ready * capacity) if ready else math.inf
        total += rate
        late += rate * (wait > LATE)
        recent.append(rate)
        waits.append(wait)
        day.times.append(now)
        day.rates.append(rate)
        day.ready.append(ready)
        day.waits.append(wait)
        day.replica_hours += (ready + len(starting)) * TICK / 3600
        wanted = max(1, scaler.decide(Observed(now, sum(recent) / len(recent), max(waits), ready, len(starting))))
        current = ready + len(starting)
        if wanted > current:
            day.flaps += now - stopped < 900
            stopped = -math.inf
            starting += [now + STARTUP] * (wanted - current)
        elif wanted < current:
            stopped = now
            cancelled = min(len(starting), current - wanted)
            starting = starting[: len(starting) - cancelled]
            ready -= current - wanted - cancelled
    day.late = late / total
    return day
