"""The server's log: JSON lines on standard error, one per request, never with a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        return logging.DEBUG if self.method == "GET" and status < 400 else logging.INFO


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


def configure_logging(level: str) -> None:
    """Send everything at a level of `LOG_LEVELS` or above to standard error as JSON. Third-party loggers start at warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
