"""The frontend's side of data-parallel replicas: its sockets, its router, and which request is where."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import msgspec
import zmq

from minivllm.core.routing import LoadPublisher, make_router
from minivllm.engine import dp_messages
from minivllm.engine.core_client import OnMessage
from minivllm.engine.core_handle import GRACE_SECONDS
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    BeginAnew,
    CoreFailed,
    CoreLeaving,
    CoreLog,
    CoreReady,
    DropClient,
    EngineCoreOutputs,
    Farewell,
    FromCore,
    Heartbeat,
    SetTracing,
    Shutdown,
    StoppedSequence,
    StopSequences,
    ToCore,
    decode_from_core,
    encode,
)
from minivllm.engine.dp_engine_core_proc import identity_of, index_of
from minivllm.engine.dp_messages import FrontendWelcome, HelloFrontend, Loads, Refused, ReplicaDied
from minivllm.engine.dp_sockets import GapFinder, Sockets
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.replica_launcher import POLL_MS, FrontendPlace, ReplicaLauncher
from minivllm.engine.replica_table import ReplicaTable
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

_HOPELESS = 3
"""A process of this machine that has been silent for so many timeouts is replaced."""
_PAUSE_SECONDS = 2.0
"""A thread that has not come round for so long was stopped."""


class Replicas:
    """All that a frontend has to do with its replicas: its sockets, its router, and which request is where.

    A thread forwards messages. It holds this object, and not the client, so that a client that nobody uses is garbage.

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
        """Held while the table or the sending socket is used."""
        router = make_router(parallel.data_parallel_routing, place.client_count, place.client_index)
        self._table = ReplicaTable(router, config.cache_config.block_size)
        self._last_heard: dict[int, float] = {}
        self._ready: dict[int, CoreReady] = {}
        """What each replica said when it was ready."""
        self._left: set[int] = set()
        """Those that have left, as they were told to, while their processes end."""
        self._returning: set[int] = set()
        """Those of them in whose place another is started."""
        self._announced: set[int] = set()
        """Those that have said that they leave."""
        self._said_hello: set[bytes] = set()
        """Those that messages can be sent to."""
        self._broken: set[int] = set()
        """Those whose connection was made anew, so that messages to them may be lost."""
        self._gaps = GapFinder()
        self._early: dict[int, CoreReady] = {}
        """Those that are ready, and have not said hello; looked at again at the next check."""
        self._is_tracing = False
        self._dropped: set[int] = set()
        """API servers that have died."""
        self._on_message: Callable[[], OnMessage | None] = lambda: None
        self._stopped, self._closed = threading.Event(), threading.Event()
        self._is_let_go = False
        self._thread: threading.Thread | None = None
        self._silent: set[int] = set()
        """Those that were given up though their processes may be there: nothing was heard of them, or messages were lost."""
        self._coordinator_heard, self._has_no_coordinator = time.monotonic(), False
        self._latest_round = time.monotonic()
        self._poller, self._next_check = zmq.Poller(), 0.0
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
                handshake.send(dp_messages.encode(hello))
                welcome = dp_messages.decode_from_handshake(handshake.recv())
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
            message = self._next_message()
            if isinstance(message, CoreFailed) and message.engine_index in ranks:
                if self._launcher is None:
                    raise SystemExit(1)  # the first frontend says why
                if kind := {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}.get(message.error_type):
                    raise kind(message.message)
                cause = f"{message.error_type}: {message.message}" if message.error_type else message.message
                raise EngineDeadError(f"Replica {message.engine_index} could not start: {cause}")
            if message is not None:
                self._take(message)
            if self._launcher is not None:
                self._launcher.check_others()

    # -- to the replicas, from any thread ------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:
        """Those of the replica that has fewest."""
        return self._table.num_gpu_blocks

    @property
    def states(self) -> dict[int, str]:
        """As for `AsyncLLMEngine`. Only the first frontend knows of those that start or are given up."""
        states = {index: self._table.state_of(index) for index in range(self._size)}
        if self._launcher is not None:
            local = self._launcher.local
            for index, state in states.items():
                if state == "gone" and index not in self._silent | (self._left - self._returning):
                    states[index] = "given up" if index in local.given_up else "starting" if local.is_coming(index) else "gone"
        return states

    @property
    def num_deaths(self) -> dict[int, int]:
        """How often each replica of this machine has died, by rank; in the first frontend."""
        return dict(self._launcher.local.num_deaths) if self._launcher is not None else {}

    @property
    def process_ids(self) -> list[int]:
        """The processes of this machine's replicas, by rank."""
        assert self._launcher is not None
        return self._launcher.local.process_ids

    @property
    def coordinator_process_id(self) -> int:
        """The coordinator's process."""
        assert self._launcher is not None
        return self._launcher.coordinator.process_id

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        """Send a request to the replica that the router chooses, but none of these. Returns its rank.

        Raises:
            EngineDeadError: No other replica takes requests.
        """
        request = replace(request, client_index=self._place.client_index)
        with self._lock:
            while not self._send(index := self._table.add(request, avoid), AddRequest(request)):
                self._table.abort(request.request_id)  # no way leads there; when it is heard of again, it takes requests again
                self._table.let_leave(index)
        return index

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests where they are."""
        with self._lock:
            for request_id in request_ids:
                if (index := self._table.abort(request_id)) is not None:
                    self._send(index, AbortRequests([request_id]))

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        """Stop sequences where they are."""
        with self._lock:
            for sequence in sequences:
                if (index := self._table.stop(sequence)) is not None:
                    self._send(index, StopSequences([sequence]))

    @property
    def ready(self) -> dict[int, CoreReady]:
        """What each replica that is or was there said when it was ready, by rank."""
        return dict(self._ready)

    def send_to(self, index: int, message: ToCore) -> bool:
        """Send a message to one replica. False if it is gone."""
        with self._lock:
            return self._table.state_of(index) != "gone" and self._send(index, message)

    def drop_client(self, client_index: int) -> None:
        """Another API server has died: replicas drop its requests, also those that come later."""
        self._dropped.add(client_index)
        self.send(DropClient(client_index))

    def send(self, message: ToCore) -> None:
        """Send a message to all replicas."""
        with self._lock:
            if isinstance(message, SetTracing):
                self._is_tracing = message.on
                message = SetTracing(message.on, self._place.client_index)
            for index in self._table.members:
                self._send(index, message)

    def _send(self, index: int, message: ToCore) -> bool:
        """Send a message to a replica. False if it is gone."""
        try:
            self._requests.send_multipart([identity_of(index), encode(message)], zmq.NOBLOCK)
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
                message = self._next_message()
                if message is not None and not self._stopped.is_set() and not self._take(message):
                    return
        except Exception as error:
            logger.exception("The messages of the replicas cannot be read any more.")
            self._tell(CoreFailed(type(error).__name__, str(error)))
        finally:
            self._closed.set()
            if self._is_let_go:
                self.stop()

    def _next_message(self) -> FromCore | None:
        """The next message of a replica, or that one is gone; None if there is nothing for a while."""
        self._note_pause()
        if time.monotonic() >= self._next_check:  # however much there is to read
            self._next_check = time.monotonic() + POLL_MS / 1000
            if found := self._find_gone():
                return found
        events = dict(self._poller.poll(POLL_MS))
        if self._loads in events and (told := self._take_published(self._loads.recv())):
            return told
        if self._outputs not in events:
            return None
        try:
            number, data = self._outputs.recv_multipart()
            message = decode_from_core(data)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Dropped a message of a replica that cannot be decoded: %s", error)
            return None
        index = message.engine_index
        if not 0 <= index < self._size:
            return None
        self._last_heard[index] = time.monotonic()
        is_missing = self._gaps.is_missing(index, int.from_bytes(number, "little"))
        if is_missing and index in self._table.members and not isinstance(message, CoreReady | CoreLeaving | CoreFailed):
            return self._fence(index, "messages of it were lost")
        return message

    def _note_pause(self) -> None:
        """If this process was stopped for a while, nobody was silent: nobody was listened to."""
        now = time.monotonic()
        if now - self._latest_round > _PAUSE_SECONDS:
            self._last_heard = dict.fromkeys(self._last_heard, now)
            self._coordinator_heard = now
        self._latest_round = now

    def _find_gone(self) -> CoreFailed | CoreReady | None:
        """A replica of this machine whose process has ended, or one elsewhere that is silent; or one that was ready too early.

        The coordinator is looked after, too.
        """
        self._check_coordinator()
        now = time.monotonic()
        if self._launcher is not None:
            for index in self._silent:
                if now - self._last_heard[index] > _HOPELESS * self._timeout:
                    self._launcher.local.kill(index)
            if ended := self._launcher.local.find_ended():
                self._silent.discard(ended.engine_index)
                return CoreFailed("", ended.end, engine_index=ended.engine_index, was_killed=ended.was_killed)
        self._take_hellos()
        for index in self._table.members:
            if index in self._broken:
                return self._fence(index, "its connection broke, and messages to it may be lost")
        for index in self._table.members:
            if now - self._last_heard[index] > self._timeout:
                return self._fence(index, f"nothing heard from it for {self._timeout} seconds")
        return self._early.popitem()[1] if self._early else None  # as if it came now

    def _fence(self, index: int, reason: str) -> CoreFailed:
        """A replica is out of reach, or was for a moment. What it had goes on elsewhere; when it is heard again, it begins anew."""
        self._silent.add(index)
        self._broken.discard(index)
        return CoreFailed("", reason, engine_index=index, has_died=False)

    def _take_hellos(self) -> None:
        """Note the replicas that messages can be sent to, and those among them that could be sent to already, on another connection."""
        with self._lock:
            while self._requests.poll(0):
                identity = self._requests.recv_multipart()[0]
                index = index_of(identity)
                if identity in self._said_hello and index in self._table.members:
                    self._broken.add(index)
                self._said_hello.add(identity)

    def _check_coordinator(self) -> None:
        """Do without the coordinator if it is gone, until another has been started."""
        if self._has_no_coordinator:
            return
        if self._launcher is not None:
            end = self._launcher.coordinator.poll()
        else:
            is_silent = time.monotonic() - self._coordinator_heard > 3 * LoadPublisher.IDLE_SECONDS
            end = "is not responding" if is_silent else None
        if end is not None:
            with self._lock:
                self._table.stop_reports()
            logger.error("The coordinator of the replicas %s: routing goes by what is in flight until there is another.", end)
            self._has_no_coordinator = self._launcher is None or not self._launcher.restart_coordinator()
            if self._has_no_coordinator and self._launcher is not None:
                logger.error("Too many coordinators have died: no replica can join any more.")

    def _take_published(self, data: bytes) -> CoreFailed | None:
        """Handle what the coordinator says. Returns the end of a replica that it tells of."""
        self._coordinator_heard = time.monotonic()
        if self._launcher is None:
            self._has_no_coordinator = False  # it was only silent
        message = dp_messages.decode_published(data)
        if isinstance(message, ReplicaDied):
            self._silent.discard(message.engine_index)
            if self._table.state_of(message.engine_index) != "gone":
                return CoreFailed("", message.end, engine_index=message.engine_index, was_killed=message.was_killed)
        elif isinstance(message, Loads):
            with self._lock:
                self._table.update_loads(message.loads)
        elif self._launcher is not None:  # once is enough
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        return None

    def _take(self, message: FromCore) -> bool:
        """Handle a message, and forward it if it concerns the engine. False if nobody wants messages any more."""
        index = message.engine_index
        if isinstance(message, CoreLog):
            if self._launcher is not None and (index == 0 or message.level >= logging.WARNING):
                text = message.text if index == 0 else f"Replica {index}: {message.text}"
                logging.getLogger(message.logger).log(message.level, "%s", text)
            return True
        state = self._table.state_of(index)
        if isinstance(message, EngineCoreOutputs):
            if state == "gone":
                return True  # sent before it ended
            if state == "leaving" and index not in self._announced:
                self._remind(index)
        if isinstance(message, Heartbeat):
            if state == "leaving":
                self._remind(index)
            if state != "gone" or index not in self._silent or index in self._early:
                return True
            if not self._send(index, BeginAnew(self._place.client_index)):
                return True  # it is heard, and no way leads there yet
            message = self._ready[index]  # it was thought to be gone, and is not
        if isinstance(message, CoreLeaving):
            if message.has_left:
                return self._tell(self._note_left(message))
            self._let_leave(index)
            return True
        if isinstance(message, CoreReady):
            if state != "gone":  # another process, after one whose end was not noticed
                self._tell(self._lose(CoreFailed("", "it was started again", engine_index=index, is_last=False)))
            if not self._take_in(message):
                return True
            message = CoreReady(self.num_gpu_blocks, index)
        elif isinstance(message, CoreFailed):
            if index in self._left:  # its process has ended, too
                self._left.discard(index)
                return True
            message = self._give_up(message)
        elif isinstance(message, EngineCoreOutputs):
            with self._lock:
                message.outputs = [output for output in message.outputs if self._table.take_output(index, output)]
        return self._tell(message)

    def _take_in(self, ready: CoreReady) -> bool:
        """A replica takes requests from now on. False if it has not said hello yet on the socket that they are sent to."""
        index = ready.engine_index
        self._take_hellos()
        with self._lock:
            if identity_of(index) not in self._said_hello:
                self._early[index] = ready
                return False
            self._ready[index] = ready
            for gone in (self._left, self._returning, self._announced, self._silent, self._broken):
                gone.discard(index)
            self._table.take_in(index, ready.num_gpu_blocks)
            if self._is_tracing:
                self._send(index, SetTracing(True, self._place.client_index))
            for client_index in self._dropped:
                self._send(index, DropClient(client_index))
        if self._launcher is not None:
            self._launcher.local.note_ready(index)
            if self._thread is not None or index not in self._launcher.local.processes:
                logger.warning("Replica %d takes requests.", index)
        return True

    def _remind(self, index: int) -> None:
        """A replica that leaves is there. If it has said that it leaves, the farewell may be lost; if not, it was out of reach, and is back."""
        with self._lock:
            if index in self._announced:
                self._send(index, Farewell(self._place.client_index))
            else:
                self._table.reopen(index, self._ready[index].num_gpu_blocks)
                logger.warning("Replica %d is back and takes requests.", index)

    def _let_leave(self, index: int) -> None:
        with self._lock:
            self._announced.add(index)
            self._table.let_leave(index)
            self._send(index, Farewell(self._place.client_index))
            num_requests = len(self._table.requests_at(index))
        if self._launcher is not None or num_requests:
            logger.warning("Replica %d leaves: it finishes what it has (requests: %d) and gets no more.", index, num_requests)

    def _note_left(self, message: CoreLeaving) -> CoreFailed:
        """A replica has finished what it had."""
        index = message.engine_index
        if self._launcher is not None:
            logger.warning("Replica %d has left%s.", index, ", and is started again" if message.returns else "")
        self._left.add(index)
        if message.returns:
            self._returning.add(index)
        return self._judge_loss(self._lose(CoreFailed("", "it left", engine_index=index, has_died=False)))

    def _give_up(self, failure: CoreFailed) -> CoreFailed:
        """A replica has died, or is out of reach."""
        index = failure.engine_index
        self._lose(failure)
        if self._launcher is not None:
            logger.error("%s", replica_error(failure))
            if index not in self._silent:
                self._launcher.local.remove(index)
                self._launcher.local.start_another(index)
        return self._judge_loss(failure)

    def _lose(self, failure: CoreFailed) -> CoreFailed:
        """Forget a replica, and say which requests are lost with it."""
        index = failure.engine_index
        with self._lock:
            failure.request_ids = self._table.remove(index)
            self._send(index, BeginAnew(self._place.client_index))  # if it is there after all
        return failure

    def _judge_loss(self, failure: CoreFailed) -> CoreFailed:
        """What the end of a replica means for the engine: that of some requests, if there are other replicas, or of all."""
        index = failure.engine_index
        failure.is_last = self._table.is_empty
        if not failure.is_last:
            return failure
        may_come = self._place.restarts
        if self._launcher is not None:
            ranks = self._config.parallel_config.local_ranks
            may_come = any(self._launcher.local.is_coming(index) for index in ranks if index not in self._left)
        failure.restarting = may_come or bool(self._returning) or not self._config.parallel_config.is_on_one_machine
        failure.message = f"no replica of the model is left. The last one, {index}: {failure.message}"
        return failure

    def _tell(self, message: FromCore) -> bool:
        on_message = self._on_message()
        if on_message is not None:
            on_message(message)
        return on_message is not None

    # -- health and end ------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is responding."""
        now = time.monotonic()
        silent = [now - self._last_heard[index] for index in self._table.open]
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
        if self._launcher is not None:
            self.send(Shutdown())
            self._launcher.stop(told=self._table.open)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._closed.wait(GRACE_SECONDS)
        with self._lock:
            self._sockets.close()


def replica_error(failure: CoreFailed) -> EngineDeadError:
    """What users are told when a replica is gone, and others are not."""
    cause = f"{failure.error_type}: {failure.message}" if failure.error_type else failure.message
    return EngineDeadError(f"Replica {failure.engine_index} of the model has ended: {cause.rstrip('.')}.")
