"""The surroundings and limits of a submission, their enforcement, and the outcome of each cell."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from minivllm.course.grading.observe import Observer
from minivllm.course.grading.submissions import Cell

_GRACE_SECONDS = 3.0
"""How long an interrupted cell may take to stop."""
_MOST_OUTPUTS = 500
Status = Literal["ok", "error", "slow", "loud", "deaf", "dead", "memory", "disk", "late"]
"""How a cell ended: normally; with an error; interrupted (slow: it ran too long, loud: it printed too much); with its kernel (deaf: it
could not be interrupted, dead: it exited Python, memory, disk); or late: the time for the whole notebook was up."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Attributes:
        cell_seconds: For one cell.
        total_seconds: For all cells together, including reruns.
        memory_bytes: Resident memory of the kernel and the processes it started.
        kept_output: Bytes of a cell's output that are kept.
        most_output: Bytes of output after which a cell is stopped.
        written_bytes: Size of the files in its own folder.
    """

    cell_seconds: float = 120
    total_seconds: float = 600
    memory_bytes: float = 4 * 1024**3
    kept_output: int = 1_000_000
    most_output: int = 8_000_000
    written_bytes: int = 2 * 1024**3


@dataclass(frozen=True)
class Surroundings:
    """What a kernel needs to know about the lesson and the machine.

    Attributes:
        preload: Import statements to run before the learner's first cell.
        imports: Import statements to rerun before each check, so that the names of the package are bound again.
        unreadable: Folders and files that cells must not open.
        unwritable: Folders in which cells must not write.
        sandboxed: Whether to run the kernel in bubblewrap's sandbox.
        num_threads: Its compute threads: its share of the processors.
        observer: Runs each check that passed once more, with other input; None where nothing is graded.
        seconds: How long each check took with the lesson's solution, by its id.
    """

    preload: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    unreadable: tuple[Path, ...] = ()
    unwritable: tuple[Path, ...] = ()
    sandboxed: bool = False
    num_threads: int = 1
    observer: Observer | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def seconds_after_a_hang(self, cell: Cell) -> float:
        """For a cell after a check that never ended, and may call the same method: plenty if it does not."""
        return 5 + 5 * self.seconds.get(cell.cell_id, 1.0)


@dataclass
class CellRun:
    """The outcome of one cell."""

    status: Status = "dead"
    error: tuple[str, str] = ("", "")
    """Name and message of the exception."""
    passed: bool = False
    """Whether it is a check that returned its receipt."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    starved: bool = False
    """Whether it ran too long while something else had the processor."""
    observations: str | None = None
    """What a check that passed saw when it was run with other input."""
    observer_run: CellRun | None = None
    """How that observation ended."""
    seconds: float = 0.0
    """How long it ran."""
    limit: float = 0.0
    """How long it might have run."""


@dataclass
class Watch:
    """Decides when to interrupt a cell, and when to kill a kernel that ignores it."""

    deadline: float
    is_last: bool
    reason: Status | None = None
    _interrupted: list[float] = field(default_factory=list)
    _looked: dict[str, float] = field(default_factory=dict)

    def is_due(self, what: str, seconds: float) -> bool:
        """Whether the last time was at least this many seconds ago; true the first time."""
        now = time.monotonic()
        if now - self._looked.get(what, float("-inf")) < seconds:
            return False
        self._looked[what] = now
        return True

    def look(self, output: Output) -> str | None:
        """What to do now: "interrupt" the cell, "kill" the kernel, or None."""
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
    """A cell's output, up to a limit."""

    def __init__(self, limits: Limits) -> None:
        self.kept: list[dict[str, Any]] = []
        self.is_idle = False
        self.is_too_much = False
        self._seen = 0
        self._limits = limits

    def add(self, message: dict[str, Any]) -> None:
        """Add a message from the kernel."""
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
        # Errors are kept: they explain the result.
        if (self._seen > self._limits.kept_output or len(self.kept) >= _MOST_OUTPUTS) and (kind != "error" or size > 100_000):
            return
        self.kept.append({"output_type": kind, **content})
