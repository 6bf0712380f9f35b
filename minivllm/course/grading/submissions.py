"""Submissions: the learner and lesson of a notebook, and its cells with the lesson's own cells restored.

Every cell of a lesson has a `grade_id` in its metadata, which survives JupyterLab, Colab and nbgrader. By this id, given cells and
checks get their original source back, and deleted ones return to their place. Only the answers, and cells that the learner added, come
from the learner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from minivllm.course.exercise_cells import GradedCell, graded_cell, grading, is_answer, is_check, read_notebook
from minivllm.course.first_cells import as_exercise
from minivllm.course.grading.stubs import find_asked, find_defined, make_stubs
from minivllm.course.last_cell import RESULTS
from minivllm.errors import CourseError

MOST_BYTES = 50_000_000
"""Larger files are not read."""


@dataclass(frozen=True)
class Cell:
    """A cell as it is graded.

    Attributes:
        cell_id: Its `grade_id`; empty for a cell that the learner added.
        kind: An answer (filled in by the learner), a check, given (text or code of the lesson), or the learner's own.
        cell_type: "code", "markdown" or "raw".
        source: What is run or shown.
        check: The check in it, if any.
        note: What was repaired, as a sentence; empty if nothing.
    """

    cell_id: str
    kind: Literal["answer", "check", "given", "own"]
    cell_type: str
    source: str
    check: GradedCell | None = None
    note: str = ""


@dataclass(frozen=True)
class Lesson:
    """A gradable lesson: its name ("04_paged_kv_cache") and the cells of its solved notebook."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def checks(self) -> list[GradedCell]:
        """All checks, in order."""
        return [cell.check for cell in self.cells if cell.check is not None]


@dataclass(frozen=True)
class Submission:
    """A notebook that was handed in."""

    learner: str
    lesson: Lesson
    path: Path
    notes: tuple[str, ...] = ()


class DamagedNotebook(CourseError):  # noqa: N818 - a reason shown to the learner
    """A submitted file that is not a readable notebook."""


def load_lessons(folder: Path) -> list[Lesson]:
    """The lessons of a folder of solved notebooks.

    Raises:
        CourseError: The folder does not exist, or no notebook in it has a check.
    """
    if not folder.is_dir():
        raise CourseError(f"There is no folder {folder} with solved notebooks: name it with --solutions.")
    lessons = [load_lesson(path) for path in sorted(folder.glob("*.ipynb"))]
    lessons = [lesson for lesson in lessons if lesson.checks]
    if not lessons:
        raise CourseError(f"No notebook in {folder} has a check to grade: name the folder of solved notebooks with --solutions.")
    return lessons


def load_lesson(path: Path) -> Lesson:
    """A lesson from its solved notebook."""
    cells = []
    for cell in read_notebook(path)["cells"]:
        cell_id = str(grading(cell).get("grade_id") or cell.get("id", ""))
        if cell_id == RESULTS:  # the learner's kernel does not keep results while it is graded
            cells.append(Cell(cell_id, "given", "markdown", "Your points are at the top of this page."))
            continue
        kind = "answer" if is_answer(cell) else "check" if is_check(cell) else "given"
        check = graded_cell(cell) if kind == "check" else None
        cells.append(Cell(cell_id, kind, cell["cell_type"], as_exercise(cell_id, cell["source"]), check))
    return Lesson(path.stem, tuple(cells))


def find_submissions(arguments: Sequence[Path], lessons: Sequence[Lesson]) -> tuple[list[Submission], list[str]]:
    """The notebooks to grade, sorted by lesson and learner, and a sentence for each that is skipped.

    Args:
        arguments: Notebooks, and folders that are searched recursively.
        lessons: What can be graded.

    Raises:
        CourseError: A path does not exist, a named file belongs to no lesson, or nothing is left to grade.
    """
    found: list[Submission] = []
    remarks: list[str] = []
    for argument in arguments:
        if argument.is_dir():
            for path in _notebooks_below(argument):
                if path.is_symlink():
                    remarks.append(f"{path} is skipped: it is a link to another file.")
                    continue
                lesson = find_lesson(path, lessons)
                if lesson is None:
                    remarks.append(f"{path} is skipped: it belongs to no lesson.")
                else:
                    found.append(Submission(_learner(path, lesson, argument), lesson, path))
        elif argument.is_file():
            lesson = find_lesson(argument, lessons)
            if lesson is None:
                names = ", ".join(lesson.name for lesson in lessons)
                raise CourseError(f"{argument} belongs to no lesson: its name must contain one of {names}.")
            found.append(Submission(_learner(argument, lesson, None), lesson, argument))
        else:
            raise CourseError(f"{argument} does not exist: name notebooks, or folders of notebooks.")
    if not found:
        names = ", ".join(lesson.name for lesson in lessons)
        raise CourseError(
            f"No notebook of a lesson was found: its name must contain one of {names}, or begin with the lesson's number."
        )
    return _newest(found), remarks


def _notebooks_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.ipynb")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and (path.is_symlink() or path.is_file()):
            yield path


def find_lesson(path: Path, lessons: Iterable[Lesson]) -> Lesson | None:
    """The lesson whose name the file name contains, or else whose number it begins with."""
    stem = path.stem.lower()
    named = [lesson for lesson in lessons if lesson.name.lower() in stem]
    if named:
        return max(named, key=lambda lesson: len(lesson.name))
    numbered = [lesson for lesson in lessons if re.match(rf"0*{_number(lesson)}(?!\d)", stem)] if path.suffix == ".ipynb" else []
    return numbered[0] if len(numbered) == 1 else None


def _number(lesson: Lesson) -> str:
    digits = re.match(r"\d+", lesson.name)
    return str(int(digits[0])) if digits else "(?!)"


def _learner(path: Path, lesson: Lesson, searched: Path | None) -> str:
    """The learner whose notebook it is: the folder's name, or the file name without the lesson's."""
    if searched is not None and path.parent != searched:
        return path.relative_to(searched).parts[0]
    rest = re.sub(re.escape(lesson.name), "", path.stem, count=1, flags=re.IGNORECASE)
    rest = re.sub(r"( ?\(\d+\)|-Copy\d+)$", "", rest).strip(" _-.")  # how browsers and JupyterLab name a copy
    if not rest:
        return path.resolve().parent.name or "learner"
    return rest


def _newest(found: list[Submission]) -> list[Submission]:
    """The newest submission of each learner for each lesson."""
    groups: dict[tuple[str, str], dict[Path, Submission]] = {}
    for item in found:
        groups.setdefault((item.lesson.name, item.learner), {})[item.path.resolve()] = item
    chosen = []
    for key in sorted(groups):
        items = sorted(groups[key].values(), key=lambda item: (item.path.stat().st_mtime, str(item.path)))
        item = items[-1]
        if len(items) > 1:
            note = f"{len(items)} files were submitted for this lesson; the newest, {item.path.name}, was graded."
            item = replace(item, notes=(note,))
        chosen.append(item)
    return chosen


@dataclass(frozen=True)
class Restored:
    """A submission's cells as they are graded, and what was repaired, as sentences."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _Group:
    """A submission's version of one lesson cell, and the learner's own cells after it."""

    sources: list[tuple[str, str]] = field(default_factory=list)
    own: list[Cell] = field(default_factory=list)


def restore(path: Path, lesson: Lesson) -> Restored:
    """A submission with the lesson's own cells restored.

    Raises:
        DamagedNotebook: The file is not a notebook.
    """
    submitted, notes = read_cells(path)
    originals = {cell.cell_id: cell for cell in lesson.cells}
    groups = {cell_id: _Group() for cell_id in originals}
    first: list[Cell] = []
    own = first
    num_duplicates = 0
    for cell_id, cell_type, source in submitted:
        original = originals.get(cell_id)
        if original is None:
            own.append(Cell("", "own", cell_type, source))
        elif not groups[cell_id].sources:
            groups[cell_id].sources.append((cell_type, source))
            own = groups[cell_id].own
        elif original.kind == "check":
            num_duplicates += 1
        else:  # an answer that was split has its id twice
            own.append(Cell("", "own", cell_type, source))
    if not any(group.sources for group in groups.values()):
        notes.append(f"This notebook has no cell of lesson {lesson.name}: was it made from another one?")
    if num_duplicates:
        notes.append("A duplicated check was graded once.")
    cells = list(first)
    for original in lesson.cells:
        group = groups[original.cell_id]
        cells += [_restored(original, group), *group.own]
    cells, unwritten = _with_stubs(cells, originals)
    notes += unwritten
    if any(cell.note for cell in cells if cell.kind == "given"):
        notes.append("Cells that are not answers were changed or deleted; the original ones were graded.")
    return Restored(tuple(cells), tuple(notes))


def _with_stubs(cells: list[Cell], originals: dict[str, Cell]) -> tuple[list[Cell], list[str]]:
    """The cells with stubs after each answer for what is not defined anywhere, and a sentence for each."""
    defined = find_defined(cell.source for cell in cells if cell.cell_type == "code" and cell.kind in ("answer", "own"))
    restored, notes = [], []
    for cell in cells:
        restored.append(cell)
        if cell.kind == "answer":
            source, missing = make_stubs(find_asked(originals[cell.cell_id].source), defined)
            if missing:
                restored.append(Cell("", "given", "code", source))
                notes.append(f"The notebook does not define {', '.join(missing)}: the stub was put back.")
    return restored, notes


def _restored(original: Cell, group: _Group) -> Cell:
    word = "check" if original.kind == "check" else "cell"
    if original.cell_type != "code":  # a learner's edits of the text do not matter
        return original
    if not group.sources:
        if original.kind == "answer":
            # Restoring the source would reveal the solution.
            return replace(original, source="# This cell was deleted.", note="The answer above was deleted.")
        return replace(original, note=f"This {word} was deleted; the original was restored.")
    cell_type, source = group.sources[0]
    if original.kind == "answer":
        note = "" if cell_type == original.cell_type else f"The answer above was in a {cell_type} cell; it was run as code."
        return replace(original, source=source, note=note)
    is_changed = source.strip() != original.source.strip() or cell_type != original.cell_type
    return replace(original, note=f"This {word} was changed; the original was graded." if is_changed else "")


def read_cells(path: Path) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Id, type and source of each cell of an untrusted notebook, and notes about damaged cells.

    Raises:
        DamagedNotebook: The file is not a notebook; the message is for the learner.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DamagedNotebook(f"The file is larger than {MOST_BYTES // 10**6} MB; clear its outputs and submit it again.")
        content = path.read_bytes()
    except OSError as error:
        raise DamagedNotebook(f"The file cannot be read: {error.strerror}.") from None
    if not content.strip():
        raise DamagedNotebook("The file is empty.")
    try:
        notebook = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DamagedNotebook("The file is not a notebook: it is not UTF-8 text.") from None
    except (ValueError, RecursionError):
        raise DamagedNotebook("The file is not a notebook: it is not valid JSON.") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        old = isinstance(notebook, dict) and "worksheets" in notebook
        raise DamagedNotebook(
            "The notebook is in a format from before 2015; open and save it in JupyterLab."
            if old
            else "The file is not a notebook: it has no cells."
        )
    cells, notes = [], []
    for number, cell in enumerate(notebook["cells"], start=1):
        read = _read_cell(cell)
        if read is None:
            notes.append(f"Cell {number} of the file is damaged and was skipped.")
        else:
            cells.append(read)
    return cells, notes[:10]


def _read_cell(cell: Any) -> tuple[str, str, str] | None:
    if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw"):
        return None
    source = cell.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return None
    metadata = cell.get("metadata")
    data = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    cell_id = data.get("grade_id") if isinstance(data, dict) else None
    # JSON can contain unpaired surrogates, which kernels reject.
    source = source.encode("utf-8", "replace").decode("utf-8")
    return str(cell_id or cell.get("id") or ""), cell["cell_type"], source


def project_folders() -> list[Path]:
    """The project's own folders, in which submissions must not write."""
    package = Path(__file__).resolve().parents[2]
    root = package.parent
    return [root if (root / "pyproject.toml").is_file() else package]
