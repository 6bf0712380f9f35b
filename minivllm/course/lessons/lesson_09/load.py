"""The checks of lesson 09 for a load generator: arrivals of a Poisson process, and a loop that does not wait for answers."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

from minivllm.course.lessons.lesson_09.metrics import TICK
from minivllm.course.observations import expect, expect_number, fail, require, rounds, see

_MANY = 4000
_FROM_RNG = "rng: draw from it, and only from it"


def check_poisson_times(poisson_times: Any) -> None:
    """Independent, exponentially distributed gaps of the right mean, drawn from the given generator alone."""
    before = random.getstate()
    for rate, rng in zip((0.5, 4.0, 40.0), rounds("poisson", 3), strict=True):
        rate *= rng.uniform(0.8, 1.25)
        said = f"poisson_times(rate={rate:.3g}, count={_MANY}, rng)"
        times = _times(poisson_times(rate, _MANY, random.Random(rng.random())), said, _MANY)
        expect(said, "arrival times", _MANY, len(times), "count")
        _check_gaps(said, rate, [later - earlier for earlier, later in itertools.pairwise([0.0, *times])])
        see(round(rate, 6))
    again, same, other = (list(poisson_times(4.0, 20, random.Random(seed))) for seed in (1, 1, 2))
    expect("poisson_times, called twice with random.Random(1).", "the same times", True, again == same, _FROM_RNG)
    expect("poisson_times with random.Random(1) and random.Random(2).", "the same times", False, again == other, _FROM_RNG)
    untouched = random.getstate() == before
    expect("The state of the module random, before and after.", "the same", True, untouched, _FROM_RNG)
    said, what = "poisson_times(rate=4, count=20), with 300 seeds.", "spread of the last arrival in seconds (standard deviation)"
    lasts = [_times(poisson_times(4.0, 20, random.Random(seed)), said, 20)[-1] for seed in range(300)]
    look = "what fixes the total: the gaps are independent, so the last arrival differs from run to run"
    _expect_about(said, what, 20**0.5 / 4, statistics.stdev(lasts), 0.2, look)
    expect("poisson_times(rate=4, count=0)", "times", [], list(poisson_times(4.0, 0, random.Random(1))), "count")


def _times(returned: Any, said: str, count: int) -> list[float]:
    """The returned times, if they are numbers."""
    try:
        return [float(time) for time in itertools.islice(returned, count + 1)]
    except (TypeError, ValueError):
        fail(f"{said}\nExpected: a list of numbers\nGot: {returned!r:.200}\nLook at what is returned.")


def _check_gaps(said: str, rate: float, gaps: list[float]) -> None:
    look = "the sum of the gaps: each arrival comes one gap after the one before"
    expect(said, "negative gaps", [], [gap for gap in gaps if gap < 0][:3], look)
    expect(said, "a first arrival at 0", False, gaps[0] == 0, "the first of the times: there is a gap before it, too")
    mean = statistics.mean(gaps)
    _expect_about(said, "mean gap in seconds", 1 / rate, mean, 0.09 / rate, "the mean gap: 1 / rate seconds")
    for factor, share in ((0.5, 0.393), (2.0, 0.865)):
        shorter = sum(gap < factor * mean for gap in gaps) / len(gaps)
        look = "how gaps are drawn: exponentially distributed ones are mostly short and sometimes very long"
        _expect_about(said, f"share of gaps shorter than {factor:g} times the mean", share, shorter, 0.042, look)
    centred = [gap - mean for gap in gaps]
    correlation = sum(a * b for a, b in itertools.pairwise(centred)) / sum(a * a for a in centred)
    _expect_about(said, "correlation of a gap with the one before", 0.0, correlation, 0.09, "a new draw for each gap")


def _expect_about(said: str, what: str, expected: float, got: float, tolerance: float, look: str) -> None:
    """As `expect`, for what chance moves: `tolerance` is five standard deviations."""
    is_near = abs(got - expected) <= tolerance
    require(True, is_near, f"{said}\nExpected {what}: about {expected:.3g}\nGot {what}: {got:.3g}\nLook at {look}.")


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A request of a made-up engine."""

    number: int


class MadeUpEngine:
    """What `drive` gets instead of a `TimedEngine`: it has no model, and refuses what a load generator must not do.

    Attributes:
        begin: The clock at the call.
        times: When requests come, in seconds after that: with bursts and long pauses; some fall exactly on the end of a step.
        seconds: How long each step takes, again and again from the front.
        lengths: Steps that each request takes.
        seats: How many requests a step advances.
        added: For each request: its number, the arrival passed, and the clock when it was handed over.
        left: Steps that unfinished requests still need.
    """

    def __init__(self, rng: random.Random) -> None:
        count, now = rng.randint(0, 25), 0.0
        self.times: list[float] = []
        for _ in range(count):
            now += rng.choice((0, 0, rng.randint(1, 8), rng.randint(1, 400))) * TICK
            self.times.append(now)
        self.seconds = [rng.choice((1, 2, 4, 8, 64)) * TICK for _ in range(rng.randint(1, 4))]
        self.lengths = [rng.randint(1, 12) for _ in range(count)]
        self.begin = self.clock = rng.randrange(1, 9000) * TICK
        self.seats = rng.randint(1, 4)
        self.added: list[tuple[int, float, float]] = []
        self.left: list[int] = []
        self.num_steps = self.num_calls = 0
        times = ", ".join(f"{time:g}" for time in self.times[:8]) + (" …" if count > 8 else "")
        steps, turns = ", ".join(f"{step:g}" for step in self.seconds), " in turns" if len(self.seconds) > 1 else ""
        self.said = f"drive(engine, requests, times) of {count} requests, called at {self.begin:g} s, times = [{times}]; the engine's steps take {steps} s{turns}."

    def _refuse(self, expected: str, got: str, look: str) -> NoReturn:
        fail(f"{self.said}\nExpected: {expected}\nGot: {got}\nLook at {look}.")

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls > 20_000:
            got = f"call after call, at {self.clock:g} s, with {len(self.added)} requests handed over"
            look = "what the loop does at the very moment at which a request is due, and when there is nothing to do"
            self._refuse("an end, with all requests answered", got, look)

    def _next_due(self) -> float:
        """When the first request is due that was not handed over; infinity if all were."""
        known = {number for number, _, _ in self.added}
        return next((self.begin + time for number, time in enumerate(self.times) if number not in known), math.inf)

    def now(self) -> float:
        """As `TimedEngine.now`."""
        self._count()
        return self.clock

    @property
    def busy(self) -> bool:
        """As `TimedEngine.busy`."""
        self._count()
        return bool(self.left)

    def add(self, request: Item, arrival: float) -> None:
        """As `TimedEngine.add`."""
        self._count()
        if not isinstance(request, Item) or not isinstance(arrival, Real):
            expected = "engine.add(request, arrival), with one of the requests and a number"
            self._refuse(expected, f"engine.add({request!r}, {arrival!r})", "the arguments of engine.add")
        self.added.append((request.number, arrival, self.clock))
        self.left.append(self.lengths[request.number])

    def step(self) -> int:
        """As `TimedEngine.step`."""
        self._count()
        due, got = self._next_due(), f"a step at {self.clock:g} s"
        if due <= self.clock:
            look = "the loop that hands over: all that are due (<=), whether earlier ones are answered or not"
            self._refuse(f"the request due at {due:g} s to be handed over before the next step", f"{got} without it", look)
        if not self.left:
            self._refuse("a step only while a request is unfinished", f"{got} with nothing to do", "engine.busy")
        self.clock += self.seconds[self.num_steps % len(self.seconds)]
        self.num_steps += 1
        before = len(self.left)
        self.left = [steps - (place < self.seats) for place, steps in enumerate(self.left)]
        self.left = [steps for steps in self.left if steps]
        return before - len(self.left)

    def wait_until(self, moment: float) -> None:
        """As `TimedEngine.wait_until`."""
        self._count()
        due, got = self._next_due(), f"wait_until({moment!r}) at {self.clock:g} s"
        if not isinstance(moment, Real):
            self._refuse("wait_until(moment), with a number", got, "what is waited for")
        if self.left and moment > self.clock:
            expected = f"a step, because {len(self.left)} requests are unfinished"
            self._refuse(expected, got, "when to wait: only if there is nothing to do")
        if due == math.inf and moment > self.clock:
            self._refuse("an end, because all requests are answered", got, "when the loop ends")
        if moment > due:
            look = "the times: they are in seconds after the call, and the clock does not begin at 0"
            self._refuse(f"to wait until the next request is due, at {due:g} s", got, look)
        self.clock = max(self.clock, moment)


def check_drive(drive: Any) -> None:
    """Each request is handed over at its time, with its own time as its arrival, and all are answered."""
    for rng in rounds("drive", 150):
        engine = MadeUpEngine(rng)
        said, numbers = engine.said, list(range(len(engine.times)))
        requests, times = [Item(number) for number in numbers], list(engine.times)
        drive(engine, requests, times)
        left, look = (
            [[item.number for item in requests], times],
            "what changes the lists that were given: count instead of removing",
        )
        expect(said, "requests and times in the caller's lists afterwards", [numbers, engine.times], left, look)
        look = "the loop that hands over: each request once, in the order of the times"
        expect(said, "requests in the order in which they were handed over", numbers, [added[0] for added in engine.added], look)
        for number, arrival, moment in engine.added:
            due = engine.begin + engine.times[number]
            early = f"Expected: request {number} at {due:g} s\nGot: request {number} at {moment:g} s, before its user has sent it"
            require(False, moment < due, f"{said}\n{early}\nLook at the times: they are in seconds after the call.")
            mistakes = {"the moment at which it was handed over; its user sent it earlier, and has waited since": moment}
            expect_number(said, f"arrival of request {number}", due, arrival, "the second argument of engine.add", mistakes)
        expect(said, "unfinished requests when drive returns", 0, len(engine.left), "when the loop ends")
        see([engine.clock, engine.num_steps])
