"""Sends an answer, whole or as server-sent events, until it is complete or ended early.

A disconnect, the deadline or a shutdown end an answer early: its writer is cancelled, which closes the engine's stream and frees the
request's blocks. No task outlives the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.entrypoints.connection import last_word
from minivllm.entrypoints.openai.answer import Answer
from minivllm.entrypoints.openai.errors import ApiError, as_api_error
from minivllm.entrypoints.request_log import RequestRecord
from minivllm.entrypoints.server_state import ServerState

DONE = b"data: [DONE]\n\n"
EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EndedBy(enum.Enum):
    """Why an answer ended early."""

    CLIENT = "client disconnected"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class AnswerResponse(Response):
    """Sends an answer.

    Args:
        state: The server's.
        make_answer: Called when the request is admitted. May raise RequestError.
        num_sequences: Sequences to admit.
    """

    def __init__(self, state: ServerState, make_answer: Callable[[], Answer], num_sequences: int) -> None:
        super().__init__()
        self._state = state
        self._make_answer = make_answer
        self._num_sequences = num_sequences
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; an error becomes the response, or the last event of a stream that has begun."""
        record: RequestRecord = scope["minivllm.record"]
        try:
            if self._state.closing.begun:
                raise ApiError(503, "The server is shutting down.")
            with self._state.admission.admit(self._num_sequences):
                ended_by = await self._run(self._write(record, send), receive)
            if ended_by is None:
                return
            record.end = ended_by.value
            if ended_by is EndedBy.CLIENT:
                return
            error = self._early_end(ended_by)
        except Exception as failure:
            error = as_api_error(failure)
            record.end = "error"
            record.error = error.message if error.status_code >= 500 else None
        if not self._started:
            await error.response()(scope, receive, send)
            return
        event = b"data: " + msgspec.json.encode(error.body) + b"\n\n" + DONE
        await last_word(send({"type": "http.response.body", "body": event}), scope)

    async def _run(self, writing: Coroutine[None, None, None], receive: Receive) -> EndedBy | None:
        """Run the writer until it finishes or something ends it early; returns what did."""
        writer = asyncio.ensure_future(writing)
        enders = {
            asyncio.ensure_future(_disconnected(receive)): EndedBy.CLIENT,
            asyncio.ensure_future(self._state.closing.overdue.wait()): EndedBy.SHUTDOWN,
        }
        try:
            timeout = self._state.settings.request_timeout
            await asyncio.wait({writer, *enders}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                return writer.result()
            return next((ended_by for task, ended_by in enders.items() if task.done()), EndedBy.DEADLINE)
        finally:
            for task in (writer, *enders):
                task.cancel()
            await asyncio.gather(writer, *enders, return_exceptions=True)

    async def _write(self, record: RequestRecord, send: Send) -> None:
        answer = self._make_answer()
        record.answer = answer
        if answer.stream:
            await self._write_events(answer, send)
        else:
            body = msgspec.json.encode(await answer.response())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _write_events(self, answer: Answer, send: Send) -> None:
        """Send a chunk per choice; what they share is encoded once."""
        head = b"data: " + msgspec.json.encode(answer.head)[:-1] + b',"choices":['
        tail = b'],"usage":null}\n\n' if answer.include_usage else b"]}\n\n"
        async with contextlib.aclosing(answer.chunks()) as chunks:
            async for choices in chunks:
                if not self._started:  # not earlier: an invalid request gets its own status code
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                events = b"".join(head + msgspec.json.encode(choice) + tail for choice in choices)
                await send({"type": "http.response.body", "body": events, "more_body": True})
        last = b""
        if answer.include_usage:
            last = head + b'],"usage":' + msgspec.json.encode(answer.usage) + b"}\n\n"
        await send({"type": "http.response.body", "body": last + DONE})

    def _early_end(self, ended_by: EndedBy) -> ApiError:
        if ended_by is EndedBy.SHUTDOWN:
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
