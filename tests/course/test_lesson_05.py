"""Lesson 05's checks: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 05` makes many more mistakes, small ones.
"""

from __future__ import annotations

import ast

import nbformat
import pytest
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells
from lesson_checks import LessonChecks

pytest.importorskip("triton")  # there is none for macOS


CELLS = read_cells("05")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about what mistakes compute
ADD, SCALE, REDUCE, SOFTMAX, SILU, NORM, GATHER, TRANSPOSE, MATMUL, RUNNING = (
    "add", "scale", "reduce", "softmax", "silu", "norm", "gather", "transpose", "matmul", "running"
)  # fmt: skip
NAMES = {
    ADD: "each element is added by one program, and nothing beyond the end is touched",
    SCALE: "rows that lie apart",
    REDUCE: "masked elements neither win nor count",
    SOFTMAX: "a softmax of any numbers, each read once",
    SILU: "gate and up, piece by piece",
    NORM: "one pass: added, stored and normalized",
    GATHER: "rows are found by their numbers",
    TRANSPOSE: "a tile is turned over",
    MATMUL: "a product, tile by tile",
    RUNNING: "one pass, though the maximum is known only at its end",
}
"""The checks, by the cell of the answer."""
ENGINE = "the engine runs on your kernels"


class TestChecks(LessonChecks):
    number = "05"
    every = 47
    fewest = 7

    def cells_for(self, answer):
        return cells_of(answer.about), NAMES[answer.about]


def cells_of(answer):
    """The cells that a kernel needs: kernels do not depend on one another."""
    return [cell for cell in CELLS if cell.name in ("setup", answer, f"check-{answer}")]


def test_an_error_in_a_kernel_is_told_with_its_line():
    outcome = run_cells(edited(cells_of(ADD), "x + y, mask=inside", "x + z, mask=inside"))
    said = str(outcome.checks[NAMES[ADD]])
    assert "raised NameError in the line `tl.store(out_ptr + places, x + z, mask=inside)`: name 'z' is not defined" in said


def test_what_is_no_kernel_is_told():
    cells = [cell for cell in cells_of(ADD) if cell.name != ADD]
    cells.insert(1, Cell("own", "def add(*args): pass", "answer"))
    said = str(run_cells(cells).checks[NAMES[ADD]])
    assert "add is a function, not a kernel" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer, old, new",
    [
        (NORM, "residual * tl.rsqrt", "x * tl.rsqrt"),
        pytest.param(SILU, "tl.exp(-gate)", "tl.exp(gate)", marks=pytest.mark.long),
        pytest.param(
            NORM, "tl.store(out_ptr + places, residual *", "tl.store(x_ptr + places, residual *", marks=pytest.mark.long
        ),
    ],
)
def test_the_engine_would_notice_too(answer, old, new):
    wanted = ("setup", NORM, SILU, "kernels", "check-engine")
    outcome = run_cells(edited([cell for cell in CELLS if cell.name in wanted], old, new), with_model=True)
    assert outcome.failed == [ENGINE]
    assert "Expected tokens" in str(outcome.checks[ENGINE])


def kernels_of_the_walkthrough():
    """The source of all kernels that the walkthrough writes."""
    cells = nbformat.read(ROOT / "notebooks" / "05_triton.ipynb", as_version=4).cells
    sources = [
        "\n".join(line for line in cell.source.split("\n") if not line.startswith("%"))
        for cell in cells
        if cell.cell_type == "code"
    ]
    found = [
        node for source in sources for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    return {node.name: ast.unparse(node) for node in found}


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_nothing():
    """Each of its kernels under the name of each of the exercise's."""
    kernels = kernels_of_the_walkthrough()
    assert kernels
    for source in kernels.values():
        name = ast.parse(source).body[0].name
        cells = []
        for cell in CELLS:
            if cell.kind == "answer":
                target = next(node.name for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef))
                cells.append(Cell(cell.name, source.replace(f"def {name}(", f"def {target}("), "answer"))
            else:
                cells.append(cell)
        assert run_cells(cells).points == 0, name
