"""The check of lesson 11 for the core's thread: all messages before each step, no step without work, and no wait with it."""

from __future__ import annotations

import queue
import random
from collections import deque
from typing import Any, NoReturn

from minivllm.course.observations import expect, fail, rounds, see

_Message = tuple[str, str] | None


class _Broken(BaseException):
    """Something is not as it should be: no `except Exception` catches it."""


class Scene:
    """A core and its inbox in one, without threads or time: whatever comes, comes while the loop waits or takes a step.

    Args:
        rng: What comes when, how long requests take, and whether a call fails.

    Attributes:
        events: What has happened, in words.
        problem: What was wrong first.
    """

    def __init__(self, rng: random.Random) -> None:
        self.events: list[str] = []
        self.problem: str | None = None
        self._rng, self._names = rng, iter("abcdefghijklmnopqrstuvwxyz")
        self._waiting: deque[_Message] = deque()
        self._left: dict[str, int] = {}
        self._handed: deque[_Message] = deque()
        """Messages that the loop has taken and the core has not heard of."""
        self._returned: Any = None
        self.end: str | None = None
        self._fails_at = rng.choice((None, rng.randint(3, 20)))
        self._num_calls = self._num_core_calls = 0
        self._has_timed_out = False

    def _refuse(self, expected: str, look: str) -> NoReturn:
        shown = ", ".join(self.events[-7:])
        self.problem = (
            self.problem or f"core_loop, in this order: {shown}.\nExpected: {expected}\nGot: {self.events[-1]}\nLook at {look}."
        )
        raise _Broken

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._num_calls += 1
        if self._num_calls > 3000:
            self._refuse("an end", "what the loop does again and again")
        if self.end is not None and not self._handed:
            self._refuse(f"nothing more after {self.end}", "what ends the loop: `None` and an error do, at once")

    def _maybe_fail(self) -> None:
        self._num_core_calls += 1
        if self._num_core_calls == self._fails_at:
            self._returned = RuntimeError(f"no memory at call {self._fails_at}")
            self.events.append(f"which raises {self._returned}")
            self._handed.clear()
            raise self._returned

    def _let_come(self, at_least: int) -> None:
        for _ in range(self._rng.randint(at_least, 3)):
            roll = self._rng.random()
            name = next(self._names, None)
            if name is None or roll < 0.06:
                self._waiting.append(None)
            elif roll < 0.3 and self._left:
                self._waiting.append(("abort", self._rng.choice(sorted(self._left))))
            else:
                self._waiting.append(("add", name))

    # -- the inbox -----------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        """As of a `SimpleQueue`."""
        self._num_calls += 1
        if self._num_calls > 3000:
            self.events.append("asked again and again whether the inbox is empty")
            self._refuse("a wait in inbox.get() while there is nothing to do", "how an idle loop waits")
        return not self._waiting

    def qsize(self) -> int:
        """As of a `SimpleQueue`."""
        return 0 if self.empty() else len(self._waiting)

    def get_nowait(self) -> _Message:
        """As of a `SimpleQueue`."""
        return self.get(block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> _Message:
        """As of a `SimpleQueue`; while it waits, something comes."""
        if not self._waiting and not block:
            self.empty()
            raise queue.Empty
        if not self._waiting:
            self._wait(timeout)
        message = self._waiting.popleft()
        self._note(f"takes {message!r}")
        if message is None:
            self.end = "None"
        else:
            self._handed.append(message)
        return message

    def _wait(self, timeout: float | None) -> None:
        self._check_handed()
        self._note("waits for a message" if timeout is None else f"waits {timeout} s for a message, and none comes")
        if self._left:
            expected = f"a step, because {', '.join(self._left)} are unfinished"
            self._refuse(expected, "when to wait: only if there is nothing to do")
        self._has_timed_out = timeout is not None and not self._has_timed_out
        if self._has_timed_out:
            raise queue.Empty
        self._let_come(1)

    def _check_handed(self) -> None:
        if self._handed:
            self._refuse(f"the core to be told of {self._handed[0]!r}", "what you do with each kind of message")
        if self._returned is not None:
            self._refuse("deliver(…) with what the step has returned", "what follows a step")

    # -- the core ------------------------------------------------------------------------------------------------

    def add_request(self, request: str) -> None:
        """As of a core."""
        self._take("add", request)
        self._left[request] = self._rng.randint(1, 4)

    def abort_request(self, request_id: str) -> None:
        """As of a core."""
        self._take("abort", request_id)
        self._left.pop(request_id, None)

    def _take(self, kind: str, content: str) -> None:
        self._note(f"{kind}s {content}")
        if not self._handed or self._handed[0] != (kind, content):
            said = f"what the next message says: {self._handed[0]!r}" if self._handed else "no more than messages say"
            self._refuse(said, "which method of the core each kind of message is for")
        self._maybe_fail()
        self._handed.popleft()

    def has_unfinished_requests(self) -> bool:
        """As of a core."""
        self._num_calls += 1
        return bool(self._left)

    def step(self) -> list[str]:
        """As of a core; meanwhile, something may come."""
        self._note(f"steps {', '.join(self._left) or 'nothing'}")
        self._check_handed()
        if self._waiting:
            self._refuse(f"all messages first: {list(self._waiting)!r} are there", "how many messages you take before a step")
        if not self._left:
            self._refuse("a wait for a message, because nothing is unfinished", "when to step: only if something is unfinished")
        self._maybe_fail()
        self._returned = [f"{name}{left}" for name, left in self._left.items()]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        self._let_come(0)
        return self._returned

    def deliver(self, outputs: Any) -> None:
        """What the loop delivers to."""
        self._note(f"delivers {outputs!r}")
        if outputs is not self._returned:
            self._refuse(
                f"deliver({self._returned!r})", "what is delivered: what the step returned, or the error that was raised"
            )
        if isinstance(outputs, Exception):
            self.end = "an error"
        self._returned = None


def check_core_loop(core_loop: Any) -> None:
    """In random sequences of messages and steps, with calls that fail: each rule of the loop, one by one."""
    for rng in rounds("loop", 60):
        scene, error = Scene(rng), None
        try:
            core_loop(scene, scene, scene.deliver)
        except _Broken:
            pass
        except Exception as raised:
            error = raised
        if scene.problem is not None:
            fail(scene.problem)
        if isinstance(error, NotImplementedError):
            raise error
        said = f"core_loop, in this order: {', '.join(scene.events[-7:])}."
        look = "the `except` around the whole loop, which delivers the error and ends"
        expect(said, "an error that came out of core_loop", "None", repr(error), look)
        expect(said, "that it ended because of None, or of a delivered error", True, scene.end is not None, "what ends the loop")
        see([event for event in scene.events if event.startswith(("steps", "delivers"))])
