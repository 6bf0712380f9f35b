"""The replicas as a frontend sees them: who is there, which request is where, and what to do when either changes. No sockets, no threads.

messages, connections, ends of processes ─► ReplicaLiveness ─► decisions ─► Failover ─► messages to replicas, and to the frontend
                                              (who is there)                (which request goes where)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from minivllm.data_parallel.failover import Failover
from minivllm.data_parallel.launcher import FrontendPlace
from minivllm.data_parallel.liveness import Decision, Join, Lose, PeerState, ReplicaLiveness, Withdraw
from minivllm.data_parallel.messages import ReplicaDied, replica_name
from minivllm.data_parallel.request_table import RequestTable
from minivllm.data_parallel.routing import make_router
from minivllm.engine.core_client import ReplicaStatus
from minivllm.engine.core_messages import (
    AbortClientRequests,
    AbortRequests,
    AddRequest,
    ClientDrained,
    CoreFailed,
    CoreLost,
    DeathsExplained,
    Drain,
    DropClient,
    EngineCoreOutputs,
    FromCore,
    KillReplica,
    ReplicaChanged,
    RequestsAborted,
    RequestsResumed,
    SetTracing,
    StoppedSequence,
    StopSequences,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import EngineDeadError
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

Send = Callable[[int, int, ToCore], bool]
"""Sends a message to the process with a rank and an incarnation. False if that is out of reach."""


class ReplicaGroup:
    """Used by one thread at a time. What a method returns is for the frontend. The first frontend logs what all of them see.

    Attributes:
        num_gpu_blocks: Blocks of the smallest KV cache among the open replicas, as of when one joined last.
    """

    def __init__(self, config: EngineConfig, place: FrontendPlace, send: Send, *, is_first: bool) -> None:
        parallel = config.parallel_config
        self._place, self._send_to, self._is_first = place, send, is_first
        self._timeout = parallel.replica_timeout
        self._is_on_one_machine = parallel.is_on_one_machine
        max_num_seqs = config.scheduler_config.max_num_seqs
        router = make_router(parallel.data_parallel_routing, place.client_count, place.client_index, max_num_seqs)
        self.table = RequestTable(router, config.cache_config.block_size)
        self.failover = Failover(self.table, self._send_request, self._clear, parallel.failover_timeout, place.client_count)
        self.liveness = ReplicaLiveness(
            parallel.data_parallel_size, self._timeout, restarts=place.restarts, expected=parallel.local_ranks
        )
        self.num_gpu_blocks = 0
        self._awaited = set(parallel.local_ranks)
        """Replicas of this machine that are being started for the first time."""
        self._is_tracing = False
        self._dropped: set[int] = set()
        """API servers that have died."""
        self._outage: EngineDeadError | None = None
        """Why there is no replica, and whether one will come; None while there is one."""
        self._latest_loss = "none has been started"
        self._failures: dict[int, tuple[int, str]] = {}
        """By rank: the latest process that said why it failed, and what it said."""
        self._has_ended = False

    def name(self, rank: int) -> str:
        """A replica's name for people."""
        return replica_name(rank, len(self.liveness.peers))

    def statuses(self) -> list[ReplicaStatus]:
        """What is known of each replica, by rank; at the end those that are too many and have not left yet."""
        return [
            ReplicaStatus(rank, self.liveness.state_of(rank), peer.ready.process_id, peer.ready.num_gpu_blocks, peer.num_deaths)
            for rank, peer in enumerate(self.liveness.peers)
            if rank < self.liveness.size or self.liveness.state_of(rank) != "gone"
        ]

    def resize(self, size: int) -> list[ToFrontend]:
        """There are to be so many replicas."""
        self._log(logging.WARNING, "There are to be %d replicas instead of %d.", size, self.liveness.size)
        return [ReplicaChanged(rank, is_ready=False) for rank in self.liveness.resize(size)]

    # -- to the replicas -----------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> int:
        """Send a request to the replica that the router chooses. Returns its rank; 0 if the request waits for one."""
        return self.failover.submit(replace(request, client_index=self._place.client_index))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests where they are."""
        for request_id in request_ids:
            if (rank := self.table.remove(request_id)) is not None:
                self._send(rank, AbortRequests([request_id]))

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        """Stop sequences where they are."""
        for sequence in sequences:
            if (told := self.table.stop(sequence)) is not None:
                self._send(told[0], StopSequences([told[1]]))

    def restart(self, rank: int) -> bool:
        """Let a replica finish what it has, and start another in its place. False if it does not take requests."""
        return rank in self.table.open and self._send(rank, Drain(returns=True))

    def kill(self, rank: int) -> bool:
        """Kill a replica's process. False if it is gone."""
        return self.liveness.peers[rank].is_member and self._send(rank, KillReplica())

    def drop_client(self, client_index: int) -> None:
        """Another API server has died: replicas drop its requests, including later ones."""
        self._dropped.add(client_index)
        self.send(DropClient(client_index))

    def send(self, message: ToCore) -> None:
        """Send a message to all replicas."""
        if isinstance(message, SetTracing):
            self._is_tracing = message.on
            message = SetTracing(message.on, self._place.client_index)
        for rank, peer in enumerate(self.liveness.peers):
            if peer.is_member:
                self._send(rank, message)

    def _send_request(self, rank: int, request: EngineCoreRequest) -> bool:
        return self._send(rank, AddRequest(request, self.table.requests[request.request_id].is_suspect))

    def _clear(self, rank: int, number: int) -> bool:
        return self._send(rank, AbortClientRequests(self._place.client_index, number))

    def _send(self, rank: int, message: ToCore) -> bool:
        return self._send_to(rank, self.liveness.peers[rank].incarnation, message)

    # -- events --------------------------------------------------------------------------------------------------

    def connect(self, hellos: list[tuple[int, int]]) -> list[ToFrontend]:
        """Processes, each given by rank and incarnation, have made a connection that messages can be sent on."""
        decisions: list[Decision] = []
        for rank, incarnation in hellos:
            if self.liveness.make_room(rank):
                decisions += self.liveness.connect(rank, incarnation)
        return self._carry_out(decisions)

    def hear(self, incarnation: int, number: int, message: FromCore) -> list[ToFrontend]:
        """A replica has sent a message: its process, and how many messages that had sent before."""
        rank = message.engine_index
        if not self.liveness.make_room(rank):
            return []
        if isinstance(message, CoreFailed) and self._failures.get(rank, (0, ""))[0] != incarnation:
            self._failures[rank] = incarnation, message.cause
            if not self.liveness.peers[rank].is_member:  # else its loss is logged
                self._log(logging.ERROR, "%s could not start: %s.", self.name(rank), message.cause.rstrip("."))
        told = self._carry_out(self.liveness.hear(rank, incarnation, number, message, time.monotonic()))
        if isinstance(message, EngineCoreOutputs) and self.liveness.is_believed(rank, incarnation):
            message.outputs = [output for output in message.outputs if self.table.take_output(rank, output)]
            told.append(message)
        elif isinstance(message, RequestsAborted) and self.liveness.is_believed(rank, incarnation):
            is_mine = message.client_index == self._place.client_index
            if is_mine and self.failover.note_cleared(rank, message.number) is not None:
                told.append(RequestsResumed(rank, 1))
        return told

    def note_death(self, died: ReplicaDied) -> list[ToFrontend]:
        """A process has ended, says who started it."""
        rank = died.engine_index
        if not self.liveness.make_room(rank):
            return []
        self.liveness.peers[rank].num_deaths = died.num_deaths
        incarnation, cause = self._failures.get(rank, (0, ""))
        if died.outlook == "given up":
            self._note_loss(rank, cause if incarnation == died.incarnation else died.end)
        how = {"has_died": died.has_died, "was_killed": died.was_killed}
        return self._carry_out(self.liveness.note_death(rank, died.incarnation, died.end, **how, outlook=died.outlook))

    def find_silent(self) -> list[ToFrontend]:
        """Do without replicas that have been silent for too long."""
        return self._carry_out(self.liveness.find_silent(time.monotonic()))

    def retry_pending(self) -> list[ToFrontend]:
        """Send requests that wait for a replica, or give them up if they have waited too long."""
        told: list[ToFrontend] = []
        if resumed := [in_flight.replica or 0 for in_flight in self.failover.retry_pending()]:
            told += [RequestsResumed(rank, resumed.count(rank)) for rank in sorted(set(resumed))]
        reason = self._outage or EngineDeadError(
            f"No replica of the model could take the request within {self.failover.timeout:g} s."
        )
        if failed := self.failover.give_up_after_timeout(time.monotonic(), reason):
            told.append(failed)
        return told + self._find_outage()

    def _find_outage(self) -> list[ToFrontend]:
        """Note whether there is a replica. Returns the last message to the frontend if there is none, and none will come."""
        if any(peer.is_member for peer in self.liveness.peers):
            self._outage = None
        elif self.may_return or self._has_ended:
            again = " Another engine is being started: try again in some seconds."
            self._outage = self._outage or EngineDeadError(f"{CoreLost(self._latest_loss).error}{again}")
        else:
            self._has_ended, lost = True, CoreLost(self._latest_loss)
            self._outage = lost.error
            return [lost]
        return []

    @property
    def may_return(self) -> bool:
        """Whether there may be a replica again when none is there."""
        return not self._is_on_one_machine or any(peer.may_return for peer in self.liveness.peers)

    # -- decisions -----------------------------------------------------------------------------------------------

    def _carry_out(self, decisions: list[Decision]) -> list[ToFrontend]:
        told: list[ToFrontend] = []
        for decision in decisions:
            if isinstance(decision, Join):
                told += self._join(decision.rank, decision.num_gpu_blocks)
            elif isinstance(decision, Withdraw):
                self._withdraw(decision.rank, decision.previous)
            else:
                told += self._lose(decision)
        return told

    def _join(self, rank: int, num_gpu_blocks: int) -> list[ToFrontend]:
        if not self._send(rank, AbortClientRequests(self._place.client_index)):
            return []
        self.table.take_in(rank, num_gpu_blocks)
        self.num_gpu_blocks = self.table.num_gpu_blocks
        if self._is_tracing:
            self._send(rank, SetTracing(True, self._place.client_index))
        if rank in self.failover.excused and self._send(rank, DeathsExplained()):
            self.failover.excused.discard(rank)
        for client_index in self._dropped:
            self._send(rank, DropClient(client_index))
        if rank not in self._awaited:
            self._log(logging.WARNING, "%s takes requests.", self.name(rank))
        self._awaited.discard(rank)
        return [ReplicaChanged(rank, is_ready=True, num_gpu_blocks=num_gpu_blocks)]

    def _withdraw(self, rank: int, previous: PeerState) -> None:
        self.table.close(rank)
        if previous not in (PeerState.READY, PeerState.DRAINING):
            self._send(rank, AbortClientRequests(self._place.client_index))
        self._send(rank, ClientDrained(self._place.client_index))
        if previous is PeerState.READY:
            count = len(self.table.requests_at(rank))
            self._log(logging.WARNING, "%s is draining: it finishes its requests (%d) and gets no more.", self.name(rank), count)

    def _lose(self, decision: Lose) -> list[ToFrontend]:
        rank, cause, has_died = decision.rank, decision.cause, decision.has_died
        name = self.name(rank)
        if has_died:
            self._log(logging.ERROR, "%s has ended: %s.", name, cause.rstrip("."))
        elif decision.has_left:
            follows = ", and another is started in its place" if self.liveness.peers[rank].outlook == "starting" else ""
            self._log(logging.WARNING, "%s has left%s.", name, follows)
        else:
            self._log(logging.ERROR, "%s is lost: %s.", name, cause)
        self._note_loss(rank, cause)
        failed = self.failover.lose(rank, has_died=has_died, was_killed=decision.was_killed, name=name.lower(), cause=cause)
        for other in sorted(self.failover.excused.intersection(self.table.open)):
            self.failover.excused.discard(other)
            self._send(other, DeathsExplained())
        lost = ReplicaChanged(rank, is_ready=False, has_died=has_died)
        return [lost] if failed is None else [lost, failed]

    def _note_loss(self, rank: int, cause: str) -> None:
        self._latest_loss = (
            cause if len(self.liveness.peers) == 1 else f"no replica is left; the last, replica {rank}, was lost: {cause}"
        )

    def _log(self, level: int, text: str, *values: object) -> None:
        if self._is_first:
            logger.log(level, text, *values)

    # -- health --------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is there, or none is responding."""
        if (outage := self._outage) is not None:
            raise EngineDeadError(str(outage))
        now = time.monotonic()
        silent = [now - self.liveness.peers[rank].last_heard for rank in self.table.open]
        if silent and min(silent) > self._timeout:
            raise EngineDeadError(f"The replicas are not responding: nothing heard from them for {min(silent):.0f} seconds.")

    def check_takes_requests(self) -> None:
        """As `check_health`; but while a replica is being started, requests wait for it, up to a limit."""
        if self._outage is None or self._has_ended or self.failover.has_timed_out:
            self.check_health()
