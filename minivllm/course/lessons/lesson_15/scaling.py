"""The checks of lesson 15 for the size of a fleet over a day."""

from __future__ import annotations

import math
from typing import Any

from minivllm.course.lessons.lesson_15.days import Day, day_rates, run_day
from minivllm.course.observations import expect, require, rounds, see

TARGET, TOLERANCE = 0.7, 0.1
"""How busy a replica should be, and by how much the fleet's size may differ from what that takes before it is changed."""
MOST_FLAPS, MOST_LATE, MOST_HOURS = 8, 0.01, 1.3
"""Of a day: flaps, the share of late requests, and replica-hours over what the traffic of each tick takes at `TARGET`."""


def check_recommend(recommend: Any) -> None:
    """As many as keep each busy to the target, unless it is near enough already; never none."""
    for rng in rounds("recommend", 60):
        capacity, current = rng.choice((2.5, 4.0)), rng.choice((0, 1, 3, 10, 40))
        factor = rng.choice((0.0, 0.5, 0.85, 0.92, 0.97, 1.03, 1.08, 1.15, 1.6))
        rate = round((current or 2) * capacity * TARGET * factor + 0.0137, 4)
        need = rate / (capacity * TARGET)
        right = current if current and abs(need / current - 1) <= TOLERANCE else max(1, math.ceil(need))
        got = recommend(rate, current, capacity)
        said = f"{rate:g} requests a second; a replica answers {capacity:g} at most and should be busy to {TARGET:.0%}; there are {current}."
        known = {
            "no replica: then nobody answers the next request, and it takes minutes to start one": 0,
            "what replicas that are always busy would take: plan for the target": max(1, math.ceil(rate / capacity)),
            "rounded down: what is left over has no replica": math.floor(need),
            "the exact need: a fleet that is off by a tenth at most is left as it is, whether too large or too small": max(
                1, math.ceil(need)
            ),
        }
        look = "`recommend`: the need is rate / (capacity · target); within a tenth of `current` it stays at `current`; otherwise the need, rounded up, and 1 at least"
        named = next((f"{look}. {got} is {words}" for words, number in known.items() if number == got != right), look)
        expect(said, "replicas", right, got, named)


def check_scaler(cls: Any) -> None:
    """On days of all kinds: no flapping, hardly anybody late, and not many more replica-hours than it takes."""
    for number, rng in enumerate(rounds("day", 4)):
        capacity, peak, burst = 4.0, rng.choice((60.0, 120.0)), (1.0, 1.5)[number % 2]
        rates = day_rates(rng, peak, burst)
        see(sum(rates))  # which day it was
        start = max(1, math.ceil(rates[0] / (capacity * TARGET)))
        day = run_day(cls(capacity), rates, capacity, start)
        said = f"A day with {peak:g} requests a second at its peak{' and a burst of half as many more' if burst > 1 else ''}; a replica answers {capacity:g}."
        _judge(said, day, sum(max(1, math.ceil(rate / (capacity * TARGET))) for rate in rates) / (len(rates) / 24))


def _judge(said: str, day: Day, least_hours: float) -> None:
    hours = day.replica_hours / least_hours
    require(
        True, day.late <= MOST_LATE,
        f"{said}\nExpected late requests: {MOST_LATE:.0%} at the most\nGot late requests: {day.late:.2%}\n"
        "Look at what `decide` raises the number to, and when: to the need at `TARGET`, not at full capacity; at once; and on the rate, which leads: when the p99 rises, which lags, "
        "the queue is there, and a replica takes minutes to start.",
    )  # fmt: skip
    require(
        True, day.flaps <= MOST_FLAPS,
        f"{said}\nExpected flaps: {MOST_FLAPS} a day at the most\nGot flaps: {day.flaps}\n"
        "Look at three things (a start that follows a stop within 15 minutes is a flap): the number must not go below the largest recommendation of the last `window` seconds; the "
        "current number includes those that start; and noise of a tenth must not raise it, for which `recommend` has its tolerance.",
    )  # fmt: skip
    many = "are there replicas that start and are not counted, so that each tick orders them again? Does the number ever fall?"
    require(
        True, hours <= MOST_HOURS,
        f"{said}\nExpected replica-hours: {MOST_HOURS:g} times what the traffic of each 15 seconds takes at `TARGET`, at the most\nGot replica-hours: {hours:.2f} times\nLook at what is paid for: {many}",
    )  # fmt: skip
