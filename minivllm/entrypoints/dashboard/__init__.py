"""The live page at `/`: the lessons' picture of the cache and the batch, drawn while the server works, and a box to send prompts.

Nothing runs for it until somebody opens it. The page is plain HTML, CSS and JavaScript modules from `static/`, without a build
step and without the network; it reads `/live`, a stream of Server-Sent Events that `live.py` makes of the engine's steps, and
sends prompts to the same `/v1` that everybody else uses.
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
"""Of every answer: the page may load and ask nothing but this server, and no other site may frame it or read it."""

_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {path.name: path for path in (Path(__file__).parent / "static").iterdir() if path.suffix in _MEDIA_TYPES}


class _EventStream(StreamingResponse):
    """Server-Sent Events that end with their reader: when it leaves, the generator is closed at once, wherever it stands."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


def add_dashboard(app: FastAPI, get_engine: Callable[[], AsyncLLMEngine]) -> None:
    """Add the page, its files and its stream of events to a server.

    Args:
        app: Gets `GET /`, `GET /dashboard/{name}` and `GET /live`. They are for people, so the OpenAPI description leaves them out.
        get_engine: The engine of the moment. It is asked whenever a page connects, so that a restarted one is found.
    """

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise HTTPException(404, f"The page has no file {name!r}.")
        return _file(name)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        headers = {**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _EventStream(live_events(get_engine()), headers=headers)


def _file(name: str) -> Response:
    path = _FILES[name]
    headers = {**HEADERS, "Cache-Control": "no-cache"}
    return Response(path.read_bytes(), headers=headers, media_type=_MEDIA_TYPES[path.suffix])
