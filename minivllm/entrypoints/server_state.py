"""What a running API server keeps: its settings, the engine, how many requests it has taken on, and whether it is about to end.

All of it belongs to the event loop. Nothing here awaits between looking and changing, so two requests cannot both take the last place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.connection import LAST_WORD_SECONDS
from minivllm.entrypoints.openai.errors import ApiError
from minivllm.errors import ConfigError

_LEEWAY = 0.5
"""Seconds beyond the last word until a request is cancelled that has not heard of the end."""


@dataclass(frozen=True)
class ServerSettings:
    """What `minivllm serve` was told about requests.

    Args:
        api_keys: Any of them opens everything; with none, nothing is closed.
        max_request_bytes: The longest body of a request.
        max_waiting: Sequences that may wait beyond those that can run at once.
        request_timeout: Seconds that an answer may take, or None for as long as it needs.
        shutdown_timeout: Seconds that requests have to end when the server ends.

    Raises:
        ConfigError: A value is out of its range.
    """

    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = 2**20
    max_waiting: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("An API key must be printable ASCII characters without a space, and at least one.")
        if self.max_request_bytes < 1:
            raise ConfigError(f"max_request_bytes is {self.max_request_bytes}, but must be at least 1.")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}, but must be at least 0.")
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"request_timeout is {self.request_timeout} seconds, but must be more than 0.")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout} seconds, but must be at least 0.")


class Admission:
    """Counts the sequences that are taken on and not finished, from before their prompts are tokenized.

    Args:
        max_running: Sequences that the engine runs at once.
        max_waiting: Sequences that may wait beyond them.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.capacity = max_running + max_waiting
        self.num_sequences = 0
        """Taken on and not finished."""

    @contextlib.contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Hold places for a request while it lasts.

        Raises:
            ApiError: 400, it needs more than there are. 429, there are not enough left.
        """
        if num_sequences > self.capacity:
            raise ApiError(
                400,
                f"The request asks for {num_sequences} continuations (prompts times n), but this server takes on at most "
                f"{self.capacity} at once: send fewer prompts at a time, or lower n.",
            )
        if self.num_sequences + num_sequences > self.capacity:
            raise ApiError(
                429,
                f"The server has {self.num_sequences} continuations to write and takes on {self.capacity} at most: try again.",
            )
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences


class Closing:
    """The end of the server: first nothing new is taken on, and after a while what still runs is ended."""

    def __init__(self) -> None:
        self.begun = False
        self.overdue = asyncio.Event()
        """Set when what still runs must end."""
        self._requests: set[asyncio.Task] = set()
        self._watchers: set[asyncio.Task] = set()
        """The requests that only watch."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_once = False

    def begin(self, grace: float) -> None:
        """Take on nothing new; what runs has `grace` seconds. Who only watches (`GET`) is not waited for."""
        self.begun = True
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(0 if self._at_once else grace, self._end_all)
        _cancel(self._watchers)

    def end_now(self) -> None:
        """Have what still runs end now, or as soon as closing begins. May be called by a signal's handler."""
        self._at_once = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_all)

    @contextlib.contextmanager
    def ending(self, *, only_watches: bool) -> Iterator[None]:
        """Have the current task, which serves a request, cancelled when it is time: if it only watches, as soon as closing begins;
        else when it is overdue and has had the time for a last word."""
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


def _cancel(tasks: set[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()


@dataclass
class ServerState:
    """Everything that routes and middleware share.

    Attributes:
        engine: Generates.
        settings: What the server was told.
        model_name: The one model's name, as clients call it.
        max_model_len: The most tokens of prompt and output together that it takes.
        created: When the server began, in seconds since 1970.
    """

    engine: AsyncLLMEngine
    settings: ServerSettings
    model_name: str = field(init=False)
    max_model_len: int = field(init=False)
    admission: Admission = field(init=False)
    closing: Closing = field(default_factory=Closing)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.model_name = self.engine.model_config.name
        self.max_model_len = self.engine.model_config.max_model_len
        self.admission = Admission(self.engine.scheduler_config.max_num_seqs, self.settings.max_waiting)
