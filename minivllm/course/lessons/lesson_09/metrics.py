"""The checks of lesson 09 for numbers: percentiles, waits, rates, goodput, utilisation, and Little's law."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from minivllm.bench.summary import percentile as right_percentile
from minivllm.course.lessons.timing import RequestTimes, StepTimes
from minivllm.course.observations import expect, expect_number, fail, rounds, seeded

_ROUNDS = 60
TICK = 1 / 64
"""All times in these checks are multiples of this, so that their differences are exact."""


# -- data ------------------------------------------------------------------------------------------------------------


def make_values(rng: random.Random) -> list[float]:
    """Values in any order, some of them several times."""
    count = rng.choice((1, 2, 3, 10, 20, 99, 100, 101, 250))
    return [rng.choice((rng.randint(0, 30), rng.randint(0, 3000) * TICK)) for _ in range(count)]


def make_times(rng: random.Random, latest: float = 20.0, longest: int = 9) -> RequestTimes:
    """A request's timestamps."""
    arrival = rng.randrange(int(latest / TICK)) * TICK
    started = arrival + rng.choice((0, rng.randrange(300))) * TICK
    tokens = [started + rng.randint(1, 60) * TICK]
    for _ in range(rng.choice((0, rng.randrange(longest)))):
        tokens.append(tokens[-1] + rng.randint(1, 40) * TICK)
    return RequestTimes(arrival, started, tuple(tokens))


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


def describe(records: Sequence[RequestTimes]) -> str:
    """The first requests in words."""
    lines = [
        f"  arrival {times.arrival:g}, started {times.started:g}, tokens at {', '.join(f'{moment:g}' for moment in times.tokens)}"
        for times in records[:4]
    ]
    more = f"\n  and {len(records) - 4} more" if len(records) > 4 else ""
    return f"{len(records)} request{'' if len(records) == 1 else 's'} (times in seconds):\n" + "\n".join(lines) + more


# -- one request -----------------------------------------------------------------------------------------------------


def check_percentile(percentile: Any) -> None:
    """The nearest-rank percentile."""
    rng = seeded("percentile")
    small = [[3, 1, 2], [5, 1, 4, 2, 3], [7], [2, 9, 2, 9, 2, 9, 4]]
    for values in [*(values for values in small for _ in range(6)), *(make_values(rng) for _ in range(3 * _ROUNDS))]:
        percent = rng.choice((1, 5, 25, 50, 75, 90, 95, 99, 100, 99.5))
        if math.ceil(percent / 100 * len(values)) != math.ceil(percent * len(values) / 100):
            continue  # a matter of rounding
        given = list(values)
        got = percentile(given, percent)
        ordered = sorted(values)
        if len(values) < 10:
            said = f"percentile({values}, {percent})"
        else:
            said = f"percentile(values, {percent}) of {len(values)} values; the smallest are {ordered[:3]}, the largest {ordered[-3:]}"
        rank = math.ceil(percent * len(values) / 100)
        mistakes = {
            "the next larger value: positions in Python begin at 0": ordered[min(rank, len(values) - 1)],
            "of the values in the order in which they were given": values[rank - 1],
            "counted from the largest": ordered[-rank],
        }
        expect_number(said, "percentile", ordered[rank - 1], got, "sorting, rounding up, and counting from 1", mistakes)
        expect(said, "the caller's list afterwards", values, given, "sort(), which changes the list; sorted() does not")
    hundred = rng.sample(range(1, 101), 100)
    for percent in range(1, 101):
        got = percentile(list(hundred), percent)
        look = "rounding: 0.07 * 100 is 7.000000000000001, which rounds up to 8; multiply before you divide"
        expect_number(f"percentile(values, {percent}) of the numbers 1 to 100 in any order", "percentile", percent, got, look)


def check_latencies(latencies: Any) -> None:
    """TTFT, ITLs and end-to-end latency."""
    for rng in rounds("latencies", _ROUNDS):
        times = make_times(rng)
        said = f"latencies of a request: {describe([times]).splitlines()[1].strip()}."
        got = latencies(times)
        if not isinstance(got, tuple | list) or len(got) != 3 or not isinstance(got[1], list | tuple):
            fail(
                f"{said}\nExpected: (TTFT, list of ITLs, latency)\nGot: {got!r}\nLook at what is returned: three things, the second of them a list."
            )
        ttft, itls, latency = got
        mistakes = {"the time since the engine began with it; its user has waited longer": times.tokens[0] - times.started}
        expect_number(said, "TTFT", times.tokens[0] - times.arrival, ttft, "where the user's time begins", mistakes)
        expected = [later - earlier for earlier, later in zip(times.tokens, times.tokens[1:], strict=False)]
        expect(said, "ITLs", expected, _numbers(itls), "the pairs of tokens that follow each other; n tokens have n - 1 gaps")
        mistakes = {
            "the time since the engine began with it": times.tokens[-1] - times.started,
            "the time since the first token": times.tokens[-1] - times.tokens[0],
        }
        expect_number(
            said, "latency", times.tokens[-1] - times.arrival, latency, "the user's click, and the last token", mistakes
        )


def _numbers(values: Any) -> Any:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        return values


def waits_of(times: RequestTimes) -> tuple[float, list[float], float]:
    """What the solution's `latencies` returns."""
    gaps = [later - earlier for earlier, later in zip(times.tokens, times.tokens[1:], strict=False)]
    return times.tokens[0] - times.arrival, gaps, times.tokens[-1] - times.arrival


def is_good(times: RequestTimes, max_ttft: float, max_tpot: float) -> bool:
    """Whether a request met both goals; one of a single token has only the first."""
    ttft, gaps, latency = waits_of(times)
    return ttft <= max_ttft and (not gaps or (latency - ttft) / len(gaps) <= max_tpot)


# -- a run -----------------------------------------------------------------------------------------------------------


def check_summarize(summarize: Any) -> None:
    """Rates over the whole run, without the warm-up; pooled gaps."""
    for rng in rounds("summarize", _ROUNDS):
        records, start = make_records(rng)
        given = list(records)
        summary = summarize(given, start)
        said = f"summarize(records, start={start:g}) of {describe(records)}"
        expect(said, "the caller's list afterwards", records, given, "what sorts it, or takes something out of it")
        counted = [times for times in records if times.arrival >= start]
        end = max(times.tokens[-1] for times in counted)
        seconds = end - start
        tokens = sum(len(times.tokens) for times in counted)
        everything = {
            "with the requests of the warm-up": len(records) / seconds,
            "over the time from the first arrival": len(counted) / (end - min(times.arrival for times in counted) or 1),
            "over the time since 0 on the clock": len(counted) / end,
        }
        look = "which requests count (arrival >= start), and how long the run lasted (from start to their last token)"
        expect_number(
            said, "requests_per_second", len(counted) / seconds, _field(summary, "requests_per_second", said), look, everything
        )
        rates = [len(times.tokens) / (times.tokens[-1] - times.arrival) for times in counted]
        mistakes = {
            "the mean of the requests' own rates": sum(rates) / len(rates),
            "with the tokens of the warm-up": sum(len(times.tokens) for times in records) / seconds,
        }
        got = _field(summary, "tokens_per_second", said)
        expect_number(
            said,
            "tokens_per_second",
            tokens / seconds,
            got,
            "all tokens of the requests that count, over the seconds of the run",
            mistakes,
        )
        waits = [waits_of(times) for times in counted]
        kinds = {
            "ttft": [ttft for ttft, _, _ in waits],
            "itl": [gap for _, gaps, _ in waits for gap in gaps],
            "latency": [latency for _, _, latency in waits],
        }
        means = [sum(gaps) / len(gaps) for _, gaps, _ in waits if gaps]
        for name, values in kinds.items():
            spread = _field(summary, name, said)
            mistakes = {"the mean of each request's own mean": sum(means) / len(means)} if name == "itl" else {}
            expected = {"mean": sum(values) / len(values)} | {
                f"p{percent}": right_percentile(values, percent) for percent in (50, 99)
            }
            for part, value in expected.items():
                got = _field(spread, part, said)
                expect_number(
                    said,
                    f"{name}.{part}",
                    value,
                    got,
                    f"the list that {name} is computed from, and which requests count"
                    + ("; percentiles are by nearest rank" if part != "mean" else ""),
                    mistakes,
                )


def _field(holder: Any, name: str, said: str) -> Any:
    if not hasattr(holder, name):
        fail(
            f"{said}\nExpected: an object with the attribute {name}\nGot: {holder!r}\nLook at what is returned: a Summary, with a Spread for each of ttft, itl and latency."
        )
    return getattr(holder, name)


def make_goals(rng: random.Random) -> tuple[list[RequestTimes], float, float, float]:
    """Requests, how long the run took, and two goals that some requests meet exactly."""
    records = [make_times(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, rng.randint(4, 30))))]
    waits = [waits_of(times) for times in records]
    tpots = [sum(gaps) / len(gaps) for _, gaps, _ in waits if gaps] or [TICK]
    max_ttft = sorted(ttft for ttft, _, _ in waits)[rng.randrange(len(waits))]
    max_tpot = sorted(tpots)[rng.randrange(len(tpots))]
    max_tpot += rng.choice((0.0, 1e-9, TICK / 3))
    halves = (1, 2, 4, 8)  # divisions by these are exact; of others, none may be so close to the goal that rounding decides
    while any(len(gaps) not in halves and abs(sum(gaps) / len(gaps) - max_tpot) < 1e-8 for _, gaps, _ in waits if gaps):
        max_tpot += 1e-7
    return records, max(times.tokens[-1] for times in records) + rng.randint(1, 400) * TICK, max_ttft, max_tpot


def check_goodput(goodput: Any) -> None:
    """Only requests that met both goals count, per second of the whole run."""
    for rng in rounds("goodput", 2 * _ROUNDS):
        records, seconds, max_ttft, max_tpot = make_goals(rng)
        waits = [waits_of(times) for times in records]
        first = [ttft <= max_ttft for ttft, _, _ in waits]
        tpots = [((latency - ttft) / len(gaps) if gaps else 0.0) for ttft, gaps, latency in waits]
        next_ones = [tpot <= max_tpot for tpot in tpots]
        good = sum(is_good(times, max_ttft, max_tpot) for times in records)
        said = f"goodput(records, seconds={seconds:g}, max_ttft={max_ttft:g}, max_tpot={max_tpot:g}) of {describe(records)}"
        mistakes = {
            "how many met the goals, not how many per second": float(good),
            "with requests that met only the first goal": sum(first) / seconds,
            "with requests that met only the second goal": sum(next_ones) / seconds,
            "without the requests of a single token": sum(a and b and bool(gaps) for a, b, (_, gaps, _) in zip(first, next_ones, waits, strict=True)) / seconds,
            "a share of the requests": good / len(records),
            "without requests that meet a goal exactly (at most means <=)": sum(ttft < max_ttft and tpot < max_tpot for (ttft, _, _), tpot in zip(waits, tpots, strict=True)) / seconds,
            "with the largest gap for TPOT": sum(ttft <= max_ttft and max(gaps, default=0.0) <= max_tpot for ttft, gaps, _ in waits) / seconds,
        }  # fmt: skip
        mistakes = {name: value for name, value in mistakes.items() if value != good / seconds}
        look = "both goals, TPOT (the mean gap after the first token), and requests of a single token"
        expect_number(said, "goodput", good / seconds, goodput(list(records), seconds, max_ttft, max_tpot), look, mistakes)


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
        lines = [f"  {step.start:g} to {step.end:g}: {step.num_rows} rows, {step.num_useful} useful" for step in steps[:5]]
        more = f"\n  and {len(steps) - 5} more" if len(steps) > 5 else ""
        said = (
            f"utilisation(steps, start={start:g}, end={end:g}, num_seats={seats}) of {len(steps)} steps:\n"
            + "\n".join(lines)
            + more
        )
        returned = utilisation(list(steps), start, end, seats)
        try:
            got = tuple(returned)
        except TypeError:
            got = ()
        if len(got) != 2 or isinstance(returned, str):
            fail(f"{said}\nExpected: (busy, useful)\nGot: {returned!r}\nLook at what is returned: two shares.")
        span = end - start
        unclipped = sum(step.end - step.start for step in steps)
        mistakes = {"with what lies outside the window": unclipped / span}
        expect_number(said, "busy", busy, got[0], "the part of each step inside the window", mistakes)
        inside = [max(0.0, min(step.end, end) - max(step.start, start)) for step in steps]
        rows = sum(seconds * step.num_rows for seconds, step in zip(inside, steps, strict=True))
        mistakes = {
            "with the rows of padding": rows / (seats * span),
            "a share of the busy time, not of all time": useful / busy if busy else math.nan,
            "the mean over steps, however long each lasted": sum(step.num_useful for step in steps) / (seats * len(steps)),
        }
        expect_number(said, "useful", useful, got[1], "useful rows times seconds, over seats times all seconds", mistakes)


def right_average(records: Sequence[RequestTimes], start: float, end: float) -> float:
    """What the solution's `average_in_system` returns."""
    return sum(max(0.0, min(times.tokens[-1], end) - max(times.arrival, start)) for times in records) / (end - start)


def make_window(rng: random.Random, records: Sequence[RequestTimes]) -> tuple[float, float]:
    """A window that requests reach into and out of; or one that holds them all."""
    last = max(times.tokens[-1] for times in records)
    if rng.random() < 0.3:
        return 0.0, last
    start = rng.randrange(int(last / TICK)) * TICK
    return start, start + rng.randint(1, int(last / TICK)) * TICK


def check_average_in_system(average_in_system: Any) -> None:
    """How many requests wait or run, averaged over time."""
    for rng in rounds("in system", 2 * _ROUNDS):
        records = [make_times(rng) for _ in range(rng.randint(1, 20))]
        start, end = make_window(rng, records)
        said = f"average_in_system(records, start={start:g}, end={end:g}) of {describe(records)}"
        span = end - start
        latency = sum(times.tokens[-1] - times.arrival for times in records)
        mistakes = {
            "without the time in which they waited to be started": sum(max(0.0, min(times.tokens[-1], end) - max(times.started, start)) for times in records) / span,
            "with what lies outside the window": latency / span,
            "an average over requests": latency / len(records),
        }  # fmt: skip
        expected = right_average(records, start, end)
        mistakes = {name: value for name, value in mistakes.items() if value != expected}
        look = "how long each request was in the system (from arrival to its last token) within the window"
        expect_number(said, "average", expected, average_in_system(list(records), start, end), look, mistakes)
