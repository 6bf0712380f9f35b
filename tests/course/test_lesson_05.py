"""Lesson 05's checks: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 05` makes many more mistakes, small ones.
"""

from __future__ import annotations

import ast

import nbformat
import pytest
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, untouched
from mutate_lesson import WANTED, find_survivors

pytest.importorskip("triton")  # there is none for macOS

from minivllm.course.lessons import lesson_05

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

_PLACES = "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"
_X = "x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)"

WRONG = {
    # add
    "add: no mask in a load": (ADD, "x = tl.load(x_ptr + places, mask=inside)", "x = tl.load(x_ptr + places)", "outside x_ptr"),
    "add: no mask in the store": (ADD, "x + y, mask=inside", "x + y", "writes outside out_ptr"),
    "add: all programs the same": (ADD, _PLACES, "tl.arange(0, BLOCK)", "Programs 0"),
    "add: one too many": (ADD, "places < size", "places <= size", "outside"),
    "add: one too few": (ADD, "places < size", "places < size - 1", "nobody wrote it"),
    "add: subtracted": (ADD, "x + y, mask", "x - y, mask", "Expected out_ptr[0]"),
    "add: x twice": (ADD, "tl.load(y_ptr", "tl.load(x_ptr", "Expected out_ptr[0]"),
    "add: shifted by one": (ADD, _PLACES, f"{_PLACES} + 1", "BLOCK of them, from program_id"),
    "add: blocks overlap": (ADD, _PLACES, "tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)", "which of them comes last is not known"),
    "add: a gap between blocks": (ADD, _PLACES, "tl.program_id(0) * (BLOCK + 1) + tl.arange(0, BLOCK)", "nobody wrote it"),
    "add: into x": (ADD, "tl.store(out_ptr", "tl.store(x_ptr", "The launch changed x_ptr"),
    # scale_rows
    "scale: the other stride": (SCALE, "row * x_stride", "row * out_stride", ""),
    "scale: the other stride in the store": (SCALE, "row * out_stride", "row * x_stride", ""),
    "scale: rows are thought to touch": (SCALE, "row * x_stride", "row * num_columns", ""),
    "scale: the first factor for all": (SCALE, "factors_ptr + row", "factors_ptr", "which factor is its own"),
    "scale: a factor for each column": (SCALE, "factors_ptr + row)", "factors_ptr + columns, mask=inside)", ""),
    "scale: no mask": (SCALE, "mask=inside)\n    factor", "mask=columns < BLOCK)\n    factor", "outside x_ptr"),
    "scale: the gap is written": (SCALE, "x * factor, mask=inside", "x * factor, mask=columns < out_stride", "outside out_ptr"),
    "scale: one row for all": (SCALE, "row = tl.program_id(0)", "row = 0", "write out_ptr[0, 0]"),
    # max_and_sum
    "reduce: 0 wins": (REDUCE, 'tl.where(inside, x, float("-inf"))', "x", "0 is larger than every negative number"),
    "reduce: the smallest": (REDUCE, "tl.max(", "-tl.max(-", "Expected maxima_ptr"),
    "reduce: float16": (REDUCE, "other=0.0).to(tl.float32)", "other=0.0)", "Expected sums_ptr"),
    "reduce: minus infinity is added": (REDUCE, "other=0.0)", 'other=float("-inf"))', "Got sums_ptr[0]: -inf"),
    "reduce: the mean": (REDUCE, "tl.sum(x, axis=0))", "tl.sum(x, axis=0) / num_columns)", "Expected sums_ptr"),
    "reduce: exchanged": (REDUCE, "tl.store(sums_ptr + row, tl.sum(x, axis=0))", "tl.store(sums_ptr + row, tl.max(x, axis=0))", "Expected sums_ptr"),
    "reduce: read twice": (REDUCE, "tl.sum(x, axis=0)", "tl.sum(tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32), axis=0)", "2 times as much as it must"),
    "reduce: the sum of what was masked": (REDUCE, "mask=inside, other=0.0", "mask=columns < x_stride, other=0.0", ""),
    "reduce: masked elements are anything": (REDUCE, "mask=inside, other=0.0)", "mask=inside)", "Got sums_ptr[0]: nan"),
    # softmax
    "softmax: nothing is subtracted": (SOFTMAX, "tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)", "whether the maximum is subtracted"),
    "softmax: 0 for masked elements": (SOFTMAX, 'other=float("-inf")', "other=0.0", "what masked elements count as"),
    "softmax: the minimum is subtracted": (SOFTMAX, "tl.max(x, axis=0)", "tl.min(tl.where(inside, x, 0.0), axis=0)", "maximum"),
    "softmax: not divided": (SOFTMAX, "weights / tl.sum(weights, axis=0)", "weights", "Expected out_ptr"),
    "softmax: base 2": (SOFTMAX, "tl.exp(x", "tl.exp2(x", "Expected out_ptr"),
    "softmax: divided by the largest": (SOFTMAX, "tl.sum(weights", "tl.max(weights", "Expected out_ptr"),
    "softmax: read twice": (SOFTMAX, "tl.max(x, axis=0)", 'tl.max(tl.load(x_ptr + row * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32), axis=0)', "2 times as much"),
    "softmax: in float16": (SOFTMAX, "weights = tl.exp(x - tl.max(x, axis=0))", "weights = tl.exp(x - tl.max(x, axis=0)).to(tl.float16)", "Expected out_ptr"),
    # silu_and_mul
    "silu: up is gate": (SILU, "x_stride + size + columns", "x_stride + columns", "up begins `size` numbers after gate"),
    "silu: up a block later": (SILU, "+ size + columns", "+ BLOCK + columns", ""),
    "silu: the sigmoid of gate": (SILU, "gate / (1.0", "1.0 / (1.0", "Expected out_ptr"),
    "silu: the sign": (SILU, "tl.exp(-gate)", "tl.exp(gate)", "Expected out_ptr"),
    "silu: in float16": (SILU, "gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)", "gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)", "Expected dtype"),
    "silu: every piece the first": (SILU, "tl.program_id(1) * BLOCK + ", "", "write out_ptr[0, 0]"),
    "silu: the axes exchanged": (SILU, "tl.program_id(1) * BLOCK", "tl.program_id(0) * BLOCK", ""),
    "silu: as wide as x": (SILU, "inside = columns < size", "inside = columns < 2 * size", "outside"),
    "silu: up is forgotten": (SILU, " * up, mask", ", mask", "Expected out_ptr"),
    # add_rms_norm
    "norm: the sum is not stored": (NORM, "    tl.store(residual_ptr + places, residual, mask=inside)\n", "", "what is stored to residual_ptr"),
    "norm: x is stored": (NORM, "tl.store(residual_ptr + places, residual,", "tl.store(residual_ptr + places, x,", "what is stored to residual_ptr"),
    "norm: the mean of a block": (NORM, "axis=0) / size", "axis=0) / BLOCK", "not BLOCK"),
    "norm: no mean": (NORM, "axis=0) / size", "axis=0)", "the mean"),
    "norm: eps outside": (NORM, "tl.rsqrt(mean_square + eps)", "(tl.rsqrt(mean_square) + eps)", "eps inside the root"),
    "norm: no eps": (NORM, "mean_square + eps", "mean_square", "eps inside the root"),
    "norm: no weight": (NORM, " * weight, mask", ", mask", "the weight"),
    "norm: multiplied by the root": (NORM, "tl.rsqrt(", "tl.sqrt(", "Expected out_ptr"),
    "norm: x alone": (NORM, "residual * tl.rsqrt", "x * tl.rsqrt", "Expected out_ptr"),
    "norm: squares in float16": (NORM, "tl.sum(residual * residual, axis=0)", "tl.sum((residual * residual).to(tl.float16), axis=0).to(tl.float32)", "the dtype of the squares"),
    "norm: rows are thought to touch": (NORM, "tl.program_id(0) * stride", "tl.program_id(0) * size", ""),
    "norm: the sum is read again": (NORM, "mean_square = tl.sum(residual * residual, axis=0) / size", "again = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)\n    mean_square = tl.sum(again * again, axis=0) / size", "2 times as much as it must"),
    "norm: a weight for each token": (NORM, "weight_ptr + columns", "weight_ptr + places", ""),
    "norm: masked elements are anything": (NORM, "residual = tl.load(residual_ptr + places, mask=inside, other=0.0)", "residual = tl.load(residual_ptr + places, mask=inside)", "Got out_ptr"),
    # gather
    "gather: -1 is read": (GATHER, "mask=inside & (row >= 0)", "mask=inside", "outside table_ptr"),
    "gather: rows in order": (GATHER, "row * table_stride", "i * table_stride", ""),
    "gather: -1 is not written": (GATHER, "x, mask=inside)", "x, mask=inside & (row >= 0))", "nobody wrote it"),
    "gather: scattered": (GATHER, "i * out_stride", "row * out_stride", ""),
    "gather: row 0 for -1": (GATHER, "row = tl.load(rows_ptr + i)", "row = tl.maximum(tl.load(rows_ptr + i), 0)", ""),
    "gather: read, then thrown away": (GATHER, "x = tl.load(table_ptr + row * table_stride + columns, mask=inside & (row >= 0), other=0.0)", "x = tl.load(table_ptr + tl.maximum(row, 0) * table_stride + columns, mask=inside, other=0.0)\n    x = tl.where(row >= 0, x, 0.0)", "Look at the loads"),
    "gather: rows are thought to touch": (GATHER, "row * table_stride", "row * num_columns", ""),
    # transpose
    "transpose: not turned": (TRANSPOSE, "columns * out_stride + rows", "rows * out_stride + columns", ""),
    "transpose: the other stride": (TRANSPOSE, "rows * x_stride", "rows * out_stride", ""),
    "transpose: ids exchanged": (TRANSPOSE, "rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]\n    columns = (tl.program_id(1)", "rows = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]\n    columns = (tl.program_id(0)", ""),
    "transpose: columns unmasked": (TRANSPOSE, "(rows < num_rows) & (columns < num_columns)", "(rows < num_rows) & (columns >= 0)", ""),
    "transpose: either is enough": (TRANSPOSE, "(rows < num_rows) & (columns", "(rows < num_rows) | (columns", ""),
    "transpose: turned twice": (TRANSPOSE, "tl.store(out_ptr + columns * out_stride + rows, tile,", "tl.store(out_ptr + columns * out_stride + rows, tl.trans(tile),", ""),
    # matmul
    "matmul: k unmasked": (MATMUL, "(rows < m) & (inner[None, :] < k)", "(rows < m) & (inner[None, :] >= 0)", "outside a_ptr"),
    "matmul: the last product only": (MATMUL, "total += tl.dot", "total = tl.dot", "Expected out_ptr"),
    "matmul: without the first tile": (MATMUL, "range(0, k, BLOCK)", "range(BLOCK, k, BLOCK)", "Expected out_ptr"),
    "matmul: the first tile only": (MATMUL, "range(0, k, BLOCK)", "range(0, BLOCK, BLOCK)", "Expected out_ptr"),
    "matmul: b is turned": (MATMUL, "inner[:, None] * b_stride + columns", "columns * b_stride + inner[:, None]", ""),
    "matmul: the store is unmasked": (MATMUL, "total, mask=(rows < m) & (columns < n)", "total", "writes outside out_ptr"),
    "matmul: always the first columns of a": (MATMUL, "inner = start + tl.arange(0, BLOCK)", "inner = tl.arange(0, BLOCK)", ""),
    "matmul: a stride of b": (MATMUL, "rows * a_stride", "rows * b_stride", ""),
    "matmul: sums in float16": (MATMUL, "total += tl.dot(a, b, input_precision=\"ieee\")", "total = (total + tl.dot(a, b, input_precision=\"ieee\")).to(tl.float16)", "the dtype of the sum"),
    "matmul: masked elements are anything": (MATMUL, "mask=b_inside, other=0.0", "mask=b_inside", "masked elements must count as 0"),
    # running_max_and_sum
    "running: the maximum begins at 0": (RUNNING, 'float("-inf"), 0.0', "0.0, 0.0", "it begins below all numbers"),
    "running: not corrected": (RUNNING, "total * tl.exp(maximum - new_maximum) +", "total +", "it has to shrink"),
    "running: corrected the wrong way": (RUNNING, "tl.exp(maximum - new_maximum)", "tl.exp(new_maximum - maximum)", "it has to shrink"),
    "running: the old maximum stays": (RUNNING, "        maximum = new_maximum\n", "", ""),
    "running: the maximum of the piece": (RUNNING, "tl.maximum(maximum, tl.max(x, axis=0))", "tl.max(x, axis=0)", "the maximum so far"),
    "running: 0 for masked elements": (RUNNING, "columns < num_columns, other=float(\"-inf\")", "columns < num_columns, other=0.0", ""),
    "running: the first piece only": (RUNNING, "range(0, num_columns, BLOCK)", "range(0, BLOCK, BLOCK)", ""),
    "running: the last piece is left out": (RUNNING, "range(0, num_columns, BLOCK)", "range(0, num_columns - BLOCK + 1, BLOCK)", ""),
    "running: the old maximum in the new sum": (RUNNING, "tl.exp(x - new_maximum)", "tl.exp(x - maximum)", ""),
    "running: two passes": (RUNNING, "    tl.store(sums_ptr + row, total)", "    total = 0.0\n    for start in range(0, num_columns, BLOCK):\n        columns = start + tl.arange(0, BLOCK)\n        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < num_columns, other=float(\"-inf\")).to(tl.float32)\n        total += tl.sum(tl.exp(x - maximum), axis=0)\n    tl.store(sums_ptr + row, total)", "2 times as much as it must"),
}  # fmt: skip

RIGHT = {
    "add: what is outside is 0": (ADD, "y = tl.load(y_ptr + places, mask=inside)", "y = tl.load(y_ptr + places, mask=inside, other=0.0)"),
    "add: in float32": (ADD, "x + y, mask", "x.to(tl.float32) + y.to(tl.float32), mask"),
    "reduce: a second variable": (REDUCE, 'tl.where(inside, x, float("-inf"))', "tl.where(columns >= num_columns, -3e38, x)"),
    "softmax: multiplied by the inverse": (SOFTMAX, "weights / tl.sum(weights, axis=0)", "weights * (1.0 / tl.sum(weights, axis=0))"),
    "softmax: by tl.softmax's steps": (SOFTMAX, "tl.exp(x - tl.max(x, axis=0))", "tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)"),
    "silu: tl.sigmoid": (SILU, "gate / (1.0 + tl.exp(-gate)) * up", "gate * tl.sigmoid(gate) * up"),
    "norm: divided by the root": (NORM, "residual * tl.rsqrt(mean_square + eps)", "residual / tl.sqrt(mean_square + eps)"),
    "gather: 64-bit numbers": (GATHER, "row = tl.load(rows_ptr + i)", "row = tl.load(rows_ptr + i).to(tl.int64)"),
    "transpose: the tile is turned first": (TRANSPOSE, "tl.store(out_ptr + columns * out_stride + rows, tile, mask=inside)", "tl.store(out_ptr + tl.trans(columns) * out_stride + tl.trans(rows), tl.trans(tile), mask=tl.trans(inside))"),
    "matmul: dot adds": (MATMUL, 'total += tl.dot(a, b, input_precision="ieee")', 'total = tl.dot(a, b, total, input_precision="ieee")'),
    "running: elementwise, put together at the end": (RUNNING, '    maximum, total = float("-inf"), 0.0\n', '    maximum, total = -1e30, 0.0\n'),
}  # fmt: skip


def cells_of(answer):
    """The cells that a kernel needs: kernels do not depend on one another."""
    return [cell for cell in CELLS if cell.name in ("setup", answer, f"check-{answer}")]


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(cells)
    assert (outcome.points, outcome.broken, outcome.failed) == (0, {}, list(NAMES.values()))
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.parametrize("answer, old, new, words", WRONG.values(), ids=WRONG)
def test_a_mistake_fails_and_is_named(answer, old, new, words):
    outcome = run_cells(edited(cells_of(answer), old, new))
    assert outcome.failed == [NAMES[answer]]
    assert words in str(outcome.checks[NAMES[answer]])
    assert outcome.broken == {}


@pytest.mark.parametrize("answer, old, new", RIGHT.values(), ids=RIGHT)
def test_another_right_answer_passes(answer, old, new):
    outcome = run_cells(edited(cells_of(answer), old, new))
    assert (outcome.failed, outcome.broken) == ([], {})


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
def test_small_mistakes_are_caught():
    count, survivors = find_survivors("05", every=47)
    assert 1 - len(survivors) / count >= WANTED, [mutant.change for mutant in survivors]


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer, old, new",
    [
        (NORM, "residual * tl.rsqrt", "x * tl.rsqrt"),
        (SILU, "tl.exp(-gate)", "tl.exp(gate)"),
        (NORM, "tl.store(out_ptr + places, residual *", "tl.store(x_ptr + places, residual *"),
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


def test_all_checks_are_exported_and_used():
    text = "\n".join(cell.source for cell in CELLS)
    assert [name for name in lesson_05.__all__ if f"lesson_05.{name}(" not in text] == []
