"""What becomes of requests whose replica is lost: they go on at another one, where they were.

    waiting ──► assigned ──token──► running ──► finished, aborted
       ▲           │                   │
       └───────────┴──── replica lost ─┘──► given up, after two deaths without a token in between

A token depends on the request, its seed and its position alone, so another replica computes the same ones from the prompt and the output
so far. A request that was at a replica that died may be what killed it. Until it has got another token it is a suspect: suspects go on
one at a time at each replica, so that a death is blamed on one, and not on those that happened to be there. If replicas without the
request were killed as well, something else may be killing them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable

from minivllm.engine.core_client import EngineCoreClient
from minivllm.engine.core_messages import CoreLost
from minivllm.engine.output_processor import OutputProcessor, RequestState
from minivllm.errors import EngineDeadError, RequestGivenUpError

MAX_DEATHS = 2
"""Replicas that may die in a row while they compute a request without giving it a token. One more for each that was killed elsewhere lately."""
MEMORY_SECONDS, MAX_KILLS = 60.0, 4
"""How long a kill elsewhere speaks for a request, and how many do."""


class Failover:
    """Sends requests to replicas, and again when their replica is lost.

    Used from one thread.

    Args:
        output_processor: Has the state of every unfinished request.
        client: Sends requests to replicas.
    """

    def __init__(self, output_processor: OutputProcessor, client: EngineCoreClient) -> None:
        self._output_processor, self._client = output_processor, client
        self._waiting: dict[str, RequestState] = {}
        """Requests that are at no replica, those that came first at the beginning."""
        self._deaths: dict[str, int] = {}
        """Of suspects: the deaths of replicas that had them since their latest token."""
        self._tried: dict[str, int] = {}
        """Of suspects that are at a replica: its rank."""
        self._kills: deque[tuple[float, frozenset[str]]] = deque(maxlen=32)
        """Replicas that were killed by SIGKILL, by a request or from outside: when, and the requests that they had."""

    @property
    def waiting(self) -> list[RequestState]:
        """Requests that are at no replica."""
        return list(self._waiting.values())

    @property
    def sent(self) -> list[tuple[str, int]]:
        """Requests that are at a replica, each with its number."""
        states = self._output_processor.states
        return [(request_id, state.request.number) for request_id, state in states.items() if request_id not in self._waiting]

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait, and not only for their turn."""
        return bool(self._waiting) and not self._tried

    def submit(self, state: RequestState) -> bool:
        """Send a new request to a replica. If none takes requests, it waits. Returns whether it was sent."""
        return self._send(state, ()) or self._wait(state)

    def lose(self, requests: Collection[tuple[str, int]], *, has_died: bool, was_killed: bool = False) -> list[RequestState]:
        """A replica is lost with these requests: they wait to go on. Call `resume` then.

        Args:
            requests: Those that were there, each with its number.
            has_died: It may have been one of them that killed it. If not, it left, or is out of reach.
            was_killed: By SIGKILL, so that it may have been somebody else.

        Returns:
            The requests to be given up.
        """
        given_up = []
        if was_killed:
            self._kills.append((time.monotonic(), frozenset(request_id for request_id, _ in requests)))
        for request_id, number in requests:
            state = self._output_processor.states.get(request_id)
            if state is None or state.request.number != number:
                continue  # it has finished, and the name may be another's now
            self._tried.pop(request_id, None)
            if has_died:
                self._deaths[request_id] = self._deaths.get(request_id, 0) + 1
            if has_died and self._deaths[request_id] >= MAX_DEATHS + was_killed * self._count_kills_without(request_id):
                self.forget(request_id)
                given_up.append(state)
                for kill in [kill for kill in self._kills if request_id in kill[1]]:  # these are explained
                    self._kills.remove(kill)
            else:
                self._wait(state)
        return given_up

    def resume(self) -> list[RequestState]:
        """Send the requests that wait, as far as replicas take them. Returns those that go on now."""
        sent: list[RequestState] = []
        is_full = False
        if not self._client.takes_requests:
            return sent
        for request_id, state in list(self._waiting.items()):
            is_suspect, is_new = request_id in self._deaths, not state.was_sent
            if is_suspect and is_full:
                continue
            avoid = set(self._tried.values()) if is_suspect else ()
            if self._send(state, avoid):
                if not is_new:
                    sent.append(state)
                if is_suspect:
                    self._tried[request_id] = state.engine_index
            elif is_suspect:
                is_full = True  # each replica that takes requests has a suspect already
        return sent

    def note_tokens(self, request_ids: Iterable[str]) -> bool:
        """Requests have got tokens, or have finished. Returns whether others may go on now: then call `resume`."""
        if not self._deaths:
            return False
        return sum(self.forget(request_id) for request_id in request_ids) > 0

    def forget(self, request_id: str) -> bool:
        """A request is a suspect no longer, or is gone. Returns whether others may go on now: then call `resume`."""
        self._waiting.pop(request_id, None)
        self._deaths.pop(request_id, None)
        return self._tried.pop(request_id, None) is not None

    def _count_kills_without(self, request_id: str) -> int:
        """How many replicas were killed lately that did not have a request."""
        since = time.monotonic() - MEMORY_SECONDS
        return min(MAX_KILLS, sum(moment > since and request_id not in requests for moment, requests in self._kills))

    def _wait(self, state: RequestState) -> bool:
        self._waiting[state.request.request_id] = state
        return False

    def _send(self, state: RequestState, avoid: Collection[int]) -> bool:
        request = self._output_processor.renew(state) if state.was_sent else state.request
        try:
            state.engine_index = self._client.add_request(request, avoid)
        except EngineDeadError:
            return False
        state.was_sent = True
        self._waiting.pop(request.request_id, None)
        return True


def give_up_error(lost: CoreLost) -> RequestGivenUpError:
    """What the sender of a request that is given up is told."""
    return RequestGivenUpError(
        f"The request was given up: at least {MAX_DEATHS} replicas of the model in a row died while they computed it, the last one, "
        f"replica {lost.engine_index}, in this way: {lost.cause.rstrip('.')}."
    )
