"""What happens to requests whose replica is lost: another one continues them where they stopped.

    pending ──► at a replica ──token──► at a replica ──► finished, aborted
       ▲             │                       │
       └─────────────┴───── replica lost ────┴──► given up, after two deaths without a token in between;
                                                more if replicas are being killed from outside, too

A token depends on the request, its seed and its position alone, so another replica computes the same ones from the prompt and the output
so far, which the client has seen. The frontend gets outputs, or an error that ends the request, and nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

from minivllm.data_parallel.request_table import InFlightRequest, RequestTable
from minivllm.engine.core_messages import RequestsFailed
from minivllm.errors import EngineDeadError, RequestGivenUpError
from minivllm.request import EngineCoreRequest

MAX_DEATHS = 2
"""Replicas that may die in a row while they compute a request without giving it a token. One more for each that was killed elsewhere lately."""
MEMORY_SECONDS, MAX_KILLS = 60.0, 4
"""How long a kill elsewhere counts in a request's favour, and how many count."""


class Blame:
    """Finds the requests that kill replicas.

    A request that was at a replica that died may be what killed it: it is a suspect, until it has got another token. Suspects go on one at a
    time at each replica (see `Failover`), so that the next death is blamed on one. Replicas may also be killed from outside: each one that was
    killed by SIGKILL without having a suspect is evidence in that suspect's favour.
    """

    def __init__(self) -> None:
        self._kills: deque[tuple[float, frozenset[str]]] = deque(maxlen=32)
        """Replicas that were killed by SIGKILL, by a request or from outside: when, and the requests that they had."""

    def note_death(self, requests: list[InFlightRequest], *, was_killed: bool, now: float) -> list[InFlightRequest]:
        """A replica has died, perhaps killed by SIGKILL, so from outside. Returns those of its requests to be given up; the others are suspects."""
        if was_killed:
            self._kills.append((now, frozenset(in_flight.request_id for in_flight in requests)))
        guilty = []
        for in_flight in requests:
            in_flight.num_deaths += 1
            request_id = in_flight.request_id
            if in_flight.num_deaths >= MAX_DEATHS + was_killed * self._count_kills_without(request_id, now):
                guilty.append(in_flight)
                for kill in [kill for kill in self._kills if request_id in kill[1]]:  # these are explained
                    self._kills.remove(kill)
        return guilty

    def _count_kills_without(self, request_id: str, now: float) -> int:
        """How many replicas were killed lately that did not have a request."""
        since = now - MEMORY_SECONDS
        return min(MAX_KILLS, sum(moment > since and request_id not in requests for moment, requests in self._kills))


class Failover:
    """Sends requests of the table to replicas, and again when their replica is lost. `send` returns False if a replica is out of reach."""

    def __init__(self, table: RequestTable, send: Callable[[int, EngineCoreRequest], bool], timeout: float) -> None:
        self._table, self._send = table, send
        self.timeout = timeout
        """Seconds that a request may wait for a replica."""
        self._blame = Blame()
        self.has_timed_out = False
        """Whether requests were given up because no replica was open, and none has come since."""

    def submit(self, request: EngineCoreRequest) -> int:
        """Send a new request to a replica; if none takes it, it waits. Returns the replica's rank; 0 if it waits."""
        in_flight = self._table.add(request)
        self._try_to_place(in_flight)
        return in_flight.replica or 0

    def lose(
        self, rank: int, *, has_died: bool, was_killed: bool = False, name: str = "", cause: str = ""
    ) -> RequestsFailed | None:
        """A replica is lost. The requests that it had wait for another. Returns those to be given up.

        Args:
            rank: Which one.
            has_died: Whether one of its requests may have killed it. If not, it has left, or is out of reach.
            was_killed: Whether it was killed by SIGKILL, so perhaps from outside.
            name, cause: What it is called, and how it ended, in words.
        """
        lost = self._table.lose(rank)
        if not has_died or not (guilty := self._blame.note_death(lost, was_killed=was_killed, now=time.monotonic())):
            return None
        return self._give_up(guilty, give_up_error(name, cause), rank)

    def retry_pending(self) -> list[InFlightRequest]:
        """Send waiting requests to replicas that take them. Returns the ones that resume after a loss."""
        if not (self._table.open and (pending := self._table.pending)):
            return []
        resumed, busy = [], self._replicas_with_suspects()
        free = set(self._table.open) - busy
        for in_flight in pending:
            if in_flight.is_suspect and not free:
                continue
            was_sent = in_flight.was_sent
            if (rank := self._try_to_place(in_flight, busy if in_flight.is_suspect else ())) is None:
                continue
            if in_flight.is_suspect:
                busy.add(rank)
                free.discard(rank)
            if was_sent:
                resumed.append(in_flight)
        return resumed

    def give_up_after_timeout(self, now: float, error: EngineDeadError) -> RequestsFailed | None:
        """The requests that have waited too long for a replica. A suspect whose turn will come does not wait for one."""
        if self._table.open:
            self.has_timed_out = False
        if not (pending := self._table.pending):
            return None
        late, have_turns = [], bool(self._replicas_with_suspects())
        for in_flight in pending:
            if have_turns and in_flight.is_suspect:
                in_flight.waiting_since = None
            elif in_flight.waiting_since is None:
                in_flight.waiting_since = now
            elif self.has_timed_out or now - in_flight.waiting_since > self.timeout:
                late.append(in_flight)
        if not late:
            return None
        self.has_timed_out = not self._table.open
        return self._give_up(late, error)

    def _replicas_with_suspects(self) -> set[int]:
        requests = self._table.requests.values()
        return {item.replica for item in requests if item.is_suspect and item.replica is not None}

    def _try_to_place(self, in_flight: InFlightRequest, avoid: Collection[int] = ()) -> int | None:
        """Send a request to a replica, and return its rank; None if it must wait. One that cannot be encoded is forgotten."""
        while True:
            try:
                rank, request = self._table.place(in_flight, avoid)
            except EngineDeadError:
                return None
            try:
                is_sent = self._send(rank, request)
            except Exception:
                self._table.remove(in_flight.request_id)
                raise
            if is_sent:
                in_flight.was_sent, in_flight.waiting_since = True, None
                return rank
            self._table.take_back(in_flight)
            self._table.close(rank)

    def _give_up(self, requests: list[InFlightRequest], error: EngineDeadError, rank: int | None = None) -> RequestsFailed:
        for in_flight in requests:
            self._table.remove(in_flight.request_id)
        return RequestsFailed([(in_flight.request_id, in_flight.request.number) for in_flight in requests], error, rank)


def give_up_error(name: str, cause: str) -> RequestGivenUpError:
    """What the sender of a request that kills replicas is told."""
    return RequestGivenUpError(
        f"The request was given up: at least {MAX_DEATHS} processes of the model in a row died while they computed it. The last was "
        f"{name}: {cause.rstrip('.')}."
    )
