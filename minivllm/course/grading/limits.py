"""What one submission may take, and what came of each of its cells."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

_GRACE_SECONDS = 3.0
"""How long a cell may take to end after it was interrupted."""
_MOST_OUTPUTS = 500
Status = Literal["ok", "error", "slow", "loud", "deaf", "dead", "memory", "disk", "late"]
"""How a cell ended: as it should, with an error, interrupted (it ran too long, it printed too much), with the kernel (it could not
be interrupted, it ended Python, it took too much memory or room on the disk), or because the time for the whole notebook was over."""


@dataclass(frozen=True)
class Limits:
    """What one submission may take.

    Attributes:
        cell_seconds: of one cell.
        total_seconds: of all cells together, those that are run again included.
        memory_bytes: of the kernel and the processes it started, resident.
        kept_output: bytes of a cell's output that are kept.
        most_output: bytes of output after which a cell is stopped.
        written_bytes: of the files in its own folder.
    """

    cell_seconds: float = 120
    total_seconds: float = 600
    memory_bytes: float = 4 * 1024**3
    kept_output: int = 1_000_000
    most_output: int = 8_000_000
    written_bytes: int = 2 * 1024**3


@dataclass
class CellRun:
    """What came of one cell."""

    status: Status = "dead"
    error: tuple[str, str] = ("", "")
    """Name and text of the exception."""
    passed: bool = False
    """Whether it is a check whose receipt came back."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Watch:
    """Decides when a cell is interrupted, and when that did not help."""

    deadline: float
    is_last: bool
    reason: Status | None = None
    _interrupted: list[float] = field(default_factory=list)
    _looked: dict[str, float] = field(default_factory=dict)

    def is_due(self, what: str, seconds: float) -> bool:
        """Whether it is so long ago that this was looked at; the first time is at once."""
        now = time.monotonic()
        if now - self._looked.get(what, float("-inf")) < seconds:
            return False
        self._looked[what] = now
        return True

    def look(self, output: Output) -> str | None:
        """What to do with the cell now: "interrupt" it, "kill" the kernel, or nothing."""
        now = time.monotonic()
        if self.reason is None and now > self.deadline:
            self.reason = "late" if self.is_last else "slow"
        elif self.reason is None and output.is_too_much:
            self.reason = "loud"
        if self.reason is None:
            return None
        if self._interrupted and now > self._interrupted[0] + _GRACE_SECONDS:
            return "kill"
        if not self._interrupted or (len(self._interrupted) == 1 and now > self._interrupted[0] + _GRACE_SECONDS / 2):
            self._interrupted.append(now)
            return "interrupt"
        return None


class Output:
    """What a cell shows, up to a limit."""

    def __init__(self, limits: Limits) -> None:
        self.kept: list[dict[str, Any]] = []
        self.is_idle = False
        self.is_too_much = False
        self._seen = 0
        self._limits = limits

    def add(self, message: dict[str, Any]) -> None:
        """Take in a message of the kernel's."""
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            self.is_idle = self.is_idle or content.get("execution_state") == "idle"
        if kind == "clear_output":
            self.kept.clear()
        if kind not in ("stream", "display_data", "execute_result", "error"):
            return
        size = len(json.dumps(content, default=str))
        self._seen += size
        self.is_too_much = self.is_too_much or self._seen > self._limits.most_output
        # Errors are kept: they say why.
        if (self._seen > self._limits.kept_output or len(self.kept) >= _MOST_OUTPUTS) and (kind != "error" or size > 100_000):
            return
        self.kept.append({"output_type": kind, **content})
