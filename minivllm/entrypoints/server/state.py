"""The state of a running API server: settings, engine, admission and shutdown.

The event loop owns it. Nothing here awaits between a check and its update, so two requests cannot both take the last slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from fastapi import Request

from minivllm.config import check_at_least
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.openai.answer import tokenizer_of
from minivllm.entrypoints.openai.errors import ApiError, quoted
from minivllm.entrypoints.server.connection import LAST_WORD_SECONDS
from minivllm.errors import ConfigError

MAX_API_SERVERS = 64
"""Each is a process of about 330 MB."""
_LEEWAY = 0.5
"""Seconds past LAST_WORD_SECONDS until requests that still run are cancelled."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of `minivllm serve`, whose help describes them; times are in seconds.

    `max_waiting` counts sequences beyond those that run. Any of the `api_keys` grants access; without any, there is no authentication. `chat_template` is the template itself. With `may_manage`,
    clients may restart replicas. With `escape_special_tokens`, no text in a message is read as a special token. `seed` is for `AsyncLLMEngine.join`.

    Raises:
        ConfigError: A value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = 2**20
    max_waiting: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    api_server_count: int = 1
    allow_kill: bool = False
    chat_template: str | None = None
    allowed_origins: tuple[str, ...] = ()
    may_manage: bool = True
    allowed_hosts: tuple[str, ...] = ()
    salt_by_key: bool = False
    escape_special_tokens: bool = False
    log_level: str = "info"
    seed: int = 0

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("An API key must be printable ASCII characters without a space, and at least one.")
        check_at_least("max_request_bytes", self.max_request_bytes, 1)
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(f"api_server_count is {self.api_server_count}, but must be from 1 to {MAX_API_SERVERS}.")
        check_at_least("max_waiting", self.max_waiting, 0)
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"request_timeout is {self.request_timeout} seconds, but must be more than 0.")
        if malformed := [name for name in self.allowed_hosts if not name_of(name)]:
            raise ConfigError(
                f"allowed_hosts has {malformed[0]!r}, which is no name: it must be one such as example.org, or '*'."
            )
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout} seconds, but must be at least 0.")

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """The names, besides this machine's own, under which requests may ask for this server; None for any."""
        if self.allowed_hosts:
            return frozenset(map(name_of, self.allowed_hosts))
        return frozenset() if is_loopback(self.host) and not self.api_keys else None


class Admission:
    """Limits the sequences in flight to a capacity, which may change, counted from before tokenization."""

    def __init__(self, get_capacity: Callable[[], int]) -> None:
        self._get_capacity = get_capacity
        self.num_sequences = 0
        self.num_requests = 0

    @contextlib.contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Reserve capacity for a request while it runs.

        Raises:
            ApiError: 400 if it exceeds the total capacity, 429 if too little of it is free.
        """
        capacity = self._get_capacity()
        if num_sequences > capacity:
            message = f"The request asks for {num_sequences} continuations (prompts times n), but this server accepts at most "
            raise ApiError(400, f"{message}{capacity} at once: send fewer prompts at a time, or lower n.")
        if self.num_sequences + num_sequences > capacity:
            in_flight = f"it has {self.num_sequences} continuations in flight and accepts {capacity}"
            raise ApiError(429, f"The server is full: {in_flight}. Try again.")
        self.num_sequences += num_sequences
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_sequences -= num_sequences
            self.num_requests -= 1


class Turns:
    """Lets one caller work at a time, and few wait: tokenizing long texts side by side would take the processor from answers."""

    MOST_WAITING = 64

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_callers = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one's turn. Raises an ApiError, 429, if too many wait."""
        if self._num_callers > self.MOST_WAITING:
            raise ApiError(429, f"The server is tokenizing for {self._num_callers} other requests. Try again.")
        self._num_callers += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_callers -= 1


class Closing:
    """Shutdown: new requests are refused at once, running ones end after a grace period."""

    def __init__(self) -> None:
        self.begun = False
        self.overdue = asyncio.Event()
        """Set when running requests must end."""
        self._requests: set[asyncio.Task] = set()
        self._watchers: set[asyncio.Task] = set()
        """GET requests, which shutdown does not wait for."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_once = False

    def begin(self, grace: float) -> None:
        """Refuse new requests; running ones have `grace` seconds, watchers none."""
        self.begun = True
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(0 if self._at_once else grace, self._end_all)
        _cancel(self._watchers)

    def end_now(self) -> None:
        """End running requests now, or as soon as closing begins. Safe in a signal handler."""
        self._at_once = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_all)

    @contextlib.contextmanager
    def ending(self, *, only_watches: bool) -> Iterator[None]:
        """Register the current task to be cancelled: a watcher as soon as closing begins, a request when it is overdue."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._watchers if only_watches else self._requests
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)

    def _end_all(self) -> None:
        assert self._loop is not None
        self.overdue.set()
        self._loop.call_later(LAST_WORD_SECONDS + _LEEWAY, _cancel, self._requests)


def name_of(host: str) -> str:
    """The name in a Host header, without the port, in lower case; "" if it is malformed."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:]+?)\.?)(?::[0-9]*)?", host)
    return (parts[1] or parts[2]).lower() if parts else ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine alone."""
    try:
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _cancel(tasks: set[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()


@dataclass
class ServerState:
    """Everything that routes and middleware share."""

    engine: AsyncLLMEngine
    settings: ServerSettings
    admission: Admission = field(init=False)
    closing: Closing = field(default_factory=Closing)
    tokenizing: Turns = field(default_factory=Turns)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.settings.chat_template is not None:
            tokenizer_of(self.engine).hf_tokenizer.chat_template = self.settings.chat_template
        if self.settings.escape_special_tokens:
            tokenizer_of(self.engine).escapes_special_tokens = True
        self.admission = Admission(self._capacity)

    def _capacity(self) -> int:
        """How many sequences may be in flight here: more with more replicas."""
        max_running = self.engine.scheduler_config.max_num_seqs * self.engine.num_engines
        return math.ceil((max_running + self.settings.max_waiting) / self.settings.api_server_count)


def state_of(request: Request) -> ServerState:
    """The state of the server that got a request."""
    state: ServerState = request.app.state.server
    return state


def check_model(request: Request, model: str | None) -> None:
    """Refuse a request for another model than the one that is served; None is any."""
    name = state_of(request).engine.model_config.name
    if model is not None and model != name:
        raise ApiError(
            404, f"There is no model {quoted(model)}: this server serves {quoted(name)}.", param="model", code="model_not_found"
        )
