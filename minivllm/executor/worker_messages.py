"""The messages between an executor and its workers in other processes: MessagePack, strictly decoded into types.

A request is sent once and then named by a number, so that a step is small however long its prompts are; the executor's `RequestLedger`
mirrors the workers' tables of requests. vLLM has `NewRequestData` and `CachedRequestData` for that (`vllm/v1/core/sched/output.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import astuple

from minivllm.distributed.meeting import Meeting
from minivllm.executor.processes import LogMessage, Message, plain_number
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, Masks, RankTiming, SequenceData, SequenceOutput, SequencePart


class WorkerSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker is told first.

    Attributes:
        configs: Pickled: the configs of the model, the cache, the scheduler and the worker, and the parallel config.
        group_memory, pipeline_memory: As for `join_groups`.
        meeting: Where the ranks meet.
    """

    configs: bytes
    rank: int
    world_size: int
    group_memory: int
    pipeline_memory: int
    meeting: Meeting
    log_level: int


class WorkerProcessSetup(WorkerSetup, kw_only=True):
    """For a worker in a process that inherits file descriptors: a line of JSON on its standard input.

    Attributes:
        parent: The executor's process.
        inbox: Memory and waiting end of the queue that all workers read.
        outbox: Memory and ringing end of this worker's own queue.
    """

    parent: int
    inbox: tuple[int, int]
    outbox: tuple[int, int]


# -- to the workers --------------------------------------------------------------------------------------------------


class StepSequence(SequencePart[int], array_like=True, forbid_unknown_fields=True):
    """A `SequenceData` whose request is a number."""


class Step(Message):
    """An `ExecuteModelRequest`.

    Attributes:
        number: Identifies the message; the answer repeats it.
        new_requests: New requests, by the numbers that stand for them from now on.
        forgotten: Numbers that are no longer used.
        timed: Whether ranks answer with their timing.
        masks_follow: Whether the step needs a `StepMasks`.
    """

    number: int
    new_requests: dict[int, EngineCoreRequest]
    forgotten: list[int]
    timed: bool
    masks_follow: bool
    sequences: list[StepSequence]
    blocks_to_swap_out: list[tuple[int, int]]
    blocks_to_swap_in: list[tuple[int, int]]
    blocks_to_copy: list[tuple[int, int]]


class StepMasks(Message):
    """The masks of the step with this number, which comes before. It has no answer of its own."""

    number: int
    masks: Masks


class Call(Message):
    """Call a method of the worker with plain values."""

    number: int
    method: str
    arguments: list[Any]


Question = Step | Call
"""What every rank answers, in the order in which they were sent."""
ToWorker = Question | StepMasks


class Kind(msgspec.Struct):
    """The kind of a message to a worker, and its number, even if something else in it is wrong."""

    type: str
    number: int


# -- from a worker ---------------------------------------------------------------------------------------------------


class StepResult(Message):
    """What the rank that samples has sampled; others answer without outputs. With its timing after a timed step."""

    number: int
    outputs: list[SequenceOutput]
    timing: RankTiming | None = None


class CallResult(Message):
    """What a method returned, as plain values."""

    number: int
    value: Any


class Failed(Message):
    """A step or a call raised an error."""

    number: int
    error_type: str
    message: str


class WorkerLog(LogMessage):
    """A log record of a worker, while it was busy with the message of this number."""

    number: int


Answer = StepResult | CallResult | Failed
FromWorker = Answer | WorkerLog

encode = msgspec.msgpack.Encoder(enc_hook=plain_number).encode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_kind: Callable[[bytes], Kind] = msgspec.msgpack.Decoder(Kind).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode


# -- requests by number ----------------------------------------------------------------------------------------------


class RequestLedger:
    """The requests that the workers know: the `capacity` most recently used. Others are sent again when needed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[int, tuple[int, EngineCoreRequest]] = OrderedDict()
        """`id()` of a request to its number and itself; kept alive so that the id stays unique."""
        self._last_number = 0

    def to_step(self, number: int, request: ExecuteModelRequest, timed: bool = False, masks_follow: bool = False) -> Step:
        """The message for a step."""
        new_requests: dict[int, EngineCoreRequest] = {}
        sequences = []
        for seq in request.sequences:
            key = id(seq.request)
            if key not in self._known:
                self._last_number += 1
                self._known[key] = self._last_number, seq.request
                new_requests[self._last_number] = seq.request
            self._known.move_to_end(key)
            sequences.append(StepSequence(self._known[key][0], *astuple(seq)[1:]))
        forgotten = []
        while len(self._known) > max(self._capacity, len(sequences)):
            forgotten.append(self._known.popitem(last=False)[1][0])
        return Step(
            number, new_requests, forgotten, timed, masks_follow, sequences,
            request.blocks_to_swap_out, request.blocks_to_swap_in, request.blocks_to_copy,
        )  # fmt: skip


def to_request(step: Step, known: dict[int, EngineCoreRequest]) -> ExecuteModelRequest:
    """The inverse of `RequestLedger.to_step`. Updates `known`, the worker's table of requests."""
    known.update(step.new_requests)
    for number in step.forgotten:
        known.pop(number, None)
    sequences = [SequenceData(known[seq.request], *astuple(seq)[1:]) for seq in step.sequences]
    return ExecuteModelRequest(sequences, step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy)
