"""Runs the API server: takes the port, starts the engine, serves until a signal or the engine's death, and shuts down in order.

Ctrl-C or SIGTERM   new requests are refused; running ones have the shutdown timeout to finish, then end with an error
a second            running requests end now
a third             the process exits without waiting for anything
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.api_server import make_app
from minivllm.entrypoints.connection import Connection
from minivllm.entrypoints.server_state import ServerSettings, ServerState
from minivllm.errors import ConfigError

logger = logging.getLogger(__name__)

_MANY_FILES = 65_536
_LEEWAY = 10.0
"""Seconds beyond the shutdown timeout until uvicorn gives up on connections that do not end."""


def run_server(start_engine: Callable[[], AsyncLLMEngine], settings: ServerSettings, *, host: str, port: int) -> int:
    """Serve until a signal, or until the engine is dead for good.

    Args:
        start_engine: Starts the engine.
        settings: How to treat requests.
        host: Address to listen on.
        port: TCP port; 0 takes a free one.

    Returns:
        The exit status: 0 after a signal, 1 after the engine's death.

    Raises:
        ConfigError: The port cannot be had.
        ModelLoadError: The engine cannot be started.
    """
    with bind(host, port) as listener:  # before the engine is loaded: a port in use is known at once
        address = listener.getsockname()
        print(f"Loading the model; then the server listens at {url_of(address)}.", file=sys.stderr, flush=True)
        if not settings.api_keys and not ipaddress.ip_address(address[0]).is_loopback:
            print(
                f"minivllm: warning: anybody who reaches {address[0]} can use this server: set --api-key, or leave --host out.",
                file=sys.stderr,
            )
        raise_file_limit()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)  # until uvicorn takes the signals: what has been started is ended
        engine = start_engine()
        try:
            server = make_server(ServerState(engine, settings), address)
            server.run(sockets=[listener])
        finally:
            engine.shutdown()
    return server.exit_status


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def raise_file_limit() -> None:
    """Have as many connections as the system allows this process: the usual limit is from a time of fewer.

    Mirrors `set_ulimit` of vLLM.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a limit that they do not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_server(state: ServerState, address: tuple) -> ApiServer:
    """The server that will listen at a socket's address."""
    config = uvicorn.Config(
        make_app(state),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        backlog=128,
        timeout_graceful_shutdown=int(state.settings.shutdown_timeout + _LEEWAY),
    )
    return ApiServer(config, state, address)


class ApiServer(uvicorn.Server):
    """uvicorn's server, with a shutdown of its own, and an exit status where uvicorn raises the signal again.

    Args:
        config: uvicorn's.
        state: The app's.
        address: Where it will listen.

    Attributes:
        exit_status: For the shell, when it has ended.
        url: Where it can be reached.
    """

    LAST_WORDS_SECONDS = 1.0
    """From the engine's death to the server's end, so that clients and a look at /health learn why."""

    def __init__(self, config: uvicorn.Config, state: ServerState, address: tuple) -> None:
        super().__init__(config)
        self.exit_status = 0
        self.url = url_of(address)
        self._state = state
        self._address = address
        self._num_signals = 0
        self._watch: asyncio.Task[None] | None = None

    def end(self, exit_status: int) -> None:
        """Begin to end."""
        self.exit_status = exit_status
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the first ends in order, the second at once, the third without waiting for anything."""
        self._num_signals += 1
        self.should_exit = True
        if self._num_signals == 2:
            self._state.closing.end_now()
        elif self._num_signals > 2:
            os._exit(128 + sig)  # the engine's process notices, and ends too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so.

        Raises:
            ConfigError: Another server began to listen there while this one loaded.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(_port_sentence(*self._address[:2], error)) from error
        self._watch = asyncio.create_task(self._end_with_the_engine())
        print(greeting(self.url, self._state), file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for running requests, end the engine."""
        self._state.closing.begin(self._state.settings.shutdown_timeout)
        await super().shutdown(sockets)
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._state.engine.shutdown)

    async def _end_with_the_engine(self) -> None:
        try:
            await self._state.engine.wait_dead()
        except Exception:
            logger.exception("The engine cannot be watched any more, so the server ends.")
        await asyncio.sleep(self.LAST_WORDS_SECONDS)
        self.end(1)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port, and does not listen yet.

    Raises:
        ConfigError: The address or the port cannot be had.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65,536
        raise ConfigError(f"port is {port}, but must be from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(_port_sentence(host, port, error)) from error
    return listener


def _port_sentence(host: str, port: int, error: OSError) -> str:
    return (
        f"The server cannot listen at {host}, port {port} ({error.strerror or error}): choose another --port, or end who has it."
    )


def url_of(address: tuple) -> str:
    """The URL of a socket's address."""
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(url: str, state: ServerState) -> str:
    """What a person needs to know when the server listens."""
    key = ' -H "Authorization: Bearer KEY"' if state.settings.api_keys else ""
    return (
        f"minivllm serves {state.model_name} at {url} until Ctrl-C. Try it:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"""-d '{{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}'"""
    )
