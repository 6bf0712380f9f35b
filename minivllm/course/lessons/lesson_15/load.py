"""The check of lesson 15 for the load of a trace."""

from __future__ import annotations

import math
import random
from typing import Any

from minivllm.bench.production import TracedRequest
from minivllm.course.observations import expect, expect_number, require, rounds

_COLUMNS = ("requests", "prompt tokens", "output tokens")


def random_trace(rng: random.Random, window: float) -> list[TracedRequest]:
    """Arrivals with pauses that are longer than a window, and a window that has only begun at the end. Some traces have a few windows, some over 100."""
    now, trace, fewest = 0.0, [], rng.choice((6, rng.randint(20, 60), 300))
    while len(trace) < fewest or trace[-1].arrival_time < 2 * window:
        trace.append(TracedRequest(round(now, 3), rng.randint(1, 900), rng.randint(1, 90)))
        now += rng.choice((0.03, 0.1, 0.2, 0.5, rng.random() * 3)) * window
    return trace


def count_loads(trace: list[TracedRequest], window: float, every: bool = True, whole: bool = True) -> list[tuple[float, ...]]:
    """The load of each window, counted window by window. Without `every`, windows without requests are left out; without `whole`, the last is in."""
    number = int(trace[-1].arrival_time // window) + (not whole)
    loads = []
    for i in range(number):
        those = [request for request in trace if i * window <= request.arrival_time < (i + 1) * window]
        if those or every:
            counts = len(those), sum(request.prompt_len for request in those), sum(request.output_len for request in those)
            loads.append(tuple(count / window for count in counts))
    return loads


def nearest_rank(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(percent * len(values) / 100) - 1)]


def check_loads(loads: Any, load_at: Any) -> None:
    """Each whole window counts, also an empty one; and a percentile is a window's load, not a mean."""
    for rng in rounds("loads", 30):
        window = rng.choice((0.5, 10, 60))
        trace = random_trace(rng, window)
        said = f"{len(trace)} requests from 0 to {trace[-1].arrival_time:g} s, in windows of {window:g} s."
        expected, got = count_loads(trace, window), [tuple(load) for load in loads(trace, window)]
        _expect_length(said, len(expected), len(got), trace, window)
        for i, (right, mine) in enumerate(zip(expected, got, strict=True)):
            require(
                3,
                len(mine),
                f"{said}\nExpected in a window: 3 numbers\nGot in a window: {len(mine)}\nLook at what `loads` puts into its list.",
            )
            for column, name in enumerate(_COLUMNS):
                mistakes = {
                    "the number in the window, not the number a second": right[column] * window,
                    "the other kind of tokens": right[3 - column] if column else math.nan,
                    "prompt and output tokens together": right[1] + right[2] if column else math.nan,
                }
                look = "`loads`: which requests are in a window (from its first moment, up to the next one's), and by how many seconds you divide"
                expect_number(said, f"{name} a second in window {i}", right[column], mine[column], look, mistakes)
        percent = rng.choice((1, 25, 50, 90, 99, 100))
        mine = load_at(trace, window, percent)
        require(
            3,
            len(mine),
            f"{said}\nExpected from load_at: 3 numbers\nGot from load_at: {len(mine)}\nLook at what `load_at` returns.",
        )
        for column, name in enumerate(_COLUMNS):
            _expect_percentile(said, name, [load[column] for load in expected], percent, mine[column])


def _expect_length(said: str, expected: int, got: int, trace: list[TracedRequest], window: float) -> None:
    look = "`loads`: one entry for each window that is over when the last request arrives"
    if got == len(count_loads(trace, window, every=False)) or got == len(count_loads(trace, window, every=False, whole=False)):
        look = "windows in which nobody came: they are part of the traffic, and count as 0"
    elif got == expected + 1:
        look = "the last window: it has only begun, and would look like a quiet one"
    expect(said, "number of windows", expected, got, look)


def _expect_percentile(said: str, name: str, values: list[float], percent: float, got: Any) -> None:
    ordered, rank = sorted(values), math.ceil(percent * len(values) / 100)
    place = percent * (len(values) - 1) / 100
    low = math.floor(place)
    between = ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    mistakes = {
        "the mean of all windows, which hides the busy ones": sum(values) / len(values),
        "one rank too high": ordered[min(rank, len(ordered) - 1)],
        "one rank too low": ordered[max(0, rank - 2)],
        "between two windows: no window had that load": between,
        "the busiest window": ordered[-1],
        "counted from the wrong end": ordered[-rank],
    }
    right = nearest_rank(values, percent)
    look = "`load_at`: nearest rank, for each of the three by itself: in order, the value at place ceil(percent · n / 100), counted from 1"
    expect_number(
        said,
        f"{name} a second, percentile {percent}",
        right,
        got,
        look,
        {said: wrong for said, wrong in mistakes.items() if wrong != right},
    )
