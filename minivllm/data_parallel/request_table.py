"""Every request in flight: what its frontend sent, its tokens so far, and where it is. No sockets here.

This is all that another replica needs to go on with a request when the one that has it is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

from minivllm.data_parallel.routing import Router
from minivllm.engine.core_messages import EngineCoreOutput, ReplicaLoad, StoppedSequence
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest, Resumption


@dataclass
class InFlightRequest:
    """A request that has not finished.

    Attributes:
        unfinished: The indices of its unfinished sequences.
        token_ids: The output so far of the unfinished sequences, by index; empty before the first token.
        replica: The rank of the replica that has it; None while it waits for one.
        number: Identifies the latest sending. Outputs of an earlier one may still arrive, and are ignored.
        was_sent: Whether a replica has it, or had it before.
        num_deaths: Replicas that have died while they had it, since its latest token.
        num_trials: Those of them that had nothing else.
        died_at: The ranks of these replicas.
        is_alone: Whether it is at a replica that has nothing else and gets nothing else, until it has got a token.
        waiting_since: Since when it has waited for a replica, in seconds; None while it is at one, or waits only for its turn.
    """

    request: EngineCoreRequest
    unfinished: set[int] = field(init=False)
    metrics: RequestMetrics = field(init=False)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    replica: int | None = None
    number: int = -1
    was_sent: bool = False
    num_deaths: int = 0
    num_trials: int = 0
    died_at: set[int] = field(default_factory=set)
    is_alone: bool = False
    waiting_since: float | None = None

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.request.sampling_params.n))
        self.metrics = RequestMetrics(self.request.arrival_time)

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.request.request_id

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what killed its replica."""
        return self.num_deaths > 0

    def acquit(self) -> None:
        """It is no suspect any more."""
        self.num_deaths, self.num_trials, self.is_alone = 0, 0, False
        self.died_at.clear()

    def to_send(self, number: int) -> EngineCoreRequest:
        """The request for a replica; if another replica has begun it, with its output so far."""
        self.number = number
        if not self.token_ids:
            return replace(self.request, number=number)
        output = {index: list(self.token_ids[index]) for index in sorted(self.unfinished)}
        params = replace(self.request.sampling_params, prompt_logprobs=None)  # all of them came before the first token
        return replace(self.request, number=number, sampling_params=params, resumption=Resumption(output, self.metrics))

    def add(self, output: EngineCoreOutput) -> None:
        """Add what a step computed."""
        self.metrics = output.metrics
        if output.sequences or output.finished:
            self.acquit()
        for new in output.sequences:
            if new.index in self.unfinished:
                self.token_ids.setdefault(new.index, []).extend(new.token_ids)
                if new.finish_reason is not None:
                    self.finish_sequence(new.index)
        if output.finished:
            self.unfinished.clear()

    def finish_sequence(self, index: int) -> None:
        """A sequence gets no more tokens."""
        self.unfinished.discard(index)
        self.token_ids.pop(index, None)


class RequestTable:
    """The requests in flight, and the replicas that take requests. A request is at one replica, or waits for one.

    A replica takes requests while it is open. When it is closed, it keeps the ones it has.

    Attributes:
        num_gpu_blocks: Blocks of the open replica that has fewest; 0 if none is open.
    """

    def __init__(self, router: Router, block_size: int) -> None:
        self._router, self._block_size = router, block_size
        self._num_gpu_blocks: dict[int, int] = {}
        """Of the open replicas, by rank."""
        self.num_gpu_blocks = 0
        self.requests: dict[str, InFlightRequest] = {}
        self._pending: dict[str, InFlightRequest] = {}
        self._numbers = itertools.count()

    # -- replicas ------------------------------------------------------------------------------------------------

    @property
    def open(self) -> list[int]:
        """The ranks of the replicas that take requests."""
        return list(self._num_gpu_blocks)

    def take_in(self, rank: int, num_gpu_blocks: int) -> None:
        """A replica takes requests from now on. It has none."""
        self._num_gpu_blocks[rank] = num_gpu_blocks
        self.num_gpu_blocks = min(self._num_gpu_blocks.values())
        self._router.open(rank, num_gpu_blocks * self._block_size)

    def close(self, rank: int) -> None:
        """A replica gets no more requests."""
        if self._num_gpu_blocks.pop(rank, None) is not None:
            self.num_gpu_blocks = min(self._num_gpu_blocks.values(), default=0)
            self._router.close(rank)

    def lose(self, rank: int) -> list[InFlightRequest]:
        """A replica is lost. Returns the requests that it had, which wait for another."""
        self.close(rank)
        lost = self.requests_at(rank)
        for in_flight in lost:
            in_flight.replica = None
            self._pending[in_flight.request_id] = in_flight
        return lost

    def stop_reports(self) -> None:
        """The coordinator is gone."""
        self._router.stop_reports()

    def update_loads(self, loads: dict[int, ReplicaLoad]) -> None:
        """The coordinator has published."""
        self._router.has_reports = True
        for rank in self._num_gpu_blocks.keys() & loads.keys():
            self._router.update(rank, loads[rank])

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[InFlightRequest]:
        """The requests that wait for a replica, in the order in which they began to."""
        return list(self._pending.values())

    def requests_at(self, rank: int) -> list[InFlightRequest]:
        """The requests that a replica has."""
        return [in_flight for in_flight in self.requests.values() if in_flight.replica == rank]

    def add(self, request: EngineCoreRequest) -> InFlightRequest:
        """A new request. It waits for a replica."""
        in_flight = InFlightRequest(request)
        self.requests[request.request_id] = self._pending[request.request_id] = in_flight
        return in_flight

    def too_small_for(self, request: EngineCoreRequest) -> set[int]:
        """The open replicas whose cache is too small for a request."""
        num_blocks = -(-(request.max_num_tokens - 1) // self._block_size)  # the last token is never fed back
        if num_blocks <= self.num_gpu_blocks:
            return set()
        return {rank for rank, size in self._num_gpu_blocks.items() if size < num_blocks}

    def place(self, in_flight: InFlightRequest, avoid: Collection[int] = ()) -> tuple[int, EngineCoreRequest]:
        """Choose a replica for a request that waits: the one that it asks for if that is open, else the router's choice; but none to `avoid`.
        Returns its rank, and what to send there.

        Raises:
            EngineDeadError: No other replica is open, or none of them has a cache that is large enough.
        """
        request = in_flight.request
        if too_small := self.too_small_for(request):
            avoid = too_small.union(avoid)
        wanted = request.data_parallel_rank
        if wanted in self._num_gpu_blocks and wanted not in avoid:
            rank = self._router.assign(wanted)
        else:
            rank = self._router.route(request.prompt_token_ids, request.cache_salt, avoid)
        in_flight.replica = rank
        del self._pending[request.request_id]
        return rank, in_flight.to_send(next(self._numbers))

    def take_back(self, in_flight: InFlightRequest) -> None:
        """A request could not be sent to its replica: it waits again."""
        assert in_flight.replica is not None
        self._router.finish(in_flight.replica)
        in_flight.replica, in_flight.is_alone = None, False
        self._pending[in_flight.request_id] = in_flight

    def remove(self, request_id: str) -> int | None:
        """A request has ended. Returns the replica that has it, if any does."""
        in_flight = self.requests.pop(request_id, None)
        self._pending.pop(request_id, None)
        if in_flight is None or in_flight.replica is None:
            return None
        self._router.finish(in_flight.replica)
        return in_flight.replica

    def stop(self, stopped: StoppedSequence) -> tuple[int, StoppedSequence] | None:
        """A stop string was found in a sequence. Returns the replica that has it, and what to tell it."""
        in_flight = self.requests.get(stopped.request_id)
        if in_flight is None or in_flight.request.number != stopped.number:
            return None
        in_flight.finish_sequence(stopped.index)
        rank, number = in_flight.replica, in_flight.number
        if not in_flight.unfinished:
            self.remove(stopped.request_id)
        return None if rank is None else (rank, msgspec.structs.replace(stopped, number=number))

    def take_output(self, rank: int, output: EngineCoreOutput) -> bool:
        """A replica has sent an output: note it, and give it the number by which the frontend knows the request. False if the request is not
        there: it may have been aborted, or sent elsewhere, meanwhile."""
        in_flight = self.requests.get(output.request_id)
        if in_flight is None or (in_flight.number, in_flight.replica) != (output.number, rank):
            return False
        in_flight.add(output)
        if not in_flight.unfinished:
            self.remove(output.request_id)
        output.number = in_flight.request.number
        return True
