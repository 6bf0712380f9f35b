"""The checks of lesson 09 for a load generator: arrivals of a Poisson process, and a loop that does not wait for answers."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

from minivllm.course.lessons.lesson_09.metrics import TICK
from minivllm.course.observations import expect, expect_number, fail, require, rounds, see

_MANY = 4000


def check_poisson_times(poisson_times: Any) -> None:
    """Independent, exponentially distributed gaps of the right mean, drawn from the given generator alone."""
    before = random.getstate()
    for rate, rng in zip((0.5, 4.0, 40.0), rounds("poisson", 3), strict=True):
        rate *= rng.uniform(0.8, 1.25)
        said = f"poisson_times(rate={rate:.3g}, count={_MANY}, rng)"
        times = _times(poisson_times(rate, _MANY, random.Random(rng.random())), said, _MANY)
        expect(said, "arrival times", _MANY, len(times), "count")
        gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
        shown = f"{[round(time, 3) for time in times[:6]]} …"
        require(
            True,
            min(gaps) >= 0,
            f"{said}\nExpected: ascending times, none before 0\nGot: {shown}\nLook at the sum of the gaps: each arrival comes one gap after the one before.",
        )
        require(
            True,
            gaps[0] > 0,
            f"{said}\nExpected: a gap before the first arrival too\nGot: a first arrival at 0\nLook at the first of the times.",
        )
        mean = statistics.mean(gaps)
        _expect_about(said, "mean gap in seconds", 1 / rate, mean, 0.09 / rate, "the mean gap: 1 / rate seconds")
        for factor, share in ((0.5, 0.393), (2.0, 0.865)):
            shorter = sum(gap < factor * mean for gap in gaps) / len(gaps)
            look = "how gaps are drawn: exponentially distributed ones are mostly short and sometimes very long"
            _expect_about(said, f"share of gaps shorter than {factor:g} times the mean", share, shorter, 0.042, look)
        centred = [gap - mean for gap in gaps]
        correlation = sum(a * b for a, b in itertools.pairwise(centred)) / sum(a * a for a in centred)
        _expect_about(said, "correlation of a gap with the one before", 0.0, correlation, 0.09, "a new draw for each gap")
        see(round(rate, 6))
    again, same, other = (list(poisson_times(4.0, 20, random.Random(seed))) for seed in (1, 1, 2))
    look = "rng: draw only from it"
    require(
        True,
        again == same,
        f"poisson_times was called twice with random.Random(1).\nExpected times: {again}\nGot times: {same}\nLook at {look}.",
    )
    require(
        True,
        again != other,
        "random.Random(1) and random.Random(2)\nExpected: different times\nGot: the same times\nLook at rng: draw from it.",
    )
    untouched = random.getstate() == before
    require(
        True,
        untouched,
        "Expected: nothing drawn from the module random itself\nGot: its state has changed\nLook at rng: draw from it.",
    )
    said = "poisson_times(rate=4, count=20), with 300 seeds."
    lasts = [_times(poisson_times(4.0, 20, random.Random(seed)), said, 20)[-1] for seed in range(300)]
    look = "what fixes the total: the gaps are independent, so the last arrival differs from run to run"
    spread = "spread of the last arrival in seconds (standard deviation)"
    _expect_about(said, spread, 20**0.5 / 4, statistics.stdev(lasts), 0.2, look)
    expect("poisson_times(rate=4, count=0)", "times", [], list(poisson_times(4.0, 0, random.Random(1))), "count")


def _times(returned: Any, said: str, count: int) -> list[float]:
    """The returned times, if they are numbers."""
    try:
        return [float(time) for time in itertools.islice(returned, count + 1)]
    except (TypeError, ValueError):
        fail(f"{said}\nExpected: a list of numbers\nGot: {returned!r:.200}\nLook at what is returned.")


def _expect_about(said: str, what: str, expected: float, got: float, tolerance: float, look: str) -> None:
    """As `expect`, for what chance moves: `tolerance` is five standard deviations."""
    is_near = abs(got - expected) <= tolerance
    require(True, is_near, f"{said}\nExpected {what}: about {expected:.3g}\nGot {what}: {got:.3g}\nLook at {look}.")


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

    def _refuse(self, expected: str, got: str, look: str) -> NoReturn:
        fail(f"{self.schedule.describe()}\nExpected: {expected}\nGot: {got}\nLook at {look}.")

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls > 20_000:
            self._refuse(
                "an end, with all requests answered",
                f"call after call, at {self.clock:g} s, with {len(self.added)} requests handed over",
                "what the loop does at the very moment at which a request is due, and when there is nothing to do",
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
            expected = "engine.add(request, arrival), with one of the requests and a number"
            self._refuse(expected, f"engine.add({request!r}, {arrival!r})", "the arguments of engine.add")
        self.added.append((request.number, arrival, self.clock))
        self.left.append(self.schedule.lengths[request.number])

    def _coming(self) -> list[tuple[int, float]]:
        """The requests that were not handed over: their numbers, and when they are due."""
        known = {number for number, _, _ in self.added}
        return [(i, self.schedule.begin + time) for i, time in enumerate(self.schedule.times) if i not in known]

    def step(self) -> int:
        """As `TimedEngine.step`."""
        self._count()
        for number, due in self._coming()[:1]:
            if due <= self.clock:
                self._refuse(
                    f"request {number}, due at {due:g} s, to be handed over before the next step",
                    f"a step at {self.clock:g} s without it",
                    "the loop that hands over: all that are due (<=), whether earlier ones are answered or not",
                )
        if not self.left:
            what = "a step only while a request is unfinished"
            self._refuse(what, f"a step at {self.clock:g} s with nothing to do", "engine.busy")
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
        if not isinstance(moment, Real):
            self._refuse("wait_until(moment), with a number", f"wait_until({moment!r})", "what is waited for")
        coming, got = self._coming(), f"wait_until({moment:g}) at {self.clock:g} s"
        if self.left and moment > self.clock:
            expected = f"a step, because {len(self.left)} requests are unfinished"
            self._refuse(expected, got, "when to wait: only if there is nothing to do")
        if not coming and not self.left and moment > self.clock:
            self._refuse("an end, because all requests are answered", got, "when the loop ends")
        if coming and moment > coming[0][1]:
            expected = f"to wait until the next request is due, at {coming[0][1]:g} s"
            look = "the times: they are in seconds after the call, and the clock does not begin at 0"
            self._refuse(expected, f"wait_until({moment:g})", look)
        self.clock = max(self.clock, moment)


def check_drive(drive: Any) -> None:
    """Each request is handed over at its time, with its own time as its arrival, and all are answered."""
    for rng in rounds("drive", 150):
        schedule = make_schedule(rng)
        engine, said = MadeUpEngine(schedule), schedule.describe()
        requests, times = [Item(number) for number in range(len(schedule.times))], list(schedule.times)
        drive(engine, requests, times)
        left = [[item.number for item in requests], times]
        look = "what changes the lists that were given: count instead of removing"
        expect(
            said,
            "requests and times in the caller's lists afterwards",
            [list(range(len(schedule.times))), schedule.times],
            left,
            look,
        )
        numbers = [number for number, _, _ in engine.added]
        look = "the loop that hands over: each request once, in the order of the times"
        expect(said, "requests in the order in which they were handed over", list(range(len(schedule.times))), numbers, look)
        for number, arrival, moment in engine.added:
            due = schedule.begin + schedule.times[number]
            early = f"{said}\nExpected: request {number} at {due:g} s\nGot: request {number} at {moment:g} s, before its user has sent it\nLook at the times: they are in seconds after the call."
            require(False, moment < due, early)
            mistakes = {"the moment at which it was handed over; its user sent it earlier, and has waited since": moment}
            expect_number(said, f"arrival of request {number}", due, arrival, "the second argument of engine.add", mistakes)
        look = "when the loop ends"
        expect(said, "unfinished requests when drive returns", 0, len(engine.left), look)
        see([engine.clock, engine.num_steps])
