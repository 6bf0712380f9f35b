"""Observes a learner's metrics, load generator and batcher from outside: random runs, and the results.

See `lesson_04.observe`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.course.lessons.lesson_07.engine import describe_steps
from minivllm.course.lessons.lesson_09.batching import RUNS, run_static
from minivllm.course.lessons.lesson_09.choice import observe_choose
from minivllm.course.lessons.lesson_09.load import make_schedule, observe_drive, shape_of
from minivllm.course.lessons.lesson_09.metrics import make_goals, make_records, make_steps, make_times, make_values, make_window

_ROUNDS = 20
_Observe = Callable[[Any, random.Random], list[Any]]


def _digits(value: Any) -> float:
    """A number without rounding errors in its last digits. All times are multiples of 1/64: the shift keeps them away from ties."""
    return round(float(value) + 1.2345678912e-8, 6)


def _observe_percentile(percentile: Any, rng: random.Random) -> list[Any]:
    some = [_digits(percentile(make_values(rng), rng.choice((1, 25, 50, 75, 90, 95, 99, 100)))) for _ in range(3 * _ROUNDS)]
    hundred = rng.sample(range(1, 101), 100)
    return some + [_digits(percentile(hundred, percent)) for percent in range(1, 101)]


def _observe_latencies(latencies: Any, rng: random.Random) -> list[Any]:
    observations = []
    for _ in range(_ROUNDS):
        ttft, itls, latency = latencies(make_times(rng))
        observations.append([_digits(ttft), [_digits(gap) for gap in itls], _digits(latency)])
    return observations


def _observe_summarize(summarize: Any, rng: random.Random) -> list[Any]:
    observations = []
    for _ in range(_ROUNDS):
        summary = summarize(*make_records(rng))
        spreads = [
            [_digits(getattr(spread, part)) for part in ("mean", "p50", "p99")]
            for spread in (summary.ttft, summary.itl, summary.latency)
        ]
        observations.append([_digits(summary.requests_per_second), _digits(summary.tokens_per_second), *spreads])
    return observations


def _observe_goodput(goodput: Any, rng: random.Random) -> list[Any]:
    return [_digits(goodput(*make_goals(rng))) for _ in range(2 * _ROUNDS)]


def _observe_utilisation(utilisation: Any, rng: random.Random) -> list[Any]:
    return [list(map(_digits, utilisation(*make_steps(rng)))) for _ in range(2 * _ROUNDS)]


def _observe_in_system(average_in_system: Any, rng: random.Random) -> list[Any]:
    observations = []
    for _ in range(2 * _ROUNDS):
        records = [make_times(rng) for _ in range(rng.randint(1, 20))]
        observations.append(_digits(average_in_system(records, *make_window(rng, records))))
    return observations


def _observe_poisson(poisson_times: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(3):
        rate, count = rng.choice((0.3, 2.0, 11.0, 60.0)), rng.randint(3000, 6000)
        times = [float(time) for time in poisson_times(rate, count, random.Random(rng.random()))]
        observations.append([rate, shape_of(times), abs(times[-1] * rate / count - 1) < 0.1])
    return observations


def _observe_drive(drive: Any, rng: random.Random) -> list[Any]:
    return [observe_drive(drive, make_schedule(rng)) for _ in range(_ROUNDS)]


def _observe_batches(cls: Any, rng: random.Random) -> list[Any]:
    return [describe_steps(run_static(cls, str(rng.random()), {"num_gpu_blocks": 1000})) for _ in range(2)]


def _observe_static(cls: Any, rng: random.Random) -> list[Any]:
    return [describe_steps(run_static(cls, str(rng.random()), rng.choice(RUNS))) for _ in range(2)]


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-percentile": ("percentile", _observe_percentile),
    "check-latencies": ("latencies", _observe_latencies),
    "check-summarize": ("summarize", _observe_summarize),
    "check-goodput": ("goodput", _observe_goodput),
    "check-utilisation": ("utilisation", _observe_utilisation),
    "check-in-system": ("average_in_system", _observe_in_system),
    "check-poisson": ("poisson_times", _observe_poisson),
    "check-drive": ("drive", _observe_drive),
    "check-static": ("MyStaticBatcher", _observe_batches),
    "check-decisions": ("MyStaticBatcher", _observe_static),
    "check-text": ("MyStaticBatcher", _observe_batches),
    "check-choose": ("choose_max_num_seqs", observe_choose),
}
"""For each check, what it tests, and how to observe it."""
