"""How bodies are read: strict JSON, bounded in size, time and parts, before pydantic sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from minivllm.entrypoints.openai.errors import ApiError, quoted
from minivllm.entrypoints.server.state import state_of

BODY_SECONDS = 60.0
"""Time limit for receiving a request body."""
MAX_PARTS_OF_BODY = 20_000
"""Lists, objects and fields of a request: 2,048 messages of one part each have 14,337."""
BYTES_PER_VALUE = 5
"""A body may have as many values in its lists as a body of the maximum size has at this many bytes each: most token ids are longer."""
_PARTS = (b"[", b"{", b":")
"""One for each list, object and field."""
DROP_SECONDS, DROP_BYTES = 5.0, 2**28
"""How long, and how much of, a body that is too long is received before it is refused."""


def has_json(request: Request) -> bool:
    """Whether the request declares its body as JSON, which a page of another site can do only after asking (CORS)."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower() == "application/json"


class JsonRequest(Request):
    """A request whose body must be strict JSON (no NaN, valid UTF-8, bounded nesting), not too long, and not too slow."""

    async def body(self) -> bytes:
        """The body. Raises an ApiError if it is too long, or does not arrive in time."""
        if not hasattr(self, "_body"):
            try:
                self._body = await asyncio.wait_for(self._read(), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
            except ApiError:
                if "expect" not in self.headers:  # a client that waits for 100 Continue has sent nothing
                    await self._drop_rest()
                raise
        return self._body

    async def _read(self) -> bytes:
        body = bytearray()
        self._check_size(int(self.headers.get("content-length", 0)))
        async for chunk in self.stream():
            body += chunk
            self._check_size(len(body))
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        limit = state_of(self).settings.max_request_bytes
        if num_bytes > limit:
            raise ApiError(413, f"The body is longer than this server's limit of {limit} bytes: send fewer prompts at a time.")

    async def _drop_rest(self) -> None:
        """Receive what a client still sends, within limits: it would see a broken connection instead of the answer."""

        async def drop() -> None:
            num_bytes = 0
            async for chunk in self.stream():
                num_bytes += len(chunk)
                if num_bytes > DROP_BYTES:
                    return

        if not self._stream_consumed:
            with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect):
                await asyncio.wait_for(drop(), DROP_SECONDS)

    async def json(self) -> Any:
        """The body. Raises an ApiError that says where it is invalid, or that it has too many parts."""
        body = await self.body()
        check_num_parts(body, max_values=state_of(self).settings.max_request_bytes // BYTES_PER_VALUE)
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.") from None
        except RecursionError:
            raise ApiError(400, "The body is JSON that is nested too deeply.") from None
        await asyncio.sleep(0)  # let others run before it is validated
        return content


def check_num_parts(body: bytes, max_values: int) -> None:
    """Refuse JSON of many parts before it is parsed: a megabyte of tiny lists would block the event loop for tenths of a second.

    Raises:
        ApiError: There are more than `MAX_PARTS_OF_BODY` lists, objects and fields, or more than `max_values` values in all lists.
    """
    num_parts, num_values = sum(map(body.count, _PARTS)), body.count(b",")
    if num_parts <= MAX_PARTS_OF_BODY and num_values <= max_values:  # most bodies need no look at which characters are text
        return
    characters = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_text = np.logical_xor.accumulate(characters == ord('"'))
    counts = np.bincount(characters[~is_text], minlength=256)
    if sum(counts[ord(mark)] for mark in _PARTS) > MAX_PARTS_OF_BODY:
        raise ApiError(400, f"The body has more than {MAX_PARTS_OF_BODY} lists, objects and fields: send fewer at a time.")
    if counts[ord(",")] > max_values:
        raise ApiError(400, f"The body has more than {max_values} values: send fewer at a time.")


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest`, and requires Content-Type application/json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind a check of the Content-Type."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if self.body_field is not None and not has_json(request):
                given = quoted(request.headers.get("content-type", ""))
                raise ApiError(415, f"Content-Type is {given}, but must be application/json.")
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
