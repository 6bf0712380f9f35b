"""Runs the API server: binds the port, starts the engine, serves until a signal or the engine's death, and shuts down cleanly.

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
"""Seconds past the shutdown timeout until uvicorn drops connections that are still open."""


def run_server(start_engine: Callable[[], AsyncLLMEngine], settings: ServerSettings, *, host: str, port: int) -> int:
    """Serve until a signal, or until the engine is dead.

    Args:
        start_engine: Starts the engine.
        settings: How to treat requests.
        host: Address to listen on.
        port: TCP port; 0 picks a free one.

    Returns:
        The exit status: 0 after a signal, 1 after the engine's death.

    Raises:
        ConfigError: The port cannot be bound.
        ModelLoadError: The engine cannot be started.
    """
    with bind(host, port) as listener:  # before loading the model: a port in use fails at once
        address = listener.getsockname()
        print(f"Loading the model; the server will listen on {url_of(address)}.", file=sys.stderr, flush=True)
        if not settings.api_keys and not ipaddress.ip_address(address[0]).is_loopback:
            print(
                f"minivllm: warning: anyone who can reach {address[0]} can use this server: set --api-key, or leave --host out.",
                file=sys.stderr,
            )
        raise_file_limit()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit_on_signal)  # until uvicorn installs its handlers: shut the engine down
        engine = start_engine()
        try:
            server = ApiServer(ServerState(engine, settings), address)
            server.run(sockets=[listener])
        finally:
            engine.shutdown()
    return server.exit_status


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def raise_file_limit() -> None:
    """Raise the limit on open files, and so on connections. Mirrors `set_ulimit` of vLLM."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have an undocumented limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ApiServer(uvicorn.Server):
    """uvicorn's server with its own shutdown, and an exit status where uvicorn re-raises the signal.

    Args:
        state: What it serves, and how.
        address: That of the socket it will listen on.
    """

    LAST_WORDS_SECONDS = 1.0
    """Time between the engine's death and the server's exit, so that clients and /health can tell why."""

    def __init__(self, state: ServerState, address: tuple) -> None:
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
        super().__init__(config)
        self.exit_status = 0
        self.url = url_of(address)
        self._state = state
        self._address = address
        self._num_signals = 0
        self._watch: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal as the module's docstring says."""
        self._num_signals += 1
        self.should_exit = True
        if self._num_signals == 2:
            self._state.closing.end_now()
        elif self._num_signals > 2:
            os._exit(128 + sig)  # the engine process notices, and exits too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the greeting.

        Raises:
            ConfigError: Another process took the port while the model was loading.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(_port_sentence(*self._address[:2], error)) from error
        self._watch = asyncio.create_task(self._exit_with_engine())
        print(greeting(self.url, self._state), file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for running requests, shut the engine down."""
        self._state.closing.begin(self._state.settings.shutdown_timeout)
        await super().shutdown(sockets)
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._state.engine.shutdown)

    async def _exit_with_engine(self) -> None:
        try:
            await self._state.engine.wait_dead()
        except Exception:
            logger.exception("Watching the engine failed; the server shuts down.")
        await asyncio.sleep(self.LAST_WORDS_SECONDS)
        self.exit_status = 1
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: The address or the port cannot be bound.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65,536
        raise ConfigError(f"port is {port}, but must be from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(_port_sentence(host, port, error)) from error
    return listener


def _port_sentence(host: str, port: int, error: OSError) -> str:
    return f"The server cannot listen on {host}, port {port} ({error.strerror or error}): choose another --port, or stop what uses it."


def url_of(address: tuple) -> str:
    """The URL of a socket's address."""
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(url: str, state: ServerState) -> str:
    """Printed when the server is ready."""
    key = ' -H "Authorization: Bearer KEY"' if state.settings.api_keys else ""
    return (
        f"minivllm serves {state.engine.model_config.name} at {url} until Ctrl-C. Try it:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"""-d '{{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}'"""
    )
