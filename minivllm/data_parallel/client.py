"""The frontend's way to several replicas of the model, each an engine core in a process of its own.

    add_request ─► Router ─► ROUTER ─► the replica's DEALER
    on_message  ◄─ PULL ◄─ outputs of all replicas           loads ─► SUB ─► Router

    DPLBAsyncMPClient    for `AsyncLLMEngine`: messages arrive by themselves
    DPLBSyncMPClient     for `LLMEngine`: waits for each output

Mirrors `DPLBAsyncMPClient` in `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Collection
from weakref import WeakMethod

from minivllm.data_parallel.failover import Failover, give_up_error
from minivllm.data_parallel.launcher import FrontendPlace, ReplicaLauncher
from minivllm.data_parallel.replicas import Replicas
from minivllm.engine.core_client import MPClient, OnMessage
from minivllm.engine.core_messages import (
    CoreLost,
    CoreReady,
    EngineCoreOutput,
    EngineCoreOutputs,
    SchedulerStats,
    StoppedSequence,
    ToCore,
    ToFrontend,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.output_processor import OutputProcessor
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest


class DPLBAsyncMPClient(MPClient):
    """For a frontend that is told of each message, in a thread of the client's.

    Messages are those of `AsyncMPClient`. After a `CoreLost` that is not the last one, the other replicas go on.

    Args:
        config: The engine's.
        place, launcher: As for `Replicas`.

    Attributes:
        replicas: Which there are, and where their requests are.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: A replica cannot be started.
    """

    def __init__(self, config: EngineConfig, place: FrontendPlace, launcher: ReplicaLauncher | None = None) -> None:
        self.replicas = Replicas(config, place, launcher)
        self.client_index, self.client_count = place.client_index, place.client_count
        self._finalizer = weakref.finalize(self, self.replicas.let_go)
        self.num_gpu_blocks = self.replicas.num_gpu_blocks
        self.num_engines = config.parallel_config.data_parallel_size

    @property
    def process_id(self) -> int:
        """The process of the first replica."""
        return self.replicas.statuses()[0].process_id

    @property
    def takes_requests(self) -> bool:
        return self.replicas.num_gpu_blocks > 0

    def start(self, on_message: OnMessage) -> None:
        """From now on, call a method with each message."""
        self.replicas.start(WeakMethod(on_message))

    def send(self, message: ToCore) -> None:
        self.replicas.send(message)

    def add_request(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        return self.replicas.add_request(request, avoid)

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
        launcher = ReplicaLauncher(config)
        super().__init__(config, launcher.place, launcher)
        self._messages: queue.SimpleQueue[ToFrontend] = queue.SimpleQueue()
        self._failover: Failover
        self.start(self._put)

    def _put(self, message: ToFrontend) -> None:
        self._messages.put(message)

    def use(self, output_processor: OutputProcessor) -> Failover:
        """Let requests go on elsewhere when their replica is lost. The engine submits its requests to what this returns."""
        self._failover = Failover(output_processor, self)
        return self._failover

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step of any replica.

        Raises:
            EngineDeadError: No replica is left, or all were shut down.
        """
        while True:
            message = self._messages.get()
            if isinstance(message, EngineCoreOutputs):
                if self._failover.note_tokens(
                    output.request_id for output in message.outputs if output.sequences or output.finished
                ):
                    self._failover.resume()
                return message
            if isinstance(message, CoreReady):
                self._failover.resume()
            elif message.is_last:
                self.shutdown()
                raise message.error
            elif given_up := self._lose_replica(message):
                return EngineCoreOutputs(given_up, time.perf_counter(), SchedulerStats(), engine_index=message.engine_index)

    def _lose_replica(self, lost: CoreLost) -> list[EngineCoreOutput]:
        """One of several replicas is lost: its requests go on at others. Returns the errors of those that are given up."""
        given_up = self._failover.lose(lost.requests or [], has_died=lost.has_died, was_killed=lost.was_killed)
        self._failover.resume()
        error, metrics = str(give_up_error(lost)), RequestMetrics(time.perf_counter())
        return [
            EngineCoreOutput(state.request.request_id, state.request.number, [], True, metrics, error=error) for state in given_up
        ]

    def shutdown(self) -> None:
        super().shutdown()
        self._messages.put(CoreLost("it was shut down"))
