"""The checks of lesson 09 for numbers: percentiles, waits, rates, goodput, utilisation, and Little's law."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.bench.summary import Distribution
from minivllm.course.lessons.timing import RequestTimes, StepTimes
from minivllm.course.observations import expect, expect_number, fail, rounds, seeded

_ROUNDS = 60
_BY_RANK = "; percentiles are by nearest rank"
TICK = 1 / 64
"""All times in these checks are multiples of this, so that their differences are exact."""


def make_times(rng: random.Random) -> RequestTimes:
    """A request's timestamps."""
    arrival = rng.randrange(int(20 / TICK)) * TICK
    started = arrival + rng.choice((0, rng.randrange(300))) * TICK
    tokens = [started + rng.randint(1, 60) * TICK]
    for _ in range(rng.choice((0, rng.randrange(9)))):
        tokens.append(tokens[-1] + rng.randint(1, 40) * TICK)
    return RequestTimes(arrival, started, tuple(tokens))


def show_first(most: int, lines: list[str]) -> str:
    """The first few lines, and how many more there are."""
    return "\n".join(lines[:most]) + (f"\n  and {len(lines) - most} more" if len(lines) > most else "")


def describe(records: Sequence[RequestTimes]) -> str:
    """The first requests in words."""
    lines = [
        f"  arrival {times.arrival:g}, started {times.started:g}, tokens at {', '.join(f'{moment:g}' for moment in times.tokens)}"
        for times in records
    ]
    return f"{len(records)} request{'' if len(records) == 1 else 's'} (times in seconds):\n{show_first(4, lines)}"


class Waits(NamedTuple):
    """What a request waited, in seconds: what the solution's `latencies` returns."""

    ttft: float
    itls: list[float]
    latency: float

    @property
    def tpot(self) -> float:
        """The mean gap; 0 if there is only one token."""
        return statistics.fmean(self.itls or [0.0])


def waits_of(times: RequestTimes) -> Waits:
    """What a request waited."""
    itls = [later - earlier for earlier, later in zip(times.tokens, times.tokens[1:], strict=False)]
    return Waits(times.tokens[0] - times.arrival, itls, times.tokens[-1] - times.arrival)


# -- one request -----------------------------------------------------------------------------------------------------


def make_values(rng: random.Random) -> list[float]:
    """Values in any order, some of them several times."""
    count = rng.choice((1, 2, 3, 10, 20, 99, 100, 101, 250))
    return [rng.choice((rng.randint(0, 30), rng.randint(0, 3000) * TICK)) for _ in range(count)]


def check_percentile(percentile: Any) -> None:
    """The nearest-rank percentile."""
    rng = seeded("percentile")
    small = [[3, 1, 2], [5, 1, 4, 2, 3], [7], [2, 9, 2, 9, 2, 9, 4]] * 6
    for values in [*small, *(make_values(rng) for _ in range(3 * _ROUNDS))]:
        percent = rng.choice((1, 5, 25, 50, 75, 90, 95, 99, 100, 99.5))
        rank, ordered, given = math.ceil(percent * len(values) / 100), sorted(values), list(values)
        if math.ceil(percent / 100 * len(values)) != rank:
            continue  # a matter of rounding: see below
        shown = f"{len(values)} values; the smallest are {ordered[:3]}, the largest {ordered[-3:]}"
        said = f"percentile({values}, {percent})" if len(values) < 10 else f"percentile(values, {percent}) of {shown}"
        mistakes = {
            "the next larger value: positions in Python begin at 0": ordered[min(rank, len(values) - 1)],
            "of the values in the order in which they were given": values[rank - 1],
            "counted from the largest": ordered[-rank],
        }
        got, look = percentile(given, percent), "sorting, rounding up, and counting from 1"
        expect_number(said, "percentile", ordered[rank - 1], got, look, mistakes)
        expect(said, "the caller's list afterwards", values, given, "sort(), which changes the list; sorted() does not")
    hundred = rng.sample(range(1, 101), 100)
    look = "rounding: 0.07 * 100 is 7.000000000000001, which rounds up to 8; multiply before you divide"
    for percent in range(1, 101):
        said = f"percentile(values, {percent}) of the numbers 1 to 100 in any order"
        expect_number(said, "percentile", percent, percentile(list(hundred), percent), look)


def check_latencies(latencies: Any) -> None:
    """TTFT, ITLs and end-to-end latency."""
    for rng in rounds("latencies", _ROUNDS):
        times = make_times(rng)
        said = f"latencies of a request: {describe([times]).splitlines()[1].strip()}."
        got, right = latencies(times), waits_of(times)
        if not isinstance(got, tuple | list) or len(got) != 3 or not isinstance(got[1], list | tuple):
            look = "what is returned: three things, the second of them a list"
            fail(f"{said}\nExpected: (TTFT, list of ITLs, latency)\nGot: {got!r}\nLook at {look}.")
        mistakes = {"the time since the engine began with it; its user has waited longer": times.tokens[0] - times.started}
        expect_number(said, "TTFT", right.ttft, got[0], "where the user's time begins", mistakes)
        expect(said, "ITLs", right.itls, list(got[1]), "the pairs of tokens that follow each other; n tokens have n - 1 gaps")
        mistakes = {
            "the time since the engine began with it": times.tokens[-1] - times.started,
            "the time since the first token": times.tokens[-1] - times.tokens[0],
        }
        expect_number(said, "latency", right.latency, got[2], "the user's click, and the last token", mistakes)


# -- a run -----------------------------------------------------------------------------------------------------------


def make_records(rng: random.Random) -> tuple[list[RequestTimes], float]:
    """Requests in any order, and when the measurement begins.

    Some came before it, and one of them may be answered last of all; of those after it, at least one has two tokens.
    """
    records = [make_times(rng) for _ in range(rng.choice((rng.randint(5, 40), rng.randint(5, 40), 250)))]
    start = rng.choice((0.0, 2.0, 7.5))
    first = start + rng.choice((0, 0, rng.randint(1, 90))) * TICK
    records.append(RequestTimes(first, first + TICK, (first + 2 * TICK, first + 5 * TICK)))
    if start and rng.random() < 0.5:
        records.append(RequestTimes(start - TICK, start, (start + 3 * TICK, 50.0)))
    if rng.random() < 0.3:
        records = [times for times in records if times.arrival < start or times.arrival >= first]
    rng.shuffle(records)
    return records, start


def summary_of(records: list[RequestTimes], start: float) -> Iterator[tuple[str, float, str, dict[str, float]]]:
    """Each field of a summary: its name, the right value, where to look, and what common mistakes give."""
    counted = [times for times in records if times.arrival >= start]
    waits, end = [waits_of(times) for times in counted], max(times.tokens[-1] for times in counted)
    look = "which requests count (arrival >= start), and how long the run lasted (from start to their last token)"
    mistakes = {
        "with the requests of the warm-up": len(records) / (end - start),
        "over the time from the first arrival": len(counted) / (end - min(times.arrival for times in counted)),
        "over the time since 0 on the clock": len(counted) / end,
    }
    yield "requests_per_second", len(counted) / (end - start), look, mistakes
    num_tokens, num_all_tokens = (sum(len(times.tokens) for times in some) for some in (counted, records))
    look = "all tokens of the requests that count, over the seconds of the run"
    mistakes = {
        "the mean of the requests' own rates": statistics.fmean((1 + len(wait.itls)) / wait.latency for wait in waits),
        "with the tokens of the warm-up": num_all_tokens / (end - start),
    }
    yield "tokens_per_second", num_tokens / (end - start), look, mistakes
    pooled = {
        "ttft": [wait.ttft for wait in waits],
        "itl": [gap for wait in waits for gap in wait.itls],
        "latency": [wait.latency for wait in waits],
    }
    mean_of_means = statistics.fmean(wait.tpot for wait in waits if wait.itls)
    for name, values in pooled.items():
        mistakes = {"the mean of each request's own mean": mean_of_means} if name == "itl" else {}
        look = f"the list that {name} is computed from, and which requests count"
        for part, more in {"mean": "", "p50": _BY_RANK, "p99": _BY_RANK}.items():
            yield f"{name}.{part}", getattr(Distribution.of(values), part), look + more, mistakes


def check_summarize(summarize: Any) -> None:
    """Rates over the whole run, without the warm-up; pooled gaps."""
    for rng in rounds("summarize", _ROUNDS):
        records, start = make_records(rng)
        given = list(records)
        summary, said = summarize(given, start), f"summarize(records, start={start:g}) of {describe(records)}"
        expect(said, "the caller's list afterwards", records, given, "what sorts it, or takes something out of it")
        for name, right, look, mistakes in summary_of(records, start):
            got = summary
            for part in name.split("."):
                if not hasattr(got, part):
                    look = "what is returned: a Summary, with a Spread for each of ttft, itl and latency"
                    fail(f"{said}\nExpected: an object with the attribute {part}\nGot: {got!r}\nLook at {look}.")
                got = getattr(got, part)
            expect_number(said, name, right, got, look, mistakes)


def make_goals(rng: random.Random) -> tuple[list[RequestTimes], float, float, float]:
    """Requests, how long the run took, and two goals that some requests meet exactly."""
    records = [make_times(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, rng.randint(4, 30))))]
    waits = [waits_of(times) for times in records]
    tpots = [wait.tpot for wait in waits if wait.itls] or [TICK]
    max_ttft = sorted(wait.ttft for wait in waits)[rng.randrange(len(waits))]
    max_tpot = sorted(tpots)[rng.randrange(len(tpots))] + rng.choice((0.0, 1e-9, TICK / 3))
    halves = (1, 2, 4, 8)  # divisions by these are exact; of others, none may be so close to the goal that rounding decides
    while any(wait.itls and len(wait.itls) not in halves and abs(wait.tpot - max_tpot) < 1e-8 for wait in waits):
        max_tpot += 1e-7
    return records, max(times.tokens[-1] for times in records) + rng.randint(1, 400) * TICK, max_ttft, max_tpot


def is_good(times: RequestTimes, max_ttft: float, max_tpot: float) -> bool:
    """Whether a request met both goals; one of a single token has only the first."""
    wait = waits_of(times)
    return wait.ttft <= max_ttft and wait.tpot <= max_tpot


def goodput_mistakes(waits: list[Waits], seconds: float, max_ttft: float, max_tpot: float) -> dict[str, float]:
    """What common mistakes make of a goodput."""
    good = [wait for wait in waits if wait.ttft <= max_ttft and wait.tpot <= max_tpot]
    return {
        "how many met the goals, not how many per second": float(len(good)),
        "with requests that met only the first goal": sum(wait.ttft <= max_ttft for wait in waits) / seconds,
        "with requests that met only the second goal": sum(wait.tpot <= max_tpot for wait in waits) / seconds,
        "without the requests of a single token": sum(bool(wait.itls) for wait in good) / seconds,
        "a share of the requests": len(good) / len(waits),
        "without requests that meet a goal exactly (at most means <=)": sum(wait.ttft < max_ttft and wait.tpot < max_tpot for wait in good) / seconds,
        "with the largest gap for TPOT": sum(max(wait.itls, default=0.0) <= max_tpot for wait in waits if wait.ttft <= max_ttft) / seconds,
    }  # fmt: skip


def check_goodput(goodput: Any) -> None:
    """Only requests that met both goals count, per second of the whole run."""
    for rng in rounds("goodput", 2 * _ROUNDS):
        records, seconds, max_ttft, max_tpot = make_goals(rng)
        said = f"goodput(records, seconds={seconds:g}, max_ttft={max_ttft:g}, max_tpot={max_tpot:g}) of {describe(records)}"
        right = sum(is_good(times, max_ttft, max_tpot) for times in records) / seconds
        mistakes = goodput_mistakes([waits_of(times) for times in records], seconds, max_ttft, max_tpot)
        look = "both goals, TPOT (the mean gap after the first token), and requests of a single token"
        expect_number(said, "goodput", right, goodput(list(records), seconds, max_ttft, max_tpot), look, mistakes)


# -- the time from start to end --------------------------------------------------------------------------------------


def make_steps(rng: random.Random) -> tuple[list[StepTimes], float, float, int]:
    """Steps, with pauses and padding, a window, and how many seats there are."""
    seats, now, steps = rng.choice((2, 4, 8)), rng.randrange(200) * TICK, []
    for _ in range(rng.randint(1, 25)):
        now += rng.choice((0, 0, rng.randint(1, 60))) * TICK
        rows = rng.randint(1, seats)
        steps.append(StepTimes(now, now + rng.randint(1, 30) * TICK, rows, rng.randint(1, rows)))
        now = steps[-1].end
    first, last = int(steps[0].start / TICK), int(steps[-1].end / TICK)
    start = rng.randint(max(0, first - 20), last - 1)
    end = rng.randint(start + 1, last + 40)
    if rng.random() < 0.4:
        start, end = first, last
    return steps, start * TICK, end * TICK, seats


def right_utilisation(steps: Sequence[StepTimes], start: float, end: float, num_seats: int) -> tuple[float, float]:
    """What the solution's `utilisation` returns."""
    inside = [max(0.0, min(step.end, end) - max(step.start, start)) for step in steps]
    useful = sum(seconds * step.num_useful for seconds, step in zip(inside, steps, strict=True))
    return sum(inside) / (end - start), useful / (num_seats * (end - start))


def check_utilisation(utilisation: Any) -> None:
    """Time-weighted shares of a window."""
    for rng in rounds("utilisation", 2 * _ROUNDS):
        steps, start, end, seats = make_steps(rng)
        busy, useful = right_utilisation(steps, start, end, seats)
        lines = [f"  {step.start:g} to {step.end:g}: {step.num_rows} rows, {step.num_useful} useful" for step in steps]
        call = f"utilisation(steps, start={start:g}, end={end:g}, num_seats={seats}) of {len(steps)} steps"
        said = f"{call}:\n{show_first(5, lines)}"
        got = utilisation(list(steps), start, end, seats)
        if not isinstance(got, tuple | list) or len(got) != 2:
            fail(f"{said}\nExpected: (busy, useful)\nGot: {got!r}\nLook at what is returned: two shares.")
        mistakes = {"with what lies outside the window": sum(step.end - step.start for step in steps) / (end - start)}
        expect_number(said, "busy", busy, got[0], "the part of each step inside the window", mistakes)
        padded = [replace(step, num_useful=step.num_rows) for step in steps]
        mistakes = {
            "with the rows of padding": right_utilisation(padded, start, end, seats)[1],
            "a share of the busy time, not of all time": useful / busy if busy else math.nan,
            "the mean over steps, however long each lasted": statistics.fmean(step.num_useful for step in steps) / seats,
        }
        expect_number(said, "useful", useful, got[1], "useful rows times seconds, over seats times all seconds", mistakes)


def right_average(records: Sequence[RequestTimes], start: float, end: float) -> float:
    """What the solution's `average_in_system` returns."""
    return sum(max(0.0, min(times.tokens[-1], end) - max(times.arrival, start)) for times in records) / (end - start)


def check_average_in_system(average_in_system: Any) -> None:
    """How many requests wait or run, averaged over time: in a window that requests reach into and out of, or one that holds all."""
    for rng in rounds("in system", 2 * _ROUNDS):
        records = [make_times(rng) for _ in range(rng.randint(1, 20))]
        start, end = 0.0, max(times.tokens[-1] for times in records)
        if rng.random() < 0.7:
            last = int(end / TICK)
            start = rng.randrange(last) * TICK
            end = start + rng.randint(1, last) * TICK
        said = f"average_in_system(records, start={start:g}, end={end:g}) of {describe(records)}"
        latency = sum(waits_of(times).latency for times in records)
        served = [replace(times, arrival=times.started) for times in records]
        mistakes = {
            "without the time in which they waited to be started": right_average(served, start, end),
            "with what lies outside the window": latency / (end - start),
            "an average over requests": latency / len(records),
        }
        look = "how long each request was in the system (from arrival to its last token) within the window"
        got = average_in_system(list(records), start, end)
        expect_number(said, "average", right_average(records, start, end), got, look, mistakes)
