"""The results of a notebook's checks, for its last cell: points, and a link to each check that failed.

`check` records here, so that a learner who runs all cells, and lands at the last one, sees at once where to go.
"""

from __future__ import annotations

import html
import os
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote


def count_points(points: float) -> str:
    """Points with their word: "1 point", "2 points"."""
    return f"{points:g} point" + ("" if points == 1 else "s")


@dataclass(frozen=True)
class CheckResult:
    """How a check last went, and the id of its cell (None where the notebook's front end does not tell)."""

    name: str
    points: int
    passed: bool
    cell_id: str | None


_RESULTS: dict[str, CheckResult] = {}
"""The latest result of each check that this kernel has run, by name."""


def record(name: str, points: int, *, passed: bool) -> None:
    """Remember how a check went. A check that is run again replaces its old result."""
    _RESULTS[name] = CheckResult(name, points, passed, _current_cell_id())


def passed_checks() -> set[str]:
    """The names of the checks that passed when this kernel last ran them."""
    return {result.name for result in _RESULTS.values() if result.passed}


class Results:
    """The results of a notebook's checks. A notebook shows them with links to the failed checks."""

    def __init__(self, results: list[CheckResult], most: int) -> None:
        self.results = results
        self.most = most

    def _sentences(self) -> tuple[str, list[CheckResult], str]:
        """The points, the checks that failed, and a sentence about checks that were not run."""
        failed = [result for result in self.results if not result.passed]
        points = sum(result.points for result in self.results if result.passed)
        missing = self.most - points - sum(result.points for result in failed)
        headline = f"{points} of {count_points(self.most)}."
        if not failed and not missing:
            headline += " All checks passed."
        not_run = f"Not run yet: checks worth {count_points(missing)}." if missing else ""
        return headline, failed, not_run

    def __repr__(self) -> str:
        headline, failed, not_run = self._sentences()
        lines = [f"✗ {result.name} ({count_points(result.points)})" for result in failed]
        return "\n".join(filter(None, [headline, *(["These checks failed:"] if failed else []), *lines, not_run]))

    def _repr_html_(self) -> str | None:
        headline, failed, not_run = self._sentences()
        if not failed:
            return None  # the text says it all
        items = "".join(f"<li>{_link(result)} ({count_points(result.points)})</li>" for result in failed)
        more = f"<p>{not_run}</p>" if not_run else ""
        return f"<p>{headline} These checks failed:</p><ul>{items}</ul>{more}"


def show_results(*, most: int) -> Results:
    """The points of this notebook so far and the checks that failed, each with a link to its cell. For the notebook's last cell.

    Args:
        most: The points of all its checks, to tell checks that were not run from failed ones.

    Example:
        show_results(most=20)
    """
    return Results(list(_RESULTS.values()), most)


def _link(result: CheckResult) -> str:
    text = html.escape(result.name)
    if result.cell_id is None:
        return text
    # JupyterLab follows `NAME.ipynb#cell-id=ID`; Jupyter tells the kernel the notebook's name.
    notebook = quote(PurePosixPath(os.environ.get("JPY_SESSION_NAME", "")).name)
    return f'<a href="{notebook}#cell-id={html.escape(quote(result.cell_id))}">{text}</a>'


def _current_cell_id() -> str | None:
    """The id of the running cell, if the front end sent it along, as JupyterLab does."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    header = getattr(shell, "parent_header", None) or {}
    return header.get("metadata", {}).get("cellId")
