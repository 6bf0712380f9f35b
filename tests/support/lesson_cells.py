"""A lesson's solved notebook as cells that can be changed and run without Jupyter: for tests of the checks.

Used by the tests of each lesson and by `tests/support/mutate_lesson.py`.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from minivllm.course.observations import recording

ROOT = Path(__file__).parents[2]
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = 'raise NotImplementedError("write this")'


@dataclass(frozen=True)
class Cell:
    """A code cell: its id, its source, and whether it is an "answer", a "check" or "given"."""

    name: str
    source: str
    kind: str

    @property
    def needs_a_model(self) -> bool:
        """Whether it loads one: such a cell takes seconds."""
        return re.search(r"\bLLM\(", self.source) is not None or "smollm2-135m" in self.source


@dataclass
class Outcome:
    """What the checks of a notebook came to: by name, None for a pass or the error. `broken` has errors elsewhere, by cell."""

    checks: dict[str, BaseException | None] = field(default_factory=dict)
    seen: dict[str, list] = field(default_factory=dict)
    """What each check has seen, by name: see `minivllm.course.observations`."""
    broken: dict[str, BaseException] = field(default_factory=dict)
    points: int = 0
    most_points: int = 0

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed, in the notebook's order."""
        return [name for name, error in self.checks.items() if error is not None]


def solution_path(number: str) -> Path:
    """The solved notebook of a lesson, by its two digits."""
    return next((ROOT / "solutions").glob(f"{number}_*.ipynb"))


def read_cells(number: str) -> list[Cell]:
    """The code cells of a lesson's solution, without lines that only IPython understands."""
    cells = []
    for cell in nbformat.read(solution_path(number), as_version=4).cells:
        if cell.cell_type == "code":
            grader = cell.metadata.get("nbgrader", {})
            kind = "check" if grader.get("grade") else "answer" if grader.get("solution") else "given"
            lines = [line for line in cell.source.split("\n") if not line.startswith(("%", "!"))]
            cells.append(Cell(cell.id, "\n".join(lines), kind))
    return cells


def read_walkthrough(number: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes that a lesson's walkthrough defines, in order."""
    notebook = nbformat.read(next((ROOT / "notebooks").glob(f"{number}_*.ipynb")), as_version=4)
    sources = [re.sub(r"^%", "#", cell.source, flags=re.MULTILINE) for cell in notebook.cells if cell.cell_type == "code"]
    return [node for source in sources for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def untouched(source: str) -> str:
    """An answer cell as the exercise has it: a stub stands for what is between the markers."""
    lines, inside = [], False
    for line in source.split("\n"):
        if line.strip() == BEGIN:
            inside = True
            lines.append(line[: len(line) - len(line.lstrip())] + STUB)
        elif line.strip() == END:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def run_cells(
    cells: Sequence[Cell], *, with_model: bool = False, stop_at_failure: bool = False, seed: int | None = None
) -> Outcome:
    """Run cells one after another in one namespace. A failing check does not keep later cells from running.

    Args:
        cells: As `read_cells` gives them, changed or not.
        with_model: Run cells that load a model too.
        stop_at_failure: End with the first check that fails.
        seed: Of the checks' random numbers; None for those of a notebook.
    """
    outcome = Outcome()

    @contextmanager
    def check(name: str, points: int):
        outcome.most_points += points
        try:
            with recording(seed) as seen:
                outcome.seen[name] = seen.observations
                yield
        except Exception as error:
            outcome.checks[name] = error
        else:
            outcome.checks[name] = None
            outcome.points += points

    namespace: dict = {"__name__": "__main__"}
    for cell in cells:
        if cell.needs_a_model and not with_model:
            continue
        before = len(outcome.failed)
        file = f"<{cell.name}>"
        linecache.cache[file] = (
            len(cell.source),
            None,
            cell.source.splitlines(keepends=True),
            file,
        )  # where Triton reads a kernel's source
        try:
            exec(compile(cell.source, file, "exec"), namespace)
        except Exception as error:
            if len(outcome.failed) == before:  # not what follows a failed check in its cell
                outcome.broken[cell.name] = error
        namespace["check"] = check
        if stop_at_failure and (outcome.failed or outcome.broken):
            break
    return outcome


def without_earlier_checks(cells: list[Cell], changed: list[Cell]) -> list[Cell]:
    """The changed cells without the checks that come before the first change: they see nothing of it, and take time."""
    place = next(i for i, (before, after) in enumerate(zip(cells, changed, strict=True)) if before != after)
    return [cell for i, cell in enumerate(changed) if cell.kind != "check" or i > place]


def in_language(cells: list[Cell], language: str) -> list[Cell]:
    """The cells of lesson 06, which can be solved with loops or in Triton, with one of the two written. Other lessons' cells stay as they are."""
    other = {"numba": "-kernel", "triton": "-loops"}[language]
    return [Cell(cell.name, untouched(cell.source), cell.kind) if cell.name.endswith(other) else cell for cell in cells]


def edited(cells: list[Cell], old: str, new: str) -> list[Cell]:
    """The cells with one passage of one answer changed.

    Raises:
        ValueError: The passage stands in no answer, or more than once.
    """
    if "\n" not in old:  # a line may be given with its indentation or without
        old, new = old.strip(), new.strip()
    count = sum(cell.source.count(old) for cell in cells if cell.kind == "answer")
    if count != 1:
        raise ValueError(f"{old!r} stands {count} times in the answers, but must stand there once")
    return [Cell(cell.name, cell.source.replace(old, new), cell.kind) if cell.kind == "answer" else cell for cell in cells]
