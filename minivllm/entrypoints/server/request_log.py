"""The server's log: JSON lines on standard error, one per request, never with a prompt, an answer or a key."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from minivllm.entrypoints.openai.answer import Answer

logger = logging.getLogger("minivllm.requests")

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass
class RequestRecord:
    """A request's log entry.

    Attributes:
        request_id: The client's X-Request-Id, or a generated one.
        status: Of the response; None if the client disconnected first.
        end: How it ended: "finished", "client disconnected", "deadline", "shutdown" or "error".
        error: Cause of a server error.
        ignored_fields: Names of fields that had no effect.
        answer: What was generated, if anything.
    """

    request_id: str
    method: str
    path: str
    status: int | None = None
    end: str = "finished"
    error: str | None = None
    ignored_fields: list[str] = field(default_factory=list)
    answer: Answer | None = None
    begin: float = field(default_factory=time.perf_counter)

    def log(self) -> None:
        """Write the line; for a successful GET (metrics, health) at level debug."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "end": self.end,
            "seconds": round(time.perf_counter() - self.begin, 4),
        }
        if self.answer is not None:
            first = self.answer.time_to_first_token
            fields |= {
                "id": self.answer.id,
                "stream": self.answer.stream,
                "prompt_tokens": self.answer.usage["prompt_tokens"],
                "completion_tokens": self.answer.usage["completion_tokens"],
                "seconds_to_first_token": None if first is None else round(first, 4),
            }
        if self.ignored_fields:
            fields["ignored_fields"] = self.ignored_fields
        if self.error is not None:
            fields["error"] = self.error
        logger.log(self._level(), "request", extra={"fields": fields})

    def _level(self) -> int:
        status = self.status or 0
        if status >= 500 or self.error is not None:
            return logging.WARNING
        return logging.DEBUG if self.method in ("GET", "HEAD") and status < 400 else logging.INFO


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON: time (UTC), level, logger and message, and the `fields` of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{now}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class QueuedLog(logging.Handler):
    """Writes lines in a thread of its own, so that a full disk or pipe does not block the server.

    Lines it cannot write are dropped and counted, and those beyond the `capacity` that may wait.
    """

    CLOSE_SECONDS = 1.0
    """How long the last lines may take at the end of the process."""

    def __init__(self, stream: TextIO, capacity: int = 10_000) -> None:
        super().__init__()
        try:  # not the stream itself: a blocked write would hold its lock, even at the end of the process
            self._write = functools.partial(_write_all, os.dup(stream.fileno()))
        except OSError:  # a stream without a file
            self._write = functools.partial(print, file=stream, flush=True)
        self._lines: queue.Queue[str] = queue.Queue(capacity)
        self._num_dropped = 0
        self._count_lock = threading.Lock()
        """Not the handler's lock, which is held while `close` waits for the last lines."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line."""
        try:
            line = self.format(record)
        except Exception as error:  # a mistake in the logging call must not end the code that logs
            cause = f"{type(error).__name__}: {error}"
            line = self.format(_make_record("A message of %s could not be written: %s", record.name, cause))
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._count_dropped(1)

    def close(self) -> None:
        """Wait for the last lines, but not forever."""
        deadline = time.monotonic() + self.CLOSE_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        super().close()

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                if num_dropped := self._num_dropped:
                    message = "%d lines of this log were dropped, because they could not be written."
                    self._write(self.format(_make_record(message, num_dropped)))
                    self._count_dropped(-num_dropped)
                self._write(line)
            except (OSError, ValueError):  # a full disk, a stream that was closed
                self._count_dropped(1)
            finally:
                self._lines.task_done()

    def _count_dropped(self, number: int) -> None:
        with self._count_lock:
            self._num_dropped += number


def _write_all(file: int, line: str) -> None:
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]


def _make_record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("minivllm.log", logging.WARNING, __file__, 0, message, arguments, None)


def say(sentence: str) -> None:
    """Write a line to standard error, or drop it if the disk or the pipe is full."""
    if sys.stderr is None:
        return
    try:
        file = sys.stderr.fileno()
    except OSError:  # a stream without a file
        print(sentence, file=sys.stderr)
        return
    with contextlib.suppress(OSError, ValueError):
        if select.select((), (file,), (), 0)[1]:
            os.write(file, sentence.encode() + b"\n")  # print would keep an unwritten line, and retry at exit


def configure_logging(level: str) -> None:
    """Send everything at a level of `LOG_LEVELS` or above to standard error as JSON. Third-party loggers start at warning."""
    handler = QueuedLog(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
