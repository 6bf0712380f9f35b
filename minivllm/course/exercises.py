"""Generates exercises from the solved notebooks: `make exercises`, or `python -m minivllm.course.exercises`.

nbgrader's own preprocessor removes the lines between the solution markers, so learners get the same cells from here and from nbgrader.
"""

from __future__ import annotations

import argparse
import ast
import copy
import logging
import sys
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import BEGIN_SOLUTION, END_SOLUTION, STUB, find_problems, is_answer, is_check, read_notebook
from minivllm.course.first_cells import as_exercise
from minivllm.errors import CourseError

IGNORE_OUTPUT = "nbval-ignore-output"
"""Tells `pytest --nbval` to run a cell but not compare its output: an exercise has no outputs yet."""
GO_ON = "raises-exception"
"""Tells Jupyter to run the cells after a failed check too, so that "Run All" reaches the last cell, which sums up the points."""


def make_exercise(solution: Any) -> Any:
    """The exercise for a solved notebook, which is left unchanged.

    Cells keep their ids and metadata. Answers are replaced by the stub, outputs and traces of a run are removed, every code cell is
    tagged `nbval-ignore-output`, and every check `raises-exception`.

    Raises:
        CourseError: The cells are not marked properly (names the first problem), or nbgrader is not installed.
    """
    problems = find_problems(solution)
    if problems:
        raise CourseError(problems[0] + (f" ({len(problems) - 1} more.)" if len(problems) > 1 else ""))
    try:
        from nbgrader.preprocessors import ClearSolutions
    except ModuleNotFoundError as error:
        if error.name != "nbgrader":
            raise
        raise CourseError("Making exercises needs nbgrader: `pip install nbgrader`.") from None

    clear = ClearSolutions(
        code_stub={"python": STUB}, begin_solution_delimeter=BEGIN_SOLUTION, end_solution_delimeter=END_SOLUTION, log=_LOG
    )
    exercise, _ = clear.preprocess(copy.deepcopy(solution), {})
    for cell in exercise.cells:
        cell.source = as_exercise(cell.id, cell.source)
        problem = _find_stub_problem(cell.source) if is_answer(cell) else None
        if problem:
            raise CourseError(f"Cell {cell.id!r}: {problem}.")
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
            tags = [IGNORE_OUTPUT, GO_ON] if is_check(cell) else [IGNORE_OUTPUT]
            cell.metadata["tags"] = [*(tag for tag in cell.metadata.get("tags", []) if tag not in tags), *tags]
        cell.metadata = {name: value for name, value in cell.metadata.items() if name not in _LEFT_BY_A_RUN}
    exercise.metadata = {"kernelspec": solution.metadata.get("kernelspec", _KERNEL), "language_info": {"name": "python"}}
    return exercise


_LOG = logging.getLogger(__name__)
_LEFT_BY_A_RUN = {"execution", "collapsed", "scrolled", "jupyter"}
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def _find_stub_problem(source: str) -> str | None:
    """Why running an untouched answer would raise, or None: only the checks after it should fail."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return f"without the lines between the markers it is not valid Python ({error.msg})"
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    stub = ast.dump(ast.parse(STUB).body[0])
    if any(isinstance(node, ast.Raise) and ast.dump(node) == stub and id(node) not in inside for node in ast.walk(tree)):
        return f"{BEGIN_SOLUTION} is outside a function, so the untouched cell would raise"
    return None


def generate_exercises(solutions: Path) -> dict[str, str]:
    """File names and texts of the exercises for a folder of solutions. Deterministic."""
    import nbformat

    exercises = {}
    for path in sorted(solutions.glob("*.ipynb")):
        try:
            exercise = make_exercise(read_notebook(path))
        except CourseError as error:
            raise CourseError(f"{path.name}: {error}") from None
        exercises[path.name] = nbformat.writes(exercise, version=nbformat.NO_CONVERT) + "\n"
    return exercises


def write_exercises(solutions: Path, folder: Path, *, force: bool = False) -> list[Path]:
    """Write the exercises for all solutions into a folder and return the paths that are new or changed.

    Raises:
        CourseError: A solution is invalid, or an exercise to be overwritten was run, so it may hold a learner's work (see `force`).
    """
    exercises = generate_exercises(solutions)
    changed = {folder / name: text for name, text in exercises.items() if _text(folder / name) != text}
    for path in [] if force else [path for path in changed if path.exists()]:
        if any(cell.get("execution_count") for cell in read_notebook(path)["cells"]):
            raise CourseError(f"{path} was run, so it may contain work: move it away, or add --force to overwrite it.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return list(changed)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def main(argv: list[str] | None = None) -> int:
    """Write exercises/ from solutions/."""
    parser = argparse.ArgumentParser(
        prog="python -m minivllm.course.exercises", description="Generate the exercises from the solutions."
    )
    parser.add_argument("--solutions", type=Path, default=Path("solutions"), metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--exercises", type=Path, default=Path("exercises"), metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite exercises that were run")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.solutions.is_dir():
            raise CourseError(f"There is no folder {arguments.solutions}: run this in the root of the repository.")
        changed = write_exercises(arguments.solutions, arguments.exercises, force=arguments.force)
    except (CourseError, OSError) as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 2
    for path in changed:
        print(path)
    print(f"{len(changed)} of {len(list(arguments.solutions.glob('*.ipynb')))} exercises are new or changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
