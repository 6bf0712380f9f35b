"""The frontend's way to several replicas of the model, each an engine core in a process of its own; or to one that is restarted when it dies.

    add_request ─► Router ─► ROUTER ─► the replica's DEALER
    on_message  ◄─ PULL ◄─ outputs of all replicas           loads ─► SUB ─► Router

    DPLBAsyncMPClient    for `AsyncLLMEngine`: messages arrive by themselves
    DPLBSyncMPClient     for `LLMEngine`: waits for each output

The client keeps each request in flight with its output so far. When a replica is lost, the client sends its requests to another, and the
frontend notices nothing but a pause. Mirrors `DPLBAsyncMPClient` in `vllm/v1/engine/core_client.py`, which does not outlive a replica.
"""

from __future__ import annotations

import queue
import time
import weakref
from weakref import WeakMethod

from minivllm.data_parallel.launcher import FrontendPlace, OtherFrontends, ReplicaLauncher
from minivllm.data_parallel.replicas import Replicas
from minivllm.engine.core_client import AsyncMPClient, MPClient, OnMessage
from minivllm.engine.core_handle import CoreProcess
from minivllm.engine.core_messages import (
    CoreLost,
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestsFailed,
    SchedulerStats,
    StoppedSequence,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest


class DPLBAsyncMPClient(MPClient):
    """For a frontend that is called with each message, in the client's thread. Messages are those of `AsyncMPClient`.

    Args:
        config: The engine's.
        place, launcher: As for `Replicas`.

    Attributes:
        replicas: Which there are, and how to restart one.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, place: FrontendPlace, launcher: ReplicaLauncher | None = None) -> None:
        self.replicas = Replicas(config, place, launcher)
        self._lock, self._group = self.replicas.lock, self.replicas.group
        self.client_index, self.client_count = place.client_index, place.client_count
        self.num_engines = config.parallel_config.data_parallel_size
        self._finalizer = weakref.finalize(self, self.replicas.let_go)

    @property
    def num_gpu_blocks(self) -> int:  # type: ignore[override]
        return self._group.num_gpu_blocks

    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method with each message."""
        self.replicas.start(WeakMethod(on_message))

    def send(self, message: ToCore) -> None:
        with self._lock:
            self._group.send(message)

    def add_request(self, request: EngineCoreRequest) -> int:
        with self._lock:
            return self._group.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        with self._lock:
            self._group.abort_requests(request_ids)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        with self._lock:
            self._group.stop_sequences(sequences)

    def check_health(self) -> None:
        """Raise an EngineDeadError if no replica is there, or none is responding."""
        self._group.check_health()

    def check_takes_requests(self) -> None:
        """As `check_health`; but while a replica is being started, requests wait for it, up to a limit."""
        self._group.check_takes_requests()

    def shutdown(self) -> None:
        self._finalizer.detach()
        self.replicas.stop()


class DPLBSyncMPClient(DPLBAsyncMPClient):
    """For a frontend that waits for each output.

    Args:
        config: The engine's.
    """

    def __init__(self, config: EngineConfig) -> None:
        launcher = ReplicaLauncher(config)
        super().__init__(config, launcher.place, launcher)
        self._messages: queue.SimpleQueue[ToFrontend] = queue.SimpleQueue()
        self.start(self._put)

    def _put(self, message: ToFrontend) -> None:
        self._messages.put(message)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step of any replica.

        Raises:
            EngineDeadError: No replica is left, or all were shut down.
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
        super().shutdown()
        self._messages.put(CoreLost("it was shut down"))


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
