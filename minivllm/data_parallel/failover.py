"""What happens to requests whose replica is lost: another one continues them where they stopped.

    pending ──► at a replica ──token──► at a replica ──► finished, aborted
       ▲             │                       │
       └─────────────┴───── replica lost ────┴──► given up, if it is to blame for that (see `Blame`)

A token depends on the request, its seed and its position alone, so another replica computes the same ones from the prompt and the output
so far, which the client has seen. The frontend gets outputs, or an error that ends the request, and nothing else.

A request that goes on alone needs a replica that has nothing else. That replica gets no more requests, and is told to abort the ones that it
has; when it has said that it has, these go on elsewhere, and the request is sent. If that replica dies now, nobody else can be the cause.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection

from minivllm.data_parallel.blame import MAX_DEATHS_IN_COMPANY, Blame
from minivllm.data_parallel.request_table import InFlightRequest, RequestTable
from minivllm.engine.core_messages import RequestsFailed
from minivllm.errors import EngineDeadError, RequestGivenUpError
from minivllm.request import EngineCoreRequest


def _must_be_alone(in_flight: InFlightRequest) -> bool:
    return in_flight.num_deaths >= MAX_DEATHS_IN_COMPANY


class Failover:
    """Sends requests of the table to replicas, and again when their replica is lost.

    Args:
        send: Sends a request to a replica. Returns False if that is out of reach.
        clear: Tells a replica to abort all that it has, and to answer with a number (see `note_cleared`). Returns as `send`.
        timeout: Seconds that a request may wait for a replica.
        client_count: As for `Blame`.

    Attributes:
        excused: Replicas that died because of a request that was given up then: until somebody takes them out, to tell who restarts them.
    """

    def __init__(
        self,
        table: RequestTable,
        send: Callable[[int, EngineCoreRequest], bool],
        clear: Callable[[int, int], bool],
        timeout: float,
        client_count: int = 1,
    ) -> None:
        self._table, self._send, self._clear = table, send, clear
        self.timeout = timeout
        self._blame = Blame(client_count)
        self._trials: dict[int, InFlightRequest] = {}
        """By rank: the request that is alone there, or will be when the replica has been cleared."""
        self._clearing: dict[int, int] = {}
        """Of replicas that have been told to abort what they have: the number that the answer will have."""
        self._numbers = itertools.count(1)
        self.excused: set[int] = set()
        self.has_timed_out = False
        """Whether requests were given up because no replica was open, and none has come since."""

    def submit(self, request: EngineCoreRequest) -> int:
        """Send a new request to a replica; if none takes it, it waits. Returns the replica's rank; 0 if it waits."""
        in_flight = self._table.add(request)
        self._try_to_place(in_flight, self._reserved())
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
        self._end_trial(rank)
        if not has_died:
            for in_flight in lost:
                in_flight.is_alone = False
            return None
        if not (guilty := self._blame.note_death(lost, rank, was_killed=was_killed, now=time.monotonic())):
            return None
        self.excused.update(*(in_flight.died_at for in_flight in guilty))
        return self._give_up(guilty, give_up_error(name, cause), rank)

    def retry_pending(self) -> list[InFlightRequest]:
        """Send waiting requests to replicas that take them. Returns the ones that resume after a loss."""
        if not (self._table.open and (pending := self._table.pending)):
            return []
        resumed = []
        reserved = self._reserved()
        free = set(self._table.open) - reserved
        quiet = free - self._replicas_with_suspects() if any(in_flight.is_suspect for in_flight in pending) else free
        for in_flight in pending:
            if _must_be_alone(in_flight) or not (quiet if in_flight.is_suspect else free):
                continue
            was_sent = in_flight.was_sent
            if (
                rank := self._try_to_place(in_flight, set(self._table.open) - quiet if in_flight.is_suspect else reserved)
            ) is None:
                continue
            if in_flight.is_suspect:
                quiet.discard(rank)
            if was_sent:
                resumed.append(in_flight)
        self._begin_trials(free, quiet)
        return resumed

    # -- requests that go on alone -------------------------------------------------------------------------------

    def note_cleared(self, rank: int, number: int) -> InFlightRequest | None:
        """A replica has aborted what it had: send the request that goes on alone there. Returns it, if it was sent."""
        if self._clearing.get(rank) != number:
            return None
        del self._clearing[rank]
        for other in self._table.requests_at(rank):
            self._table.take_back(other)
        in_flight = self._trials[rank]
        if self._table.requests.get(in_flight.request_id) is not in_flight:  # its client has hung up
            return None
        if self._try_to_place(in_flight, set(self._table.open) - {rank}) is None:
            return None
        in_flight.is_alone = True
        return in_flight

    def _begin_trials(self, free: set[int], quiet: set[int]) -> None:
        """Let suspects that must be alone have replicas for themselves: `quiet` ones, but one of those that are `free` is left to the others.
        Who has died most often comes first, and not where it has died."""
        have_turns = {in_flight.request_id for in_flight in self._trials.values()}
        waiting = [item for item in self._table.pending if _must_be_alone(item) and item.request_id not in have_turns]
        num_left = min(1, len(self._table.open) - 1)
        for in_flight in sorted(waiting, key=lambda item: -item.num_deaths):
            ranks = quiet & set(self._table.open) - self._table.too_small_for(in_flight.request)
            if not ranks or len(free) <= num_left:
                return
            died_at, table = in_flight.died_at, self._table
            rank = min(ranks, key=lambda rank: (rank in died_at, len(table.requests_at(rank)), rank))
            free.discard(rank)
            quiet.discard(rank)
            number = next(self._numbers)
            if self._clear(rank, number):
                self._trials[rank], self._clearing[rank] = in_flight, number
            else:
                self._table.close(rank)

    def _end_trial(self, rank: int) -> None:
        self._trials.pop(rank, None)
        self._clearing.pop(rank, None)

    def _reserved(self) -> set[int]:
        """The replicas that have one request alone, or will have: others keep away."""
        for rank, in_flight in list(self._trials.items()):
            is_there = in_flight.is_alone and self._table.requests.get(in_flight.request_id) is in_flight
            if not is_there and rank not in self._clearing:
                del self._trials[rank]
        return set(self._trials)

    def give_up_after_timeout(self, now: float, error: EngineDeadError) -> RequestsFailed | None:
        """The requests that have waited too long for a replica. One whose turn will come does not wait for one."""
        if self._table.open:
            self.has_timed_out = False
        if not (pending := self._table.pending):
            return None
        reserved = self._reserved()
        late, have_turns = [], bool(reserved or self._replicas_with_suspects())
        for in_flight in pending:
            if have_turns and (in_flight.is_suspect or reserved.issuperset(self._table.open)):
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
        f"The request was given up: at least {MAX_DEATHS_IN_COMPANY + 1} processes of the model in a row died while they computed it, the last "
        f"one while it computed nothing else. That was "
        f"{name}: {cause.rstrip('.')}."
    )
