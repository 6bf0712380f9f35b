"""Stored notebooks were run from top to bottom, show no errors, are small, and name files that exist.

That their outputs are right is checked by running them: `pytest --nbval notebooks`, which `make test` does.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def notebook(request):
    return request.param, nbformat.read(request.param, as_version=4)


def test_there_are_notebooks():
    assert ROOT / "notebooks" / "00_start_here.ipynb" in NOTEBOOKS


def test_it_was_run_from_top_to_bottom(notebook):
    _, content = notebook
    counts = [cell.execution_count for cell in content.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]


def test_it_is_valid_and_small(notebook):
    path, content = notebook
    nbformat.validate(content)
    assert path.stat().st_size < 2**20


def test_it_names_no_place_on_the_machine_that_ran_it(notebook):
    path, _ = notebook
    assert not re.search(r"(?<![\w.])/(home|root|Users|work|tmp)/", path.read_text())


def test_the_files_it_names_exist(notebook):
    path, content = notebook
    text = "\n".join(cell.source for cell in content.cells)
    for name in re.findall(r"`(minivllm/[\w/]+\.py|[a-z]+/\d\d_\w+\.ipynb)`", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_it_has_the_parts_of_a_lesson(notebook):
    _, content = notebook
    headings = [
        line for cell in content.cells if cell.cell_type == "markdown" for line in cell.source.split("\n") if line[:1] == "#"
    ]
    assert re.fullmatch(r"# \d\d · .+", headings[0])
    for part in ("## What you have", "## Three questions to think over", "## To read"):
        assert part in headings
