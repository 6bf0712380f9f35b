"""Grades submissions: restores the lesson's cells, runs the notebook, and reports for each check whether it passed, or why not.

No submission can affect another: whatever goes wrong in one becomes a reason in its grade. (Modelled on nbgrader's autograder; here a
check passes only if it returns its receipt, see `kernel.py`, and if the observations match those of the solution, see `observe.py`.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from minivllm.course.exercise_cells import GradedCell
from minivllm.course.grading.borrowed import find_borrowed
from minivllm.course.grading.kernel_client import KernelDidNotStart, run_cells
from minivllm.course.grading.limits import CellRun, Limits, Surroundings
from minivllm.course.grading.observe import find_difference, find_observer
from minivllm.course.grading.submissions import Cell, DamagedNotebook, Lesson, Submission, restore
from minivllm.course.grading.untrusted_text import without_colours
from minivllm.errors import CourseError

_MOST_REASON = 600


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: whether it passed, and what the learner should know."""

    check: GradedCell
    passed: bool
    reason: str = ""

    @property
    def points(self) -> float:
        """The points earned."""
        return self.check.points if self.passed else 0


@dataclass(frozen=True)
class Grade:
    """The grade of one submission.

    Attributes:
        submission: What was graded.
        results: One per check of the lesson, in order.
        notes: Further remarks, as sentences.
        cells: The notebook as it was graded; empty if it could not be read.
        runs: The outcomes of its cells, by index.
        remarks: What went wrong in its cells, by index, as sentences.
        is_failure: Whether the grader failed, whatever the notebook is worth.
    """

    submission: Submission
    results: tuple[CheckResult, ...]
    notes: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    runs: dict[int, CellRun] = field(default_factory=dict)
    remarks: dict[int, list[str]] = field(default_factory=dict)
    is_failure: bool = False

    @property
    def score(self) -> float:
        """The points earned."""
        return sum(result.points for result in self.results)

    @property
    def most(self) -> float:
        """The points available."""
        return sum(result.check.points for result in self.results)

    @property
    def reason(self) -> str:
        """Why points are missing, in one line."""
        reasons = [*self.notes, *(result.reason for result in self.results if not result.passed)]
        return " ".join(dict.fromkeys(" ".join(reason.split()) for reason in reasons if reason))


def grade_all(
    submissions: Sequence[Submission],
    limits: Limits,
    jobs: int,
    unreadable: Sequence[Path],
    unwritable: Sequence[Path],
    sandboxed: bool = False,
    seed: int = 0,
) -> Iterator[Grade]:
    """Grade submissions in parallel; yields grades as they are ready.

    A submission that ran out of time without having had a processor is graded once more, alone, after all others.

    Args:
        submissions: What to grade.
        limits: For each submission.
        jobs: How many to run at a time.
        unreadable: Folders and files that submissions must not open, in addition to each other's.
        unwritable: Folders in which they must not write.
        sandboxed: Whether to run them in bubblewrap's sandbox.
        seed: Of the observers' random input. No submission may know it.
    """
    solved: dict[str, Solved] = {}
    closed = (*unreadable, *(submission.path for submission in submissions))
    guarded = (*unwritable, *{submission.path.parent for submission in submissions})
    stopped = Event()

    def run(submission: Submission, num_threads: int) -> Grade:
        surroundings = surroundings_of(submission.lesson, closed, guarded, seed)
        solution = solved[submission.lesson.name]
        surroundings = replace(surroundings, sandboxed=sandboxed, num_threads=num_threads, seconds=solution.seconds)
        return grade(submission, limits, surroundings, stopped, solution.observations)

    processors = _num_processors()
    starved = []
    for lesson in {submission.lesson.name: submission.lesson for submission in submissions}.values():
        solved[lesson.name] = run_solution(lesson, replace(surroundings_of(lesson, (), (), seed), num_threads=processors))
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, item, max(1, processors // jobs)) for item in submissions]
        try:
            for future in as_completed(futures):
                made = future.result()
                if any(cell.starved for cell in made.runs.values()):
                    starved.append(made.submission)
                else:
                    yield made
            for submission in starved:
                yield run(submission, processors)
        finally:  # on an interrupt, do not wait for running kernels
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_SOLUTION_LIMITS = Limits(cell_seconds=900, total_seconds=1800)
"""A new machine compiles the kernels in this run."""


@dataclass(frozen=True)
class Solved:
    """A lesson's own solution: the observations of each check, and the seconds that it took."""

    observations: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def run_solution(lesson: Lesson, surroundings: Surroundings) -> Solved:
    """Run the lesson's own solution."""
    observer = surroundings.observer
    if observer is None:
        return Solved()
    # Outside of the sandbox, so that the kernels that this compiles are kept, and no submission compiles them again.
    cells = tuple(cell for cell in lesson.cells if cell.cell_type == "code")
    solved = Solved()
    try:
        runs = run_cells(cells, surroundings, _SOLUTION_LIMITS, Event())
    except KernelDidNotStart as error:
        raise CourseError(f"The solution of {lesson.name} cannot be observed: {error}") from None
    for index, cell in enumerate(cells):
        if cell.check is not None:
            run = runs.get(index, CellRun("late"))
            if not run.observations:
                why = _unobserved(cell, run.observer_run or run)
                raise CourseError(f"The check {cell.check.name!r} of {lesson.name} cannot be graded: of its solution, {why}.")
            solved.observations[cell.cell_id] = run.observations
            solved.seconds[cell.cell_id] = run.seconds
    return solved


def grade(
    submission: Submission, limits: Limits, surroundings: Surroundings, stopped: Event, expected: Mapping[str, str] | None = None
) -> Grade:
    """Grade one submission, whatever is in it; setting `stopped` ends it early. `expected` are the observations of the solution."""
    try:
        return _grade(submission, limits, surroundings, stopped, expected or {})
    except DamagedNotebook as error:
        return _nothing(submission, str(error))
    except Exception as error:
        reason = f"This notebook could not be graded. Please tell your teacher: {type(error).__name__}: {error}."
        return replace(_nothing(submission, reason), is_failure=True)


def _nothing(submission: Submission, reason: str) -> Grade:
    results = tuple(CheckResult(check, False) for check in submission.lesson.checks)
    return Grade(submission, results, (*submission.notes, reason))


def _grade(
    submission: Submission, limits: Limits, surroundings: Surroundings, stopped: Event, expected: Mapping[str, str]
) -> Grade:
    restored = restore(submission.path, submission.lesson)
    cells = restored.cells
    runs = run_cells(cells, surroundings, limits, stopped)
    numbers = _numbers(cells)
    results, since_last, remarks = [], [], {}
    late = next((index for index, run in runs.items() if run.status == "late"), None)
    notes = [*submission.notes, *restored.notes]
    if late is not None:
        notes.append(f"The notebook took more than {limits.total_seconds:g} s in total and was stopped at cell {numbers[late]}.")
    for index, cell in enumerate(cells):
        run = runs.get(index)
        remarks[index] = _remarks(cell, run, numbers.get(index), limits)
        said = [*([cell.note] if cell.note and cell.kind != "given" else []), *remarks[index]]
        if cell.check is None:
            since_last += said
            continue
        passed, contradiction = run is not None and run.passed, None
        if run is not None and run.passed and cell.cell_id in expected:
            contradiction = find_difference(expected[cell.cell_id], run.observations or "")
            passed = contradiction is None
            if contradiction and not run.observations and run.observer_run is not None:
                contradiction = _unobserved(cell, run.observer_run)
        if passed:
            reasons = [cell.note]
        elif contradiction is not None:
            reasons = [
                f"This check passed in the notebook, but not when it was run with other input: {contradiction}.",
                *said,
            ]
        elif run is None or run.status == "late":
            reasons = ["This check was not reached.", *since_last, *said]
        else:
            reasons = [*since_last, *said]
        results.append(CheckResult(cell.check, passed, _shortened(" ".join(filter(None, reasons)))))
        notes += [remark for remark in since_last if remark not in reasons]
        since_last = []
    notes += [*since_last, *find_borrowed(cells, numbers, submission.lesson)]
    return Grade(submission, tuple(results), tuple(dict.fromkeys(notes)), cells, runs, remarks)


def surroundings_of(
    lesson: Lesson, unreadable: Sequence[Path], unwritable: Sequence[Path], seed: int | None = None
) -> Surroundings:
    """The surroundings of a kernel for a lesson; with a seed, it has an observer."""
    from minivllm.course.grading.kernel import find_imports

    given = [cell.source for cell in lesson.cells if cell.kind in ("given", "check") and cell.cell_type == "code"]
    observer = find_observer(lesson, seed) if seed is not None else None
    return Surroundings(
        preload=tuple(find_imports(given, "minivllm")),
        imports=tuple(find_imports(given, "minivllm")),
        unreadable=tuple(unreadable),
        unwritable=tuple(unwritable),
        observer=observer,
    )


def _unobserved(cell: Cell, run: CellRun) -> str:
    """Why there are no observations."""
    if run.status == "error" and run.error[0] == "CheckFailed":
        return _check_text(cell, *run.error).rstrip(".")
    if run.status == "error":
        return f"it raised {_error(*run.error)}".rstrip(".")
    return {
        "slow": f"it ran longer than {run.limit:.0f} s",
        "late": "the time for the whole notebook was up",
        "loud": "it printed too much",
        "ok": "the check did not pass",
    }.get(run.status, "it ended Python, or had to be killed")


def _numbers(cells: Sequence[Cell]) -> dict[int, int]:
    """The execution count of each code cell, by index."""
    code = [index for index, cell in enumerate(cells) if cell.cell_type == "code"]
    return {index: number for number, index in enumerate(code, start=1)}


_RUN_WITHOUT = "the other cells were run without it"


def _remarks(cell: Cell, run: CellRun | None, number: int | None, limits: Limits) -> list[str]:
    """What went wrong in a cell, as sentences for the learner."""
    if run is None:
        return []
    what = {
        "given": f"Cell {number}, part of the lesson, or your code that it calls,",
        "check": f"Your code, called by the check in cell {number},",
    }.get(cell.kind, f"Your cell {number}")
    name, text = run.error
    sentences = {
        "slow": f"{what} ran longer than {run.limit:.0f} s and was stopped.",
        "loud": f"{what} printed more than {limits.most_output / 10**6:g} MB and was stopped.",
        "deaf": f"{what} could not be stopped after {run.limit:.0f} s, so its kernel was killed; {_RUN_WITHOUT}.",
        "dead": f"{what} made Python exit (os._exit, exit, or a crash); {_RUN_WITHOUT}.",
        "memory": f"{what} used more than {limits.memory_bytes / 1024**3:.3g} GiB of memory and was killed; {_RUN_WITHOUT}.",
    }
    sentences["disk"] = f"{what} wrote more than {limits.written_bytes / 1024**3:.3g} GiB to disk and was killed; {_RUN_WITHOUT}."
    remarks = [f"{what} {refusal}, which is not allowed." for refusal in run.refused]
    if run.status in sentences:
        remarks.insert(0, sentences[run.status])
    elif run.status == "error" and cell.kind == "check":
        remarks.insert(0, _check_text(cell, name, text))
    elif run.status == "error" and name == "SystemExit":
        remarks.insert(0, f"{what} called exit or sys.exit and stopped there.")
    elif run.status == "error" and not (name == "PermissionError" and run.refused):
        remarks.insert(0, f"{what} raised an error, {_error(name, text)}")
    elif run.status == "ok" and cell.kind == "check" and not run.passed:
        remarks.insert(0, "This check did not run to its end.")
    return remarks


def _check_text(cell: Cell, name: str, text: str) -> str:
    """The message of a failed check without its headline."""
    if name != "CheckFailed":
        return _error(name, text)
    headline, _, rest = text.partition("\n")
    text = (rest if headline.startswith("✗") and cell.check.name in headline else text).strip()
    return text if text.endswith((".", "!", "?")) or "\n" in text else text + "."


def _error(name: str, text: str) -> str:
    first = re.sub(r" ?\(<string>[^)]*\)|\d+\.py, (?=line \d+\))", "", text.strip().split("\n")[0])[:200]  # an internal file name
    return f"{name}: {first}." if first else f"{name}."


def _shortened(text: str) -> str:
    text = without_colours(text).strip()
    return text if len(text) <= _MOST_REASON else text[:_MOST_REASON].rstrip() + " …"
