"""The links between an executor and its workers as scripts: for the checks of lesson 12, which need no process and no time.

Their other ends do what a check wants, in a random order. Whoever would wait for ever hears so at once: a learner's code runs in a
thread, which sleeps from then on, so that no `except` of its own can swallow what is said.
"""

from __future__ import annotations

import pickle
import queue
import random
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from minivllm.course.lessons.ranks import MOST_SECONDS, STILL_COMPUTES, add_situation
from minivllm.course.observations import fail

MOST_WAITS = 1000
UNHURRIED = (0.0, 0.0, 5.0)
HURRIED = (0.0, 0.0, 0.7)
"""Seconds until the next answer comes: as long as no rank has failed, and after that, which is less than a PATIENCE."""


def encode(value: Any) -> bytes:
    """Plain data as bytes."""
    return pickle.dumps(value)


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Only for what processes of your own have sent: a pickle from a stranger can run anything."""
    return pickle.loads(data)


class Scripted:
    """An end of links that can stop a function that uses it."""

    def __init__(self) -> None:
        self._outcome: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run(self, function: Callable[[], Any], said: str) -> Any:
        """What a function returns or raises, unless it was stopped. `said` is the situation, for messages."""

        def run() -> None:
            try:
                self._outcome.put(("returned", function()))
            except BaseException as error:
                self._outcome.put(("raised", error))

        threading.Thread(target=run, daemon=True).start()
        try:
            how, value = self._outcome.get(timeout=MOST_SECONDS)
        except queue.Empty:
            fail(f"{said}\nExpected: it returns\nGot: it still computes after {MOST_SECONDS:g} s\n{STILL_COMPUTES}")
        if how == "stopped":
            fail(f"{said}\n{value}")
        if how == "raised":
            raise add_situation(value, said)
        return value

    def stop(self, message: str) -> NoReturn:
        """Let `run` fail with a message. Its function never hears of it: it sleeps."""
        self._outcome.put(("stopped", message))
        while True:
            threading.Event().wait()


class WorkersLink(Scripted):
    """The worker's end of a link, with messages to read. After the last one, the executor is gone."""

    def __init__(self, messages: list[bytes]) -> None:
        super().__init__()
        self.messages = messages
        self.sent: list[Any] = []
        self.has_ended = False

    def receive(self) -> bytes:
        """The next message."""
        if not self.messages:
            if self.has_ended:
                self.stop(
                    "Expected: serve returns when receive raises EOFError\nGot: it reads again\n"
                    "Look at the EOFError of receive: it needs an `except EOFError` of its own, which returns."
                )
            self.has_ended = True
            raise EOFError
        return self.messages.pop(0)

    def send(self, data: bytes) -> None:
        """Answer."""
        self.sent.append(decode(data) if isinstance(data, bytes) else f"not bytes: {data!r}")


class ScriptedLinks(Scripted):
    """Links to workers that do what a script says, in a random order.

    Attributes:
        script: What each rank does with the next message: "ok", "error", "waits" (for the others, for ever) or "ends".
        sent: The messages, by rank.
    """

    def __init__(self, rng: random.Random, world_size: int) -> None:
        super().__init__()
        self._rng, self._world_size = random.Random(rng.getrandbits(32)), world_size
        self.script: list[str] = []
        self.values: list[Any] = []
        self.sent: list[list[Any]] = [[] for _ in range(world_size)]
        self.interrupt = False
        self._coming: list[list[bytes | None]] = [[] for _ in range(world_size)]
        self._readable: set[int] = set()
        self._num_waits = 0
        self._number: Any = None
        self._has_failed = False
        self._delay = self._waited = 0.0

    def __len__(self) -> int:
        return self._world_size

    def send(self, rank: int, data: bytes) -> None:
        """A message to a rank."""
        if not isinstance(data, bytes):
            self.stop(
                f"Expected: bytes given to links.send\nGot: {type(data).__name__}\nLook at encode, which makes bytes of plain data."
            )
        message = decode(data)
        if not (isinstance(message, (tuple, list)) and len(message) == 3 and isinstance(message[2], (tuple, list))):
            self.stop(
                f"Expected: a message (number, method, arguments)\nGot: {message!r}\n"
                "Look at call: encode((self.number, method, arguments)), with the arguments as one tuple."
            )
        number, method, arguments = message
        self._number, self._has_failed, self._num_waits = number, False, 0
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
        if self._num_waits > MOST_WAITS:
            self.stop(
                "Expected: every call ends\nGot: the executor waits again and again\nLook at what it does when receive raises an EOFError, "
                "and when wait returns an empty list: that much time has passed then, so one wait(PATIENCE) is enough."
            )
        ranks = [rank for rank, coming in enumerate(self._coming) if coming]
        if not ranks and seconds is None:
            self._say_why_for_ever()
        if ranks and seconds is not None and self._waited + seconds < self._delay:
            self._waited += seconds
            return []
        self._delay, self._waited = self._rng.choice(HURRIED if self._has_failed else UNHURRIED), 0.0
        ready = sorted(self._rng.sample(ranks, self._rng.randint(1, len(ranks)))) if ranks else []
        self._readable = set(ready)
        return ready

    def _say_why_for_ever(self) -> NoReturn:
        told = max(map(len, self.sent))
        if missed := [rank for rank in range(self._world_size) if len(self.sent[rank]) < told]:
            self.stop(
                f"Expected: a message to every rank\nGot: none to rank {missed[0]}\nLook at call: all ranks compute every step."
            )
        self.stop("Expected: every call ends\nGot: links.wait(None) waits for ever, because no rank will write any more\n"
                 "Look at who is waited for, at PATIENCE once a rank has failed, and at answers that were dropped because their number is not "
                 "that of the message.")  # fmt: skip

    def receive(self, rank: int) -> bytes:
        """What a rank has written. Raises EOFError if it has ended."""
        if rank not in self._readable:
            self.stop(f"Expected: receive for ranks that wait() has named, once each\nGot: receive({rank}), which hangs if it has nothing to say\n"
                 "Look at what links.wait returns.")  # fmt: skip
        self._readable.discard(rank)
        data = self._coming[rank].pop(0)
        if data is None:
            self._coming[rank].append(None)
            raise EOFError
        number, succeeded, _ = decode(data)
        if number == self._number and not succeeded:
            self._has_failed, self._delay = True, self._rng.choice(HURRIED)
        return data
