"""Folded outputs: cells whose output answers a prediction have `"jupyter": {"outputs_hidden": true}` in their metadata.

For a folded output JupyterLab shows the first line of its first text, which is often the answer. So `make notebooks` puts an empty
output before it, which shows nothing, folded or unfolded; `pytest --nbval` ignores it.
"""

from __future__ import annotations

from typing import Any


def is_folded(cell: Any) -> bool:
    """Whether JupyterLab opens the notebook with this cell's output folded."""
    return cell["cell_type"] == "code" and bool(cell["metadata"].get("jupyter", {}).get("outputs_hidden"))


def cover_answers(notebook: Any) -> None:
    """Put the empty output before every folded one that has none, and remove it elsewhere."""
    import nbformat

    uncover_answers(notebook)
    for cell in notebook.cells:
        if is_folded(cell) and cell.outputs:
            cell.outputs.insert(0, nbformat.v4.new_output("display_data", {}))


def uncover_answers(notebook: Any) -> None:
    """Remove the empty outputs."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_cover(output)]


def _is_cover(output: Any) -> bool:
    return output["output_type"] == "display_data" and not output["data"]
