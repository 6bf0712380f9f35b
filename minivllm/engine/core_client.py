"""The frontend's way to the engine core, wherever it runs.

    InprocClient    the core is called directly: `LLM`, notebooks
    SyncMPClient    a process of its own, and a frontend that waits for each output
    AsyncMPClient   a process (or thread) of its own, and outputs that arrive by themselves; a core that dies can be replaced

Mirrors `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakMethod

from minivllm.data_parallel.restart_policy import RestartPolicy
from minivllm.engine.core_handle import CoreHandle
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreLost,
    EngineCoreOutputs,
    Shutdown,
    StoppedSequence,
    StopSequences,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.errors import EngineDeadError
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

OnMessage = Callable[[ToFrontend], None]

NOT_RESPONDING_SECONDS = 10.0
"""A core that is silent for longer is reported as not responding."""


@dataclass(frozen=True)
class ReplicaStatus:
    """What is known of a replica.

    Attributes:
        rank: Which one.
        state: "ready", "draining" (it finishes what it has), "unreachable", "starting", "given up" (it died too often), or "gone".
        process_id: Its process, on its machine, or the one before it; 0 if there was none.
        num_gpu_blocks: Of its KV cache; 0 if there was none.
        num_deaths: How often its process has died.
    """

    rank: int
    state: str
    process_id: int = 0
    num_gpu_blocks: int = 0
    num_deaths: int = 0


class ReplicaControl(Protocol):
    """For those who run a server: what its replicas do, and how to end one."""

    def statuses(self) -> list[ReplicaStatus]:
        """What is known of each replica, by rank."""

    def restart(self, rank: int) -> bool:
        """Let a replica finish what it has, while others get the new requests, and start another in its place. False if it is not ready."""

    def kill(self, rank: int) -> bool:
        """Kill a replica's process, to see its requests go on elsewhere. False if it is gone."""

    def drop_client(self, client_index: int) -> None:
        """Another frontend that uses the same replicas has died: they drop its requests."""


class EngineCoreClient(ABC):
    """Talks to an engine core.

    Attributes:
        num_gpu_blocks: Blocks of the core's KV cache on the device.
        num_engines: How many replicas there are.
        client_index, client_count: Which of the frontends that use them this is, and how many there are.
    """

    num_gpu_blocks: int
    num_engines: int = 1
    client_index, client_count = 0, 1

    @property
    def takes_requests(self) -> bool:
        """Whether there is a core that takes requests, as far as is known."""
        return True

    @abstractmethod
    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        """Queue a request, at none of these replicas. Returns the rank of the one where it is; 0 if there is only one core.

        Raises:
            EngineDeadError: There is no core that takes it.
        """

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Finish requests and free their blocks. Unknown and finished ids are ignored."""

    @abstractmethod
    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        """Finish sequences in whose text a stop string was found."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the core. Safe to call again."""


class InprocClient(EngineCoreClient):
    """Calls an engine core in this process.

    Args:
        core: The engine core.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.num_gpu_blocks = core.num_gpu_blocks

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        self.core.add_request(request)
        return 0

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        self.core.stop_sequences(sequences)

    def get_output(self) -> EngineCoreOutputs:
        """Run one step."""
        return self.core.step()

    def shutdown(self) -> None:
        self.core.shutdown()


class MPClient(EngineCoreClient):
    """Sends messages to an engine core in a process or thread of its own."""

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Hand over a message, from any thread. It is lost if the core is gone."""

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        self.send(AddRequest(request))
        return 0

    def abort_requests(self, request_ids: list[str]) -> None:
        self.send(AbortRequests(request_ids))

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        if sequences:
            self.send(StopSequences(sequences))


class SyncMPClient(MPClient):
    """For a frontend that waits for each output.

    Args:
        core: A running core.
    """

    def __init__(self, core: CoreHandle) -> None:
        self._core = core
        self.num_gpu_blocks = core.ready.num_gpu_blocks

    def send(self, message: ToCore) -> None:
        self._core.send(message)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step.

        Raises:
            EngineDeadError: The core has failed or was shut down.
        """
        message = self._core.receive()
        if isinstance(message, EngineCoreOutputs):
            return message
        raise (message if isinstance(message, CoreLost) else CoreLost("it was shut down")).error

    def shutdown(self) -> None:
        self._core.shutdown()


class AsyncMPClient(MPClient):
    """For a frontend that is told of each message, in a thread of the client's.

    A message is an `EngineCoreOutputs`, a `CoreLost` (the last one, unless the core `may_return`), or a `CoreReady` after a restart.

    Args:
        start_core: Starts a core and returns it when it is ready.
        restart: Start another core when one dies.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: The first core cannot be started.
    """

    def __init__(self, start_core: Callable[[], CoreHandle], *, restart: bool = False) -> None:
        self._supervisor = CoreSupervisor(start_core, restart)
        self._finalizer = weakref.finalize(self, self._supervisor.let_go)  # its thread holds the supervisor, and not the client
        self.num_gpu_blocks = self._supervisor.core.ready.num_gpu_blocks
        self.replicas: ReplicaControl = _OneReplica(self._supervisor)

    @property
    def process_id(self) -> int:
        """The process that computes."""
        return self._supervisor.core.process_id

    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method with each message."""
        self._supervisor.start(WeakMethod(on_message))

    def send(self, message: ToCore) -> None:
        self._supervisor.core.send(message)

    @property
    def takes_requests(self) -> bool:
        return self._supervisor.is_ready

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        if avoid or not self._supervisor.is_ready:
            raise EngineDeadError("There is no engine that takes requests.")
        return super().add_request(request)

    def check_health(self) -> None:
        """Raise an EngineDeadError if the core is not responding."""
        heard = self._supervisor.core.last_heard
        if heard is not None and (silent := time.monotonic() - heard) > NOT_RESPONDING_SECONDS:
            raise EngineDeadError(f"The engine is not responding: nothing heard from its process for {silent:.0f} seconds.")

    def shutdown(self) -> None:
        self._finalizer.detach()
        self._supervisor.stop()


class _OneReplica:
    """The only core, as a `ReplicaControl`: there is no other that could take its requests."""

    def __init__(self, supervisor: CoreSupervisor) -> None:
        self._supervisor = supervisor

    def statuses(self) -> list[ReplicaStatus]:
        core = self._supervisor.core
        state = "ready" if self._supervisor.is_ready else "gone"
        return [ReplicaStatus(0, state, core.process_id, core.ready.num_gpu_blocks, self._supervisor.num_deaths)]

    def restart(self, rank: int) -> bool:
        return False

    def kill(self, rank: int) -> bool:
        return False

    def drop_client(self, client_index: int) -> None:
        pass


class CoreSupervisor:
    """Forwards a core's messages, and replaces the core when it dies.

    Args:
        start_core, restart: As for `AsyncMPClient`.
    """

    MAX_FAILED_STARTS = 3
    """Failed starts in a row before giving up; a core that dies soon counts as one."""

    def __init__(self, start_core: Callable[[], CoreHandle], restart: bool) -> None:
        self.core = start_core()
        self.is_ready = True
        """Whether the core takes requests, as far as is known."""
        self.num_deaths = 0
        self._start_core = start_core
        self._restart = restart
        self._stopped = threading.Event()
        self._on_message: Callable[[], OnMessage | None]

    def start(self, on_message: Callable[[], OnMessage | None]) -> None:
        """Begin to forward, for as long as the weak reference gives a method to forward to."""
        self._on_message = on_message
        threading.Thread(target=self._run, name="minivllm outputs", daemon=True).start()

    def stop(self) -> None:
        """End the core, and one that is being started as soon as it is there."""
        self._stopped.set()
        self.core.shutdown()

    def let_go(self) -> None:
        """Tell the core to end, without waiting for it: called by the garbage collector, in any thread."""
        self._stopped.set()
        self.core.send(Shutdown())

    def _run(self) -> None:
        policy, started = RestartPolicy(self.MAX_FAILED_STARTS), -float("inf")
        while (lost := self._forward()) is not None:
            self.is_ready = False
            self.num_deaths += 1
            logger.error("%s", lost.error)
            self.core.shutdown()
            lost.may_return = self._restart
            self._tell(lost)
            if not self._restart or not self._start_another(policy, time.monotonic() - started, lost):
                return
            started = time.monotonic()

    def _forward(self) -> CoreLost | None:
        """Forward messages until the core is lost. None if it was shut down, or nobody wants them any more."""
        while True:
            message = self.core.receive()
            if message is None or self._stopped.is_set():
                return None
            if isinstance(message, CoreLost):
                return message
            if not self._tell(message):
                return None

    def _tell(self, message: ToFrontend) -> bool:
        on_message = self._on_message()
        if on_message is not None:
            on_message(message)
        return on_message is not None

    def _start_another(self, policy: RestartPolicy, lived: float, lost: CoreLost) -> bool:
        """Start a core in place of a dead one. False after too many failed starts in a row, or if nobody wants it any more."""
        pause = policy.next_pause(lived)
        while pause is not None:
            if self._stopped.wait(pause):
                return False
            try:
                core = self._start_core()
            except Exception as error:  # many kinds: no memory, no file, no process
                if self._stopped.is_set():
                    return False
                pause = policy.next_pause(None)
                logger.error("Start %d of %d of another engine failed: %s", policy.num_short_lives, self.MAX_FAILED_STARTS, error)
                lost = CoreLost(f"starting another failed: {error}", may_return=True)
                self._tell(lost)
                continue
            self.core, self.is_ready = core, True
            if self._stopped.is_set():
                core.shutdown()
                return False
            logger.warning("Another engine has been started.")
            self._tell(core.ready)
            return True
        logger.error("%d starts of an engine in a row failed: giving up.", self.MAX_FAILED_STARTS)
        self._tell(CoreLost(lost.cause))
        return False
