"""Lesson 05's checks: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 05` makes many more mistakes, small ones.
"""

from __future__ import annotations

import ast
import re

import pytest
from lesson_cells import Cell, edited, read_cells, read_walkthrough, run_cells
from lesson_checks import LessonChecks

pytest.importorskip("triton")  # there is none for macOS


CELLS = read_cells("05")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about what mistakes compute


class TestChecks(LessonChecks):
    number = "05"
    with_other_input = frozenset({"check-engine"})
    every = 47
    fewest = 7

    def cells_for(self, answer):
        cells = cells_of(answer.about)
        return cells, re.search(r'check\("(.*?)"', cells[-1].source)[1]


def cells_of(answer):
    """The cells that a kernel needs: kernels do not depend on one another."""
    return [cell for cell in CELLS if cell.name in ("setup", answer, f"check-{answer}")]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            "@triton.jit\ndef add(out_ptr, x_ptr, y_ptr, size, BLOCK: tl.constexpr):\n    tl.store(out_ptr, z)",
            "raised NameError in the line `tl.store(out_ptr, z)`: name 'z' is not defined",
        ),
        ("def add(*args): pass", "add is a function, not a kernel"),
    ],
)
def test_what_is_wrong_with_a_kernel_itself_is_told(own, said):
    setup, _, check = cells_of("add")
    [error] = run_cells([setup, Cell("own", own, "answer"), check]).checks.values()
    assert said in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("residual * tl.rsqrt", "x * tl.rsqrt"),
        pytest.param("tl.exp(-gate)", "tl.exp(gate)", marks=pytest.mark.nightly),
        pytest.param("tl.store(out_ptr + places, residual *", "tl.store(x_ptr + places, residual *", marks=pytest.mark.nightly),
    ],
)
def test_the_engine_would_notice_too(old, new):
    wanted = ("setup", "norm", "silu", "kernels", "check-engine")
    outcome = run_cells(edited([cell for cell in CELLS if cell.name in wanted], old, new), with_model=True)
    assert outcome.failed == ["the engine runs on your kernels"]
    assert "Expected tokens" in str(outcome.checks["the engine runs on your kernels"])


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_nothing():
    """Each of its kernels under the name of each of the exercise's."""
    kernels = [node for node in read_walkthrough("05") if node.decorator_list]
    assert kernels
    names = {cell.name: re.search(r"def (\w+)\(", cell.source)[1] for cell in CELLS if cell.kind == "answer"}
    for kernel in kernels:
        source = ast.unparse(kernel)
        cells = [
            Cell(cell.name, source.replace(f"def {kernel.name}(", f"def {names[cell.name]}("), "answer")
            if cell.name in names
            else cell
            for cell in CELLS
        ]
        assert run_cells(cells).points == 0, kernel.name
