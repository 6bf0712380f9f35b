"""Makes `pytest --nbval` report each notebook's points and failed checks.

pytest loads this plugin wherever minivllm is installed. Without `--nbval` it does nothing, and it imports neither torch nor notebook
tools.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minivllm.course.grading.untrusted_text import csv_text
from minivllm.course.results import count_points

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from minivllm.course.exercise_cells import GradedCell


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--grades`."""
    parser.getgroup("minivllm", "minivllm's course").addoption(
        "--grades", metavar="FILE.csv", help="with --nbval: write the points of each check and notebook to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Reject a file that cannot be written before any notebook runs; count points if notebooks are run."""
    runs_notebooks = any(config.getoption(name, default=False) for name in ("nbval", "nbval_lax"))
    grades = config.getoption("grades")
    if grades is not None:
        in_parallel = config.getoption("dist", default="no") != "no"  # pytest-xdist, where it is installed
        problem = _find_problem(Path(grades), runs_notebooks, in_parallel)
        if problem:
            raise pytest.UsageError(problem)
    if runs_notebooks:
        config.pluginmanager.register(PointCounter(grades and Path(grades)), "minivllm-points")


def _find_problem(path: Path, runs_notebooks: bool, in_parallel: bool) -> str | None:
    if not runs_notebooks:
        return "--grades needs --nbval, which runs the notebooks."
    if in_parallel:
        return "--grades needs a single process: omit -n, or use -n 0."
    if path.suffix != ".csv":
        return f"--grades writes CSV, so its file must end in .csv, but {path} does not."
    if path.is_dir() or not path.resolve().parent.is_dir():
        return f"--grades cannot write {path}: it must be a file in an existing folder."
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        return f"--grades has no permission to write {path}."
    return None


class PointCounter:
    """Records which graded cells of which notebooks passed. A cell that ends without the line that its check prints has not passed.

    Args:
        grades: Where to write the CSV, if anywhere.
    """

    def __init__(self, grades: Path | None) -> None:
        self._grades = grades
        self._checks: dict[str, dict[str, GradedCell]] = {}
        """By notebook and test id."""
        self._passed: set[str] = set()
        self._deselected: set[str] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record a check; nbval turns each code cell into a test."""
        cell: Any = getattr(item, "cell", None)
        if cell is None or item.path.suffix != ".ipynb":
            return
        from minivllm.course.exercise_cells import graded_cell, is_check

        if is_check(cell):
            name = os.path.relpath(item.path, item.config.invocation_params.dir)
            self._checks.setdefault(Path(name).as_posix(), {})[item.nodeid] = graded_cell(cell)
            # An exercise's checks are tagged `raises-exception`, so that Jupyter goes on after one; here a failed check is a failed test.
            item.options["check_exception"] = False  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fail a graded cell that did not say that its check passed: an unknown magic ends a cell without an error, and a branch may skip it."""
        yield
        checks = next((checks for checks in self._checks.values() if item.nodeid in checks), None)
        if checks is not None:
            name = checks[item.nodeid].name
            said = "".join(output.get("text", "") for output in item.test_outputs or () if output.get("name") == "stdout")  # type: ignore[attr-defined]
            assert f"✓ {name} (" in said, f"The check {name!r} did not run: restore this cell as the exercise had it."

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Forget notebooks none of whose checks run."""
        self._deselected.update(item.nodeid for item in items)
        self._checks = {name: checks for name, checks in self._checks.items() if not self._deselected.issuperset(checks)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a cell that ran to its end."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def _results(self, notebook: str) -> list[tuple[GradedCell, float]]:
        """A notebook's checks with their points. Copies of one check count once."""
        passed = {check.cell_id for test, check in self._checks[notebook].items() if test in self._passed}
        checks = {check.cell_id: check for check in reversed(self._checks[notebook].values())}  # of copies, the first
        return [(check, check.points if check.cell_id in passed else 0) for check in reversed(checks.values())]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a line for each notebook that has checks."""
        if self._checks:
            terminalreporter.section("points")
        for notebook in self._checks:
            results = self._results(notebook)
            points, most = sum(points for _, points in results), sum(check.points for check, _ in results)
            failed = [check.name for check, points in results if points < check.points]
            line = f"{notebook}: {points:g} of {count_points(most)}" + (f"; failed: {'; '.join(failed)}" if failed else "")
            terminalreporter.write_line(line, green=not failed, yellow=bool(failed))
        if self._grades:
            terminalreporter.write_line(f"Points written to {self._grades}.")

    def pytest_sessionfinish(self) -> None:
        """Write the CSV: a row for each check, and the total of each notebook."""
        if self._grades is None:
            return
        with self._grades.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["notebook", "check", "points", "max_points"])
            for notebook in self._checks:
                results = self._results(notebook)
                for check, points in results:
                    table.writerow([csv_text(notebook), csv_text(check.name), points, check.points])
                total, most = sum(points for _, points in results), sum(check.points for check, _ in results)
                table.writerow([csv_text(notebook), "total", total, most])
