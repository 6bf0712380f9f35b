"""The links between an executor and its workers as scripts: for the checks of lesson 12, which need no process and no time.

Their other ends do what a check wants, in a random order. Whoever would wait for ever hears so at once.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.observations import fail

MOST_WAITS = 1000


def encode(value: Any) -> bytes:
    """Plain data as bytes."""
    return pickle.dumps(value)


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Only for what processes of your own have sent: a pickle from a stranger can run anything."""
    return pickle.loads(data)


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
            fail(
                f"Expected: bytes given to links.send\nGot: {type(data).__name__}\nLook at encode, which makes bytes of plain data."
            )
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
        if self._num_waits > MOST_WAITS:
            fail(
                "Expected: every call ends\nGot: the executor waits again and again\nLook at what it does when receive raises an EOFError."
            )
        ranks = [rank for rank, coming in enumerate(self._coming) if coming]
        if not ranks and seconds is None:
            told = max(map(len, self.sent))
            if missed := [rank for rank in range(self._world_size) if len(self.sent[rank]) < told]:
                fail(
                    f"Expected: a message to every rank\nGot: none to rank {missed[0]}\nLook at call: all ranks compute every step."
                )
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
