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

from minivllm.engine.core_client import MPClient, OnMessage, dead_error
from minivllm.engine.core_messages import (
    CoreFailed,
    Die,
    EngineCoreOutput,
    EngineCoreOutputs,
    FromCore,
    Leave,
    SchedulerStats,
    StoppedSequence,
    ToCore,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.failover import Failover, give_up_reason
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.replica_launcher import FrontendPlace, ReplicaLauncher
from minivllm.engine.replicas import Replicas
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest


class DPLBAsyncMPClient(MPClient):
    """For a frontend that is told of each message, in a thread of the client's.

    Messages are those of `AsyncMPClient`. A `CoreFailed` that `is_last` no replica is left after; else the others go on.

    Args:
        config: The engine's.
        place, launcher: As for `Replicas`.

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
        return self.replicas.process_ids[0]

    @property
    def replica_states(self) -> dict[int, str]:
        """As for `AsyncLLMEngine`."""
        return self.replicas.states

    @property
    def replica_blocks(self) -> dict[int, int]:
        """As for `AsyncLLMEngine`."""
        return {index: ready.num_gpu_blocks for index, ready in self.replicas.ready.items()}

    @property
    def replica_process_ids(self) -> dict[int, int]:
        """As for `AsyncLLMEngine`."""
        return {index: ready.process_id for index, ready in self.replicas.ready.items()}

    @property
    def replica_deaths(self) -> dict[int, int]:
        """As for `AsyncLLMEngine`."""
        return self.replicas.num_deaths

    def drop_client(self, client_index: int) -> None:
        """As for `AsyncLLMEngine`."""
        self.replicas.drop_client(client_index)

    def restart_replica(self, rank: int) -> bool:
        """As for `AsyncLLMEngine`."""
        return self.replicas.send_to(rank, Leave(returns=True))

    def kill_replica(self, rank: int) -> bool:
        """As for `AsyncLLMEngine`."""
        return self.replicas.send_to(rank, Die())

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
        self._messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self._failover: Failover
        self.start(self._put)

    def _put(self, message: FromCore) -> None:
        self._messages.put(message)

    def use(self, output_processor: OutputProcessor) -> Failover:
        """Let requests go on elsewhere when their replica is lost. The engine submits its requests to what this returns."""
        self._failover = Failover(output_processor, self.add_request)
        return self._failover

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the result of a step of any replica.

        Raises:
            EngineDeadError: No replica is left, or all were shut down.
        """
        while True:
            message = self._messages.get()
            if isinstance(message, EngineCoreOutputs):
                if self._failover.note_tokens(output.request_id for output in message.outputs if output.sequences):
                    self._failover.resume()
                return message
            if isinstance(message, CoreFailed) and message.is_last:
                self.shutdown()
                raise dead_error(message)
            if isinstance(message, CoreFailed) and (given_up := self._lose_replica(message)):
                return EngineCoreOutputs(given_up, time.perf_counter(), SchedulerStats(), engine_index=message.engine_index)

    def _lose_replica(self, failure: CoreFailed) -> list[EngineCoreOutput]:
        """One of several replicas is gone: its requests go on at others. Returns the errors of those that are given up."""
        died = {"has_died": failure.has_died, "was_killed": failure.was_killed}
        given_up = [state.request for state in self._failover.lose(failure.request_ids or [], **died)]
        self._failover.resume()
        error, metrics = give_up_reason(failure), RequestMetrics(time.perf_counter())
        return [EngineCoreOutput(request.request_id, request.number, [], True, metrics, error=error) for request in given_up]

    def shutdown(self) -> None:
        super().shutdown()
        self._messages.put(CoreFailed("", "it was shut down"))
