"""uvicorn's connection with timeouts for clients that stop reading or send no request.

Without them, a client that stops reading its stream would hold its capacity forever, and silent clients would use up the server's
file descriptors.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

TAKE_SECONDS = 60.0
"""How long a client may read nothing once the socket buffers are full."""
HEAD_SECONDS = 20.0
"""How long a client may take to send a request's headers."""
ABORT = "abort_connection"
"""Key in a request's `scope["state"]`: the function that aborts its connection, dropping unsent data."""
RESET_SECONDS = (0.05, 0.5, 3.0)
"""When to check whether a client that closed its sending side has reset the connection."""
LAST_WORD_SECONDS = 2.0
"""How long a slow client has to receive the end of its response."""


MAX_CHUNKS, BYTES_PER_CHUNK = 512, 256
"""A body may come in this many chunks, and in one more for each so many bytes: a chunk costs the event loop as much as hundreds of bytes."""


MAX_HEADERS = 256
"""Lines of a request's head, or of its trailer: each costs as much as a chunk, however short it is."""


class BoundedBuffer(ReceiveBuffer):
    """What h11 has received. It counts the lines of a head before h11 parses them."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """As h11's. Raises RemoteProtocolError if there are too many."""
        lines = super().maybe_extract_lines()
        if lines is not None and len(lines) > MAX_HEADERS:
            raise h11.RemoteProtocolError("there are too many headers", error_status_hint=431)
        return lines


class BoundedParser(h11.Connection):
    """Parses requests, and refuses many headers, and a body in tiny chunks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receive_buffer = BoundedBuffer()
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError at a chunk too many."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_CHUNKS + self._num_bytes // BYTES_PER_CHUNK:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        return event


async def last_word(sending: Awaitable[None], scope: Scope) -> None:
    """Send the end of a response; abort the connection if the client does not receive it in time."""
    try:
        await asyncio.wait_for(sending, LAST_WORD_SECONDS)
    except asyncio.TimeoutError:
        scope["state"][ABORT]()


class Connection(H11Protocol):
    """An h11 connection with these timeouts. h11 is always installed, and bounds the size of headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Watch the client from the first unsent byte, and let every request abort the connection."""
        self.conn = BoundedParser(h11.SERVER, self.conn._max_incomplete_event_size)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._start("head", HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Feed h11, and stop the timer when a request's headers are complete."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # a malformed rest, when the answer had begun
            self.transport.abort()
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop("head")
        elif "head" not in self._timers:
            self._start("head", HEAD_SECONDS)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """The client has closed its sending side. Answer if it still listens; one that does not resets the connection at the next byte."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["method"] != "POST":
            return False
        if self.scope["http_version"] != "1.1":  # it does not know 100 Continue
            return False
        cycle.keep_alive = False
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for seconds in RESET_SECONDS:
            self.loop.call_later(seconds, self._abort_if_reset)
        return True

    def _abort_if_reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if not self.transport.is_closing() and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def pause_writing(self) -> None:
        """The socket buffer is full. Also called while closing, which would otherwise wait forever for the client."""
        super().pause_writing()
        self._start("take", TAKE_SECONDS)

    def resume_writing(self) -> None:
        """The socket buffer is empty again."""
        super().resume_writing()
        self._stop("take")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both timers."""
        super().connection_lost(exc)
        self._stop("head")
        self._stop("take")

    def _start(self, timer: str, seconds: float) -> None:
        """Abort the connection if this timer is not stopped in time."""
        self._timers[timer] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
