"""The checks of lesson 12 for the executor and its workers, over links whose other ends are a script."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.course.lessons.rank_links import ScriptedLinks, WorkersLink, encode
from minivllm.course.observations import expect, fail, rounds
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, WorkerError

_WHICH = {
    "answers": "call: the values of all ranks, in the order of their numbers, whatever order they came in, however long it takes as long as none has failed",
    "errors": "when one rank or more has answered with an error: wait for all others too, each time up to PATIENCE, then raise a WorkerError that begins with the lowest of these ranks and has its text, 'Rank 1: ValueError: ...'",
    "dead": "what makes the engine dead: an EOFError from receive, or nothing within PATIENCE after a rank has failed. The message begins with that rank, 'Rank 1 ...', and has its text if it has answered",
    "after": "self.dead: a dead executor raises its EngineDeadError at once, and sends nothing",
    "late": "answers to an earlier message: they have another number, and are not what is waited for",
}


_ANSWER = "serve: one answer for each message, with its number; an error in the worker is an answer, and the loop goes on"
_LOOP = "the loop: getattr(worker, method)(*arguments) once for each message, and an error in it does not end the loop"
_LATE = 100, 199
"""The numbers in answers to a call that was interrupted. Those of other calls are smaller."""
_LEAST = "the rank with the least room: every rank holds a part of every block"


# -- the worker's side -----------------------------------------------------------------------------------------------


class _Worker:
    """Answers at random, and now and then raises."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.did: list[Any] = []

    def execute_model(self, request: list[int]) -> list[int]:
        self.did.append(request)
        if self.rng.random() < 0.3:
            raise self.rng.choice((ValueError, ConfigError, ZeroDivisionError, EOFError))(f"no step {len(self.did)}")
        return [2 * number for number in request]

    def determine_num_available_blocks(self) -> tuple[int, int]:
        self.did.append("determine")
        return len(self.did), 3

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.did.append((num_gpu_blocks, num_cpu_blocks))


def check_serve(serve: Any) -> None:
    """A worker answers each message, and goes on after an error."""
    for rng in rounds("serve", 30):
        first = rng.randint(1, 99)
        calls: list[tuple[str, tuple[Any, ...]]] = [("determine_num_available_blocks", ()), ("explode", ())]
        calls += [("initialize_cache", (rng.randint(1, 9), 0)), *(("execute_model", ([rng.randint(1, 9)],)) for _ in range(4))]
        rng.shuffle(calls)
        _check_answers(serve, [(first + i, *call) for i, call in enumerate(calls)], rng.getrandbits(32))


def _check_answers(serve: Any, messages: list[Any], seed: int) -> None:
    link, worker, other = WorkersLink([encode(message) for message in messages]), *(_Worker(random.Random(seed)) for _ in "ab")
    said = f"{len(messages)} messages, one for a method `explode` that the worker does not have. Then the executor is gone."
    try:
        link.run(lambda: serve(worker, link), said)
    except EOFError:
        fail(
            f"{said}\nExpected: serve returns\nGot: it raises EOFError\nLook at the EOFError of receive: `except EOFError`, and return."
        )
    expected = [(number, *_try(other, method, arguments)) for number, method, arguments in messages]
    expect(said, "calls of the worker", other.did, worker.did, _LOOP)
    got = [tuple(answer) if isinstance(answer, (tuple, list)) else answer for answer in link.sent]
    for message, right, mine in zip(messages, expected, got, strict=False):
        expect(f"The message {message}.", "answer", right, mine, _ANSWER)
    expect(said, "number of answers", len(messages), len(got), _ANSWER)
    expect(said, "waits for more", True, link.has_ended, "the loop: it ends with the EOFError of receive, not before")


def _try(worker: Any, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(worker, method)(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


# -- the executor's side ---------------------------------------------------------------------------------------------


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, or the error, the rank that it names first, and that rank's text."""
    try:
        return call()
    except (EngineDeadError, WorkerError) as error:
        ranks, texts = re.findall(r"Rank (\d+)", str(error)), re.findall(r"ValueError: \d+", str(error))
        return f"{type(error).__name__} about rank {ranks[0] if ranks else '(none)'}" + "".join(f": {text}" for text in texts[:1])
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
        return ("dead" if "waits" in script else "errors"), f"{kind} about rank {failed[0]}: ValueError: {values[failed[0]]}"
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
        links = ScriptedLinks(rng, rng.randint(1, 4))
        executor, state = cls(links), _State()
        for number in range(1, 6):
            _check_call(executor, links, rng, state, number)
        numbers = [message[0] for message in links.sent[0]]
        look = "self.number: each message has its own"
        expect("All calls of an executor.", "different numbers", len(numbers), len(set(numbers)), look)
    for rng in rounds("blocks", 20):
        _check_rest(cls, ScriptedLinks(rng, rng.randint(1, 4)), rng)


@dataclass
class _State:
    """What has happened to an executor: the error that ended it, and whether a wait was interrupted."""

    dead: str = ""
    was_interrupted: bool = False


def _check_call(executor: Any, links: ScriptedLinks, rng: random.Random, state: _State, number: int) -> None:
    if number > 1 and not state.dead and rng.random() < 0.2:
        state.was_interrupted = links.interrupt = True
        links.script = [rng.choice(("ok", "ok", "error")) for _ in range(len(links))]
        links.values = [rng.randint(*_LATE) for _ in range(len(links))]
        with contextlib.suppress(KeyboardInterrupt):
            links.run(lambda: executor.call("interrupted", number), f"Call {number}, interrupted by Ctrl-C.")
    links.script, links.values = make_script(rng, len(links)), [rng.randint(0, 99) for _ in range(len(links))]
    argument, before = rng.randint(0, 99), len(links.sent[0])
    late = " The wait for an earlier call was interrupted by Ctrl-C, so its answers come now." if state.was_interrupted else ""
    said = f"Call {number} on {len(links)} ranks, which do: {', '.join(links.script)}.{late}"
    got = _outcome(lambda: links.run(lambda: executor.call("work", argument, number), said))
    about, expected = ("after", state.dead) if state.dead else _expected(links.script, links.values)
    is_mixed_up = any(int(digits) >= _LATE[0] for digits in re.findall(r"\d+", str(got)))
    expect(said, "outcome of call", expected, got, _WHICH["late" if is_mixed_up else about])
    sent = [[message[1:] for message in messages[before:]] for messages in links.sent]
    messages = [] if state.dead else [("work", (argument, number))]
    look = _WHICH["after"] if state.dead else "call: one message to every rank"
    expect(said, "messages to each rank", [messages] * len(links), sent, look)
    state.dead = expected if about == "dead" else state.dead


def _check_rest(cls: Any, links: ScriptedLinks, rng: random.Random) -> None:
    executor, links.script = cls(links), ["ok"] * len(links)
    links.values = [(rng.randint(1, 99), rng.randint(0, 99)) for _ in range(len(links))]
    said = f"The ranks have room for {links.values} blocks (device, host)."
    blocks = tuple(min(sizes) for sizes in zip(*links.values, strict=True))
    got = links.run(executor.determine_num_available_blocks, said)
    expect(said, "blocks", blocks, tuple(got) if isinstance(got, (tuple, list)) else got, _LEAST)
    links.values = [f"token of rank {rank}" for rank in range(len(links))]
    look = "execute_model: all ranks compute the step, and rank 0 alone samples"
    expect(
        "execute_model(request).", "outputs", links.values[0], links.run(lambda: executor.execute_model("request"), said), look
    )
    links.run(lambda: executor.initialize_cache(*blocks), said)
    calls = [("determine_num_available_blocks", ()), ("execute_model", ("request",)), ("initialize_cache", blocks)]
    expect("All methods were called.", "messages to the last rank", calls, [message[1:] for message in links.sent[-1]], look)
