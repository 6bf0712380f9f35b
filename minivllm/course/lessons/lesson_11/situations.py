"""An event loop for each check, and a core that notes what is asked of it: nothing here can hang a notebook."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

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


class _Run(Generic[_Made]):
    """A coroutine on an event loop of its own, in a thread that a check can leave behind."""

    def __init__(self, work: Callable[[], Awaitable[_Made]], seconds: float) -> None:
        self.results: list[_Made] = []
        self.errors: list[BaseException] = []
        self.lost: list[BaseException] = []
        """What was raised in callbacks, for which nobody waits."""
        self._work, self._seconds = work, seconds
        self.thread = threading.Thread(target=self._run_loop, daemon=True)
        self.thread.start()
        self.thread.join(seconds + SECONDS)

    async def _limited(self) -> _Made:
        asyncio.get_running_loop().set_exception_handler(self._note_lost)
        return await asyncio.wait_for(self._work(), self._seconds)

    def _note_lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:
            self.lost.append(context["exception"])

    def _run_loop(self) -> None:
        try:
            self.results.append(asyncio.run(self._limited()))
        except BaseException as error:
            self.errors.append(error)


def run(said: str, work: Callable[[], Awaitable[_Made]], seconds: float = SECONDS) -> _Made:
    """What a coroutine returns, run on an event loop of its own. One that waits forever, or blocks the loop, ends in a sentence."""
    ran, expected = _Run(work, seconds), "an end"
    for error in [*ran.errors, *ran.lost]:
        if isinstance(error, NotImplementedError):  # "write this", wherever it was raised
            raise error
    if ran.lost and len(list(traceback.walk_tb(ran.lost[0].__traceback__))) > 1:  # from within what was called
        raise ran.lost[0]
    if ran.thread.is_alive():
        got = "the event loop is blocked, or somebody catches a CancelledError and goes on"
        look = (
            "MyStream first, if its check fails; then at what waits without `await`, repeats without one, or joins a thread, "
            "and what is caught. Then restart the kernel"
        )
    elif ran.lost:
        expected, got = "no error in a callback", f"{type(ran.lost[0]).__name__}: {ran.lost[0]}"
        look = "what is called on the event loop, and with what"
    elif ran.errors and isinstance(ran.errors[0], (TimeoutError, asyncio.TimeoutError)):
        got = f"nothing for {seconds:.0f} seconds: somebody waits for news that nobody sends"
        look = "who wakes whom: each `await` of an event, and each message for the core"
    elif ran.errors:
        raise ran.errors[0]
    else:
        return ran.results[0]
    fail(f"{said}\nExpected: {expected}\nGot: {got}\nLook at {look}.")


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
        handled_in: The threads in which the engine has handled outputs.
        misused: Whether the event loop's `call_soon` was called in another thread.
    """

    def __init__(self, engine: LLMEngine, fails_at: int | None = None, is_gated: bool = False) -> None:
        self.plain, self._fails_at = PlainCore(engine.core), fails_at
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.handled_in: set[int] = set()
        self.misused = False
        self.num_steps = 0
        self._is_in_step = False
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
        self.aborted.append(request_id if isinstance(request_id, str) else f"a {type(request_id).__name__}")
        self.plain.abort_request(self.aborted[-1])

    def has_unfinished_requests(self) -> bool:
        """As `PlainCore.has_unfinished_requests`."""
        self.threads.add(threading.get_ident())
        return self.plain.has_unfinished_requests()

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits to be allowed."""
        return self._is_in_step and self.num_steps >= self._num_allowed

    def step(self) -> list[CoreOutput]:
        """As `PlainCore.step`, when it is allowed."""
        self.threads.add(threading.get_ident())
        self._is_in_step = True
        with self._gate:
            if not self._gate.wait_for(lambda: self.num_steps < self._num_allowed, SECONDS):
                raise RuntimeError("nobody let the core take this step")
        self.num_steps += 1
        self._is_in_step = False
        if self.num_steps == self._fails_at:
            raise RuntimeError(f"out of memory in step {self.num_steps}")
        return self.plain.step()


class ChattyLetters(Letters):
    """Letters that know a form for conversations, and a character of two tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A token for each letter, and two for an é."""
        return [token for c in text for token in ([28, 29] if c == "é" else super(ChattyLetters, self).encode(c))]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages, one after another."""
        return self.encode(" ".join(message["content"] for message in messages))


class NotedFrontend(Frontend):
    """Notes in which threads it tokenizes."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.threads: set[int] = set()

    def process(self, *request: Any) -> Any:
        """As of a frontend."""
        self.threads.add(threading.get_ident())
        return super().process(*request)


def make_core(crowd: Crowd, **options: Any) -> tuple[WatchedCore, NotedFrontend, list[EngineCoreRequest]]:
    """A core with few blocks, its frontend, and the crowd's requests for it."""
    engine = crowd.make_engine(ends=options.pop("ends", True))
    requests = [engine.input_processor.process_inputs(*request).core_request for request in crowd.requests]
    engine.input_processor._tokenizer = ChattyLetters()  # type: ignore[assignment]
    frontend = NotedFrontend("letters", engine.input_processor, ChattyLetters())
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
    await becomes(lambda: not _other_tasks())
    expect(said, "tasks that still run", 0, len(_other_tasks()), "tasks that you start: who ends them?")


def _other_tasks() -> set[asyncio.Task[Any]]:
    """The tasks that neither this check nor `run` has started."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return {task for task in tasks if not task.get_coro().__qualname__.startswith("_Run.")}  # type: ignore[union-attr]


class _Loop:
    """An event loop that notes who calls what from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: WatchedCore) -> None:
        self._loop, self._core, self._thread = loop, core, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon(self, *call: Any) -> Any:
        """As of the loop, for which it must be called in its thread."""
        self._core.misused |= threading.get_ident() != self._thread
        return self._loop.call_soon_threadsafe(*call)


@asynccontextmanager
async def started(cls: Any, core: WatchedCore, **options: Any) -> AsyncIterator[Any]:
    """A learner's engine. Its thread is told to end, whatever a check finds."""

    class Watched(cls):  # type: ignore[misc]
        def handle(self, outputs: Any) -> None:
            core.handled_in.add(threading.get_ident())
            super().handle(outputs)

    engine = Watched(core, **options)
    engine.loop = _Loop(engine.loop, core)
    try:
        yield engine
    finally:
        core.allow()
        engine.inbox.put(None)
