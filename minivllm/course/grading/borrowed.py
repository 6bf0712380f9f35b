"""Finds cells that use parts of the package which the lesson itself does not use: answers in them may be the package's own.

Findings cost no points; they are reported to teacher and learner. Only the text of the cells is read, so it can be evaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from minivllm.course.grading.stubs import parse
from minivllm.course.grading.submissions import Cell, Lesson

_PUBLIC = ("minivllm.course.check", "minivllm.course.show_results", "minivllm.errors", "minivllm.viz")
_PUBLIC += tuple(f"minivllm.{name}" for name in ("LLM", "EngineArgs", "SamplingParams", "CompletionOutput", "RequestOutput"))
"""What no lesson asks for."""


def find_borrowed(cells: Sequence[Cell], numbers: dict[int, int], lesson: Lesson) -> list[str]:
    """A sentence for each of the learner's cells that uses what the lesson's cells do not.

    Args:
        cells: The submission as it is graded.
        numbers: The execution count of each code cell, by index.
        lesson: The lesson, solved.
    """
    allowed = {*_PUBLIC, *(name for cell in lesson.cells if cell.cell_type == "code" for name in _used_names(cell.source))}
    said = []
    for index, cell in enumerate(cells):
        if cell.cell_type != "code" or cell.kind not in ("answer", "own"):
            continue
        names = _longest(name for name in _used_names(cell.source) if not _is_allowed(name, allowed))
        if names:
            said.append(
                f"Cell {numbers[index]} uses {', '.join(names)}, which the lesson does not: its points may not be for the learner's own work."
            )
    return said


def _is_allowed(name: str, allowed: set[str]) -> bool:
    """Whether a name is allowed, or is an attribute of one that is; of a lesson's module, only what the lesson uses."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in allowed for count in range(2, len(parts) + 1))


def _longest(names: Iterable[str]) -> list[str]:
    """The names, without those that begin another."""
    found = sorted(set(names))
    return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]


def _used_names(source: str) -> list[str]:
    """What a cell uses of the package: full names of what it imports, attributes of a lesson's checks, and texts that are such names."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if name.startswith(("minivllm.", "lesson_")) and "." in name]
