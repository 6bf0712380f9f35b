"""The cell that a graded notebook ends with: its points, and links to the checks that failed (`show_results`).

"Run All" ends there. `make exercises` writes the cell, so that its number of points is always that of the notebook's checks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import GIVEN, graded_cells
from minivllm.course.results import CheckResult, Results

RESULTS = "results"
"""The id of the cell."""


def renew_last_cell(notebook: Any) -> None:
    """End a notebook that has checks with the cell that sums them up; leave other notebooks unchanged.

    If the notebook was run, the cell gets the output for passing all checks, as in a solved notebook.
    """
    import nbformat

    checks = graded_cells(notebook)
    notebook.cells = [cell for cell in notebook.cells if cell.get("id") != RESULTS]
    if not checks:
        return
    most = int(sum(check.points for check in checks))
    source = f"from minivllm.course import show_results\n\nshow_results(most={most})"
    last = nbformat.v4.new_code_cell(source, id=RESULTS, metadata={"nbgrader": GIVEN | {"grade_id": RESULTS}})
    number = max((cell.get("execution_count") or 0 for cell in notebook.cells), default=0)
    if number:
        last.execution_count = number + 1
        results = Results([CheckResult(check.name, int(check.points), True, None) for check in checks], most)
        data = {"text/plain": repr(results)}
        last.outputs = [nbformat.v4.new_output("execute_result", data, execution_count=last.execution_count)]
    notebook.cells.append(last)


def main() -> int:
    """Renew the last cell of all solutions in the working directory."""
    import nbformat

    for file in sorted(Path("solutions").glob("*.ipynb")):
        notebook = nbformat.read(file, as_version=4)
        renew_last_cell(notebook)
        nbformat.write(notebook, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
