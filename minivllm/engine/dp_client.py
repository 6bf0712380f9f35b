"""The frontend's way to several replicas of the model, each an engine core in a process of its own.

    add_request ─► Router ─► ROUTER ─► the replica's DEALER
    on_message  ◄─ PULL ◄─ outputs of all replicas           loads ─► SUB ─► Router

    DPLBAsyncMPClient    for `AsyncLLMEngine`: messages arrive by themselves
    DPLBSyncMPClient     for `LLMEngine`: waits for each output

Mirrors `DPLBAsyncMPClient` in `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from weakref import WeakMethod

import msgspec
import zmq

from minivllm.core.routing import make_router
from minivllm.engine import dp_messages
from minivllm.engine.core_client import NOT_RESPONDING_SECONDS, MPClient, OnMessage, dead_error
from minivllm.engine.core_handle import GRACE_SECONDS, make_socket_folder
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    CoreLeaving,
    CoreLog,
    CoreReady,
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
from minivllm.engine.dp_coordinator import CoordinatorSetup
from minivllm.engine.dp_engine_core_proc import identity_of
from minivllm.engine.dp_messages import (
    VERSION,
    FromHandshake,
    FrontendWelcome,
    HelloFrontend,
    HelloNode,
    Loads,
    NodeWelcome,
    Refused,
    hash_config,
)
from minivllm.engine.dp_sockets import KeyPair, Sockets, check_may_listen, load_key_file, tcp_address
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.replica_processes import DPCoordinator, LocalReplicas
from minivllm.engine.replica_table import ReplicaTable
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

_POLL_MS = 100
"""How long a process may be gone before it is noticed."""


class Replicas:
    """All that a frontend has to do with its replicas: their processes, its sockets, its router, and which request is where.

    A thread forwards messages. It holds this object, and not the client, so that a client that nobody uses is garbage.

    Args:
        config: The engine's.
        restart: Start another replica of this machine when one dies.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, restart: bool) -> None:
        self._config = config
        parallel = config.parallel_config
        self._size = parallel.data_parallel_size
        key = load_key_file(Path(parallel.data_parallel_key_file)) if parallel.data_parallel_key_file else None
        if not parallel.is_on_one_machine:
            check_may_listen(parallel.data_parallel_address, key)
        self._lock = threading.RLock()
        """Held while the table or the sending socket is used."""
        self._table = ReplicaTable(make_router(parallel.data_parallel_routing), config.cache_config.block_size)
        self._last_heard: dict[int, float] = {}
        self._ready: dict[int, CoreReady] = {}
        """What each replica said when it was ready."""
        self._left: set[int] = set()
        """Those that have left, as they were told to, while their processes end."""
        self._announced: set[int] = set()
        """Those that have said that they leave."""
        self._said_hello: set[bytes] = set()
        """Those that messages can be sent to."""
        self._early: dict[int, CoreReady] = {}
        """Those that are ready, and have not said hello."""
        self._is_tracing = False
        self._on_message: Callable[[], OnMessage | None] = lambda: None
        self._stopped, self._closed = threading.Event(), threading.Event()
        self._is_let_go = False
        self._thread: threading.Thread | None = None
        self._coordinator: DPCoordinator | None = None
        self._has_no_coordinator = False
        self._poller, self._next_check = zmq.Poller(), 0.0
        self._local: LocalReplicas | None = None
        self._folder = make_socket_folder()
        self._sockets = Sockets(key)
        try:
            self._connect(key, restart)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    # -- starting ------------------------------------------------------------------------------------------------

    def _connect(self, key: KeyPair | None, restart: bool) -> None:
        """Listen; start the coordinator, and the replicas of this machine."""
        parallel, folder = self._config.parallel_config, f"ipc://{self._folder}"
        handshake_address = f"{folder}/handshake"
        listen = [f"{folder}/{name}" for name in ("requests", "outputs", "reports")]
        if not parallel.is_on_one_machine:
            handshake_address = tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
            listen = [tcp_address(parallel.data_parallel_address, 0)] * 3
        options = {"SNDHWM": 0, "ROUTER_MANDATORY": 1, "ROUTER_HANDOVER": 1}
        try:
            self._requests, input_address = self._sockets.bind(zmq.ROUTER, listen[0], **options)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"data_parallel_address is {parallel.data_parallel_address}, where this machine cannot listen ({error.strerror})."
            ) from None
        self._outputs, output_address = self._sockets.bind(zmq.PULL, listen[1], RCVHWM=0)
        config_hash, log_level = hash_config(self._config), logging.getLogger().getEffectiveLevel()
        self._coordinator = DPCoordinator(
            CoordinatorSetup(handshake_address, listen[2], f"{folder}/loads", key, 1, self._size, config_hash, log_level)
        )
        with self._sockets.connect(zmq.DEALER, handshake_address, LINGER=0) as handshake:
            welcome = self._ask(handshake, HelloFrontend(0, input_address, output_address))
            assert isinstance(welcome, FrontendWelcome)
            self._loads = self._sockets.connect(zmq.SUB, welcome.publish_address, SUBSCRIBE=b"")
            for socket in (self._outputs, self._loads):
                self._poller.register(socket, zmq.POLLIN)
            addresses = self._ask(handshake, HelloNode(VERSION, config_hash, list(parallel.local_ranks)))
        if isinstance(addresses, Refused):
            raise ConfigError(addresses.message)
        assert isinstance(addresses, NodeWelcome)
        self._local = LocalReplicas(self._config, addresses, key, restart=restart, socket_folder=self._folder)

    def _ask(self, handshake: zmq.Socket[bytes], message: HelloFrontend | HelloNode) -> FromHandshake:
        assert self._coordinator is not None
        handshake.send(dp_messages.encode(message))
        while not handshake.poll(_POLL_MS):
            if end := self._coordinator.poll():
                port = self._config.parallel_config.data_parallel_rpc_port
                raise ConfigError(
                    f"The coordinator of the replicas {end}: perhaps data_parallel_rpc_port {port} is in use; choose another."
                )
        return dp_messages.decode_from_handshake(handshake.recv())

    def _wait_until_ready(self) -> None:
        """Until the replicas of this machine are, which load the model at the same time; or one elsewhere, if there are none here."""
        ranks = set(self._config.parallel_config.local_ranks)
        if not ranks:
            logger.warning("Waiting for a replica on another machine.")
        while not (ranks <= set(self._table.open) and self._table.open):
            message = self._next_message()
            if isinstance(message, CoreFailed) and message.engine_index in ranks:
                if kind := {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}.get(message.error_type):
                    raise kind(message.message)
                cause = f"{message.error_type}: {message.message}" if message.error_type else message.message
                raise EngineDeadError(f"Replica {message.engine_index} could not start: {cause}")
            if message is not None:
                self._take(message)

    # -- to the replicas, from any thread ------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:
        """Those of the replica that has fewest."""
        return self._table.num_gpu_blocks

    @property
    def states(self) -> dict[int, str]:
        """Of each replica, by rank: "ready", "leaving" or "gone"."""
        return {index: self._table.state_of(index) for index in range(self._size)}

    @property
    def process_ids(self) -> list[int]:
        """The processes of this machine's replicas, by rank."""
        assert self._local is not None
        return self._local.process_ids

    @property
    def coordinator_process_id(self) -> int:
        """The coordinator's process."""
        assert self._coordinator is not None
        return self._coordinator.process_id

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the replica that the router chooses.

        Raises:
            EngineDeadError: No replica takes requests.
        """
        with self._lock:
            while not self._send(index := self._table.add(request), AddRequest(request)):
                self._table.abort(request.request_id)  # no way leads there; when it is heard of again, it takes requests again
                self._table.let_leave(index)

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

    def send(self, message: ToCore) -> None:
        """Send a message to all replicas."""
        with self._lock:
            if isinstance(message, SetTracing):
                self._is_tracing = message.on
            for index in self._table.open:
                if index == 0 or not isinstance(message, SetTracing):  # the steps of several replicas do not make one run
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
        if time.monotonic() >= self._next_check:  # however much there is to read
            self._next_check = time.monotonic() + _POLL_MS / 1000
            if gone := self._find_gone():
                return gone
        events = dict(self._poller.poll(_POLL_MS))
        if self._loads in events:
            self._take_published(self._loads.recv())
        if self._outputs not in events:
            return None
        try:
            message = decode_from_core(self._outputs.recv())
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.error("Dropped a message of a replica that cannot be decoded: %s", error)
            return None
        if not 0 <= message.engine_index < self._size:
            return None
        self._last_heard[message.engine_index] = time.monotonic()
        return message

    def _find_gone(self) -> CoreFailed | None:
        """A replica of this machine whose process has ended, or one elsewhere that is silent."""
        assert self._local is not None and self._coordinator is not None
        if not self._has_no_coordinator and (end := self._coordinator.poll()):
            self._has_no_coordinator = True
            with self._lock:
                self._table.stop_reports()
            logger.error("The coordinator of the replicas %s: routing goes by what is in flight, and no replica can join.", end)
        for ready in list(self._early.values()):
            self._take_in(ready)
        if ended := self._local.find_ended():
            return CoreFailed("", f"its process {ended[1]}", engine_index=ended[0])
        now = time.monotonic()
        for index in self._table.members:
            if now - self._last_heard[index] <= NOT_RESPONDING_SECONDS:
                continue
            if index not in self._local.processes:
                return CoreFailed("", f"nothing heard from it for {NOT_RESPONDING_SECONDS:.0f} seconds", engine_index=index)
            if self._table.state_of(index) == "ready":  # its process is stopped, or very busy
                logger.warning(
                    "Nothing heard from replica %d for %.0f seconds: it gets no requests.", index, NOT_RESPONDING_SECONDS
                )
                with self._lock:
                    self._table.let_leave(index)
        return None

    def _take_published(self, data: bytes) -> None:
        message = dp_messages.decode_published(data)
        if isinstance(message, Loads):
            with self._lock:
                self._table.update_loads(message.loads)
        else:
            logging.getLogger(message.logger).log(message.level, "%s", message.text)

    def _take(self, message: FromCore) -> bool:
        """Handle a message, and forward it if it concerns the engine. False if nobody wants messages any more."""
        index = message.engine_index
        if isinstance(message, CoreLog):
            if index == 0 or message.level >= logging.WARNING:
                text = message.text if index == 0 else f"Replica {index}: {message.text}"
                logging.getLogger(message.logger).log(message.level, "%s", text)
            return True
        if isinstance(message, Heartbeat):
            state = self._table.state_of(index)
            if state == "leaving":
                self._remind(index)
            if state != "gone" or index not in self._ready or index in self._left or index in self._early:
                return True
            message = self._ready[index]  # it was thought to be gone, and is not
        if isinstance(message, CoreLeaving):
            if message.has_left:
                return self._tell(self._note_left(index))
            self._let_leave(index)
            return True
        if isinstance(message, CoreReady):
            if self._table.state_of(index) != "gone":  # another process, after one whose end was not noticed
                self._tell(self._lose(CoreFailed("", "it was started again", engine_index=index)))
            self._take_in(message)
            if not self._table.open:
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

    def _take_in(self, ready: CoreReady) -> None:
        """A replica takes requests from now on; or soon, if it has not said hello yet on the socket that they are sent to."""
        assert self._local is not None
        index = ready.engine_index
        with self._lock:
            while self._requests.poll(0):
                self._said_hello.add(self._requests.recv_multipart()[0])
            if identity_of(index) not in self._said_hello:
                self._early[index] = ready
                return
            self._early.pop(index, None)
            self._ready[index] = ready
            self._left.discard(index)
            self._announced.discard(index)
            self._local.note_ready(index)
            self._table.take_in(index, ready.num_gpu_blocks)
            if self._is_tracing and index == 0:
                self._send(index, SetTracing(True))
        if self._thread is not None or index not in self._local.processes:
            logger.warning("Replica %d takes requests.", index)

    def _remind(self, index: int) -> None:
        """A replica that leaves is there. If it has said that it leaves, the farewell may be lost; if not, it was out of reach, and is back."""
        with self._lock:
            if index in self._announced:
                self._send(index, Farewell())
            else:
                self._table.reopen(index, self._ready[index].num_gpu_blocks)
                logger.warning("Replica %d is back and takes requests.", index)

    def _let_leave(self, index: int) -> None:
        with self._lock:
            self._announced.add(index)
            self._table.let_leave(index)
            self._send(index, Farewell())
            num_requests = len(self._table.requests_at(index))
        logger.warning("Replica %d leaves: it finishes what it has (requests: %d) and gets no more.", index, num_requests)

    def _note_left(self, index: int) -> CoreFailed:
        """A replica has finished what it had."""
        logger.warning("Replica %d has left.", index)
        self._left.add(index)
        return self._weigh(self._lose(CoreFailed("", "it left", engine_index=index)))

    def _give_up(self, failure: CoreFailed) -> CoreFailed:
        """A replica has died: its requests fail."""
        assert self._local is not None
        self._local.remove(failure.engine_index)
        logger.error("%s", replica_error(failure))
        self._lose(failure)
        self._local.start_another(failure.engine_index)
        return self._weigh(failure)

    def _lose(self, failure: CoreFailed) -> CoreFailed:
        """Forget a replica, and say which requests are lost with it."""
        index = failure.engine_index
        with self._lock:
            failure.request_ids = self._table.remove(index)
            self._send(index, AbortRequests(failure.request_ids))  # if it is there after all
        return failure

    def _weigh(self, failure: CoreFailed) -> CoreFailed:
        """What the end of a replica means for the engine: that of some requests, if there are other replicas, or of all."""
        assert self._local is not None
        index = failure.engine_index
        if not self._table.is_empty:
            return failure
        message = f"all replicas have. The last one was {index}: {failure.message}"
        may_come = bool(self._local.processes.keys() - self._left) or not self._config.parallel_config.is_on_one_machine
        return CoreFailed(failure.error_type, message, restarting=may_come, engine_index=index)

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
        if silent and min(silent) > NOT_RESPONDING_SECONDS:
            raise EngineDeadError(f"The replicas are not responding: nothing heard from them for {min(silent):.0f} seconds.")

    def let_go(self) -> None:
        """Tell the replicas to end, without waiting for it: called by the garbage collector, in any thread."""
        self._is_let_go = True
        self.send(Shutdown())
        self._stopped.set()

    def stop(self) -> None:
        """End all processes. Safe to call again, from any thread."""
        self._stopped.set()
        if self._local is not None:
            self.send(Shutdown())
            self._local.shutdown(told=self._table.open)
        if self._coordinator is not None:
            self._coordinator.shutdown()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._closed.wait(GRACE_SECONDS)
        with self._lock:
            self._sockets.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def replica_error(failure: CoreFailed) -> EngineDeadError:
    """What users are told when a replica is gone, and others are not."""
    cause = f"{failure.error_type}: {failure.message}" if failure.error_type else failure.message
    return EngineDeadError(f"Replica {failure.engine_index} of the model has ended: {cause.rstrip('.')}.")


class DPLBAsyncMPClient(MPClient):
    """For a frontend that is told of each message, in a thread of the client's.

    Messages are those of `AsyncMPClient`. A `CoreFailed` with `request_ids` is the end of one replica, and the others go on.

    Args:
        config: The engine's.
        restart: Start another replica when one dies.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, *, restart: bool = False) -> None:
        self.replicas = Replicas(config, restart)
        self._finalizer = weakref.finalize(self, self.replicas.let_go)
        self.num_gpu_blocks = self.replicas.num_gpu_blocks
        self.num_engines = config.parallel_config.data_parallel_size

    @property
    def process_id(self) -> int:
        """The process of the first replica."""
        return self.replicas.process_ids[0]

    @property
    def replica_states(self) -> dict[int, str]:
        """As for `AsyncLLMEngine`."""
        return self.replicas.states

    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method with each message."""
        self.replicas.start(WeakMethod(on_message))

    def send(self, message: ToCore) -> None:
        self.replicas.send(message)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.replicas.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.replicas.abort_requests(request_ids)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        self.replicas.stop_sequences(sequences)

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is responding."""
        self.replicas.check_health()

    def shutdown(self) -> None:
        self._finalizer.detach()
        self.replicas.stop()


class DPLBSyncMPClient(DPLBAsyncMPClient):
    """For a frontend that waits for each output.

    Args:
        config: The engine's.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self.start(self._put)

    def _put(self, message: FromCore) -> None:
        self._messages.put(message)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step of any replica.

        Raises:
            EngineDeadError: A replica has failed, or all were shut down.
        """
        while True:
            message = self._messages.get()
            if isinstance(message, EngineCoreOutputs):
                return message
            if isinstance(message, CoreFailed):
                self.shutdown()
                raise dead_error(message) if message.request_ids is None else replica_error(message)

    def shutdown(self) -> None:
        super().shutdown()
        self._messages.put(CoreFailed("", "it was shut down"))
