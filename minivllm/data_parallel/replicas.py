"""The frontend's side of data-parallel replicas: the sockets, and the thread that reads them.

outputs of replicas, loads, ends of processes ─► ReplicaLiveness ─► decisions ─► ReplicaTable, replicas, frontend
                                                    (who is there)                (which request is where)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import msgspec
import zmq

from minivllm.data_parallel import messages
from minivllm.data_parallel.engine_core_proc import identity_of, index_of, read_header
from minivllm.data_parallel.launcher import POLL_MS, FrontendPlace, ReplicaLauncher
from minivllm.data_parallel.liveness import Decision, Join, Lose, PeerState, ReplicaLiveness, Withdraw
from minivllm.data_parallel.messages import FrontendWelcome, HelloFrontend, Loads, Refused, ReplicaDied
from minivllm.data_parallel.replica_table import ReplicaTable
from minivllm.data_parallel.routing import LoadPublisher, make_router
from minivllm.data_parallel.sockets import Sockets
from minivllm.engine.core_client import OnMessage, ReplicaStatus
from minivllm.engine.core_handle import GRACE_SECONDS
from minivllm.engine.core_messages import (
    AbortClientRequests,
    AbortRequests,
    AddRequest,
    ClientDrained,
    CoreFailed,
    CoreLog,
    CoreLost,
    CoreReady,
    Drain,
    DropClient,
    EngineCoreOutputs,
    KillReplica,
    SetTracing,
    Shutdown,
    StoppedSequence,
    StopSequences,
    ToCore,
    ToFrontend,
    decode_from_core,
    encode,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0
"""A thread that has not come round for so long was stopped."""


class Replicas:
    """All that a frontend has to do with its replicas: its sockets, which replicas there are, and which request is where.

    A thread reads messages and forwards them. It holds this object, and not the client, so that a client that nobody uses is garbage.

    Args:
        config: The engine's.
        place: Which frontend this is.
        launcher: What has started the processes, which belong to the first frontend; None in the others.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, place: FrontendPlace, launcher: ReplicaLauncher | None) -> None:
        self._config, self._place, self._launcher = config, place, launcher
        parallel = config.parallel_config
        self._size, self._timeout = parallel.data_parallel_size, parallel.replica_timeout
        self._lock = threading.RLock()
        """Held while what follows is used, and the socket to the replicas."""
        router = make_router(parallel.data_parallel_routing, place.client_count, place.client_index)
        self._table = ReplicaTable(router, config.cache_config.block_size)
        self._liveness = ReplicaLiveness(self._size, self._timeout, restarts=place.restarts, expected=parallel.local_ranks)
        self._is_tracing = False
        self._dropped: set[int] = set()
        """API servers that have died."""
        self._on_message: Callable[[], OnMessage | None] = lambda: None
        self._stopped, self._closed = threading.Event(), threading.Event()
        self._is_let_go = False
        self._thread: threading.Thread | None = None
        self._coordinator_heard, self._has_coordinator = time.monotonic(), True
        self._latest_check = time.monotonic()
        self._poller = zmq.Poller()
        self._sockets = Sockets(place.key)
        try:
            self._connect()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    # -- starting ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Listen, and say so; start the replicas of this machine, if that is this frontend's task."""
        options = {"SNDHWM": 0, "ROUTER_MANDATORY": 1, "ROUTER_HANDOVER": 1}
        try:
            self._requests, input_address = self._sockets.bind(zmq.ROUTER, self._place.address("requests"), **options)
        except zmq.ZMQError as error:
            host = self._config.parallel_config.data_parallel_address
            raise ConfigError(f"data_parallel_address is {host}, where this machine cannot listen ({error.strerror}).") from None
        self._outputs, output_address = self._sockets.bind(zmq.PULL, self._place.address("outputs"), RCVHWM=0)
        hello = HelloFrontend(self._place.client_index, input_address, output_address)
        with self._sockets.connect(zmq.DEALER, self._place.handshake_address, LINGER=0) as handshake:
            if self._launcher is not None:
                welcome = self._launcher.ask(handshake, hello)
            else:
                handshake.send(messages.encode(hello))
                welcome = messages.decode_from_handshake(handshake.recv())
            if isinstance(welcome, Refused):
                raise EngineDeadError(welcome.message)
            assert isinstance(welcome, FrontendWelcome)
            self._loads = self._sockets.connect(zmq.SUB, welcome.publish_address, SUBSCRIBE=b"")
            for socket in (self._outputs, self._loads):
                self._poller.register(socket, zmq.POLLIN)
            if self._launcher is not None:
                self._launcher.start_replicas(self._sockets, handshake)

    def _wait_until_ready(self) -> None:
        """Until the replicas of this machine are, which load the model at the same time; or one elsewhere, if there are none here."""
        ranks = set(self._config.parallel_config.local_ranks)
        if not ranks and self._launcher is not None:
            logger.warning("Waiting for a replica on another machine.")
        while not (ranks <= set(self._table.open) and self._table.open):
            self._next_messages()
            if self._launcher is not None:
                self._launcher.check_others()

    def _fail_to_start(self, rank: int, failure: CoreFailed) -> None:
        """A replica cannot start. Raises the error that it has told, or in other frontends ends the process: the first one says why."""
        if self._launcher is None:
            raise SystemExit(1)
        if kind := {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}.get(failure.error_type):
            raise kind(failure.message)
        raise EngineDeadError(f"Replica {rank} could not start: {failure.cause}")

    # -- what is known of them -----------------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:
        """Those of the replica that has fewest."""
        return self._table.num_gpu_blocks

    def statuses(self) -> list[ReplicaStatus]:
        """What is known of each replica, by rank."""
        with self._lock:
            return [
                ReplicaStatus(
                    rank, self._liveness.state_of(rank), peer.ready.process_id, peer.ready.num_gpu_blocks, peer.num_deaths
                )
                for rank, peer in enumerate(self._liveness.peers)
            ]

    @property
    def process_ids(self) -> list[int]:
        """The processes of this machine's replicas, by rank; in the first frontend."""
        assert self._launcher is not None
        return self._launcher.local.process_ids

    @property
    def coordinator_process_id(self) -> int:
        """The coordinator's process; in the first frontend."""
        assert self._launcher is not None
        return self._launcher.coordinator.process_id

    # -- to the replicas, from any thread ------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        """Send a request to the replica that the router chooses, but none of these. Returns its rank.

        Raises:
            EngineDeadError: No other replica takes the request.
        """
        request = replace(request, client_index=self._place.client_index)
        with self._lock:
            while not self._send(rank := self._table.add(request, avoid), AddRequest(request)):
                self._table.abort(request.request_id)
                self._table.close(rank)
        return rank

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests where they are."""
        with self._lock:
            for request_id in request_ids:
                if (rank := self._table.abort(request_id)) is not None:
                    self._send(rank, AbortRequests([request_id]))

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        """Stop sequences where they are."""
        with self._lock:
            for sequence in sequences:
                if (rank := self._table.stop(sequence)) is not None:
                    self._send(rank, StopSequences([sequence]))

    def restart(self, rank: int) -> bool:
        """Let a replica finish what it has, and start another in its place. False if it does not take requests, or another is to follow."""
        with self._lock:
            return rank in self._table.open and self._send(rank, Drain(returns=True))

    def kill(self, rank: int) -> bool:
        """Kill a replica's process. False if it is gone."""
        with self._lock:
            return self._liveness.peers[rank].is_member and self._send(rank, KillReplica())

    def drop_client(self, client_index: int) -> None:
        """Another API server has died: replicas drop its requests, also those that come later."""
        with self._lock:
            self._dropped.add(client_index)
            self.send(DropClient(client_index))

    def send(self, message: ToCore) -> None:
        """Send a message to all replicas."""
        with self._lock:
            if isinstance(message, SetTracing):
                self._is_tracing = message.on
                message = SetTracing(message.on, self._place.client_index)
            for rank, peer in enumerate(self._liveness.peers):
                if peer.is_member:
                    self._send(rank, message)

    def _send(self, rank: int, message: ToCore) -> bool:
        """Send a message to a replica. False if there is no connection: it has died, or will be connected again, or is silent; one of these
        is noticed soon."""
        try:
            self._requests.send_multipart([identity_of(rank), encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    # -- from the replicas ---------------------------------------------------------------------------------------

    def start(self, on_message: Callable[[], OnMessage | None]) -> None:
        """Begin to forward, for as long as the weak reference gives a method to forward to."""
        self._on_message = on_message
        self._thread = threading.Thread(target=self._run, name="minivllm outputs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for message in self._next_messages():
                    if self._stopped.is_set() or not self._tell(message):
                        return
        except Exception as error:
            logger.exception("The messages of the replicas cannot be read any more.")
            self._tell(CoreLost(f"{type(error).__name__}: {error}"))
        finally:
            self._closed.set()
            if self._is_let_go:
                self.stop()

    def _tell(self, message: ToFrontend) -> bool:
        """Tell the frontend. False if nobody wants messages any more."""
        on_message = self._on_message()
        if on_message is not None:
            on_message(message)
        return on_message is not None

    def _next_messages(self) -> list[ToFrontend]:
        """Wait for news, for a moment. Returns what the frontend is to be told."""
        messages = self._check(now) if (now := time.monotonic()) >= self._latest_check + POLL_MS / 1000 else []
        events = dict(self._poller.poll(POLL_MS))
        if self._loads in events:
            messages += self._take_published(self._loads.recv())
        if self._outputs in events:
            messages += self._take_message(self._outputs.recv_multipart())
        return messages

    def _take_message(self, frames: list[bytes]) -> list[ToFrontend]:
        """Handle a message of a replica."""
        try:
            header, data = frames
            incarnation, number = read_header(header)
            message = decode_from_core(data)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Dropped a message of a replica that cannot be decoded: %s", error)
            return []
        rank = message.engine_index
        if not 0 <= rank < self._size:
            return []
        if isinstance(message, CoreLog):
            self._log(rank, message)
        if isinstance(message, CoreFailed) and self._thread is None and rank in self._config.parallel_config.local_ranks:
            self._fail_to_start(rank, message)
        with self._lock:
            decisions = [] if isinstance(message, EngineCoreOutputs) else self._take_hellos()
            decisions += self._liveness.hear(rank, incarnation, number, message, time.monotonic())
            messages = self._carry_out(decisions)
            if isinstance(message, EngineCoreOutputs) and self._liveness.is_believed(rank, incarnation):
                message.outputs = [output for output in message.outputs if self._table.take_output(rank, output)]
                messages.append(message)
        return messages

    def _log(self, rank: int, message: CoreLog) -> None:
        """Log what a replica logs, in the first frontend. All of them say the same things when they start: once is enough."""
        if self._launcher is not None and (rank == 0 or message.level >= logging.WARNING):
            text = message.text if rank == 0 else f"Replica {rank}: {message.text}"
            logging.getLogger(message.logger).log(message.level, "%s", text)

    def _take_published(self, data: bytes) -> list[ToFrontend]:
        """Handle what the coordinator says."""
        self._coordinator_heard = time.monotonic()
        if self._launcher is None:
            self._has_coordinator = True  # it was only silent
        message = messages.decode_published(data)
        if isinstance(message, ReplicaDied):
            return self._take_deaths([message])
        if isinstance(message, Loads):
            with self._lock:
                self._table.update_loads(message.loads)
        elif self._launcher is not None:  # once is enough
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        return []

    def _take_deaths(self, deaths: Iterable[ReplicaDied]) -> list[ToFrontend]:
        decisions: list[Decision] = []
        with self._lock:
            for died in deaths:
                rank = died.engine_index
                if not 0 <= rank < self._size:
                    continue
                if self._thread is None and rank in self._config.parallel_config.local_ranks:
                    self._fail_to_start(rank, CoreFailed("", died.end))
                self._liveness.peers[rank].num_deaths = died.num_deaths
                decisions += self._liveness.note_death(
                    rank, died.incarnation, died.end, has_died=died.has_died, was_killed=died.was_killed, outlook=died.outlook
                )
            return self._carry_out(decisions)

    def _check(self, now: float) -> list[ToFrontend]:
        """Look after the replicas, their processes, and the coordinator."""
        if now - self._latest_check > _PAUSE_SECONDS:  # this process was stopped for a while, and listened to nobody
            self._coordinator_heard = now
            with self._lock:
                self._liveness.excuse_silence(now)
        self._latest_check = now
        self._check_coordinator(now)
        messages: list[ToFrontend] = []
        if self._launcher is not None:
            for rank, incarnation in self._liveness.find_hopeless(now):
                self._launcher.local.kill(rank, incarnation)
            messages += self._take_deaths(self._launcher.local.find_ended())
        with self._lock:
            return messages + self._carry_out(self._take_hellos() + self._liveness.find_silent(now))

    def _take_hellos(self) -> list[Decision]:
        """Note the replicas that messages can be sent to."""
        decisions: list[Decision] = []
        while self._requests.poll(0):
            rank = index_of(self._requests.recv_multipart()[0])
            if 0 <= rank < self._size:
                decisions += self._liveness.connect(rank)
        return decisions

    def _check_coordinator(self, now: float) -> None:
        """Do without the coordinator if it is gone, until it is back."""
        end = None
        if self._launcher is not None:
            end = self._launcher.tend_coordinator()
        elif self._has_coordinator and now - self._coordinator_heard > 3 * LoadPublisher.IDLE_SECONDS:
            end = "is not responding"
            self._has_coordinator = False
        if end is not None:
            with self._lock:
                self._table.stop_reports()
            logger.error("The coordinator of the replicas %s: until it is back, requests are routed by what is in flight.", end)

    # -- decisions -----------------------------------------------------------------------------------------------

    def _carry_out(self, decisions: list[Decision]) -> list[ToFrontend]:
        """Do what was decided, in order. Returns what the frontend is to be told."""
        messages: list[ToFrontend] = []
        for decision in decisions:
            if isinstance(decision, Join):
                messages += self._join(decision)
            elif isinstance(decision, Withdraw):
                self._withdraw(decision)
            else:
                messages.append(self._lose(decision))
        return messages

    def _join(self, decision: Join) -> list[ToFrontend]:
        rank, client = decision.rank, self._place.client_index
        if not self._send(rank, AbortClientRequests(client)):
            return []
        self._table.take_in(rank, decision.num_gpu_blocks)
        if self._is_tracing:
            self._send(rank, SetTracing(True, client))
        for client_index in self._dropped:
            self._send(rank, DropClient(client_index))
        if self._launcher is not None and (self._thread is not None or rank not in self._config.parallel_config.local_ranks):
            logger.warning("Replica %d takes requests.", rank)
        return [CoreReady(self.num_gpu_blocks, rank)]

    def _withdraw(self, decision: Withdraw) -> None:
        rank, client = decision.rank, self._place.client_index
        self._table.close(rank)
        if decision.previous not in (PeerState.READY, PeerState.DRAINING):
            self._send(rank, AbortClientRequests(client))
        self._send(rank, ClientDrained(client))
        if decision.previous is PeerState.READY:
            num_requests = len(self._table.requests_at(rank))
            if self._launcher is not None or num_requests:
                logger.warning("Replica %d leaves: it finishes what it has (requests: %d) and gets no more.", rank, num_requests)

    def _lose(self, decision: Lose) -> CoreLost:
        rank, liveness = decision.rank, self._liveness
        if self._launcher is not None:
            if decision.has_died:
                logger.error("Replica %d of the model has ended: %s.", rank, decision.cause.rstrip("."))
            elif liveness.peers[rank].state is PeerState.FENCED:
                logger.error("Replica %d is lost: %s.", rank, decision.cause)
            else:
                follows = liveness.peers[rank].outlook == "starting"
                logger.warning("Replica %d has left%s.", rank, ", and another is started in its place" if follows else "")
        requests = self._table.remove(rank)
        lost = CoreLost(decision.cause, rank, requests, is_last=False, has_died=decision.has_died, was_killed=decision.was_killed)
        if not any(peer.is_member for peer in liveness.peers):
            lost.is_last = True
            lost.may_return = not self._config.parallel_config.is_on_one_machine or any(
                peer.may_return for peer in liveness.peers
            )
            lost.cause = f"no replica is left; the last, replica {rank}, was lost: {decision.cause}"
        return lost

    # -- health and end ------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is responding."""
        now = time.monotonic()
        silent = [now - self._liveness.peers[rank].last_heard for rank in self._table.open]
        if silent and min(silent) > self._timeout:
            raise EngineDeadError(f"The replicas are not responding: nothing heard from them for {min(silent):.0f} seconds.")

    def let_go(self) -> None:
        """Tell the replicas to end, without waiting for it: called by the garbage collector, in any thread."""
        self._is_let_go = True
        if self._launcher is not None:
            self.send(Shutdown())
        self._stopped.set()

    def stop(self) -> None:
        """Close the sockets, and end the processes that belong to this frontend. Safe to call again, from any thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._closed.wait(GRACE_SECONDS)
        if self._launcher is not None:
            self.send(Shutdown())
            self._launcher.stop(told=self._table.open)
        with self._lock:
            self._sockets.close()
