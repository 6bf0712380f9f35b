"""Cores, wires and clusters for the checks of lesson 13: no model, no sockets, no processes, and nothing that can hang."""

from __future__ import annotations

import queue
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec

from minivllm.course.lessons.in_flight import TextStream
from minivllm.course.lessons.lesson_08.situations import END, VOCAB_SIZE, Letters
from minivllm.course.observations import fail
from minivllm.engine.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    NewTokens,
    ReplicaLoad,
    SchedulerStats,
    StoppedSequence,
    decode_to_core,
    encode,
)
from minivllm.errors import EngineDeadError, RequestError
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest, Resumption
from minivllm.sampling_params import SamplingParams

PATIENCE = 5.0
"""Seconds after which a thread hangs."""
MOST_POLLS = 200
"""How often a loop may ask for something to do in vain."""


class Endless(BaseException):
    """A loop goes round and round and does nothing: it is broken off. Its arguments are what was expected, what came, and where to look, if known."""


def some(count: int, what: str) -> str:
    """How many of something, in words: 1 step, 2 steps."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def token_at(request: EngineCoreRequest, index: int, output: list[int]) -> int:
    """The token that follows: it depends on the prompt, the seed, the continuation, the position, and the token before."""
    last = output[-1] if output else request.prompt_token_ids[-1]
    said = f"{request.prompt_token_ids} {request.seed} {index} {len(output)} {last}"
    number = zlib.crc32(said.encode())
    return END if number % 31 == 0 else 1 + number // 31 % (VOCAB_SIZE - 1)


class FakeCore:
    """An engine core without a model: each step gives each request a token.

    Attributes:
        requests: Those that it has, and the output so far of their unfinished continuations.
        calls: What it was told, in words.
        at_step: Called at the end of a step, with its number from 1 on: for messages that come in the meantime.
        at_request: Called with each request before it is taken.
    """

    num_gpu_blocks = 100
    max_model_len = 50

    def __init__(
        self,
        at_step: Callable[[int], None] = lambda number: None,
        at_request: Callable[[EngineCoreRequest], None] = lambda request: None,
    ) -> None:
        self.at_step, self.at_request = at_step, at_request
        self.requests: dict[str, tuple[EngineCoreRequest, dict[int, list[int]], RequestMetrics]] = {}
        self.calls: list[str] = []
        self.num_steps = self._num_polls = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request, perhaps one that another core has begun."""
        if request.request_id in self.requests:
            raise RequestError(f"There is already a request {request.request_id!r}: choose another id.")
        if request.max_num_tokens > self.max_model_len:
            raise RequestError(f"The request needs {request.max_num_tokens} tokens, and the model takes {self.max_model_len}.")
        self.at_request(request)
        self.calls.append(f"add_request {request.request_id}")
        output: dict[int, list[int]] = {index: [] for index in range(request.sampling_params.n)}
        resumption = request.resumption or Resumption(output, RequestMetrics(request.arrival_time))
        output = {index: list(tokens) for index, tokens in resumption.output_token_ids.items()}
        self.requests[request.request_id] = request, output, resumption.metrics

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests."""
        self.calls.append(f"abort_requests {', '.join(request_ids)}")
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def stop_sequences(self, sequences: list[StoppedSequence]) -> None:
        """Drop continuations."""
        self.calls.append(f"stop_sequences {', '.join(f'{item.request_id}/{item.index}' for item in sequences)}")
        for stopped in sequences:
            request, output, _ = self.requests.get(stopped.request_id, (None, {}, None))
            if request is not None and request.number == stopped.number and output.pop(stopped.index, None) and not output:
                del self.requests[stopped.request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to do. Raises an `Endless` if it is asked again and again, and nothing happens."""
        self._num_polls += 1
        if self._num_polls > MOST_POLLS:
            raise Endless
        return bool(self.requests)

    def step(self) -> EngineCoreOutputs:
        """A token for each continuation of each request."""
        self.num_steps, self._num_polls = self.num_steps + 1, 0
        self.calls.append("step")
        outputs = [self._advance(request_id) for request_id in list(self.requests)]
        told = EngineCoreOutputs(outputs, float(self.num_steps), self._stats())
        self.at_step(self.num_steps)
        return told

    def report(self) -> EngineCoreOutputs:
        """The state, and no outputs."""
        self.calls.append("report")
        return EngineCoreOutputs([], -1.0, self._stats())

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.requests), num_gpu_blocks=self.num_gpu_blocks, num_steps=self.num_steps)

    def _advance(self, request_id: str) -> EngineCoreOutput:
        request, output, metrics = self.requests[request_id]
        metrics = metrics.copy()
        metrics.first_token_time = metrics.first_token_time or float(self.num_steps)
        sequences = []
        for index, tokens in list(output.items()):
            tokens.append(token_at(request, index, tokens))
            reason = "stop" if tokens[-1] in request.stop_reasons else None
            if reason is None and len(request.prompt_token_ids) + len(tokens) >= request.max_num_tokens:
                reason = "length"
            sequences.append(NewTokens(index, tokens[-1:], finish_reason=reason))
            if reason is not None:
                del output[index]
        self.requests[request_id] = request, output, metrics
        if not output:
            del self.requests[request_id]
        return EngineCoreOutput(request_id, request.number, sequences, not output, metrics)


def make_request(rng: random.Random, name: str, **options: Any) -> EngineCoreRequest:
    """A request for a `FakeCore`; `options` are sampling parameters."""
    prompt = [rng.randrange(1, 27) for _ in range(rng.randint(1, 12))]
    params = SamplingParams(temperature=1.0, **{"max_tokens": rng.randint(1, 14), **options})
    most = len(prompt) + (params.max_tokens or 0)
    return EngineCoreRequest(name, prompt, params, most, (END,), seed=rng.randrange(10**6), arrival_time=1.0)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters: several continuations, and stop strings of one to three letters, which take as many tokens."""
    stops = ["".join(rng.choices("aeinst ", k=rng.randint(1, 2))) for _ in range(rng.choice((0, 0, 2, 12)))]
    return {"n": rng.choice((1, 1, 2, 3)), "stop": stops or None, "max_tokens": rng.randint(1, 14)}


def undisturbed(request: EngineCoreRequest) -> dict[int, tuple[str, str]]:
    """The text of each continuation if nothing happens, and why it ends."""
    streams = {index: undisturbed_stream(request, index) for index in range(request.sampling_params.n)}
    return {index: (stream.text, reason if stream.stop is None else "stop") for index, (stream, reason) in streams.items()}


def undisturbed_stream(request: EngineCoreRequest, index: int) -> tuple[TextStream, str]:
    """One continuation if nothing happens, and why its replica ends it; "" if only the client knows, by a stop string."""
    stream, tokens, reason = TextStream(Letters(), request), [], ""  # type: ignore[var-annotated]
    while not reason and stream.stop is None:
        tokens.append(token_at(request, index, tokens))
        if tokens[-1] in request.stop_reasons:
            reason = "stop"
        elif len(tokens) == request.sampling_params.max_tokens:
            reason = "length"
        stream.add(tokens[-1:], bool(reason))
    return stream, reason


# -- threads ---------------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """What a replica has instead of sockets: bytes to receive, the bytes that it has sent, and the loads that it has reported."""

    to_core: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    sent: list[bytes] = field(default_factory=list)
    loads: list[ReplicaLoad] = field(default_factory=list)

    def replica(self, cls: Any, core: Any, send: Callable[[bytes], None] | None = None) -> Any:
        """A learner's replica on this wire."""
        return cls(core, self.to_core.get, send or self.sent.append, self.loads.append)


def unbroken(run: Callable[[], Any], said: str, look: str) -> None:
    """Call it; if it goes round and round, say so."""
    try:
        run()
    except Endless as error:
        again = "it waits until there is something to do", "it asks again and again, instead of waiting (`get(block=True)`)", look
        expected, got, look = error.args or again
        fail(f"{said}\nExpected: {expected}\nGot: {got}.\nLook at {look}.")


def within(run: Callable[[], Any], said: str, look: str, release: Callable[[], Any] = lambda: None) -> None:
    """Call it in a thread of its own, in which it must end soon.

    Args:
        said: The situation, in whole sentences.
        look: Continues "Look at", if it does not end.
        release: Lets the thread end if it hangs.

    Raises:
        Exception: The call raised it.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    with patch.object(threading, "excepthook", lambda hook: None):  # of the learner's own threads
        thread.start()
        thread.join(PATIENCE)
    if thread.is_alive():
        release()
        fail(f"{said}\nExpected: it ends\nGot: after {PATIENCE:g} seconds it still waits.\nLook at {look}.")
    for error in errors:
        unbroken(partial(_throw, error), said, look)


def _throw(error: BaseException) -> None:
    raise error


# -- a cluster -------------------------------------------------------------------------------------------------------


class FewestFirst:
    """A router that is right: the replica with the fewest requests of this client, and of these the first."""

    def __init__(self) -> None:
        self.in_flight: dict[int, int] = {}
        self.open_replicas: set[int] = set()
        self.asked: list[list[int]] = []

    def open(self, replica: int, cache_tokens: int = 0) -> None:
        """A replica takes requests; it has none."""
        self.in_flight[replica] = 0
        self.open_replicas.add(replica)

    def close(self, replica: int) -> None:
        """A replica takes no more requests."""
        self.open_replicas.discard(replica)

    def route(self, prompt_token_ids: list[int], avoid: Any = ()) -> int:
        """Choose one, and count the request there."""
        self.asked.append(list(prompt_token_ids))
        replicas = sorted(self.open_replicas - set(avoid))
        if not replicas:
            raise EngineDeadError("There is no replica of the model that takes requests.")
        replica = min(replicas, key=self.in_flight.__getitem__)
        self.in_flight[replica] += 1
        return replica

    def finish(self, replica: int) -> None:
        """A request has ended."""
        self.in_flight[replica] -= 1


class Cluster:
    """Replicas in which a message takes as long as a random number says, and a client that nobody tells the truth in time.

    Attributes:
        texts: What each user has read, by request and index; `ends` has the reasons for which it ended.
        sent: Every message to a replica: (replica, message).
    """

    def __init__(self, cls: Any, rng: random.Random, size: int) -> None:
        self.rng, self._num_submitted = rng, 0
        self.cores: dict[int, FakeCore] = {}
        self.inbox: dict[int, deque[Any]] = {}
        self.outbox: list[tuple[int, deque[EngineCoreOutput]]] = []
        """What processes have sent, which may be dead meanwhile; in order for each."""
        self.sent: list[tuple[int, Any]] = []
        self.texts: dict[tuple[str, int], str] = {}
        self.ends: dict[tuple[str, int], list[str]] = {}
        self.router = FewestFirst()
        self.client = cls(self.router, self.send, Letters())
        for replica in range(size):
            self.start(replica)

    def start(self, replica: int) -> None:
        """A process is there, and takes requests."""
        self.cores[replica], self.inbox[replica] = FakeCore(), deque()
        self.outbox.append((replica, deque()))
        self.client.join(replica)

    def send(self, replica: int, message: Any) -> None:
        """What the client sends with."""
        try:
            message = decode_to_core(encode(message))
        except msgspec.DecodeError as error:
            fail(
                f"{message} is sent.\nExpected: a message that the replica can decode\nGot: {error}.\nLook at `self.send` and what it is given."
            )
        self.sent.append((replica, message))
        if replica in self.inbox:
            self.inbox[replica].append(message)

    def told(self, deltas: Any) -> None:
        """The users read what the client gives them."""
        for delta in deltas or ():
            key = delta.request_id, delta.index
            self.texts[key] = self.texts.get(key, "") + delta.text
            if delta.finish_reason is not None:
                self.ends.setdefault(key, []).append(delta.finish_reason)

    def handle(self, replica: int) -> None:
        """A replica reads all its messages."""
        core, inbox = self.cores[replica], self.inbox[replica]
        while inbox:
            message = inbox.popleft()
            kind = type(message).__name__
            if kind == "AddRequest":
                if message.request.request_id in core.requests:
                    fail(
                        f"{message.request.request_id} is sent to replica {replica}, which has it already.\nExpected: it is sent once\n"
                        "Got: a second AddRequest.\nLook at `retry`: only what waits is sent, and `replica` says where it is."
                    )
                core.add_request(message.request)
            elif kind == "AbortRequests":
                core.abort_requests(message.request_ids)
            elif kind == "StopSequences":
                core.stop_sequences(message.sequences)

    def step(self, replica: int) -> None:
        """A replica reads its messages and computes a step, whose outputs are on their way then."""
        self.handle(replica)
        core = self.cores[replica]
        core._num_polls = 0
        if core.has_unfinished_requests():
            self._wire_of(replica).extend(core.step().outputs)

    def deliver(self, count: int | None = None) -> None:
        """The client reads that many outputs, of processes in any order; all if None."""
        while (count is None or count > 0) and (ready := [item for item in self.outbox if item[1]]):
            replica, wire = self.rng.choice(ready)
            self.told(self.client.take(replica, wire.popleft()))
            count = None if count is None else count - 1

    def submit(self, count: int, **options: Any) -> list[EngineCoreRequest]:
        """Requests come: with these sampling parameters, and random ones if none are given."""
        requests = []
        for _ in range(count):
            requests.append(make_request(self.rng, f"r{self._num_submitted}", **(options or random_options(self.rng))))
            self._num_submitted += 1
            self.client.submit(requests[-1])
        return requests

    def kill(self, replica: int, *, goes_on: bool = False) -> None:
        """A process ends, or is only given up, and goes on for three steps. What it has sent may be read later than the news of its end."""
        core, wire = self.cores.pop(replica), self._wire_of(replica)
        del self.inbox[replica]
        self.told(self.client.lose(replica))
        for _ in range(3 if goes_on else 0):
            wire.extend(core.step().outputs)

    def _wire_of(self, replica: int) -> deque[EngineCoreOutput]:
        return next(wire for rank, wire in reversed(self.outbox) if rank == replica)

    def run(self, num_steps: int = 200) -> None:
        """Let all replicas compute until they have nothing to do."""
        for _ in range(num_steps):
            for replica in list(self.cores):
                self.step(replica)
            if self.rng.random() < 0.7:
                self.deliver()
            if not self.client.requests:
                return
        self.deliver()
