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
from minivllm.engine.core_messages import EngineCoreOutput, RequestsFailed, StoppedSequence
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
        self.deaths: dict[str, int] = {}
        """By suspect: the deaths of replicas that had it since its latest token."""
        self._kills: deque[tuple[float, frozenset[str]]] = deque(maxlen=32)
        """Replicas that were killed by SIGKILL, by a request or from outside: when, and the requests that they had."""

    def note_death(self, request_ids: Collection[str], *, was_killed: bool, now: float) -> list[str]:
        """A replica has died.

        Args:
            request_ids: The requests that it had.
            was_killed: By SIGKILL, so perhaps from outside.
            now: The time, in seconds.

        Returns:
            The requests to be given up. The others are suspects.
        """
        if was_killed:
            self._kills.append((now, frozenset(request_ids)))
        guilty = []
        for request_id in request_ids:
            self.deaths[request_id] = self.deaths.get(request_id, 0) + 1
            if self.deaths[request_id] >= MAX_DEATHS + was_killed * self._count_kills_without(request_id, now):
                guilty.append(request_id)
                del self.deaths[request_id]
                for kill in [kill for kill in self._kills if request_id in kill[1]]:  # these are explained
                    self._kills.remove(kill)
        return guilty

    def clear(self, request_id: str) -> None:
        """A request has got a token, or has ended: it is no longer a suspect."""
        self.deaths.pop(request_id, None)

    def _count_kills_without(self, request_id: str, now: float) -> int:
        """How many replicas were killed lately that did not have a request."""
        since = now - MEMORY_SECONDS
        return min(MAX_KILLS, sum(moment > since and request_id not in requests for moment, requests in self._kills))


class Failover:
    """Sends requests to replicas, and again when their replica is lost.

    Args:
        table: Has every request in flight.
        send: Sends a request to a replica; returns False if that is out of reach.
        timeout: Seconds that requests wait for a replica, until they fail.
    """

    def __init__(self, table: RequestTable, send: Callable[[int, EngineCoreRequest], bool], timeout: float) -> None:
        self._table, self._send = table, send
        self.timeout = timeout
        self.blame = Blame()
        self.has_timed_out = False
        """Whether requests were given up because no replica was open, and none has come since."""

    def submit(self, request: EngineCoreRequest) -> int:
        """Send a new request to a replica; if none takes it, it waits. Returns the replica's rank; 0 if it waits."""
        in_flight = self._table.add(request)
        self._try_to_place(in_flight)
        return in_flight.replica or 0

    def remove(self, request_id: str) -> int | None:
        """A request was aborted. Returns the replica that has it, if any does."""
        self.blame.clear(request_id)
        return self._table.remove(request_id)

    def stop(self, stopped: StoppedSequence) -> tuple[int, StoppedSequence] | None:
        """A stop string was found in a sequence. Returns the replica that has it, and what to tell it."""
        told = self._table.stop(stopped)
        if stopped.request_id not in self._table.requests:
            self.blame.clear(stopped.request_id)
        return told

    def take_output(self, rank: int, output: EngineCoreOutput) -> bool:
        """A replica has sent an output. Returns whether its request is still in flight."""
        if not self._table.take_output(rank, output):
            return False
        if output.sequences or output.finished:
            self.blame.clear(output.request_id)
        return True

    def lose(
        self, rank: int, *, has_died: bool, was_killed: bool = False, name: str = "", cause: str = ""
    ) -> RequestsFailed | None:
        """A replica is lost. The requests that it had wait for another.

        Args:
            rank: Which one.
            has_died: Whether one of its requests may have killed it. If not, it has left, or is out of reach.
            was_killed: Whether it was killed by SIGKILL, so perhaps from outside.
            name, cause: What it is called, and how it ended, in words.

        Returns:
            The requests to be given up.
        """
        lost = {in_flight.request_id: in_flight for in_flight in self._table.lose(rank)}
        if not has_died or not (guilty := self.blame.note_death(lost, was_killed=was_killed, now=time.monotonic())):
            return None
        return self._give_up([lost[request_id] for request_id in guilty], give_up_error(name, cause), rank)

    def retry_pending(self) -> list[InFlightRequest]:
        """Send the requests that wait, as far as replicas take them. Returns those that go on after a loss."""
        if not (self._table.open and (pending := self._table.pending)):
            return []
        resumed, busy = [], self._replicas_with_suspects()
        free = set(self._table.open) - busy
        for in_flight in pending:
            is_suspect = in_flight.request_id in self.blame.deaths
            if is_suspect and not free:
                continue
            was_sent = in_flight.was_sent
            if (rank := self._try_to_place(in_flight, busy if is_suspect else ())) is None:
                continue
            if is_suspect:
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
            if have_turns and in_flight.request_id in self.blame.deaths:
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
        suspects = (self._table.requests.get(request_id) for request_id in self.blame.deaths)
        return {suspect.replica for suspect in suspects if suspect is not None and suspect.replica is not None}

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
                self.remove(in_flight.request_id)
                raise
            if is_sent:
                in_flight.was_sent, in_flight.waiting_since = True, None
                return rank
            self._table.take_back(in_flight)
            self._table.close(rank)

    def _give_up(self, requests: list[InFlightRequest], error: EngineDeadError, rank: int | None = None) -> RequestsFailed:
        for in_flight in requests:
            self.remove(in_flight.request_id)
        return RequestsFailed([(in_flight.request_id, in_flight.request.number) for in_flight in requests], error, rank)


def give_up_error(name: str, cause: str) -> RequestGivenUpError:
    """What the sender of a request that kills replicas is told."""
    return RequestGivenUpError(
        f"The request was given up: at least {MAX_DEATHS} processes of the model in a row died while they computed it. The last was "
        f"{name}: {cause.rstrip('.')}."
    )
