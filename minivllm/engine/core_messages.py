"""What the frontend and the engine core say to each other, in one process or two.

Across a process line the messages are MessagePack, decoded strictly, each into its type: anything else is an error, and nothing received
can run code (as unpickling can). Mirrors the structs of `vllm/v1/engine/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from minivllm.engine.trace import StepRecord
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError
from minivllm.executor.processes import LogMessage, Message, plain_number
from minivllm.outputs import Logprob, RequestMetrics
from minivllm.request import EngineCoreRequest, Request


class ReplicaLoad(NamedTuple):
    """How busy a replica is: sequences, and the fraction of its blocks in use, 0 to 1."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of the scheduler after a step.

    Attributes:
        num_running, num_waiting, num_swapped: Sequences in each queue.
        num_used_blocks, num_gpu_blocks: Device blocks in use, and in all.
        num_steps, num_preemptions, num_generated_tokens: Since the engine core started.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_used_blocks: int = 0
    num_gpu_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0

    @property
    def cache_usage(self) -> float:
        """Fraction of the device blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_gpu_blocks if self.num_gpu_blocks else 0.0

    @classmethod
    def sum(cls, stats: Iterable[SchedulerStats]) -> SchedulerStats:
        """The state of several replicas together."""
        return cls(*map(sum, zip(*map(msgspec.structs.astuple, stats), strict=True)))

    def when_idle(self) -> SchedulerStats:
        """The same counts, with nothing queued and no block in use."""
        return msgspec.structs.replace(self, num_running=0, num_waiting=0, num_swapped=0, num_used_blocks=0)

    @property
    def load(self) -> ReplicaLoad:
        """How busy the core is, for a router."""
        return ReplicaLoad(self.num_waiting + self.num_swapped, self.num_running, self.cache_usage)


# -- to the core -----------------------------------------------------------------------------------------------------


class AddRequest(Message):
    """Queue a request, of which a replica that had it may have died."""

    request: EngineCoreRequest
    is_suspect: bool = False


class AbortRequests(Message):
    """Nobody waits for these requests any more."""

    request_ids: list[str]


class StoppedSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sequence whose text contains a stop string, which only the frontend can see."""

    request_id: str
    number: int
    index: int
    stop_reason: str


class StopSequences(Message):
    """Finish these sequences; the other sequences of their requests go on."""

    sequences: list[StoppedSequence]


class SetTracing(Message):
    """Whether each `EngineCoreOutputs` to this API server is to carry its `StepRecord`. If so, the next record describes all requests."""

    on: bool
    client_index: int = 0


class Drain(Message):
    """To a replica: take no new requests, finish what there is, and end; if it `returns`, another is started in its place."""

    returns: bool = False


class KillReplica(Message):
    """To a replica: kill yourself, to demonstrate failover."""


class AbortClientRequests(Message):
    """To a replica: abort all requests of this API server, which move to other replicas, and say so in a `RequestsAborted`."""

    client_index: int
    number: int = 0


class DeathsExplained(Message):
    """To a replica: its process, or one before it, has died because of a request, which was given up. So the replica is not broken."""


class DropClient(Message):
    """An API server has died: drop its requests."""

    client_index: int


class ClientDrained(Message):
    """To a replica that leaves: this API server sends it no more requests."""

    client_index: int = 0


class Shutdown(Message):
    """Stop after the current step."""


ToCore = (
    AddRequest
    | AbortRequests
    | StopSequences
    | SetTracing
    | Drain
    | KillReplica
    | AbortClientRequests
    | DeathsExplained
    | DropClient
    | ClientDrained
    | Shutdown
)


# -- from the core; `engine_index` is the rank of the replica ---------------------------------------------------------


class CoreReady(Message):
    """The model is loaded and the KV cache is allocated."""

    num_gpu_blocks: int
    engine_index: int = 0
    process_id: int = 0


class NewTokens(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What a step added to one sequence, and whether it finished."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class EngineCoreOutput(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What a step added to one request.

    Attributes:
        sequences: Those with new tokens, or that finished.
        finished: Whether all of the request's sequences have finished.
        prompt_logprobs: The ones that this step computed, by position in the prompt.
        error: Why the request failed.
        client_index: The API server that sent it.
    """

    request_id: str
    number: int
    sequences: list[NewTokens]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    error: str | None = None
    client_index: int = 0


class EngineCoreOutputs(Message):
    """The result of a step, or of messages that left nothing to do.

    Attributes:
        outputs: By request, in the order of the batch.
        timestamp: When the model had computed, in seconds of the core's clock.
        record: The step's trace, if it is being watched.
    """

    outputs: list[EngineCoreOutput]
    timestamp: float
    stats: SchedulerStats
    record: StepRecord | None = None
    engine_index: int = 0


class CoreFailed(Message):
    """The core could not start, or cannot continue: its last message. `error_type` names an exception's class, or is "". `was_killed` says
    whether the reason is that a worker was killed by SIGKILL, or stopped, so perhaps from outside."""

    error_type: str
    message: str
    engine_index: int = 0
    was_killed: bool = False

    @property
    def cause(self) -> str:
        """Why, in words."""
        return f"{self.error_type}: {self.message}" if self.error_type else self.message

    def start_error(self, name: str) -> Exception:
        """What to raise if the core, which users know by this name, could not start."""
        if kind := {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}.get(self.error_type):
            return kind(self.message)
        return EngineDeadError(f"{name} could not start: {self.cause}")


class CoreDraining(Message):
    """A replica takes no new requests, finishes those it has, and ends. It ignores what is sent after the `ClientDrained`.

    Attributes:
        is_drained: Whether it has finished, and ends now.
        returns: Whether another will be started in its place.
    """

    engine_index: int = 0
    is_drained: bool = False
    returns: bool = False


class RequestsAborted(Message):
    """A replica has done what an `AbortClientRequests` with this number asked it to."""

    client_index: int
    number: int
    engine_index: int = 0


class CoreLog(LogMessage):
    """A log record for the frontend's log."""

    engine_index: int = 0


class Heartbeat(Message):
    """The core's process is alive. A replica's also repeats its `CoreReady`, should that be lost, and says whether it takes no new requests."""

    engine_index: int = 0
    num_gpu_blocks: int = 0
    process_id: int = 0
    is_draining: bool = False


FromCore = CoreReady | EngineCoreOutputs | RequestsAborted | CoreFailed | CoreDraining | CoreLog | Heartbeat


# -- from a client to its frontend -----------------------------------------------------------------------------------


@dataclass
class ReplicaChanged:
    """A core takes requests from now on, or is lost. That is for metrics: the client moves requests by itself.

    Attributes:
        num_gpu_blocks: Of its KV cache, if it is ready.
        has_died: If it is lost: whether its process has died. If not, it has drained, or is out of reach.
    """

    engine_index: int
    is_ready: bool
    num_gpu_blocks: int = 0
    has_died: bool = False


@dataclass
class RequestsResumed:
    """Requests whose replica was lost go on at another: its rank, and how many they are."""

    engine_index: int
    count: int


@dataclass
class RequestsFailed:
    """Requests, by id and number, that no replica will finish. `engine_index` is the replica that had them last, if that is why."""

    requests: list[tuple[str, int]]
    error: EngineDeadError
    engine_index: int | None = None


@dataclass
class CoreLost:
    """The core is gone for good, or the last of several: the last message."""

    cause: str

    @property
    def error(self) -> EngineDeadError:
        """What users are told."""
        return EngineDeadError(f"The engine has ended: {self.cause.rstrip('.')}.")


ToFrontend = EngineCoreOutputs | ReplicaChanged | RequestsResumed | RequestsFailed | CoreLost


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain_number)


def encode(message: ToCore | FromCore) -> bytes:
    """A message as MessagePack."""
    return _ENCODER.encode(message)


# Each raises a `msgspec.DecodeError` for anything else.
decode_to_core: Callable[[bytes], ToCore] = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core: Callable[[bytes], FromCore] = msgspec.msgpack.Decoder(FromCore).decode


def make_output(
    request: Request, sequences: list[NewTokens], finished: bool = False, error: str | None = None
) -> EngineCoreOutput:
    """What to tell the frontend about a request."""
    data, metrics = request.data, msgspec.structs.replace(request.metrics)
    return EngineCoreOutput(data.request_id, data.number, sequences, finished, metrics, None, error, data.client_index)
