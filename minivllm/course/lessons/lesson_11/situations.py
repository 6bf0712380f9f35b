"""An event loop for each check, and a core that notes what is asked of it: nothing here can hang a notebook."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from minivllm.course.lessons.assembly import CoreOutput
from minivllm.course.lessons.lesson_08.situations import Crowd, Letters
from minivllm.course.lessons.streaming import Frontend, PlainCore
from minivllm.course.observations import expect, fail
from minivllm.engine.llm_engine import LLMEngine
from minivllm.request import EngineCoreRequest

_Made = TypeVar("_Made")
SECONDS = 5.0
"""How long anything that does not wait for a model may take."""
_LOOK_AT_ENDS = "what is left behind: a message for the core, or a stream that is not taken out of self.streams"


def run(said: str, work: Callable[[], Awaitable[_Made]], seconds: float = SECONDS) -> _Made:
    """What a coroutine returns, run on an event loop of its own. One that waits forever, or blocks the loop, ends in a sentence."""
    results: list[_Made] = []
    errors: list[BaseException] = []

    async def limited() -> _Made:
        return await asyncio.wait_for(work(), seconds)

    def run_loop() -> None:
        try:
            results.append(asyncio.run(limited()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    thread.join(seconds + SECONDS)
    if thread.is_alive():
        got = "the event loop is blocked, and nothing else can run on it"
        fail(
            f"{said}\nExpected: an end\nGot: {got}\nLook at what waits without `await`, or repeats without one, and what joins a thread."
        )
    if errors and isinstance(errors[0], (TimeoutError, asyncio.TimeoutError)):
        got = f"nothing for {seconds:.0f} seconds: somebody waits for news that nobody sends"
        fail(
            f"{said}\nExpected: an end\nGot: {got}\nLook at who wakes whom: each `await` of an event, and each message for the core."
        )
    if errors:
        raise errors[0]
    return results[0]


async def iterate(made: Any) -> Any:
    """What an async generator of the learner's returned; raises if it is none."""
    if inspect.iscoroutine(made):
        name = made.__qualname__
        await made
        fail(
            f"{name} was called.\nExpected: an async generator\nGot: a coroutine, because nothing in it yields\nLook at where it yields."
        )
    return made


async def settle() -> None:
    """Let all coroutines run that can."""
    for _ in range(8):
        await asyncio.sleep(0)


async def becomes(condition: Callable[[], bool]) -> bool:
    """Wait until something is so; False if it does not become so."""
    end = time.monotonic() + SECONDS / 2
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.001)
    return True


class WatchedCore:
    """The package's core on a script, with its four methods.

    Args:
        engine: Whose core it is.
        fails_at: The step that raises an error, counted from 1.
        is_gated: Whether each step waits until `allow` lets it.

    Attributes:
        added, aborted: Ids, in order.
        threads: Who has called.
    """

    def __init__(self, engine: LLMEngine, fails_at: int | None = None, is_gated: bool = False) -> None:
        self.plain, self._fails_at = PlainCore(engine.core), fails_at
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.num_steps = 0
        self._num_allowed: float = 0 if is_gated else float("inf")
        self._gate = threading.Condition()

    def allow(self, num_steps: float = float("inf")) -> None:
        """Let so many more steps be taken."""
        with self._gate:
            self._num_allowed += num_steps
            self._gate.notify_all()

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the cache that nobody holds."""
        return self.plain.core.block_manager.get_num_free_gpu_blocks()

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.plain.has_unfinished_requests()

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `PlainCore.add_request`."""
        self.threads.add(threading.get_ident())
        self.added.append(request.request_id)
        self.plain.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """As `PlainCore.abort_request`."""
        self.threads.add(threading.get_ident())
        self.aborted.append(request_id)
        self.plain.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """As `PlainCore.has_unfinished_requests`."""
        self.threads.add(threading.get_ident())
        return self.plain.has_unfinished_requests()

    def step(self) -> list[CoreOutput]:
        """As `PlainCore.step`, when it is allowed."""
        self.threads.add(threading.get_ident())
        with self._gate:
            if not self._gate.wait_for(lambda: self.num_steps < self._num_allowed, SECONDS):
                raise RuntimeError("nobody let the core take this step")
        self.num_steps += 1
        if self.num_steps == self._fails_at:
            raise RuntimeError(f"out of memory in step {self.num_steps}")
        return self.plain.step()


class ChattyLetters(Letters):
    """Letters that know a form for conversations."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages, one after another."""
        return self.encode(" ".join(message["content"] for message in messages))


def make_core(crowd: Crowd, **options: Any) -> tuple[WatchedCore, Frontend, list[EngineCoreRequest]]:
    """A core with few blocks, its frontend, and the crowd's requests for it."""
    engine = crowd.make_engine(ends=options.pop("ends", True))
    requests = [engine.input_processor.process_inputs(*request).core_request for request in crowd.requests]
    frontend = Frontend("letters", engine.input_processor, ChattyLetters())  # type: ignore[arg-type]
    return WatchedCore(engine, **options), frontend, requests


def expected_answers(crowd: Crowd, **options: Any) -> dict[str, tuple[list[int], str | None]]:
    """The tokens and the finish reason of each request of a crowd, by the package's engine."""
    engine, answers = crowd.make_engine(**options), {}
    for outputs in crowd.run(engine.add_request, engine.step, engine.has_unfinished_requests):
        for output in outputs:
            answers[output.request_id] = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
    return answers


async def expect_nothing_left(said: str, engine: Any, core: WatchedCore, num_blocks: int) -> None:
    """No stream, no request, no block in use and no task but this one."""
    await becomes(lambda: core.is_idle and not engine.streams)
    expect(said, "requests that still have a stream", [], sorted(engine.streams), _LOOK_AT_ENDS)
    expect(said, "requests that the core still computes", False, not core.is_idle, _LOOK_AT_ENDS)
    expect(said, "free blocks", num_blocks, core.num_free_blocks, "the abort message, which frees the blocks")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    others = {task for task in others if not task.get_coro().__qualname__.startswith("run.")}  # type: ignore[union-attr]
    expect(said, "tasks that still run", 0, len(others), "tasks that you start: who ends them?")
