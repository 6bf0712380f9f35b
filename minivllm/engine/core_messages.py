"""What the two halves of `AsyncLLMEngine` say to each other: the frontend, which speaks with users, and the EngineCore, which steps.

The messages cross a socket as MessagePack. They are decoded strictly, each into its type: what is anything else is an error, and
nothing that is received can run code (as unpickling can). Mirrors the structs of `vllm/v1/engine/__init__.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.engine.trace import StepRecord
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class EngineStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine was doing after a step.

    Attributes:
        num_running, num_waiting, num_swapped: Sequences in each queue.
        num_used_blocks, num_gpu_blocks: Device blocks that are referenced, and all there are.
        num_steps, num_preemptions: Steps, and sequences that lost their blocks, since the engine began.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_used_blocks: int = 0
    num_gpu_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0

    @property
    def cache_usage(self) -> float:
        """Fraction of the device blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_gpu_blocks if self.num_gpu_blocks else 0.0


# -- to the core -----------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A request that has passed the door. `params` has those sampling parameters that differ from the defaults.

    `number` comes back with all that comes of it: an id may be used again while the last step of its former owner computes.
    """

    request_id: str
    number: int
    prompt_token_ids: list[int]
    params: dict[str, Any]
    arrival_time: float
    priority: int = 0


class AbortRequest(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Nobody waits for a request any longer."""

    request_id: str


class SetTracing(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Whether each `StepDone` is to have its `StepRecord`."""

    on: bool


class Shutdown(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Stop after the step that runs."""


ToCore = AddRequest | AbortRequest | SetTracing | Shutdown


# -- from the core ---------------------------------------------------------------------------------------------------


class CoreReady(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The model is loaded and the cache allocated."""

    num_gpu_blocks: int


class RequestDelta(msgspec.Struct, forbid_unknown_fields=True):
    """What is new of a request: a `RequestOutput` of kind DELTA without its prompt, which the frontend knows."""

    request_id: str
    number: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, number: int) -> RequestDelta:
        """The message for an output."""
        metrics, logprobs = output.metrics, output.prompt_logprobs
        return cls(output.request_id, number, output.outputs, output.finished, metrics, logprobs, output.error)


class StepDone(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What came of a step, or of messages that left nothing to do."""

    deltas: list[RequestDelta]
    stats: EngineStats
    record: StepRecord | None = None


class CoreFailed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The last message of a core that could not start, or could not go on. `error_type` is the name of an exception's class."""

    error_type: str
    message: str


class CoreLog(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Something for the frontend's log: a level and a logger's name, as `logging` has them, and the text."""

    level: int
    logger: str
    text: str


FromCore = CoreReady | StepDone | CoreFailed | CoreLog

_ENCODER = msgspec.msgpack.Encoder()
_TO_CORE = msgspec.msgpack.Decoder(ToCore)
_FROM_CORE = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """A message as MessagePack."""
    return _ENCODER.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """A message to the core; raises `msgspec.ValidationError` or `msgspec.DecodeError` for anything else."""
    return _TO_CORE.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    """A message from the core; raises `msgspec.ValidationError` or `msgspec.DecodeError` for anything else."""
    return _FROM_CORE.decode(data)
