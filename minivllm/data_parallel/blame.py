"""Which request kills replicas, and which were only there: decided from deaths and trials, without sockets, processes or a clock."""

from __future__ import annotations

from collections import deque

from minivllm.data_parallel.request_table import InFlightRequest

MAX_DEATHS_IN_COMPANY = 2
"""Replicas that may die under a request, with others there, before it goes on alone."""
NUM_TRIALS = 3
"""Deaths by SIGKILL of replicas that had nothing but a request which give it up: two may have come from outside."""
MEMORY_SECONDS, MAX_KILLS = 60.0, 2
"""How long a kill that came from outside counts in favour of requests, and how many count."""


class Blame:
    """Finds the requests that kill replicas.

    A request that was at a replica that died may be what killed it: it is a suspect, until it has got another token. Suspects go on one at a
    time at each replica, and alone after `MAX_DEATHS_IN_COMPANY` (see `Failover`). Only who was alone is ever given up: at once if the replica
    crashed, and after `NUM_TRIALS` if it was killed by SIGKILL, which may come from outside. One more for each kill of late that did.

    Args:
        client_count: API servers. With several, a request is alone among those of its own API server only, so a crash proves no more
            than a SIGKILL.
    """

    def __init__(self, client_count: int = 1) -> None:
        self._client_count = client_count
        self._kills: deque[tuple[float, list[InFlightRequest]]] = deque(maxlen=32)
        """Replicas without a suspect that were killed by SIGKILL: when, and the requests that they had. It came from outside if none of
        these is a suspect any more."""

    def note_death(self, requests: list[InFlightRequest], rank: int, *, was_killed: bool, now: float) -> list[InFlightRequest]:
        """A replica has died, perhaps killed by SIGKILL. Returns those of its requests to be given up; the others are suspects."""
        if was_killed and not any(in_flight.is_suspect for in_flight in requests):
            self._kills.append((now, requests))
        guilty = []
        for in_flight in requests:
            in_flight.num_deaths += 1
            in_flight.num_trials += in_flight.is_alone
            in_flight.died_at.add(rank)
            is_proved = not was_killed and self._client_count == 1
            if in_flight.is_alone and (is_proved or in_flight.num_trials >= NUM_TRIALS + self._count_kills_from_outside(now)):
                guilty.append(in_flight)
            in_flight.is_alone = False
        return guilty

    def _count_kills_from_outside(self, now: float) -> int:
        count = sum(
            now - moment < MEMORY_SECONDS and not any(in_flight.is_suspect for in_flight in requests)
            for moment, requests in self._kills
        )
        return min(MAX_KILLS, count)
