"""An OpenAI-compatible server without a model, for tests: what it answers, and when, is up to the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class StubServer:
    """Runs in a thread of its own.

    Attributes:
        base_url: Where it listens.
        bodies, headers: What requests it got, in order.
        handler: What it does with one.
        models: Of /v1/models; None is status 404.
        api_key: That every request must have, if any.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: list[dict[str, Any]] | None = [{"id": "stub", "max_model_len": 1000}]
        self.api_key: str | None = None
        self.base_url = ""

    async def _models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        if self.models is None:
            return web.json_response({"error": {"message": "Not found"}}, status=404)
        return web.json_response({"object": "list", "data": self.models})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return await self.handler(request, body)

    @contextlib.contextmanager
    def running(self) -> Iterator[StubServer]:
        """Start it on a free port; end it."""
        loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)

        async def start() -> int:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return site._server.sockets[0].getsockname()[1]

        self.base_url = f"http://127.0.0.1:{loop.run_until_complete(start())}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=10)
            loop.close()


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text: str, *, chat: bool = False, reason: str | None = None) -> bytes:
    """An event with a piece of an answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    return event({"object": "chunk", "choices": [choice], "usage": None})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event that counts the tokens."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


DONE = b"data: [DONE]\n\n"


async def stream(request: web.Request, parts: AsyncIterator[bytes]) -> web.StreamResponse:
    """Answer with the bytes of a stream as they come."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    async for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


def steady(first: float = 0.0, gap: float = 0.0) -> Handler:
    """Answers as well-behaved servers do: as many tokens as are asked for, the first after `first` seconds, then one every `gap`."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = "messages" in body
        num_prompt_tokens = 7 if chat else len(body["prompt"])

        async def parts() -> AsyncIterator[bytes]:
            if chat:
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            for i in range(body["max_tokens"]):
                await asyncio.sleep(gap if i else first)
                yield piece(" word", chat=chat, reason="length" if i + 1 == body["max_tokens"] else None)
            if body.get("stream_options", {}).get("include_usage"):
                yield usage(num_prompt_tokens, body["max_tokens"])
            yield DONE

        if body.get("stream"):
            return await stream(request, parts())
        await asyncio.sleep(first + gap * (body["max_tokens"] - 1))
        choice = {"index": 0, "text": " word", "finish_reason": "length"}
        counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": body["max_tokens"]}
        return web.json_response({"choices": [choice], "usage": counts})

    return handle
