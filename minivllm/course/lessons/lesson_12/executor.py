"""The checks of lesson 12 for the executor and its workers, over links whose other ends are a script."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.observations import expect, fail, rounds
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, WorkerError

_WHICH = {
    "answers": "call: the values of all ranks, in the order of their numbers, whatever order they came in",
    "errors": "when one rank or more has answered with an error: wait for all others too, then raise a WorkerError that begins with the lowest of these ranks, 'Rank 1: ...'",
    "dead": "what makes the engine dead: an EOFError from receive, or nothing within PATIENCE after a rank has failed. The message begins with that rank, 'Rank 1 ...'",
    "after": "self.dead: a dead executor raises its EngineDeadError at once, and sends nothing",
    "late": "answers to an earlier message: they have another number, and are not what is waited for",
}


def encode(value: Any) -> bytes:
    """Plain data as bytes."""
    return pickle.dumps(value)


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Only for what processes of your own have sent: a pickle from a stranger can run anything."""
    return pickle.loads(data)


# -- the worker's side -----------------------------------------------------------------------------------------------


class _Worker:
    """Answers at random, and now and then raises."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.did: list[Any] = []

    def execute_model(self, request: list[int]) -> list[int]:
        self.did.append(request)
        if self.rng.random() < 0.3:
            raise self.rng.choice((ValueError, ConfigError, ZeroDivisionError))(f"no step {len(self.did)}")
        return [2 * number for number in request]

    def determine_num_available_blocks(self) -> tuple[int, int]:
        self.did.append("determine")
        return len(self.did), 3

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.did.append((num_gpu_blocks, num_cpu_blocks))


@dataclass
class WorkersLink:
    """The worker's end of a link, with messages to read. After the last one, the executor is gone."""

    messages: list[bytes]
    sent: list[Any] = field(default_factory=list)
    has_ended: bool = False

    def receive(self) -> bytes:
        """The next message."""
        if not self.messages:
            if self.has_ended:
                fail("Expected: serve returns when receive raises EOFError\nGot: it reads again\nLook at the end of the loop.")
            self.has_ended = True
            raise EOFError
        return self.messages.pop(0)

    def send(self, data: bytes) -> None:
        """Answer."""
        self.sent.append(decode(data) if isinstance(data, bytes) else f"not bytes: {data!r}")


def check_serve(serve: Any) -> None:
    """A worker answers each message, and goes on after an error."""
    look = "serve: one answer for each message, with its number; an error in the worker is an answer, and the loop goes on"
    for rng in rounds("serve", 30):
        first = rng.randint(1, 99)
        calls = [("determine_num_available_blocks", ()), ("initialize_cache", (rng.randint(1, 9), 0)), ("explode", ())]
        calls += [("execute_model", ([rng.randint(1, 9)],)) for _ in range(4)]
        rng.shuffle(calls)
        seed = rng.getrandbits(32)
        messages = [(first + i, *call) for i, call in enumerate(calls)]
        link, worker, other = WorkersLink([encode(message) for message in messages]), *(_Worker(random.Random(seed)) for _ in "ab")
        serve(worker, link)
        said = f"{len(messages)} messages, then the executor is gone."
        expected = [(number, *_try(other, method, arguments)) for number, method, arguments in messages]
        expect(said, "calls of the worker", other.did, worker.did, "getattr(worker, method)(*arguments), once for each message")
        got = [tuple(answer) if isinstance(answer, (tuple, list)) else answer for answer in link.sent]
        for message, right, mine in zip(messages, expected, got, strict=False):
            expect(f"The message {message}.", "answer", right, mine, look)
        expect(said, "number of answers", len(messages), len(got), look)
        expect(said, "waits for more", True, link.has_ended, "the loop: it ends with the EOFError of receive, not before")


def _try(worker: Any, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(worker, method)(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


# -- the executor's side ---------------------------------------------------------------------------------------------


class ScriptedLinks:
    """Links to workers that do what a script says, in a random order.

    Attributes:
        script: What each rank does with the next message: "ok", "error", "waits" (for the others, for ever) or "ends".
        sent: The messages, by rank.
    """

    def __init__(self, rng: random.Random, world_size: int) -> None:
        self._rng, self._world_size = rng, world_size
        self.script: list[str] = []
        self.values: list[Any] = []
        self.sent: list[list[Any]] = [[] for _ in range(world_size)]
        self.interrupt = False
        self._coming: list[list[bytes | None]] = [[] for _ in range(world_size)]
        self._readable: set[int] = set()
        self._num_waits = 0

    def __len__(self) -> int:
        return self._world_size

    def send(self, rank: int, data: bytes) -> None:
        """A message to a rank."""
        if not isinstance(data, bytes):
            fail(f"Expected: bytes given to links.send\nGot: {type(data).__name__}\nLook at encode, which makes bytes of plain data.")
        number, method, arguments = decode(data)
        self.sent[rank].append((number, method, tuple(arguments)))
        what = self.script[rank]
        if what == "ends":
            self._coming[rank].append(None)
        elif what != "waits":
            value = self.values[rank] if what == "ok" else f"ValueError: {self.values[rank]}"
            self._coming[rank].append(encode((number, what == "ok", value)))

    def wait(self, seconds: float | None = None) -> list[int]:
        """Ranks with something to read."""
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        self._num_waits += 1
        if self._num_waits > 1000:
            fail("Expected: every call ends\nGot: the executor waits again and again\nLook at what it does when receive raises an EOFError.")
        ranks = [rank for rank, coming in enumerate(self._coming) if coming]
        if not ranks and seconds is None:
            told = max(map(len, self.sent))
            if missed := [rank for rank in range(self._world_size) if len(self.sent[rank]) < told]:
                fail(f"Expected: a message to every rank\nGot: none to rank {missed[0]}\nLook at call: all ranks compute every step.")
            fail("Expected: every call ends\nGot: links.wait(None) waits for ever, because no rank will write any more\n"
                 "Look at who is waited for, and at PATIENCE once a rank has failed.")  # fmt: skip
        ready = sorted(self._rng.sample(ranks, self._rng.randint(1, len(ranks)))) if ranks else []
        self._readable = set(ready)
        return ready

    def receive(self, rank: int) -> bytes:
        """What a rank has written. Raises EOFError if it has ended."""
        if rank not in self._readable:
            fail(f"Expected: receive for ranks that wait() has named, once each\nGot: receive({rank}), which hangs if it has nothing to say\n"
                 "Look at what links.wait returns.")  # fmt: skip
        self._readable.discard(rank)
        data = self._coming[rank].pop(0)
        if data is None:
            self._coming[rank].append(None)
            raise EOFError
        return data


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, or the error and the rank that it names first."""
    try:
        return call()
    except (EngineDeadError, WorkerError) as error:
        ranks = re.findall(r"Rank (\d+)", str(error))
        return f"{type(error).__name__} about rank {ranks[0] if ranks else '(none)'}"
    except MinivllmError as error:
        return repr(error)


def _expected(script: list[str], values: list[Any]) -> tuple[str, Any]:
    """The outcome of a call, and what it is about."""
    failed = [rank for rank, what in enumerate(script) if what == "error"]
    ended = [rank for rank, what in enumerate(script) if what == "ends"]
    if ended:
        return "dead", f"EngineDeadError about rank {ended[0]}"
    if failed:
        kind = "EngineDeadError" if "waits" in script else "WorkerError"
        return ("dead" if "waits" in script else "errors"), f"{kind} about rank {failed[0]}"
    return "answers", list(values)


def make_script(rng: random.Random, world_size: int) -> list[str]:
    """What the ranks do with a message. A rank waits only for one that fails or has ended."""
    kind = rng.choice(("ok", "ok", "errors", "alone", "ends"))
    if kind == "ok":
        return ["ok"] * world_size
    if kind == "errors":
        script = [rng.choice(("ok", "error")) for _ in range(world_size)]
    else:
        script = [rng.choice(("waits", "error") if kind == "alone" else ("waits", "ok")) for _ in range(world_size)]
    script[rng.randrange(world_size)] = "ends" if kind == "ends" else "error"
    return script


def check_executor(cls: Any) -> None:
    """A broadcast, answers by rank, errors after all have answered, and the end of a worker."""
    for rng in rounds("executor", 60):
        world_size, is_dead = rng.randint(1, 4), ""
        links = ScriptedLinks(rng, world_size)
        executor, was_late = cls(links), ""
        for number in range(1, 6):
            links.script, links.values = make_script(rng, world_size), [rng.randint(0, 99) for _ in range(world_size)]
            argument, before, late = rng.randint(0, 99), len(links.sent[0]), not is_dead and rng.random() < 0.2
            was_late = " The wait for an earlier call was interrupted by Ctrl-C, so its answers come now." if late else was_late
            said = f"Call {number} on {world_size} ranks, which do: {', '.join(links.script)}.{was_late}"
            if late:
                script, links.script, links.interrupt = links.script, ["ok"] * world_size, True
                try:
                    executor.call("interrupted", number)
                except KeyboardInterrupt:
                    before += 1
                links.script = script
            got = _outcome(lambda: executor.call("work", argument, number))
            about, expected = _expected(links.script, links.values)
            if is_dead:
                about, expected = "after", is_dead
            expect(said, "outcome of call", expected, got, _WHICH["late" if was_late and about == "answers" else about])
            sent = [[message[1:] for message in messages[before:]] for messages in links.sent]
            expect(said, "messages to each rank", [[] if is_dead else [("work", (argument, number))]] * world_size, sent, _WHICH["after"] if is_dead else "call: one message to every rank")
            is_dead = expected if about == "dead" else is_dead
        numbers = [message[0] for message in links.sent[0]]
        expect("All calls of an executor.", "different numbers", len(numbers), len(set(numbers)), "self.number: each message has its own")
    _check_rest(cls)


def _check_rest(cls: Any) -> None:
    for rng in rounds("blocks", 20):
        links = ScriptedLinks(rng, rng.randint(1, 4))
        executor, links.script = cls(links), ["ok"] * len(links)
        links.values = [(rng.randint(1, 99), rng.randint(0, 99)) for _ in range(len(links))]
        said = f"The ranks have room for {links.values} blocks (device, host)."
        expected = tuple(min(sizes) for sizes in zip(*links.values, strict=True))
        got = executor.determine_num_available_blocks()
        expect(said, "blocks", expected, tuple(got) if isinstance(got, (tuple, list)) else got, "the rank with the least room: every rank holds a part of every block")
        links.values = [[f"token of rank {rank}"] for rank in range(len(links))]
        look = "execute_model: all ranks compute the step, and rank 0 alone samples"
        expect("execute_model(request).", "outputs", links.values[0], executor.execute_model("request"), look)
        executor.initialize_cache(*expected)
        calls = [message[1:] for message in links.sent[-1]]
        expected_calls = [("determine_num_available_blocks", ()), ("execute_model", ("request",)), ("initialize_cache", expected)]
        expect("All methods were called.", "messages to the last rank", expected_calls, calls, look)
