"""The cells of an exercise: answers that the learner fills in, checks that grade them, and everything else, which is given.

A solved notebook (`solutions/NN_topic.ipynb`) is also a source notebook of nbgrader, whose metadata (schema 3) marks a cell as an
answer (`solution`), a check (`grade`, with `points`) or given (neither). `find_problems` validates these marks.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import CourseError

BEGIN_SOLUTION = "### BEGIN SOLUTION"
END_SOLUTION = "### END SOLUTION"
STUB = 'raise NotImplementedError("write this")'
"""Replaces the lines between the two markers in an exercise."""
SCHEMA_VERSION = 3
GIVEN = {"grade": False, "solution": False, "locked": True, "task": False, "schema_version": SCHEMA_VERSION}
"""The nbgrader metadata of a given cell, but for its `grade_id`."""


@dataclass(frozen=True)
class GradedCell:
    """One check of a notebook.

    Attributes:
        cell_id: Its `grade_id`, which is also the cell's `id`.
        name: The name in its `check("...")`; the `cell_id` if the call is gone.
        points: What it is worth, according to the metadata.
        is_intact: Whether it still calls `check`. (`minivllm grade` restores the original cell.)
    """

    cell_id: str
    name: str
    points: float
    is_intact: bool


def read_notebook(path: Path) -> Any:
    """Read a notebook with `nbformat`.

    Raises:
        CourseError: The file is missing or not a notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise CourseError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:
        raise CourseError(f"{path} is not a notebook: {str(error).splitlines()[0].rstrip('.')}.") from None


def grading(cell: Any) -> dict[str, Any]:
    """A cell's nbgrader metadata, empty if it has none."""
    found = cell["metadata"].get("nbgrader")
    return found if isinstance(found, dict) else {}


def is_answer(cell: Any) -> bool:
    """Whether the learner fills in this cell."""
    return cell["cell_type"] == "code" and grading(cell).get("solution") is True


def is_check(cell: Any) -> bool:
    """Whether this cell is graded."""
    return cell["cell_type"] == "code" and grading(cell).get("grade") is True


def graded_cell(cell: Any) -> GradedCell:
    """The check in a cell, from its metadata and source."""
    data = grading(cell)
    cell_id = str(data.get("grade_id") or cell.get("id", ""))
    points = data.get("points", 0)
    calls = _check_calls(cell["source"])
    name = next((name for name, _ in calls if name is not None), cell_id)
    is_number = isinstance(points, (int, float)) and not isinstance(points, bool)
    return GradedCell(cell_id, name, points if is_number else 0, bool(calls))


def graded_cells(notebook: Any) -> list[GradedCell]:
    """All checks of a notebook, in order."""
    return [graded_cell(cell) for cell in notebook["cells"] if is_check(cell)]


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _check_calls(source: str) -> list[tuple[str | None, int | None]]:
    """Name and points of each call of `check` in a cell, magics aside; None for an argument that is not a literal."""
    tree = _parse(source) or _parse(
        "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n"))
    )
    if tree is None:
        return []
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("check", "course.check"):
            continue
        points = next((keyword.value for keyword in node.keywords if keyword.arg == "points"), ast.Constant(1))
        calls.append((_constant(node.args[0] if node.args else None, str), _constant(points, int)))
    return calls


def _constant(node: ast.expr | None, kind: type) -> Any:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is kind else None


def find_problems(notebook: Any) -> list[str]:
    """Why a solved notebook cannot become an exercise, one sentence per problem; empty for a valid notebook."""
    cells = notebook["cells"]
    problems = [f"Two cells have the id {name!r}." for name, n in Counter(cell.get("id") for cell in cells).items() if n > 1]
    for cell in cells:
        problem = _find_problem(cell)
        if problem:
            problems.append(f"Cell {cell.get('id')!r}: {problem}.")
    names = Counter(item.name for item in graded_cells(notebook))
    return problems + [f"Two checks have the name {name!r}." for name, count in names.items() if count > 1]


def _find_problem(cell: Any) -> str | None:
    data = grading(cell)
    if data.get("schema_version") != SCHEMA_VERSION:
        return f"it has no nbgrader metadata in version {SCHEMA_VERSION} of the schema"
    if not cell.get("id") or data.get("grade_id") != cell["id"]:
        return f"its grade_id is {data.get('grade_id')!r}, but must equal the cell's id"
    flags = {name: data.get(name) for name in ("grade", "solution", "locked", "task")}
    role = next((role for role, wanted in _ROLES.items() if wanted == flags), None)
    if role is None:
        return f"its flags {flags} mark neither an answer, a check nor a given cell"
    if cell["cell_type"] != "code":
        return None if role == "given" else f"a text cell cannot be {'an answer' if role == 'answer' else 'a check'}"
    if role != "check" and "points" in data:
        return "it has points, but is not a check"
    return {"answer": _find_answer_problem, "check": _find_check_problem, "given": _find_given_problem}[role](cell)


_ROLES = {
    "answer": {"grade": False, "solution": True, "locked": False, "task": False},
    "check": {"grade": True, "solution": False, "locked": True, "task": False},
    "given": {"grade": False, "solution": False, "locked": True, "task": False},
}


def _find_answer_problem(cell: Any) -> str | None:
    if BEGIN_SOLUTION not in cell["source"] and END_SOLUTION not in cell["source"]:
        return f"it is an answer, but lacks {BEGIN_SOLUTION}"
    return _find_marker_problem(cell["source"])


def _find_check_problem(cell: Any) -> str | None:
    calls = _check_calls(cell["source"])
    if len(calls) != 1:
        return f"a check cell must call check(...) once, but this one calls it {len(calls)} times"
    name, points = calls[0]
    if name is None or points is None:
        return "the name and points in check(...) must be literals"
    if grading(cell).get("points") != points or points < 1:
        return f"its metadata says {grading(cell).get('points')} points, but check(...) says {points}"
    return _find_stray_marker(cell)


def _find_given_problem(cell: Any) -> str | None:
    if _check_calls(cell["source"]):
        return "it calls check(...), but is not marked as a check"
    return _find_stray_marker(cell)


def _find_stray_marker(cell: Any) -> str | None:
    has_marker = BEGIN_SOLUTION in cell["source"] or END_SOLUTION in cell["source"]
    return "it has a solution marker, but is not an answer" if has_marker else None


def _find_marker_problem(source: str) -> str | None:
    """Why the solution markers in a cell do not pair up, or None if they do."""
    begun = None
    for number, line in enumerate(source.split("\n"), start=1):
        if BEGIN_SOLUTION in line:
            if begun is not None:
                return f"{BEGIN_SOLUTION} in line {number} comes before the {END_SOLUTION} for line {begun}"
            begun = number
        elif END_SOLUTION in line:
            if begun is None:
                return f"{END_SOLUTION} in line {number} lacks a {BEGIN_SOLUTION} before it"
            begun = None
    return None if begun is None else f"{BEGIN_SOLUTION} in line {begun} lacks an {END_SOLUTION} after it"
