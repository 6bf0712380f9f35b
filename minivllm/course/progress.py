"""The lessons, and how far a learner has come: `minivllm course`.

Points are read from what the checks printed in the learner's own exercises when they were last run and saved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import graded_cell, is_check, read_notebook
from minivllm.course.results import count_points
from minivllm.errors import CourseError

_WORDS_PER_MINUTE = 130
_CODE_LINES_PER_MINUTE = 10
"""Careful reading speed. Both are estimates, and are shown as such."""


@dataclass(frozen=True)
class Progress:
    """A lesson and the state of its exercise.

    Attributes:
        name: "04_paged_kv_cache".
        title: "Paged KV cache".
        minutes: To read and run the lesson, estimated from its length.
        points: Of the checks that passed when the exercise was last run and saved; None if the lesson has no exercise.
        most: The points of all checks.
        was_run: Whether any check of the exercise was run.
    """

    name: str
    title: str
    minutes: int
    points: float | None
    most: float
    was_run: bool


def find_progress(lessons: Path, exercises: Path) -> list[Progress]:
    """The progress in each lesson.

    Args:
        lessons: The folder of the lessons' notebooks.
        exercises: The folder in which the learner works.

    Raises:
        CourseError: There are no lessons, or a notebook cannot be read.
    """
    paths = sorted(lessons.glob("*.ipynb"))
    if not paths:
        raise CourseError(
            f"There are no lessons in {lessons}: run this in a copy of the repository, or in an unpacked sdist of a release."
        )
    found = []
    for path in paths:
        lesson, exercise = read_notebook(path), exercises / path.name
        cells = [cell for cell in read_notebook(exercise)["cells"] if is_check(cell)] if exercise.is_file() else []
        checks = {graded_cell(cell).cell_id: graded_cell(cell) for cell in cells}  # a copy counts once
        passed = {graded_cell(cell).cell_id for cell in cells if has_passed(cell)}
        points = sum(check.points for name, check in checks.items() if name in passed)
        was_run = any(cell["outputs"] for cell in cells)
        found.append(
            Progress(
                path.stem,
                _title(lesson),
                minutes_to_read(lesson),
                points if checks else None,
                sum(check.points for check in checks.values()),
                was_run,
            )
        )
    return found


def format_progress(lessons: list[Progress]) -> str:
    """The lessons as a table, with a line on what its numbers mean."""
    width = max(len(lesson.title) for lesson in lessons)
    lines = [f"{'lesson':6}  {'topic':{width}}  {'to read':>7}  points"]
    for lesson in lessons:
        lines.append(f"{lesson.name[:2]:6}  {lesson.title:{width}}  {lesson.minutes:>3} min  {_points(lesson)}".rstrip())
    graded = [lesson for lesson in lessons if lesson.points is not None]
    if graded:
        points, most = sum(lesson.points or 0 for lesson in graded), sum(lesson.most for lesson in graded)
        lines += ["", f"In all: {points:g} of {count_points(most)}, as the exercises were when last run and saved."]
    return "\n".join([*lines, "Reading times are estimated from the length; allow an evening or two to build an exercise."])


def _points(lesson: Progress) -> str:
    if lesson.points is None:
        return "no exercise"
    return f"{lesson.points:g} of {lesson.most:g}" + ("" if lesson.was_run else ", not begun")


def has_passed(cell: Any) -> bool:
    """Whether a check printed its tick when its cell was last run."""
    if not graded_cell(cell).is_intact or any(output["output_type"] == "error" for output in cell["outputs"]):
        return False
    printed = "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")
    return f"✓ {graded_cell(cell).name} (" in printed


def _title(notebook: Any) -> str:
    """What follows the number in the first heading: "# 04 · Paged KV cache"."""
    heading = re.search(r"^# \d\d · (.+)$", notebook["cells"][0]["source"], flags=re.MULTILINE)
    return heading[1] if heading else ""


def minutes_to_read(notebook: Any) -> int:
    """Minutes to read a lesson, rounded up to five."""
    words = sum(len(cell["source"].split()) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    lines = sum(cell["source"].count("\n") + 1 for cell in notebook["cells"] if cell["cell_type"] == "code")
    return 5 * ceil((words / _WORDS_PER_MINUTE + lines / _CODE_LINES_PER_MINUTE) / 5)
