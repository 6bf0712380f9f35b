"""Stores grades on disk as soon as they are made, so that an interrupted run resumes where it stopped.

`grades.jsonl` has a line for each grade, under a key made of everything it depends on: the submission, the lesson, the limits. A grade
is reused if its key is the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from minivllm import __version__
from minivllm.course.grading.grader import CheckResult, Grade
from minivllm.course.grading.limits import Limits
from minivllm.course.grading.submissions import Submission


def _keep_seed(path: Path) -> int:
    if not path.exists():
        path.write_text(str(secrets.randbits(64)), encoding="utf-8")
    return int(hashlib.sha256(path.read_bytes()).hexdigest()[:16], 16)  # whatever is in there


class Progress:
    """The grades of this run and of earlier ones into the same folder.

    Args:
        path: The file; it need not exist.
        limits: Of this run.
        sandboxed: Whether this run uses a sandbox.

    Attributes:
        seed: Of the observers' random input: the same for everyone graded into this folder, in every run.
    """

    def __init__(self, path: Path, limits: Limits, sandboxed: bool) -> None:
        self._path = path
        self._settings = [repr(limits), sandboxed, __version__]
        self.seed = _keep_seed(path.with_name("seed"))
        self._known: dict[str, dict[str, Any]] = {}
        self._keys: dict[Submission, str] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                record = json.loads(line)
                self._known[record["key"]] = record
            except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
                continue

    def find(self, submission: Submission) -> tuple[Grade, str] | None:
        """The grade of an earlier run and the name of its page, if the submission is unchanged."""
        key = self._keys[submission] = self._key(submission)
        record = self._known.get(key)
        if record is None:
            return None
        results = {cell_id: (passed, reason) for cell_id, passed, reason in record["results"]}
        checks = tuple(CheckResult(check, *results[check.cell_id]) for check in submission.lesson.checks)
        return Grade(submission, checks, tuple(record["notes"])), record["page"]

    def add(self, grade: Grade, page: str) -> None:
        """Append a grade, after its page was written, under what was handed in when `find` was called: the file may have changed.

        Grades that only say that the grader failed are left out.
        """
        if grade.is_failure:
            return
        results = [[result.check.cell_id, result.passed, result.reason] for result in grade.results]
        record = {"key": self._keys[grade.submission], "results": results, "notes": grade.notes, "page": page}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _key(self, submission: Submission) -> str:
        lesson = [(cell.cell_id, cell.cell_type, cell.source) for cell in submission.lesson.cells]
        try:
            content = hashlib.sha256(submission.path.read_bytes()).hexdigest()
        except OSError:
            content = ""
        parts = [submission.learner, submission.lesson.name, submission.notes, content, lesson, *self._settings]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
