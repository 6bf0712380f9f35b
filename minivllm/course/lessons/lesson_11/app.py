"""The check of lesson 11 for a server: requests and responses without a socket, over a core on a script."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.lessons.lesson_08.situations import END, Crowd, Letters
from minivllm.course.lessons.lesson_11.events import read_stream
from minivllm.course.lessons.lesson_11.situations import (
    SECONDS,
    NotedFrontend,
    WatchedCore,
    becomes,
    expect_nothing_left,
    make_core,
    run,
    started,
)
from minivllm.course.observations import expect, fail, seeded

_FATAL_STEP = 6
_LOOK_AT_HANG_UPS = (
    "what happens when a client hangs up: `unless_hung_up` around all that waits, begin included, and an EventResponse"
)
_LOOK_AT_NONE = "what you do with None, which unless_hung_up returns"
_WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": "a", "max_tokens": 0},
    {"prompt": "a" * 200},
    {"prompt": "a", "temperature": -1.0, "stream": True},
)
_WHOLE, _STREAMED = (
    "a whole answer: the `JSONResponse` at the end of `answer`",
    "a streamed answer: the `EventResponse`, and its events",
)


_SCOPE = {
    "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
    "query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
}  # fmt: skip


@dataclass
class Response:
    """What a client has got."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    def read(self, said: str) -> Any:
        """The JSON of a whole answer, or the events of a streamed one; fails if it is neither."""
        data = b"".join(self.parts)
        if "event-stream" in self.headers.get("content-type", ""):
            return read_stream(said, data)
        try:
            return json.loads(data)
        except ValueError:
            fail(f"{said}\nExpected: JSON\nGot: {data[:200]!r}\nLook at what you return.")


class Client:
    """Calls an app as a server would.

    Args:
        app: The app.
        frontend: The one that it uses.
    """

    def __init__(self, app: Any, frontend: NotedFrontend) -> None:
        self.app, self.frontend = app, frontend

    async def call(
        self, method: str, path: str, body: Any = None, hang_up: asyncio.Event | None = None,
        response: Response | None = None, stalls: bool = False,
    ) -> Response:  # fmt: skip
        """The response, or the given one, which fills as it comes; with `hang_up`, the client hangs up when that is set. One that `stalls`
        takes nothing after the first part of a response."""
        response, hung_up = response or Response(), hang_up or asyncio.Event()
        messages = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                response.parts.append(message["body"])
                if stalls:
                    await asyncio.Event().wait()

        await asyncio.wait_for(
            self.app(_SCOPE | {"method": method, "path": path, "raw_path": path.encode()}, receive, send), SECONDS
        )
        return response


def check_app(make_app: Any, engine_cls: Any) -> None:
    """Whole and streamed answers, what cannot be served, more than may be, a client that hangs up, and a dead engine."""
    run("A server whose core is a script.", lambda: _answer(make_app, engine_cls), 20.0)
    run("A server whose core takes a step when it is allowed to.", lambda: _refuse_and_hang_up(make_app, engine_cls), 20.0)
    run("A server whose core dies.", lambda: _die(make_app, engine_cls), 20.0)


@asynccontextmanager
async def _start(make_app: Any, engine_cls: Any, **options: Any) -> AsyncIterator[tuple[Any, WatchedCore, Client]]:
    core, frontend, _ = make_core(Crowd("server"), **options)
    async with started(engine_cls, core, max_requests=3) as engine:
        yield engine, core, Client(make_app(engine, frontend), frontend)


async def _answer(make_app: Any, engine_cls: Any) -> None:
    async with _start(make_app, engine_cls, is_gated=True) as (engine, core, client):
        pumping = asyncio.ensure_future(_pump(core))
        rng, num_blocks = seeded("server"), core.num_free_blocks
        for number in range(12):
            await _compare_answer(client, rng, number)
        pumping.cancel()
        core.allow()
        await asyncio.gather(pumping, return_exceptions=True)
        said, is_held_up = "All twelve have been answered.", threading.get_ident() in client.frontend.threads
        expect(said, "that the event loop has tokenized", False, is_held_up, "asyncio.to_thread")
        await expect_nothing_left(said, engine, core, num_blocks)


async def _compare_answer(client: Client, rng: random.Random, number: int) -> None:
    """One answer: of a text or a chat, whole or streamed."""
    is_chat, stream, usage = number % 2 == 1, number % 4 > 1, (None, True, False)[number // 2 % 3]
    prompt, max_tokens = "".join(rng.choices("abcdeéé", k=rng.randint(1, 9))), rng.randint(1, 12)
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stream": stream, "model": "letters"}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body |= {"stream_options": {"include_usage": usage}} if stream and usage is not None else {}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    said = f"POST {path} with {json.dumps(body)}"
    response = await client.call("POST", path, body)
    expect(said, "status", 200, response.status, "what you return")
    expected, num_prompt_tokens = _expected(f"request-{number}", max_tokens), len(prompt.encode())
    if stream:
        _compare_streamed(said, response, is_chat, expected, num_prompt_tokens if usage else None)
    else:
        _compare_whole(said, response.read(said), is_chat, expected, num_prompt_tokens)


async def _pump(core: WatchedCore, num_steps: int = 10**6) -> None:
    """Allow a step now and then, so that readers see single deltas."""
    end = core.num_steps + num_steps
    while core.num_steps < end:
        if core.is_waiting:
            core.allow(1)
        await asyncio.sleep(0.002)


def _expected(request_id: str, max_tokens: int) -> tuple[str, str, int]:
    """The text, the finish reason and the number of tokens of an answer of this engine."""
    script, tokens = Crowd("server").make_script(), []
    for position in range(max_tokens):
        tokens.append(script.token(request_id, position))
        if tokens[-1] == END:
            return Letters().decode(tokens[:-1]), "stop", len(tokens)
    return Letters().decode(tokens), "length", len(tokens)


def _compare_whole(said: str, content: Any, is_chat: bool, expected: tuple[str, str, int], num_prompt_tokens: int) -> None:
    text, reason, count = expected
    choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    right = {
        "object": "chat.completion" if is_chat else "text_completion",
        "model": "letters",
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": reason}],
        "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": count, "total_tokens": num_prompt_tokens + count},
    }
    for name, value in right.items():
        expect(said, f"{name!r} of the answer", value, content.get(name) if isinstance(content, dict) else content, _WHOLE)
    expect(said, "that it has an id and a time", True, {"id", "created"} <= content.keys(), _WHOLE)


def _compare_streamed(
    said: str, response: Response, is_chat: bool, expected: tuple[str, str, int], num_prompt_tokens: int | None
) -> None:
    """`num_prompt_tokens` is None if no usage was asked for."""
    text, reason, count = expected
    is_stream = "text/event-stream" in response.headers.get("content-type", "")
    expect(said, "media type", True, is_stream, _STREAMED)
    events = response.read(said)[:-1]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    expect(said, "objects of the events", [kind], sorted({event["object"] for event in events}), "the head's kind")
    choices = [choice for event in events for choice in event["choices"]]
    got = "".join(choice["delta"]["content"] if is_chat else choice["text"] for choice in choices)
    expect(said, "text and finish reason", [text, reason], [got, choices[-1]["finish_reason"]], _STREAMED)
    usages = [event["usage"]["total_tokens"] for event in events if "usage" in event]
    right = [] if num_prompt_tokens is None else [num_prompt_tokens + count]
    expect(said, "total tokens in usage events", right, usages, "body.include_usage, and the prompt's tokens")


async def _refuse_and_hang_up(make_app: Any, engine_cls: Any) -> None:
    async with _start(make_app, engine_cls, is_gated=True, ends=False) as (engine, core, client):
        num_blocks, rng = core.num_free_blocks, seeded("refused")
        for wrong in _WRONG:
            response = await client.call("POST", "/v1/completions", wrong)
            said = f"POST /v1/completions with {str(wrong)[:80]}"
            _compare_error(said, 400, response, "what raises a RequestError, and who catches it")
        body = {"prompt": "abc", "max_tokens": rng.randint(30, 40), "temperature": 0}
        await _hang_up_early(engine, client, body)
        said, hang_up = "max_requests=3: two whole answers and a streamed one are on their way.", asyncio.Event()
        calls = [_begin(client, {**body, "stream": stream}, hang_up, stalls=stream) for stream in (False, True, False)]
        if not await becomes(lambda: len(engine.streams) == 3):
            expect(said, "requests with a stream", 3, len(engine.streams), "how a request gets to engine.generate")
        for stream in (False, True):
            response = await client.call("POST", "/v1/completions", {**body, "stream": stream})
            _compare_error(f"{said} A fourth comes, stream={stream}.", 429, response, "TooManyRequestsError, which begin raises")
        await _pump(core, 8)
        hang_up.set()
        await becomes(lambda: not engine.streams)
        core.allow()
        said = "Three clients, whole and streamed, hang up after a few steps."
        errors = [repr(error) for error in await asyncio.gather(*calls, return_exceptions=True) if isinstance(error, Exception)]
        expect(said, "errors in the server", [], errors, _LOOK_AT_NONE)
        await becomes(lambda: len(core.aborted) == 5)
        what = "aborts sent to the core: two for clients that left before the first token, three for these"
        expect(said, what, 5, len(core.aborted), _LOOK_AT_HANG_UPS)
        await expect_nothing_left(said, engine, core, num_blocks)


def _begin(
    client: Client, body: dict[str, Any], hang_up: asyncio.Event | None = None, **options: Any
) -> asyncio.Future[Response]:
    """A call that goes on beside the check."""
    return asyncio.ensure_future(client.call("POST", "/v1/completions", body, hang_up, **options))


async def _hang_up_early(engine: Any, client: Client, body: dict[str, Any]) -> None:
    for stream in (True, False) if seeded("early").random() < 0.5 else (False, True):
        said, hang_up = f"A client that hangs up before the first token, stream={stream}.", asyncio.Event()
        calling = _begin(client, {**body, "stream": stream}, hang_up)
        await becomes(lambda: len(engine.streams) == 1)
        hang_up.set()
        await becomes(lambda: not engine.streams)
        expect(said, "requests that still have a stream", [], sorted(engine.streams), _LOOK_AT_HANG_UPS)
        [outcome] = await asyncio.gather(calling, return_exceptions=True)
        errors = [repr(outcome)] if isinstance(outcome, Exception) else []
        expect(said, "errors in the server", [], errors, _LOOK_AT_NONE)


def _compare_error(said: str, status: int, response: Response, look: str) -> None:
    expect(said, "status", status, response.status, look)
    try:
        message = response.read(said)["error"]["message"]
    except (TypeError, KeyError):
        fail(
            f"{said}\nExpected: refuse(…), which makes an error with a message\nGot: {b''.join(response.parts)[:200]!r}\nLook at {look}."
        )
    expect(said, "that the error has a message", True, isinstance(message, str) and bool(message), look)


async def _die(make_app: Any, engine_cls: Any) -> None:
    async with _start(make_app, engine_cls, fails_at=_FATAL_STEP, ends=False, is_gated=True) as (engine, core, client):
        expect("GET /health", "status", 200, (await client.call("GET", "/health")).status, "health, which was given")
        body = {"prompt": "abc", "max_tokens": 9, "temperature": 0}
        whole, streamed = Response(), Response()
        calls = [_begin(client, {**body, "stream": response is streamed}, response=response) for response in (whole, streamed)]
        await becomes(lambda: len(engine.streams) == 2)
        core.allow(_FATAL_STEP - 1)
        await becomes(lambda: bool(streamed.parts))
        core.allow()
        await asyncio.gather(*calls)
        said = "The core dies after a few steps; a whole answer and a streamed one are on their way."
        _compare_error(
            f"{said} The whole one:", 503, whole, "EngineDeadError, which can come at the first delta and at any later one"
        )
        said = f"{said} The streamed one:"
        last = streamed.read(said)[-2:] if streamed.status == 200 else None
        is_error = last is not None and "out of memory" in str(last[0]) and last[1] == "[DONE]"
        expect(said, "that its last events are an error and [DONE]", True, is_error, "completion_events")
        _compare_error(
            "It is dead, and a request comes.", 503, await client.call("POST", "/v1/completions", body), "EngineDeadError"
        )
        expect("It is dead. GET /health", "status", 503, (await client.call("GET", "/health")).status, "engine.dead")
