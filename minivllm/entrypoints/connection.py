"""A client's connection: uvicorn's, which ends when its client does not take what it is sent, or does not say what it wants.

Without these bounds, a client that asks for a stream and stops to read would hold its places in the server for ever, and one that says
nothing its connection; and a server that has as many connections as it may have files open answers nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

TAKE_SECONDS = 60.0
"""How long a client may take to receive what has been sent, beyond what fits the buffers of the two machines."""
HEAD_SECONDS = 20.0
"""How long a client may take to send the head of a request, once it is connected or has begun."""
ABORT = "abort_connection"
"""Under this name, a request's `scope["state"]` has what ends its connection at once, whatever has not been sent."""


LAST_WORD_SECONDS = 2.0
"""How long a client that reads slowly has to take the error that ends its stream."""


async def last_word(sending: Awaitable[None], scope: Scope) -> None:
    """Send the end of an answer, or end the connection if its client does not take that either."""
    try:
        await asyncio.wait_for(sending, LAST_WORD_SECONDS)
    except asyncio.TimeoutError:
        scope["state"][ABORT]()


class Connection(H11Protocol):
    """A connection by h11: it is always there, and bounds the size of headers."""

    _limit: asyncio.TimerHandle | None = None
    _head_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Have the client watched from the first byte that cannot be sent, and give every request the way to end it all."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take in what came, and see whether the head of a request is whole."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._forget_head_limit()

    def _wait_for_head(self) -> None:
        if self._head_limit is None:
            self._head_limit = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def pause_writing(self) -> None:
        """Something could not be sent yet. Also when the connection is closing: it would wait for its client for ever."""
        super().pause_writing()
        self._limit = self.loop.call_later(TAKE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """All has been sent."""
        super().resume_writing()
        self._forget_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._forget_limit()
        self._forget_head_limit()

    def _forget_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
