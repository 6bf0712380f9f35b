"""Runs the API server: binds the port, starts the engine, serves until a signal or the engine's death, and shuts down cleanly.

Ctrl-C or SIGTERM   new requests are refused; running ones have the shutdown timeout to finish, then end with an error
a second            running requests end now
a third             the process exits without waiting for anything
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec
import uvicorn

from minivllm.data_parallel.launcher import FrontendPlace
from minivllm.data_parallel.liveness import HOPELESS
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.server.api_server import make_app
from minivllm.entrypoints.server.connection import Connection
from minivllm.entrypoints.server.request_log import say
from minivllm.entrypoints.server.state import ServerSettings, ServerState
from minivllm.errors import ConfigError, MinivllmError
from minivllm.executor.processes import GRACE_SECONDS, START_SECONDS, ChildProcess, LifeSigns

logger = logging.getLogger(__name__)

_MANY_FILES = 65_536
_POLL_SECONDS = 0.2
"""How often to look whether another API server has died."""
_LEEWAY = 10.0
"""Seconds past the shutdown timeout until uvicorn drops connections that are still open."""
VOUCH_SECONDS = 5.0
"""An event loop that has not come round for this long shows no signs of life."""
END_NOW = signal.SIGUSR1
"""Tells a further API server to end its requests now. A second SIGTERM would not do: systemd sends SIGTERM to all processes."""


def run_server(start_engine: Callable[[ApiServerProcesses | None], AsyncLLMEngine], settings: ServerSettings) -> int:
    """Serve until a signal, or until the engine is dead.

    Args:
        start_engine: Starts the engine, and the other API servers if there are any.
        settings: Where to listen, and how to treat requests.

    Returns:
        The exit status: 0 after a signal, 1 after the engine's death.

    Raises:
        ConfigError: The port cannot be bound.
        ModelLoadError: The engine cannot be started.
    """
    # Before the model is loaded: a port in use fails at once.
    listener, *more = bind(settings.host, settings.port, settings.api_server_count)
    with listener:
        address = listener.getsockname()
        say(f"Loading the model; the server will listen on {url_of(address)}.")
        if not settings.api_keys and not ipaddress.ip_address(address[0]).is_loopback:
            say(f"minivllm: warning: anyone who can reach {address[0]} can use this server: set --api-key, or leave --host out.")
        raise_file_limit()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit_on_signal)  # until uvicorn installs its handlers: shut the engine down
        others = ApiServerProcesses(more, settings) if more else None
        try:
            engine = start_engine(others)
            try:
                state = ServerState(engine, settings)
                warn_of_chat_template(engine)
                server = ApiServer(state, address, others)
                freeze_heap()
                server.run(sockets=[listener])
            finally:
                engine.shutdown()
        finally:
            if others is not None:
                others.shutdown()
    return server.exit_status


def warn_of_chat_template(engine: AsyncLLMEngine) -> None:
    """Warn if the model's chat template does not work, before a client finds out."""
    if engine.tokenizer is None or not engine.tokenizer.hf_tokenizer.chat_template:
        return
    try:
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except MinivllmError as error:
        say(f"minivllm: warning: {error} /v1/chat/completions does not work.")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def freeze_heap() -> None:
    """Hide the present, permanent objects from the garbage collector: scanning them would block the event loop for a tenth of a second.
    Mirrors vLLM's `freeze_gc_heap`."""
    gc.collect()
    gc.freeze()


def raise_file_limit() -> None:
    """Raise the limit on open files, and thereby on connections. Mirrors vLLM's `set_ulimit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have an undocumented limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ApiServerSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process gets at its start: the engine's config, pickled, and the file descriptor of the socket on which to listen."""

    config: bytes
    place: FrontendPlace
    settings: ServerSettings
    listener: int


class ApiServerProcesses:
    """Further API servers, `num_others` of them, each in a process of its own: they serve the same port and the same replicas.

    Each is started as `python -m minivllm.entrypoints.server.api_server_proc`, takes over one of the `listeners`, and reads one line of
    JSON from its standard input (`ApiServerSetup`). That pipe stays open: when it closes, the first API server is gone, and they exit.
    Mirrors `run_multi_api_server` in `vllm/entrypoints/cli/serve.py`, where the first process serves no requests itself.
    """

    def __init__(self, listeners: list[socket.socket], settings: ServerSettings) -> None:
        self.num_others = len(listeners)
        self._listeners, self._settings = listeners, settings
        self._timeout = 0.0
        self._processes: dict[int, ChildProcess] = {}
        """The running ones, by `FrontendPlace.client_index`."""

    def start(self, config: EngineConfig, places: list[FrontendPlace]) -> None:
        """Start them."""
        packed, self._timeout = config.to_bytes(), config.parallel_config.replica_timeout
        for place, listener in zip(places, self._listeners, strict=True):
            setup = ApiServerSetup(packed, place, self._settings, listener.fileno())
            process = ChildProcess("minivllm.entrypoints.server.api_server_proc", setup, 1, (listener.fileno(),))
            self._processes[place.client_index] = process
            listener.close()  # or connections would queue here after the process has closed its own

    def poll(self) -> str | None:
        """While they start: how one of them has ended, such as "was killed by SIGKILL"; None while all run."""
        self._kill_silent(max(HOPELESS * self._timeout, START_SECONDS))
        return next((end for process in self._processes.values() if (end := process.poll())), None)

    def find_ended(self) -> tuple[int, str] | None:
        """One that has ended, and how. Forgets it."""
        self._kill_silent(HOPELESS * self._timeout)
        for client_index, process in self._processes.items():
            if end := process.poll():
                del self._processes[client_index]
                return client_index, end
        return None

    def _kill_silent(self, limit: float) -> None:
        """Kill those that have shown no sign of life for so many seconds. Call this at least once a second."""
        for client_index, process in self._processes.items():
            if process.kill_if_silent(limit):
                logger.error("API server %d shows no sign of life: it is killed.", client_index)

    def send_signal(self, number: int) -> None:
        """Send them a signal: SIGTERM lets them finish their requests, `END_NOW` ends these with an error."""
        for process in self._processes.values():
            process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, for at most this long, and not for those that are silent."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(process.poll() for process in self._processes.values()):
            time.sleep(0.05)
            self._kill_silent(self._timeout)

    def shutdown(self) -> None:
        """End them all, by force if need be."""
        for process in self._processes.values():
            process.hang_up()
        self.wait(GRACE_SECONDS)
        self.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            process.shutdown()


class ApiServer(uvicorn.Server):
    """uvicorn's server with its own shutdown, and an exit status where uvicorn re-raises the signal.

    The first API server prints the greeting, counts signals, and ends the `others` when it ends. Others show it by their `signs` that their
    event loop comes round.
    """

    LAST_WORDS_SECONDS = 1.0
    """Time between the engine's death and the server's exit, so that clients and /health can tell why."""

    def __init__(
        self, state: ServerState, address: tuple, others: ApiServerProcesses | None = None, signs: LifeSigns | None = None
    ) -> None:
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
        self._others, self._signs, self._is_first = others, signs, signs is None
        self._num_signals = 0
        self._watches: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal as the module's docstring says."""
        self.should_exit = True
        if not self._is_first:  # the first API server counts them, and sends END_NOW
            return
        self._num_signals += 1
        if self._num_signals == 2:
            self._state.closing.end_now()
            if self._others is not None:
                self._others.send_signal(END_NOW)
        elif self._num_signals > 2:
            os._exit(128 + sig)  # the engine process notices, and exits too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the greeting. Raises ConfigError if another process took the port while the model was loading."""
        for listener in sockets or ():  # the next server need not wait for closing connections
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(_port_sentence(*self._address[:2], error)) from error
        self._watches = [asyncio.create_task(self._exit_with_engine())]
        if self._others is not None:
            self._watches.append(asyncio.create_task(self._watch_others(self._others)))
        if self._signs is not None:
            self._watches.append(asyncio.create_task(self._vouch(self._signs)))
            asyncio.get_running_loop().add_signal_handler(END_NOW, self._state.closing.end_now)
        else:
            say(greeting(self.url, self._state))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for running requests, here and in the other API servers, and shut the engine down."""
        self._state.closing.begin(self._state.settings.shutdown_timeout)
        if self._others is not None:
            self._others.send_signal(signal.SIGTERM)
        await super().shutdown(sockets)
        for watch in self._watches:
            watch.cancel()
        if self._others is not None:
            await asyncio.to_thread(self._others.wait, self._state.settings.shutdown_timeout + _LEEWAY)
        await asyncio.to_thread(self._state.engine.shutdown)

    async def _exit_with_engine(self) -> None:
        try:
            await self._state.engine.wait_dead()
        except Exception:
            logger.exception("Watching the engine failed; the server shuts down.")
        await asyncio.sleep(self.LAST_WORDS_SECONDS)
        self.exit_status = 1
        self.should_exit = True

    async def _watch_others(self, others: ApiServerProcesses) -> None:
        while True:
            if ended := others.find_ended():
                client_index, end = ended
                if not self._state.closing.begun:
                    logger.error(
                        "API server %d %s: its clients' connections have ended, and the others go on.", client_index, end
                    )
                self._state.engine.replicas.drop_client(client_index)
            await asyncio.sleep(_POLL_SECONDS)

    @staticmethod
    async def _vouch(signs: LifeSigns) -> None:
        try:
            while True:
                signs.vouch(VOUCH_SECONDS)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            signs.vouch(math.inf)


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Bound sockets that do not listen yet; the kernel balances connections among them. Raises ConfigError if the port is in use."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65,536
        raise ConfigError(f"port is {port}, but must be from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = _bind_one((family, kind, protocol), address, socket.SO_REUSEADDR)  # a port in use is an error here
        if count == 1:
            return [listener]
        address = listener.getsockname()
        listener.close()
        return _bind_many((family, kind, protocol), address, count)
    except OSError as error:
        raise ConfigError(_port_sentence(host, port, error)) from error


def _bind_many(kind: tuple[int, int, int], address: tuple, count: int) -> list[socket.socket]:
    """Sockets that share a port."""
    listeners: list[socket.socket] = []
    try:
        while len(listeners) < count:
            try:  # without SO_REUSEADDR: `bind` of another server must fail while this one loads its model
                listeners.append(_bind_one(kind, address, socket.SO_REUSEPORT))
            except OSError:  # connections of an earlier server are still closing
                listeners.append(_bind_one(kind, address, socket.SO_REUSEPORT, socket.SO_REUSEADDR))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bind_one(kind: tuple[int, int, int], address: tuple, *options: int) -> socket.socket:
    listener = socket.socket(*kind)
    try:
        for option in options:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
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
    count = state.settings.api_server_count
    servers = f", with {count} API servers" if count > 1 else ""
    return (
        f"minivllm serves {state.engine.model_config.name} at {url} until Ctrl-C{servers}. Try it:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"""-d '{{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}'"""
    )
