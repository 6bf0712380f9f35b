"""The live page at `/`: the KV cache and the batch while the server runs, and a box to send prompts.

It costs nothing until it is opened. The page is plain HTML, CSS and JavaScript modules from `static/`, without a build step or
external resources. It reads `/live`, Server-Sent Events made by `live.py`, and sends prompts to the public `/v1`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.dashboard.live import live_events

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response: the page may contact only this server, and no other site may frame or read it."""

_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {path.name: path for path in (Path(__file__).parent / "static").iterdir() if path.suffix in _MEDIA_TYPES}


class _EventStream(StreamingResponse):
    """Server-Sent Events whose generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


def add_dashboard(app: FastAPI, get_engine: Callable[[], AsyncLLMEngine], *, may_kill: bool = False) -> None:
    """Add the page, its files and its event stream to a server.

    Args:
        app: Gets `GET /`, `GET /dashboard/{name}` and `GET /live`. The OpenAPI description leaves them out.
        get_engine: Returns the engine; called for each connection, as the engine may have been restarted.
        may_kill: Whether the page has buttons that kill replicas.
    """

    @app.get("/", include_in_schema=False)
    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str = "index.html") -> Response:
        if name not in _FILES:
            raise HTTPException(404, f"The page has no file {name!r}.")
        path = _FILES[name]
        headers = HEADERS | {"Cache-Control": "no-cache"}
        return Response(path.read_bytes(), headers=headers, media_type=_MEDIA_TYPES[path.suffix])

    @app.get("/live", include_in_schema=False)
    async def live(replica: int = 0) -> Response:
        engine = get_engine()
        if not 0 <= replica < engine.num_engines:
            raise HTTPException(400, f"There is no replica {replica}: they are 0 to {engine.num_engines - 1}.")
        headers = HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _EventStream(live_events(engine, replica, may_kill=may_kill), headers=headers)
