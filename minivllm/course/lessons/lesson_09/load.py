"""The checks of lesson 09 for a load generator: arrivals of a Poisson process, and a loop that does not wait for answers."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from minivllm.course.lessons.lesson_08.situations import expect
from minivllm.course.lessons.lesson_09.metrics import TICK

_MANY = 4000


def check_poisson_times(poisson_times: Any) -> None:
    """Independent, exponentially distributed gaps of the right mean, drawn from the given generator alone."""
    before = random.getstate()
    for rate in (0.5, 4.0, 40.0):
        said = f"poisson_times(rate={rate:g}, count={_MANY}, rng=random.Random(1))"
        times = _times(poisson_times(rate, _MANY, random.Random(1)), said, _MANY)
        expect(said, "arrival times", _MANY, len(times), "count")
        gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
        assert min(gaps) >= 0, (
            f"{said}\nExpected: ascending times, none before 0\nGot: {[round(time, 3) for time in times[:6]]} …\nLook at the sum of the gaps: each arrival comes one gap after the one before."
        )
        assert gaps[0] > 0, (
            f"{said}\nExpected: a gap before the first arrival too\nGot: a first arrival at 0\nLook at the first of the times."
        )
        mean = statistics.mean(gaps)
        _expect_about(said, "mean gap in seconds", 1 / rate, mean, 0.06 / rate, "the mean gap: 1 / rate seconds")
        for factor, share in ((0.5, 0.393), (2.0, 0.865)):
            shorter = sum(gap < factor * mean for gap in gaps) / len(gaps)
            look = "how gaps are drawn: exponentially distributed ones are mostly short and sometimes very long"
            _expect_about(said, f"share of gaps shorter than {factor:g} times the mean", share, shorter, 0.025, look)
        centred = [gap - mean for gap in gaps]
        correlation = sum(a * b for a, b in itertools.pairwise(centred)) / sum(a * a for a in centred)
        _expect_about(said, "correlation of a gap with the one before", 0.0, correlation, 0.08, "a new draw for each gap")
    again, other = (list(poisson_times(4.0, 20, random.Random(seed))) for seed in (1, 2))
    same = list(poisson_times(4.0, 20, random.Random(1)))
    expect("poisson_times was called twice with random.Random(1).", "times", again, same, "rng: draw only from it")
    assert again != other, (
        "random.Random(1) and random.Random(2)\nExpected: different times\nGot: the same times\nLook at rng: draw from it."
    )
    assert random.getstate() == before, (
        "Expected: nothing drawn from the module random itself\nGot: its state has changed\nLook at rng: draw from it."
    )
    lasts = [
        _times(poisson_times(4.0, 20, random.Random(seed)), "poisson_times(rate=4, count=20)", 20)[-1] for seed in range(300)
    ]
    look = "what fixes the total: the gaps are independent, so the last arrival differs from run to run"
    _expect_about(
        "poisson_times(rate=4, count=20), with 300 seeds.",
        "spread of the last arrival in seconds (standard deviation)",
        20**0.5 / 4,
        statistics.stdev(lasts),
        0.2,
        look,
    )
    expect("poisson_times(rate=4, count=0)", "times", [], list(poisson_times(4.0, 0, random.Random(1))), "count")


def _times(returned: Any, said: str, count: int) -> list[float]:
    """The returned times, if they are numbers."""
    try:
        return [float(time) for time in itertools.islice(returned, count + 1)]
    except (TypeError, ValueError):
        raise AssertionError(f"{said}\nExpected: a list of numbers\nGot: {returned!r:.200}\nLook at what is returned.") from None


def _expect_about(said: str, what: str, expected: float, got: float, tolerance: float, look: str) -> None:
    if abs(got - expected) > tolerance:
        raise AssertionError(f"{said}\nExpected {what}: about {expected:.3g}\nGot {what}: {got:.3g}\nLook at {look}.")


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """The input of a load generator.

    Attributes:
        begin: The clock at the call.
        times: When requests come, in seconds after that.
        seconds: How long each step takes, again and again from the front.
        lengths: Steps that each request takes.
        seats: How many requests a step advances.
    """

    begin: float
    times: list[float]
    seconds: list[float]
    lengths: list[int]
    seats: int

    def describe(self) -> str:
        """In words."""
        times = ", ".join(f"{time:g}" for time in self.times[:8]) + (" …" if len(self.times) > 8 else "")
        steps, turns = ", ".join(f"{step:g}" for step in self.seconds), " in turns" if len(self.seconds) > 1 else ""
        return f"drive(engine, requests, times) of {len(self.times)} requests, called at {self.begin:g} s, times = [{times}]; the engine's steps take {steps} s{turns}."


def make_schedule(rng: random.Random) -> Schedule:
    """Arrivals with bursts and long pauses; some fall exactly on the end of a step."""
    count, now, times = rng.randint(0, 25), 0.0, []
    for _ in range(count):
        now += rng.choice((0, 0, rng.randint(1, 8), rng.randint(1, 400))) * TICK
        times.append(now)
    seconds = [rng.choice((1, 2, 4, 8, 64)) * TICK for _ in range(rng.randint(1, 4))]
    lengths = [rng.randint(1, 12) for _ in range(count)]
    return Schedule(rng.randrange(1, 9000) * TICK, times, seconds, lengths, rng.randint(1, 4))


@dataclass(frozen=True)
class Item:
    """A request of a made-up engine."""

    number: int


@dataclass
class MadeUpEngine:
    """What `drive` gets instead of a `TimedEngine`: it has no model, and watches for late requests."""

    schedule: Schedule
    clock: float = field(init=False)
    added: list[tuple[int, float, float]] = field(default_factory=list)
    """For each request: its number, the arrival passed, and the clock when it was handed over."""
    left: list[int] = field(default_factory=list)
    """Steps that unfinished requests still need."""
    num_steps: int = 0
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.clock = self.schedule.begin

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls > 20_000:
            raise AssertionError(
                f"{self.schedule.describe()}\nExpected: an end, with all requests answered\nGot: call after call, at {self.clock:g} s, with {len(self.added)} requests handed "
                "over\nLook at what the loop does at the very moment at which a request is due, and when there is nothing to do."
            )

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
            said = f"{self.schedule.describe()}\nExpected: engine.add(request, arrival), with one of the requests and a number"
            raise AssertionError(f"{said}\nGot: engine.add({request!r}, {arrival!r})\nLook at the arguments of engine.add.")
        self.added.append((request.number, arrival, self.clock))
        self.left.append(self.schedule.lengths[request.number])

    def _forgotten(self) -> int | None:
        """The first request that is due but not handed over."""
        known = {number for number, _, _ in self.added}
        return next(
            (i for i, time in enumerate(self.schedule.times) if i not in known and self.schedule.begin + time <= self.clock), None
        )

    def step(self) -> int:
        """As `TimedEngine.step`."""
        self._count()
        if (number := self._forgotten()) is not None:
            due = self.schedule.begin + self.schedule.times[number]
            raise AssertionError(
                f"{self.schedule.describe()}\nExpected: request {number}, due at {due:g} s, to be handed over before the next step\nGot: a step at {self.clock:g} s without it\n"
                "Look at the loop that hands over: all that are due (<=), whether earlier ones are answered or not."
            )
        if not self.left:
            raise AssertionError(
                f"{self.schedule.describe()}\nExpected: a step only while a request is unfinished\nGot: a step at {self.clock:g} s with nothing to do\nLook at engine.busy."
            )
        self.clock += self.schedule.seconds[self.num_steps % len(self.schedule.seconds)]
        self.num_steps += 1
        seats = self.schedule.seats
        self.left[:seats] = [steps - 1 for steps in self.left[:seats]]
        before = len(self.left)
        self.left = [steps for steps in self.left if steps > 0]
        return before - len(self.left)

    def wait_until(self, moment: float) -> None:
        """As `TimedEngine.wait_until`."""
        self._count()
        said = self.schedule.describe()
        if not isinstance(moment, Real):
            raise AssertionError(
                f"{said}\nExpected: wait_until(moment), with a number\nGot: wait_until({moment!r})\nLook at what is waited for."
            )
        if self.left and moment > self.clock:
            raise AssertionError(
                f"{said}\nExpected: a step, because {len(self.left)} requests are unfinished\nGot: wait_until({moment:g}) at {self.clock:g} s\nLook at when to wait: only if there is nothing to do."
            )
        known = {number for number, _, _ in self.added}
        coming = [self.schedule.begin + time for i, time in enumerate(self.schedule.times) if i not in known]
        if not coming and not self.left and moment > self.clock:
            raise AssertionError(
                f"{said}\nExpected: an end, because all requests are answered\nGot: wait_until({moment:g}) at {self.clock:g} s\nLook at when the loop ends."
            )
        if coming and moment > coming[0]:
            raise AssertionError(
                f"{said}\nExpected: to wait until the next request is due, at {coming[0]:g} s\nGot: wait_until({moment:g})\nLook at the times: they are in seconds after the call, and the clock does not begin at 0."
            )
        self.clock = max(self.clock, moment)


def check_drive(drive: Any) -> None:
    """Each request is handed over at its time, with its own time as its arrival, and all are answered."""
    for seed in range(150):
        schedule = make_schedule(random.Random(f"drive {seed}"))
        engine = MadeUpEngine(schedule)
        requests, times = [Item(number) for number in range(len(schedule.times))], list(schedule.times)
        given = list(requests), list(times)
        drive(engine, requests, times)
        said = schedule.describe()
        look = "what changes the lists that were given: count instead of removing"
        expect(
            said,
            "numbers of requests and times in the caller's lists afterwards",
            *[[len(part) for part in lists] for lists in (given, (requests, times))],
            look,
        )
        numbers = [number for number, _, _ in engine.added]
        look = "the loop that hands over: each request once, in the order of the times"
        expect(said, "requests in the order in which they were handed over", list(range(len(schedule.times))), numbers, look)
        for number, arrival, moment in engine.added:
            due = schedule.begin + schedule.times[number]
            if moment < due:
                raise AssertionError(
                    f"{said}\nExpected: request {number} at {due:g} s\nGot: request {number} at {moment:g} s, before its user has sent it\nLook at the times: they are in seconds after the call."
                )
            if abs(arrival - due) > 1e-9:
                known = (
                    " That is the moment at which it was handed over; its user sent it earlier, and has waited since."
                    if arrival == moment
                    else ""
                )
                raise AssertionError(
                    f"{said}\nExpected arrival of request {number}: {due:g}\nGot arrival of request {number}: {arrival!r}.{known}\nLook at the second argument of engine.add."
                )
        if engine.left:
            raise AssertionError(
                f"{said}\nExpected: all requests answered when drive returns\nGot: {len(engine.left)} unfinished\nLook at when the loop ends."
            )


def observe_drive(drive: Any, schedule: Schedule) -> list[Any]:
    """When a load generator hands over each request, and when it ends."""
    engine = MadeUpEngine(schedule)
    drive(engine, [Item(number) for number in range(len(schedule.times))], list(schedule.times))
    return [
        [[number, round(arrival, 6), round(moment, 6)] for number, arrival, moment in engine.added],
        engine.clock,
        engine.num_steps,
    ]


def shape_of(times: Sequence[float]) -> list[Any]:
    """What all correct arrival times have in common, however they are drawn: coarse properties of many of them."""
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    mean = statistics.mean(gaps)
    shares = [sum(gap < factor * mean for gap in gaps) / len(gaps) for factor in (0.5, 1.0, 2.0)]
    return [
        len(times),
        min(gaps) > 0,
        [abs(share - wanted) < 0.04 for share, wanted in zip(shares, (0.393, 0.632, 0.865), strict=True)],
    ]
