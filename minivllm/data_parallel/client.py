"""The frontend's way to several replicas of the model, each an engine core in a process of its own; or to one that is restarted when it dies.

    add_request ─► Router ─► ROUTER ─► the replica's DEALER
    on_message  ◄─ PULL ◄─ outputs of all replicas           loads ─► SUB ─► Router

The client keeps each request in flight with its output so far. When a replica is lost, the client sends its requests to another, and the
frontend notices nothing but a pause. Mirrors `DPLBAsyncMPClient` in `vllm/v1/engine/core_client.py`, which does not outlive a replica.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from weakref import WeakMethod

from minivllm.data_parallel.frontend_sockets import FrontendSockets
from minivllm.data_parallel.launcher import POLL_MS, FrontendPlace, OtherFrontends, ReplicaLauncher
from minivllm.data_parallel.liveness import MAX_REPLICAS
from minivllm.data_parallel.messages import Loads, Published, ReplicaDied
from minivllm.data_parallel.replica_group import ReplicaGroup
from minivllm.data_parallel.routing import LoadPublisher
from minivllm.engine.core_client import AsyncMPClient, MPClient, OnMessage, ReplicaStatus
from minivllm.engine.core_handle import CoreProcess
from minivllm.engine.core_messages import (
    CoreFailed,
    CoreLog,
    CoreLost,
    EngineCoreOutputs,
    FromCore,
    Shutdown,
    StoppedSequence,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.executor.processes import GRACE_SECONDS
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0
"""A thread that has not come round for this long was stopped."""


class DPLBAsyncMPClient(MPClient):
    """A `ReplicaGroup` with its sockets, and a thread that reads them and calls the frontend. Messages are those of `AsyncMPClient`.

    The thread holds this client, but the frontend only by a weak reference: when that is gone, the replicas end. `launcher`
    has started the processes, which belong to the first frontend; it is None in the others.

    Attributes:
        lock: Held while the group is used.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, place: FrontendPlace, launcher: ReplicaLauncher | None = None) -> None:
        self._launcher = launcher
        self.client_index, self.client_count = place.client_index, place.client_count
        self._local_ranks = config.parallel_config.local_ranks
        self._is_scalable = config.parallel_config.is_on_one_machine
        self.has_replicas = config.parallel_config.has_replicas
        self._on_cluster = config.parallel_config.data_parallel_backend == "ray"
        self.lock = threading.RLock()
        self._on_message: Callable[[], OnMessage | None] = lambda: None
        self._stopped, self._closed = threading.Event(), threading.Event()
        self._is_let_go = False
        self._thread: threading.Thread | None = None
        self._coordinator_heard, self._has_coordinator = time.monotonic(), True
        self._latest_check = time.monotonic()
        self._sockets = FrontendSockets(place, launcher)
        self.group = ReplicaGroup(config, place, self._sockets.send, is_first=launcher is not None)
        try:
            self._sockets.open(config.parallel_config)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _wait_until_ready(self) -> None:
        """Until the replicas that are started here are, which load the model at the same time; or one elsewhere, if there are none. None waits
        for replicas for which a cluster has no room yet."""
        if not self._local_ranks and self._launcher is not None:
            logger.warning("Waiting for a replica on another machine.")
        while not (self.group.table.open and self._find_awaited() <= set(self.group.table.open)):
            self._next_messages()
            if self._launcher is not None:
                self._launcher.check_others()

    def _find_awaited(self) -> set[int]:
        if self._on_cluster and self._launcher is None:
            return set()
        awaited = {rank for rank in self._local_ranks if rank < self.num_engines}
        return awaited if self._launcher is None else awaited - self._launcher.local.waiting

    def _check_start(self, rank: int, failure: CoreFailed) -> None:
        """A replica has failed. If it was being started, raise its error, or in other frontends end the process: the first one says why."""
        if self._thread is not None or rank not in self._local_ranks:
            return
        if self._launcher is None:
            raise SystemExit(1)
        raise failure.start_error(self.group.name(rank))

    # -- to the replicas -----------------------------------------------------------------------------------------

    @property
    def num_gpu_blocks(self) -> int:  # type: ignore[override]
        return self.group.num_gpu_blocks

    @property
    def num_engines(self) -> int:  # type: ignore[override]
        return self.group.liveness.size

    def send(self, message: ToCore) -> None:
        with self.lock:
            self.group.send(message)

    def add_request(self, request: EngineCoreRequest) -> int:
        with self.lock:
            return self.group.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        with self.lock:
            self.group.abort_requests(request_ids)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        with self.lock:
            self.group.stop_sequences(sequences)

    def statuses(self) -> list[ReplicaStatus]:
        with self.lock:
            return self.group.statuses()

    def restart(self, rank: int) -> bool:
        with self.lock:
            return self.group.restart(rank)

    def kill(self, rank: int) -> bool:
        with self.lock:
            return self.group.kill(rank)

    def scale(self, size: int) -> None:
        """Have so many replicas, as soon as the coordinator has told all API servers: further ones are started, and the last ones leave.

        Raises:
            ConfigError: Others start the replicas, or not so many can be.
        """
        if not self._is_scalable:
            raise ConfigError(
                "Replicas of this server are on machines that start their own: start or end `minivllm serve --headless` there."
            )
        if not 1 <= size <= MAX_REPLICAS:
            raise ConfigError(f"size is {size}, but must be from 1 to {MAX_REPLICAS}.")
        with self.lock:
            self._sockets.scale(size)

    def drop_client(self, client_index: int) -> None:
        with self.lock:
            self.group.drop_client(client_index)

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is there, or none is responding."""
        self.group.check_health()

    def check_takes_requests(self) -> None:
        """As `check_health`; but while a replica is being started, requests wait for it, up to a limit."""
        self.group.check_takes_requests()

    # -- the thread ----------------------------------------------------------------------------------------------

    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method of the frontend with each message, until the frontend is garbage."""
        self._on_message = WeakMethod(on_message)
        weakref.finalize(on_message.__self__, self._let_go)  # type: ignore[attr-defined]  # it is a method
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
                self.shutdown()

    def _tell(self, message: ToFrontend) -> bool:
        """Tell the frontend. False if it is gone."""
        on_message = self._on_message()
        if on_message is not None:
            on_message(message)
        return on_message is not None

    def _next_messages(self) -> list[ToFrontend]:
        """Wait for news, for a moment. Returns what the frontend is to be told."""
        told = self._check(now) if (now := time.monotonic()) >= self._latest_check + POLL_MS / 1000 else []
        published, heard = self._sockets.receive()
        if published is not None:
            told += self._take_published(published)
        if heard is not None:
            told += self._take_message(*heard)
        with self.lock:
            return told + self.group.retry_pending()

    def _take_message(self, incarnation: int, number: int, message: FromCore) -> list[ToFrontend]:
        rank = message.engine_index
        if isinstance(message, CoreLog) and self._launcher is not None and (rank == 0 or message.level >= logging.WARNING):
            # All of them say the same things when they start: once is enough.
            message.log("" if rank == 0 else f"Replica {rank}: ")
        if isinstance(message, CoreFailed):
            self._check_start(rank, message)
        with self.lock:
            told = [] if isinstance(message, EngineCoreOutputs) else self.group.connect(self._sockets.take_hellos())
            return told + self.group.hear(incarnation, number, message)

    def _take_published(self, message: Published) -> list[ToFrontend]:
        self._coordinator_heard = time.monotonic()
        if self._launcher is None:
            self._has_coordinator = True  # it was only silent
        if isinstance(message, ReplicaDied):
            return self._take_death(message)
        if isinstance(message, Loads):
            if message.size != self.num_engines:
                self.has_replicas = True
                if self._launcher is not None:
                    self._launcher.scale(message.size)
            with self.lock:
                self.group.table.update_loads(message.loads)
                return self.group.resize(message.size) if message.size != self.num_engines else []
        elif self._launcher is not None:  # once is enough
            message.log()
        return []

    def _take_death(self, died: ReplicaDied) -> list[ToFrontend]:
        self._check_start(died.engine_index, CoreFailed("", died.end))
        with self.lock:
            return self.group.note_death(died)

    def _check(self, now: float) -> list[ToFrontend]:
        """Look after the replicas, their processes, and the coordinator."""
        liveness, told = self.group.liveness, list[ToFrontend]()
        if now - self._latest_check > _PAUSE_SECONDS:  # this process was stopped for a while, and read no messages
            self._coordinator_heard = now
            with self.lock:
                liveness.excuse_silence(now)
        self._latest_check = now
        with self.lock:
            self._sockets.restore_files()
        self._check_coordinator(now)
        if self._launcher is not None:
            for rank, incarnation in liveness.find_hopeless(now):
                self._launcher.local.kill(rank, incarnation)
            for died in self._launcher.local.find_ended():
                told += self._take_death(died)
        with self.lock:
            return told + self.group.connect(self._sockets.take_hellos()) + self.group.find_silent()

    def _check_coordinator(self, now: float) -> None:
        """Do without the coordinator if it is gone, until it is back."""
        end = None
        if self._launcher is not None:
            end = self._launcher.tend_coordinator()
        elif self._has_coordinator and now - self._coordinator_heard > 3 * LoadPublisher.IDLE_SECONDS:
            end = "is not responding"
            self._has_coordinator = False
        if end is not None:
            with self.lock:
                self.group.table.stop_reports()
            logger.error("The coordinator of the replicas %s: until it is back, requests are routed by what is in flight.", end)

    # -- the end -------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Tell the replicas to end, without waiting for it: called by the garbage collector, in any thread."""
        self._is_let_go = True
        self._tell_to_end()
        self._stopped.set()

    def shutdown(self) -> None:
        """Close the sockets, and end the processes that belong to this frontend. Safe to call again, from any thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._closed.wait(GRACE_SECONDS)
        if self._launcher is not None:
            self._tell_to_end()
            self._launcher.stop(told=self.group.table.open)
        with self.lock:
            self._sockets.close()

    def _tell_to_end(self) -> None:
        if self._launcher is not None:
            with self.lock:
                self.group.send(Shutdown())


def make_async_mp_client(
    config: EngineConfig, num_threads: int | None = None, restart: bool = False, others: OtherFrontends | None = None
) -> AsyncMPClient | DPLBAsyncMPClient:
    """The client for a core in a process of its own, or for several. The arguments are those of `AsyncLLMEngine.from_engine_args`.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A core cannot be started.
    """
    if not (config.parallel_config.has_replicas or restart or others is not None):
        return AsyncMPClient(CoreProcess(config, num_threads))
    if num_threads is not None and config.parallel_config.has_replicas:
        raise ConfigError("num_threads is for one core: leave it out, and replicas divide the processors among them.")
    launcher = ReplicaLauncher(config, restart, others, num_threads)
    return DPLBAsyncMPClient(config, launcher.place, launcher)
