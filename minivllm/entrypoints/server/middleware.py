"""Middleware in front of every route: request id and log line, API key.

Plain ASGI: Starlette's `BaseHTTPMiddleware` puts a task and a queue between a stream and its client, and hides disconnects.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import uuid

import h11
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.entrypoints.openai.errors import ApiError, as_api_error, quoted
from minivllm.entrypoints.server.connection import last_word
from minivllm.entrypoints.server.request_log import RequestRecord
from minivllm.entrypoints.server.state import Closing, is_loopback, name_of

MAX_REQUEST_ID = 128
OPEN_PATHS = ("/health", "/ping")
"""For load balancers, which have no key."""


class RequestMiddleware:
    """Assigns the request id, logs the request, turns unexpected errors into status 500, and ends requests at shutdown.

    A request that is answered before its body has arrived closes its connection: the rest may be endless.
    """

    def __init__(self, app: ASGIApp, closing: Closing) -> None:
        self.app = app
        self.closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; `scope["minivllm.record"]` is its log entry."""
        scope = as_origin_form(scope)
        headers = Headers(scope=scope)
        request_id = usable_request_id(headers.get("x-request-id", ""))
        record = scope["minivllm.record"] = RequestRecord(request_id, scope["method"], scope["path"])
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        is_gone = is_complete = False

        async def watched_receive() -> Message:
            nonlocal has_body, is_gone
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                has_body = False
            elif message["type"] == "http.disconnect" and has_body:
                is_gone = True
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal is_complete
            if is_gone:
                return
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if has_body:
                    message["headers"].append((b"connection", b"close"))
            elif not message.get("more_body"):
                is_complete = True
            await send(message)

        try:
            with self.closing.ending(only_watches=scope["method"] in ("GET", "HEAD")):
                await self.app(scope, watched_receive, send_with_id)
        except asyncio.CancelledError:
            record.end = "shutdown"
            if not self.closing.begun or is_complete:
                raise
            if record.status is None:
                error = ApiError(503, "The server is shutting down.", code="shutdown")
                await last_word(error.response()(scope, receive, send_with_id), scope)
            else:
                await last_word(send_with_id({"type": "http.response.body", "body": b""}), scope)
        except h11.LocalProtocolError:  # uvicorn has already refused the rest of a malformed request
            record.end = "malformed request"
        except Exception as failure:
            error = as_api_error(failure)
            record.end, record.error = "error", error.message
            if record.status is None:
                await error.response()(scope, receive, send_with_id)
        finally:
            if is_gone:
                record.end = "client disconnected"
            record.log()


class KeyMiddleware:
    """Requires an API key for everything but `OPEN_PATHS`.

    A key comes as `Authorization: Bearer KEY`, or as the password of HTTP Basic, which browsers prompt for.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or answer 401."""
        given = given_key(Headers(scope=scope).get("authorization", ""))
        scope["minivllm.has_key"] = self.knows(given)
        if scope["path"] not in OPEN_PATHS and not scope["minivllm.has_key"]:
            error = ApiError(
                401,
                "This server needs an API key: send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                # Chromium reads only the first challenge; Basic makes it prompt for a password.
                headers={"WWW-Authenticate": 'Basic realm="minivllm", charset="UTF-8", Bearer realm="minivllm"'},
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def knows(self, key: bytes) -> bool:
        """Whether this is one of the keys, compared in constant time."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class OriginMiddleware:
    """Keeps pages of other sites from using a server on this machine, or from managing its replicas.

    A page's host name may resolve to 127.0.0.1 (DNS rebinding), and then its requests come from its own origin. So a server that listens on
    loopback without a key answers only requests for names of this machine. Under `/replicas`, no request may come from another origin.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str] | None) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or answer 403."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        error = None
        if host and self.allowed_hosts is not None and not is_known_host(name_of(host), self.allowed_hosts):
            error = ApiError(403, f"{quoted(host)} is no name of this server: use 127.0.0.1, or start it with --allowed-hosts.")
        elif (
            scope["path"].startswith("/replicas")
            and origin is not None
            and (not host or origin.partition("://")[2].lower() != host.lower())
        ):
            error = ApiError(403, "Pages of other origins may not manage this server's replicas.")
        await (self.app(scope, receive, send) if error is None else error.response()(scope, receive, send))


class GenerationCors:
    """CORS for OpenAI's routes alone: a page that may generate must not be able to restart a replica."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self.app = app
        self.with_cors = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        await (self.with_cors if scope["path"].startswith("/v1/") else self.app)(scope, receive, send)


def as_origin_form(scope: Scope) -> Scope:
    """A request for "http://host/path", as clients send it to proxies, as one for "/path" of that host."""
    scheme, separator, rest = scope["path"].partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return scope
    host, _, path = rest.partition("/")
    raw = scope["raw_path"].split(b"/", 3)
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    changes = {"path": f"/{path}", "raw_path": b"/" + (raw[3] if len(raw) > 3 else b"")}
    return {**scope, **changes, "headers": [*headers, (b"host", host.encode("latin-1", "replace"))]}


def is_known_host(name: str, allowed: frozenset[str]) -> bool:
    """Whether a name is one of these, or means this machine by itself."""
    if "*" in allowed or name in allowed or name == "localhost" or name.endswith(".localhost"):
        return True
    return is_loopback(name)


def usable_request_id(given: str) -> str:
    """The client's id if it is safe in a log and a header, else a new one."""
    return given if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable() else uuid.uuid4().hex


def given_key(authorization: str) -> bytes:
    """The key in an Authorization header, empty if there is none."""
    scheme, _, credentials = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("latin-1")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    return b""


def salt_of_key(authorization: str) -> str | None:
    """A cache salt for all requests with the same key; None without a key."""
    key = given_key(authorization)
    return hashlib.sha256(b"cache salt " + key).hexdigest() if key else None


def _digest(key: bytes) -> bytes:
    """A digest of fixed length, so that comparing it does not leak the key's."""
    return hashlib.sha256(key).digest()
