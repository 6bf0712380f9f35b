"""The basis of lesson 11: a core in four methods, what comes before and after it, and a server's small parts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Send

from minivllm import LLM
from minivllm.course.lessons.assembly import CoreOutput
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.tokenizer import Tokenizer
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams

_Made = TypeVar("_Made")
_START_SECONDS = 20.0


class TooManyRequestsError(Exception):
    """The engine has as many requests as it may have; the message says how many."""


@dataclass
class Delta:
    """What is new in an answer: tokens, their text, and why it ended, if it did."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""


class PlainCore:
    """The package's engine core, in four methods. It may be used by one thread only."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self.core.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """Forget a request, and free its blocks. Ids that are unknown, or have finished, are ignored."""
        self.core.abort_requests([request_id])

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to do."""
        return self.core.has_unfinished_requests()

    def step(self) -> list[CoreOutput]:
        """Compute a token for each running request; this takes as long as the model does."""
        return [
            CoreOutput(output.request_id, new.token_ids[-1] if new.token_ids else None, new.finish_reason, output.error)
            for output in self.core.step().outputs
            for new in output.sequences
        ]


class Frontend:
    """What turns text into a request for the core, and what turns its tokens into text again."""

    def __init__(self, model: str, input_processor: InputProcessor, tokenizer: Tokenizer) -> None:
        self.model, self.input_processor, self.tokenizer = model, input_processor, tokenizer
        self._numbers = itertools.count()

    def process(self, prompt: Prompt, params: SamplingParams) -> tuple[EngineCoreRequest, IncrementalDetokenizer]:
        """A request for the core, with an id of its own, and the detokenizer for its answer. Tokenizing a long text takes long.

        Raises:
            RequestError: It cannot be served; the message says why.
        """
        request = self.input_processor.process_inputs(f"request-{next(self._numbers)}", prompt, params).core_request
        return request, IncrementalDetokenizer(self.tokenizer, request.prompt_token_ids, request.sampling_params)

    def read_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation, in the form in which the model has seen conversations (its chat template)."""
        return self.tokenizer.apply_chat_template(messages)


class Parts(NamedTuple):
    """A core, and what surrounds it."""

    core: PlainCore
    frontend: Frontend


def make_parts(model: str = "smollm2-135m", **options: Any) -> Parts:
    """The package's core on a real model, and its frontend. The options are those of `LLM`."""
    return parts_of(LLM(model, **options).llm_engine)


def parts_of(engine: LLMEngine) -> Parts:
    """The core of an engine, and its frontend; the engine itself must not be used any more."""
    assert engine.tokenizer is not None
    return Parts(PlainCore(engine.core), Frontend(engine.core.model_config.name, engine.input_processor, engine.tokenizer))


def start_thread(core_loop: Callable[..., None], core: Any, inbox: Any, deliver: Callable[[Any], None]) -> threading.Thread:
    """Run a core's loop in a thread of its own, which ends with this process. An error that comes out of the loop is delivered, not printed."""

    def run() -> None:
        try:
            core_loop(core, inbox, deliver)
        except Exception as error:
            with contextlib.suppress(Exception):
                deliver(error)

    thread = threading.Thread(target=run, name="core", daemon=True)
    thread.start()
    return thread


# -- HTTP ------------------------------------------------------------------------------------------------------------


class CompletionBody(BaseModel):
    """The body of `POST /v1/completions`, as far as lesson 11 serves it."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with its number of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling_params(self) -> SamplingParams:
        """How to sample. Raises RequestError."""
        names = ("max_tokens", "temperature", "seed", "stop", "ignore_eos")
        return SamplingParams(**{name: getattr(self, name) for name in names})


class ChatBody(CompletionBody):
    """The body of `POST /v1/chat/completions`, as far as lesson 11 serves it."""

    prompt: str | list[int] = ""
    messages: list[dict[str, str]]


Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


def make_head(kind: Kind, model: str) -> dict[str, Any]:
    """The fields with which an answer begins, or each event of a streamed one: all events have the same."""
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def make_error(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def make_usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """What an answer has cost."""
    total = num_prompt_tokens + num_output_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens, "total_tokens": total}


async def begin(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Wait for the first delta, and return all of them. An error that comes first is raised here, while it can still become a status code."""
    return _put_back(await anext(deltas), deltas)


async def _put_back(first: Delta, others: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(others):
        yield first
        async for delta in others:
            yield delta


async def unless_hung_up(request: Any, work: Awaitable[_Made]) -> _Made | None:
    """Wait for the result of some work. If the client hangs up before, the work is cancelled, and the result is None.

    Args:
        request: FastAPI's, whose body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _hang_up(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventResponse(StreamingResponse):
    """A streamed answer. If it ends early, because its client has hung up, its generator is closed at once."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


@contextlib.contextmanager
def serve(app: Any) -> Iterator[str]:
    """Serve an app on a free port of this machine, in a thread, and give its address. Afterwards the port is free again."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn", daemon=True)
        thread.start()
        try:
            end = time.monotonic() + _START_SECONDS
            while not server.started:
                if not thread.is_alive() or time.monotonic() > end:
                    raise RuntimeError("The server did not start: what it printed says why.")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_START_SECONDS)
