"""Makes `pytest --nbval` report each notebook's points and failed checks.

pytest loads this plugin wherever minivllm is installed. Without `--nbval` it does nothing, and it imports neither torch nor notebook
tools.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.course.grading.untrusted_text import csv_text
from minivllm.course.results import count_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from minivllm.course.exercise_cells import GradedCell


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--grades`."""
    parser.getgroup("minivllm", "minivllm's course").addoption(
        "--grades", metavar="FILE.csv", help="with --nbval: write the points of each check and notebook to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Reject a file that cannot be written before any notebook runs; count points if notebooks are run."""
    from pytest import UsageError

    runs_notebooks = any(config.getoption(name, default=False) for name in ("nbval", "nbval_lax"))
    grades = config.getoption("grades")
    if grades is not None:
        in_parallel = config.getoption("dist", default="no") != "no"  # pytest-xdist, where it is installed
        problem = _find_problem(Path(grades), runs_notebooks, in_parallel)
        if problem:
            raise UsageError(problem)
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
    """Records which graded cells of which notebooks passed.

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

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Forget notebooks none of whose checks run."""
        self._deselected.update(item.nodeid for item in items)
        self._checks = {name: checks for name, checks in self._checks.items() if not self._deselected.issuperset(checks)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a cell that ran to its end."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def _points(self, test: str, check: GradedCell) -> float:
        """The points of a check: 0 if the call of `check` is gone, even though the cell then passes."""
        return check.points if test in self._passed and check.is_intact else 0

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a line for each notebook that has checks."""
        if self._checks:
            terminalreporter.section("points")
        for notebook, checks in self._checks.items():
            points = sum(self._points(test, check) for test, check in checks.items())
            most = sum(check.points for check in checks.values())
            failed = [check.name for test, check in checks.items() if self._points(test, check) < check.points]
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
            for notebook, checks in self._checks.items():
                rows = [(self._points(test, check), check.points) for test, check in checks.items()]
                for check, row in zip(checks.values(), rows, strict=True):
                    table.writerow([csv_text(notebook), csv_text(check.name), *row])
                table.writerow([csv_text(notebook), "total", *map(sum, zip(*rows, strict=True))])
