"""The frontend's way to the engine core, wherever it runs.

    InprocClient    the core is called directly: `LLM`, notebooks
    AsyncMPClient   a process (or thread) of its own, and outputs that arrive by themselves
    SyncMPClient    the same, for a frontend that waits for each output

The client of several cores, and of one that is restarted when it dies, is in `minivllm/data_parallel/client.py`. Mirrors `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from minivllm.engine.core_handle import CoreHandle
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreLost,
    EngineCoreOutput,
    EngineCoreOutputs,
    ReplicaChanged,
    RequestsFailed,
    SchedulerStats,
    Shutdown,
    StoppedSequence,
    StopSequences,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest

logger = logging.getLogger(__name__)

OnMessage = Callable[[ToFrontend], None]

NOT_RESPONDING_SECONDS = 10.0
"""A core that is silent for longer is reported as not responding."""


@dataclass(frozen=True)
class ReplicaStatus:
    """What is known of a replica.

    Attributes:
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


class EngineCoreClient(ABC):
    """Talks to an engine core.

    Attributes:
        num_gpu_blocks: Blocks of the core's KV cache on the device.
        num_engines: How many replicas there are to be.
        has_replicas: Whether there may be several: they can be restarted one by one.
        client_index, client_count: Which of the frontends that use them this is, and how many there are.
    """

    num_gpu_blocks: int
    num_engines: int = 1
    has_replicas = False
    client_index, client_count = 0, 1

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> int:
        """Queue a request. Returns the rank of the replica that has it; 0 if there is only one core, or none yet."""

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
    """Calls an engine core in this process. Without requests, it has nothing in flight."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.num_gpu_blocks = core.num_gpu_blocks

    def add_request(self, request: EngineCoreRequest) -> int:
        self.core.add_request(request)
        return 0

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)
        self.core.finish_surplus_steps()

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        self.core.stop_sequences(sequences)
        self.core.finish_surplus_steps()

    def get_output(self) -> EngineCoreOutputs:
        """Run one step."""
        outputs = self.core.step()
        try:
            self.core.finish_surplus_steps()
        except BaseException:  # Ctrl-C
            self.core.report_again(outputs.outputs)
            raise
        return outputs

    def shutdown(self) -> None:
        self.core.shutdown()


class MPClient(EngineCoreClient):
    """Sends messages to an engine core in a process or thread of its own."""

    @abstractmethod
    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method with each message, in the client's thread, as long as its object is used."""

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Hand over a message, from any thread. It is lost if the core is gone."""

    def add_request(self, request: EngineCoreRequest) -> int:
        self.send(AddRequest(request))
        return 0

    def abort_requests(self, request_ids: list[str]) -> None:
        self.send(AbortRequests(request_ids))

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        if sequences:
            self.send(StopSequences(sequences))


class AsyncMPClient(MPClient):
    """For a frontend that is called with each message, in the client's thread.

    The messages are an `EngineCoreOutputs` after each step, a `ReplicaChanged` when the core dies, and a `CoreLost`, which is the last one.
    With replicas, there are more.
    """

    def __init__(self, core: CoreHandle) -> None:
        self._core = core
        self._finalizer = weakref.finalize(self, core.send, Shutdown())
        self._lost = threading.Event()
        self.num_gpu_blocks = core.ready.num_gpu_blocks

    def statuses(self) -> list[ReplicaStatus]:
        state = "gone" if self._lost.is_set() else "ready"
        return [ReplicaStatus(0, state, self._core.process_id, self.num_gpu_blocks, int(self._lost.is_set()))]

    def restart(self, rank: int) -> bool:
        return False

    def kill(self, rank: int) -> bool:
        return False

    def scale(self, size: int) -> None:
        raise ConfigError("This server has one engine and no replicas: start it with --data-parallel-size.")

    def drop_client(self, client_index: int) -> None:
        pass

    def start(self, on_message: OnMessage) -> None:
        method = WeakMethod(on_message)  # the thread keeps neither the frontend nor this client alive
        threading.Thread(target=_forward, args=(self._core, method, self._lost), name="minivllm outputs", daemon=True).start()

    def send(self, message: ToCore) -> None:
        self._core.send(message)

    def check_health(self) -> None:
        """Raise an EngineDeadError if the core is not responding."""
        heard = self._core.last_heard
        if heard is not None and (silent := time.monotonic() - heard) > NOT_RESPONDING_SECONDS:
            raise EngineDeadError(f"The engine is not responding: nothing heard from its process for {silent:.0f} seconds.")

    def check_takes_requests(self) -> None:
        """As `check_health`."""
        self.check_health()

    def shutdown(self) -> None:
        self._finalizer.detach()
        self._core.shutdown()


class SyncMPClient(EngineCoreClient):
    """For a frontend that waits for each output: queues the messages of another client."""

    def __init__(self, client: MPClient) -> None:
        self.client, self.num_gpu_blocks = client, client.num_gpu_blocks
        self._messages: queue.SimpleQueue[ToFrontend] = queue.SimpleQueue()
        client.start(self._put)

    def _put(self, message: ToFrontend) -> None:
        self._messages.put(message)

    def add_request(self, request: EngineCoreRequest) -> int:
        return self.client.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.client.abort_requests(request_ids)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        self.client.stop_sequences(sequences)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step, of any replica if there are several.

        Raises:
            EngineDeadError: No core is left, or it was shut down.
        """
        while True:
            message = self._messages.get()
            if isinstance(message, EngineCoreOutputs):
                return message
            if isinstance(message, RequestsFailed):
                now, error = time.perf_counter(), str(message.error)
                failed = [EngineCoreOutput(*request, [], True, RequestMetrics(now), error=error) for request in message.requests]
                return EngineCoreOutputs(failed, now, SchedulerStats())
            if isinstance(message, CoreLost):
                self.shutdown()
                raise message.error

    def shutdown(self) -> None:
        self.client.shutdown()
        self._messages.put(CoreLost("it was shut down"))


def _forward(core: CoreHandle, on_message: Callable[[], OnMessage | None], lost: threading.Event) -> None:
    """Forward a core's messages until it ends or the frontend is gone."""

    def tell(message: ToFrontend) -> bool:
        method = on_message()
        if method is not None:
            method(message)
        return method is not None

    while (message := core.receive()) is not None:
        if isinstance(message, CoreLost):
            if on_message() is not None:  # else it ends because the frontend is gone
                logger.error("%s", message.error)
            core.shutdown()
            lost.set()
            tell(ReplicaChanged(0, is_ready=False, has_died=True))
        if not tell(message) or isinstance(message, CoreLost):
            return
