"""The check of lesson 15 for the tail of a fleet."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from minivllm.course.lessons.fleets import FleetGoals
from minivllm.course.lessons.lesson_15.load import nearest_rank
from minivllm.course.observations import expect, expect_number, require, rounds

Logs = list[list[tuple[float | None, list[float]]]]
"""For each replica, its requests: time to first token (None: none came), and the inter-token latencies."""


def random_logs(rng: random.Random, num_replicas: int, failed: int = 0) -> Logs:
    """Replicas with different numbers of requests, of which one is slower than the others."""
    logs: Logs = []
    for replica in range(num_replicas):
        slow = 5.0 if replica == 0 else 1.0
        count = rng.randint(5, 20) if replica == 0 else rng.randint(30, 90)
        logs.append(
            [
                (
                    round(slow * rng.expovariate(4), 4),
                    [round(rng.uniform(0.01, 0.05) * slow, 4) for _ in range(rng.randint(1, 9))],
                )
                for _ in range(count)
            ]
        )
    for _ in range(failed):
        log = rng.choice(logs[1:])
        log[rng.randrange(len(log))] = None, []
    return logs


def check_tail(tail: Any, meets: Any) -> None:
    """The p99 of all requests; who got nothing waited longest."""
    for rng in rounds("tail", 20):
        groups = [[request[0] for request in log] for log in random_logs(rng, rng.randint(2, 5))] + rng.choice(([], [[]]))
        percent = rng.choice((50, 90, 95, 99))
        everyone = [value for group in groups for value in group]
        each = [nearest_rank(group, percent) for group in groups if group]
        said = f"{len(groups)} replicas with {', '.join(str(len(group)) for group in groups)} requests."
        right = nearest_rank(everyone, percent)
        mistakes = {
            f"the mean of the replicas' p{percent}: no user's wait": sum(each) / len(each),
            f"the p{percent} of the worst replica alone": max(each),
            f"the median of the replicas' p{percent}": sorted(each)[len(each) // 2],
            f"the p{percent} of the replicas' means": nearest_rank(
                [sum(group) / len(group) for group in groups if group], percent
            ),
            "the longest wait": max(everyone),
        }
        look = "`tail`: put the waits of all replicas into one list first; then the nearest rank, as in `load_at`"
        expect_number(
            said,
            f"p{percent} (s)",
            right,
            tail(groups, percent),
            look,
            {words: wrong for words, wrong in mistakes.items() if wrong != right},
        )
    for rng in rounds("meets", 40):
        _check_meets(meets, rng)


def _check_meets(meets: Any, rng: random.Random) -> None:
    failed = rng.choice((0, 0, 1, 12))
    logs = random_logs(rng, rng.randint(2, 4), failed)
    requests = [request for log in logs for request in log]
    ttft = nearest_rank([math.inf if first is None else first for first, _ in requests], 99)
    itl = nearest_rank([gap for _, gaps in requests for gap in gaps], 99)
    goals = FleetGoals(
        ttft=(5.0 if math.isinf(ttft) else ttft) * rng.choice((0.9, 1.0, 1.1)),
        itl=itl * rng.choice((0.8, 1.0, 1.1)),
        availability=0.999,
    )
    said = (
        f"The p99 of all times to first token is {ttft:.4g} s, with {failed} of {len(requests)} requests without an answer; the p99 of all "
        f"inter-token latencies is {itl:.4g} s. Goals: {goals.ttft:.4g} s and {goals.itl:.4g} s."
    )
    right = ttft <= goals.ttft and itl <= goals.itl
    got = meets(goals, logs)
    got = bool(got) if isinstance(got, np.bool_) else got
    look = "`meets`: both goals must be kept, by the p99 of the whole fleet; a wait that is as long as the goal is kept"
    if failed > 1 and got and not right:
        look = "requests that never got a token: leaving them out makes a broken fleet look fast, so they count as `math.inf`"
    elif itl > goals.itl and got:
        look = "the inter-token latencies: the p99 of all of them, not of each request's mean"
    require(
        True,
        isinstance(got, bool),
        f"{said}\nExpected from meets: True or False\nGot from meets: {got!r}\nLook at what `meets` returns.",
    )
    expect(said, "goals met", right, got, look)
