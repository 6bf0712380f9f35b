"""Sends an answer, whole or as server-sent events, until it is complete or ended early.

A disconnect, the deadline or a shutdown end an answer early: its writer is cancelled, which closes the engine's stream and frees the
request's blocks. No task outlives the response.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.entrypoints.openai.answer import Answer
from minivllm.entrypoints.openai.errors import ApiError, as_api_error
from minivllm.entrypoints.server.connection import last_word
from minivllm.entrypoints.server.request_log import RequestRecord
from minivllm.entrypoints.server.state import ServerState

EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class AnswerResponse(Response):
    """Admits a request, and sends its answer."""

    def __init__(self, state: ServerState, answer: Answer) -> None:
        super().__init__()
        self._state = state
        self._answer = answer
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; an error becomes the response, or the last event of a stream that has begun."""
        record: RequestRecord = scope["minivllm.record"]
        try:
            if self._state.closing.begun:
                raise ApiError(503, "The server is shutting down.")
            with self._state.admission.admit(self._answer.num_sequences):
                record.answer = self._answer
                record.end = await self._run(self._write(send), receive)
            if record.end in ("finished", "client disconnected"):
                return
            error = self._early_end(record.end)
        except Exception as failure:
            error = as_api_error(failure)
            record.end = "error"
            record.error = error.message if error.status_code >= 500 else None
        if not self._started:
            await error.response()(scope, receive, send)
            return
        await last_word(send({"type": "http.response.body", "body": self._answer.error_events(error)}), scope)

    async def _run(self, writing: Coroutine[None, None, None], receive: Receive) -> str:
        """Run the writer until it finishes or something ends it early; returns how it ended, as a `RequestRecord` says it."""
        writer = asyncio.ensure_future(writing)
        enders = {
            asyncio.ensure_future(_disconnected(receive)): "client disconnected",
            asyncio.ensure_future(self._state.closing.overdue.wait()): "shutdown",
        }
        try:
            timeout = self._state.settings.request_timeout
            await asyncio.wait({writer, *enders}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()  # raises what the writer has raised
                return "finished"
            return next((end for task, end in enders.items() if task.done()), "deadline")
        finally:
            for task in (writer, *enders):
                task.cancel()
            await asyncio.gather(writer, *enders, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        if self._answer.stream:
            await self._write_events(self._answer, send)
        else:
            body = msgspec.json.encode(await self._answer.response())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _write_events(self, answer: Answer, send: Send) -> None:
        async with contextlib.aclosing(answer.events()) as parts:
            async for events in parts:
                if not self._started:  # not earlier: an invalid request gets its own status code
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": answer.last_events()})

    def _early_end(self, end: str) -> ApiError:
        if end == "shutdown":
            return ApiError(503, "The server is shutting down, and its grace period is over.", code="shutdown")
        return ApiError(
            504,
            f"The request exceeded this server's limit of {self._state.settings.request_timeout:g} seconds: "
            "ask for fewer tokens, or retry when it is less busy.",
            code="deadline",
            headers={"x-should-retry": "false"},  # OpenAI's client would retry twice
        )


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The body has been read, so no other message comes."""
    while (await receive())["type"] != "http.disconnect":
        pass
