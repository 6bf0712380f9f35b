"""The checks of lesson 13 for a replica: three threads around a core."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import Mock

from minivllm.course.lessons.fake_replicas import (
    MOST_POLLS,
    Endless,
    FakeCore,
    Wire,
    make_request,
    random_options,
    some,
    unbroken,
    within,
)
from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    SchedulerStats,
    Shutdown,
    StoppedSequence,
    StopSequences,
    decode_from_core,
    encode,
)
from minivllm.engine.engine_core_loop import EngineCoreLoop

_GARBAGE = (b"", b"\xc1", b"not a message", encode(CoreReady(5)))
_INPUT = "the loop of `run_input`"
_OUTPUT = "the loop of `run_output`"


def describe(message: Any) -> str:
    """A message in a few words."""
    if isinstance(message, AddRequest):
        return f"AddRequest {message.request.request_id}"
    if isinstance(message, AbortRequests):
        return f"AbortRequests {', '.join(message.request_ids)}"
    if isinstance(message, StopSequences):
        return f"StopSequences {', '.join(f'{item.request_id}/{item.index}' for item in message.sequences)}"
    if isinstance(message, CoreFailed):
        return f"CoreFailed({message.error_type!r}, {message.message!r})"
    return "None" if message is None else type(message).__name__


def describe_all(messages: list[Any]) -> list[str]:
    """Messages to the client: each output, then what the message was. A refusal may be a message of its own or not."""
    said = []
    for message in messages:
        _check_sendable(message)
        if not isinstance(message, EngineCoreOutputs):
            said.append(describe(message))
            continue
        for output in message.outputs:
            tokens = ", ".join(f"{new.index}: {new.token_ids}" for new in output.sequences)
            said.append(f"{output.request_id} {'refused' if output.error else tokens}")
        said += ["report"] if message.timestamp < 0 else [f"step {message.timestamp:g}"] if message.timestamp else []
    return said


def _check_sendable(message: Any) -> None:
    try:
        encode(message)
    except Exception as error:
        said = f"{describe(message)} is in the output queue.\nExpected: a message that `encode` takes\nGot: {type(error).__name__}: {error}"
        fail(f"{said}\nLook at `refusal(message.request, str(error))` and `CoreFailed(type(error).__name__, str(error))`.")


def drain(items: queue.SimpleQueue) -> list[Any]:
    """All that is in a queue."""
    taken = []
    while not items.empty():
        taken.append(items.get())
    return taken


def check_wires(cls: Any) -> None:
    """Bytes become messages and messages bytes, in order; what is no message is dropped; the load is reported when it has changed."""
    for rng in rounds("input", 8):
        messages = [AddRequest(make_request(rng, f"r{i}")) for i in range(rng.randint(1, 4))]
        data, wire = [encode(message) for message in messages], Wire()
        garbage = [rng.choice(_GARBAGE) for _ in range(rng.randint(0, 2))]
        for item in garbage:
            data.insert(rng.randint(0, len(data)), item)
        for item in [*data, None]:
            wire.to_core.put(item)
        replica = wire.replica(cls, FakeCore())
        noise = f", bytes that are none ({', '.join(map(repr, garbage))})," if garbage else ""
        said = f"The socket brings {some(len(messages), 'message')}{noise} and closes: `receive` returns None."
        within(replica.run_input, said, f"{_INPUT}: it ends when `receive` returns None")
        got = [describe(item) for item in drain(replica.input_queue)]
        expected = [describe(item) for item in [*messages, Shutdown()]]
        look = f"{_INPUT}: each message by itself, and a Shutdown when the socket is closed"
        expect(said, "in the input queue", expected, got, look)
    for rng in rounds("output", 8):
        _check_output(cls, rng)
    _check_broken_wire(cls)


def _check_output(cls: Any, rng: Any) -> None:
    wire, names = Wire(), [rng.choice(("num_running", "num_waiting", "num_used_blocks")) for _ in range(rng.randint(1, 8))]
    replica = wire.replica(cls, FakeCore())
    stats = [SchedulerStats(**{name: rng.randint(0, 1)}, num_gpu_blocks=2, num_steps=i) for i, name in enumerate(names)]
    messages: list[Any] = [EngineCoreOutputs([], float(i), item) for i, item in enumerate(stats)]
    messages.insert(rng.randint(0, len(messages)), CoreReady(100))
    for message in [*messages, None]:
        replica.output_queue.put(message)
    loads = [item.load for item in stats]
    shown = ", ".join(map(str, map(tuple, loads)))
    said = f"In the output queue are a CoreReady, the outputs of {some(len(stats), 'step')}, and None. Waiting, running and cache usage in `stats.load`: {shown}."
    within(replica.run_output, said, f"{_OUTPUT}: it ends at None", lambda: replica.output_queue.put(None))
    kinds = [type(data).__name__ for data in wire.sent if not isinstance(data, bytes)]
    expect(said, "sent that is not bytes", [], kinds, f"{_OUTPUT}: `self.send(encode(message))`")
    got = [describe(decode_from_core(data)) for data in wire.sent]
    look = f"{_OUTPUT}: every message but None, encoded, in order"
    expect(said, "sent", [describe(message) for message in messages], got, look)
    changes = [load for i, load in enumerate(loads) if i == 0 or load != loads[i - 1]]
    look = "when `report` is called: with `stats.load` of each EngineCoreOutputs, if it differs from what was reported before"
    expect(said, "loads reported", changes, wire.loads, look)


def _check_broken_wire(cls: Any) -> None:
    def send(data: bytes) -> None:
        raise OSError("the socket is broken")

    wire = Wire()
    replica = wire.replica(cls, FakeCore(), send)
    replica.output_queue.put(CoreReady(100))
    said = "`send` raises an OSError: the socket is broken, and nobody hears this replica any more."
    with contextlib.suppress(OSError):
        within(replica.run_output, said, f"{_OUTPUT}: an error ends it", lambda: replica.output_queue.put(None))
    got = [describe(item) for item in drain(replica.input_queue)]
    look = "the `finally` of `run_output`: without it the core would compute for nobody, forever"
    expect(said, "in the input queue", ["Shutdown"], got, look)


# -- the busy loop ---------------------------------------------------------------------------------------------------

_CALLS = "`take_messages` and `handle`: all messages that are there come before the next step; it waits for one only at the beginning, if there is nothing to compute; if messages leave nothing to do, `self.core.report()` follows"
_ANSWERS = "what goes into the output queue: what `step` returns, refusals, a report if messages leave nothing to do, and at the end None"
_REFUSED = "`handle`: a RequestError of `add_request` becomes a refusal, and nothing else fails; any other error comes from your own code"
_ERROR = "the `except` and the `finally` of `run_core`: a CoreFailed with the name of the error's class and its text, then None; and `handle`, which refuses at a RequestError only"


class Script:
    """Messages for a core, in place of its input queue: each batch comes after a step, or as soon as there is nothing else to do."""

    def __init__(self, core: FakeCore, batches: list[tuple[int, list[Any]]]) -> None:
        self._core, self._batches, self._items = core, deque(batches), deque[Any]()
        self._num_misses = 0
        self._latest: Any = None
        """The message that was taken, unless it was seen since that there is no other one."""

    def qsize(self) -> int:
        """How many messages are there."""
        while self._batches and self._batches[0][0] <= self._core.num_steps:
            self._items += self._batches.popleft()[1]
        self._num_misses = 0 if self._items else self._num_misses + 1
        if self._num_misses > MOST_POLLS:
            raise Endless
        if not self._items and not isinstance(self._latest, Shutdown):
            self._latest = None
        return len(self._items)

    def empty(self) -> bool:
        """Whether none is there."""
        return not self.qsize()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As of a queue, but nobody waits: the next batch comes at once."""
        latest = self._latest
        if block and self.empty():
            if isinstance(latest, Shutdown):
                look = "`take_messages`: after a Shutdown it returns False at once, and `run_core` ends"
                raise Endless("an end after a Shutdown", "it waits for another message", look)
            if self._core.requests or latest is not None:
                self._core.calls.append("it waits for a message")
            self._items += self._batches.popleft()[1] if self._batches else [Shutdown()]
        if self.empty():
            raise queue.Empty
        self._latest = self._items.popleft()
        return self._latest

    def get_nowait(self) -> Any:
        """As of a queue."""
        return self.get(block=False)


class PackageLoop(EngineCoreLoop):
    """The package's loop around a `FakeCore`."""

    def __init__(self, core: Any, *functions: Any) -> None:
        core.executor, core.scheduler, core.stop_trace, core.trace, core.has_failed = Mock(), core, Mock(), None, False
        super().__init__(core)
        self.output_queue.get()

    def run_core(self) -> None:
        """Run it, and leave out that it aborts what is left."""
        self.run_busy_loop()
        self.core.calls.pop()


def run_script(cls: Any, batches: list[tuple[int, list[Any]]], **options: Any) -> tuple[list[str], list[str]]:
    """Run a loop. Returns what its core was told, and what came out."""
    core = FakeCore(**options)
    replica = Wire().replica(cls, core)
    replica.input_queue = Script(core, batches)
    unbroken(replica.run_core, f"Messages: {describe_script(batches)}.", _CALLS)
    return core.calls, describe_all(drain(replica.output_queue))


def describe_script(batches: list[tuple[int, list[Any]]]) -> str:
    """The messages in words."""
    said = [
        f"{', '.join(map(describe, messages))} {f'after step {number}' if number else 'at the start'}"
        for number, messages in batches
    ]
    return "; ".join(said) or "none"


def make_script(rng: Any) -> list[tuple[int, list[Any]]]:
    """Requests that come, and are aborted and stopped; one has the id of another, and one is too long."""
    requests = [make_request(rng, f"r{i}", **random_options(rng)) for i in range(rng.randint(2, 5))]
    requests.append(make_request(rng, rng.choice(requests).request_id))
    too_long = AddRequest(make_request(rng, "too_long", max_tokens=60))
    messages, number = [], 0
    for request in requests:
        number = rng.choice((number, number, number + 1, number + 4))
        messages.append((number, AddRequest(request)))
        if rng.random() < 0.5:
            stop = StopSequences([StoppedSequence(request.request_id, request.number, 0, "x")])
            messages.append((number + rng.randint(0, 2), rng.choice((AbortRequests([request.request_id]), stop))))
    messages.append((number + rng.choice((1, 30)), too_long))
    return [(at, [message for when, message in messages if when == at]) for at in sorted({when for when, _ in messages})]


def check_loop(cls: Any) -> None:
    """The busy loop does what the package's does, step by step; an error ends it with a word, and it never turns idly."""
    for rng in rounds("loop", 40):
        batches = make_script(rng)
        (calls, answers), (my_calls, my_answers) = run_script(PackageLoop, batches), run_script(cls, batches)
        said = f"Messages: {describe_script(batches)}. The core refuses what is too long, or has an id that is there already."
        failure = next((answer for answer in my_answers if answer.startswith("CoreFailed")), None)
        expect(said, "failure of the core", None, failure, _REFUSED)
        expect(said, "the core's calls", calls, my_calls, partial(_first_difference, calls, my_calls, _CALLS))
        look = partial(_first_difference, answers, my_answers, _ANSWERS)
        expect(said, "in the output queue", answers, my_answers, look)
    for error in (RuntimeError("the device is lost"), ValueError("no such block")):
        _check_failure(cls, error)
    batches = [(0, [AbortRequests(["r0"]), Shutdown(), AbortRequests(["r1"])])]
    calls, answers = run_script(cls, batches)
    said = f"Messages: {describe_script(batches)}."
    expect(said, "the core's calls", ["abort_requests r0"], calls, "`take_messages`: after a Shutdown it returns False at once")
    expect(said, "in the output queue", ["None"], answers, _ANSWERS)


def _first_difference(expected: list[str], got: list[str], look: str) -> str:
    pairs = zip_longest(expected, got, fillvalue="nothing")
    number, (due, came) = next((number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"number {number}, which is {came!r} in place of {due!r}: {look}"


def _check_failure(cls: Any, error: Exception) -> None:
    """The core fails in a step, or at a request."""

    def fail_at(number: int) -> None:
        if number == 2:
            raise error

    def fail_at_request(request: Any) -> None:
        raise error

    batches = [(0, [AddRequest(make_request(seeded("loop error"), "r0", max_tokens=9, n=1, ignore_eos=True))])]
    for place, options, count in (("step 2", {"at_step": fail_at}, 2), ("`add_request`", {"at_request": fail_at_request}, 0)):
        said = f"In {place} the core raises {error!r}."
        expected = [describe(CoreFailed(type(error).__name__, str(error))), "None"]
        try:
            _, answers = run_script(cls, batches, **options)
        except type(error) as raised:
            if raised is not error:
                raise
            said += f"\nExpected: in the output queue are {expected}, and `run_core` returns"
            fail(f"{said}\nGot: it comes out of `run_core`.\nLook at {_ERROR}.")
        expect(said, "in the output queue afterwards", expected, answers[count:], _ERROR)


# -- all three threads -----------------------------------------------------------------------------------------------
