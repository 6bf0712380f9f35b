"""The cells of an exercise: which the learner fills in, which check it, and what is wrong with a notebook that mixes them up.

A solved notebook (`solutions/NN_topic.ipynb`) is also a source notebook of nbgrader, so the kinds of cells are nbgrader's. Its
metadata (schema 3) says of each cell whether it is an answer (`solution`), a check (`grade`, with `points`) or text and code that
is given (neither).
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
"""What stands in an exercise where the lines between both markers were."""
SCHEMA_VERSION = 3


@dataclass(frozen=True)
class GradedCell:
    """One check of a notebook.

    Attributes:
        cell_id: its `grade_id`, which is the cell's `id` too.
        name: what `check("...")` in it says; the `cell_id` when no such call is left in it.
        points: what the metadata says it counts.
        is_intact: whether there is still a call of `check` in it. (Whether it is the original one, `minivllm grade` sees to.)
    """

    cell_id: str
    name: str
    points: float
    is_intact: bool


def read_notebook(path: Path) -> Any:
    """A notebook, as `nbformat` gives it.

    Raises:
        CourseError: when the file is not there or is no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise CourseError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:
        raise CourseError(f"{path} is not a notebook: {str(error).splitlines()[0].rstrip('.')}.") from None


def grading(cell: Any) -> dict[str, Any]:
    """A cell's nbgrader metadata, empty when it has none."""
    found = cell["metadata"].get("nbgrader")
    return found if isinstance(found, dict) else {}


def is_answer(cell: Any) -> bool:
    """Whether the learner fills this cell in."""
    return cell["cell_type"] == "code" and grading(cell).get("solution") is True


def is_check(cell: Any) -> bool:
    """Whether this cell gives points."""
    return cell["cell_type"] == "code" and grading(cell).get("grade") is True


def graded_cell(cell: Any) -> GradedCell:
    """What a check cell checks, from its metadata and its source."""
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


def _check_calls(source: str) -> list[tuple[str | None, int | None]]:
    """Name and points of each call of `check` in a cell; None for what is not written out."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
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
    """What keeps a solved notebook from being an exercise, a sentence for each; none for a notebook that is right."""
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
        return f"its metadata lacks nbgrader's part in version {SCHEMA_VERSION} of the schema"
    if not cell.get("id") or data.get("grade_id") != cell["id"]:
        return f"its grade_id is {data.get('grade_id')!r}, but must be the cell's id"
    flags = {name: data.get(name) for name in ("grade", "solution", "locked", "task")}
    role = next((role for role, wanted in _ROLES.items() if wanted == flags), None)
    if role is None:
        return f"it is neither an answer, a check nor given, but {flags}"
    if cell["cell_type"] != "code":
        return (
            None if role == "given" else f"a cell of text cannot be an {role}" if role == "answer" else "text cannot be checked"
        )
    if role != "check" and "points" in data:
        return "it has points, but is no check"
    return {"answer": _find_answer_problem, "check": _find_check_problem, "given": _find_given_problem}[role](cell)


_ROLES = {
    "answer": {"grade": False, "solution": True, "locked": False, "task": False},
    "check": {"grade": True, "solution": False, "locked": True, "task": False},
    "given": {"grade": False, "solution": False, "locked": True, "task": False},
}


def _find_answer_problem(cell: Any) -> str | None:
    if BEGIN_SOLUTION not in cell["source"] and END_SOLUTION not in cell["source"]:
        return f"it is an answer, but has no {BEGIN_SOLUTION}"
    return _find_marker_problem(cell["source"])


def _find_check_problem(cell: Any) -> str | None:
    calls = _check_calls(cell["source"])
    if len(calls) != 1:
        return f"a check cell calls check(...) once, but this one does {len(calls)} times"
    name, points = calls[0]
    if name is None or points is None:
        return "the name and the points in check(...) must be written out"
    if grading(cell).get("points") != points or points < 1:
        return f"its metadata has {grading(cell).get('points')} points, but check(...) has {points}"
    return _find_stray_marker(cell)


def _find_given_problem(cell: Any) -> str | None:
    if _check_calls(cell["source"]):
        return "it calls check(...), but is not marked as a check"
    return _find_stray_marker(cell)


def _find_stray_marker(cell: Any) -> str | None:
    has_marker = BEGIN_SOLUTION in cell["source"] or END_SOLUTION in cell["source"]
    return "it has a marker of a solution, but is not an answer" if has_marker else None


def _find_marker_problem(source: str) -> str | None:
    """What is wrong with the pairs of markers in a cell, if anything."""
    begun = None
    for number, line in enumerate(source.split("\n"), start=1):
        if BEGIN_SOLUTION in line:
            if begun is not None:
                return f"{BEGIN_SOLUTION} in line {number} comes before the {END_SOLUTION} of the one in line {begun}"
            begun = number
        elif END_SOLUTION in line:
            if begun is None:
                return f"{END_SOLUTION} in line {number} has no {BEGIN_SOLUTION} before it"
            begun = None
    return None if begun is None else f"{BEGIN_SOLUTION} in line {begun} has no {END_SOLUTION} after it"
