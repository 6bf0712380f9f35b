"""`pytest --nbval` on exercises ends with their points, and writes them with --grades."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import nbformat
import pytest
from course_notebooks import solved_notebook

import minivllm
from minivllm.course.exercises import make_exercise

pytest_plugins = "pytester"
ROOT = Path(minivllm.__file__).parents[1]
CHECKS = ["two numbers are added", "a number is doubled, twice"]
PLUGIN = "minivllm.course.pytest_plugin"


def run_pytest(folder, *arguments):
    """pytest in a process of its own, without the plugins that happen to be installed here: those take seconds to import."""
    (folder / "pytest.ini").touch()  # the folder is a project of its own
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def half_done():
    """An exercise with its first function written, and the second one wrong."""
    notebook = make_exercise(solved_notebook())
    answer = next(cell for cell in notebook.cells if cell.id == "answer")
    answer.source = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + 1\n"
    return notebook


def emptied():
    """An exercise with nothing written, whose first check was emptied so that its cell passes."""
    notebook = make_exercise(solved_notebook())
    next(cell for cell in notebook.cells if cell.id == "check-add").source = "pass"
    return notebook


def with_formula():
    """An exercise with nothing written, whose first check is named like a formula of a spreadsheet."""
    notebook = make_exercise(solved_notebook())
    check = next(cell for cell in notebook.cells if cell.id == "check-add")
    check.source = check.source.replace(CHECKS[0], "=HYPERLINK(A1)")
    return notebook


NOTEBOOKS = {
    "solved": solved_notebook,
    "untouched": lambda: make_exercise(solved_notebook()),
    "half": half_done,
    "emptied": emptied,
    "formula": with_formula,
    "walkthrough": lambda: nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")]),
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One run over all the notebooks: what it printed, and the rows of the table."""
    folder = tmp_path_factory.mktemp("graded")
    (folder / "exercises").mkdir()
    for name, make in NOTEBOOKS.items():
        nbformat.write(make(), folder / "exercises" / f"{name}.ipynb")
    result = run_pytest(folder, "-p", "nbval.plugin", "--nbval", "exercises", "--grades", "grades.csv")
    with (folder / "grades.csv").open(encoding="utf-8", newline="") as file:
        return result, list(csv.DictReader(file))


@pytest.mark.slow
def test_each_notebook_with_checks_gets_a_line_with_its_points(graded):
    result, _ = graded
    lines = [line for line in result.stdout.split("\n") if " points" in line and ".ipynb:" in line]
    assert lines == [
        f"exercises/emptied.ipynb: 0 of 5 points; failed: check-add; {CHECKS[1]}",
        f"exercises/formula.ipynb: 0 of 5 points; failed: =HYPERLINK(A1); {CHECKS[1]}",
        f"exercises/half.ipynb: 2 of 5 points; failed: {CHECKS[1]}",
        "exercises/solved.ipynb: 5 of 5 points",
        f"exercises/untouched.ipynb: 0 of 5 points; failed: {CHECKS[0]}; {CHECKS[1]}",
    ]
    assert "Points written to grades.csv." in result.stdout


@pytest.mark.slow
def test_a_notebook_that_is_not_run_gets_no_line(tmp_path):
    for name in ("half", "untouched"):
        nbformat.write(NOTEBOOKS[name](), tmp_path / f"{name}.ipynb")
    result = run_pytest(tmp_path, "-p", "nbval.plugin", "--nbval", "-k", "half")
    assert f"half.ipynb: 2 of 5 points; failed: {CHECKS[1]}" in result.stdout
    assert "untouched.ipynb:" not in result.stdout


@pytest.mark.slow
def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(graded):
    result, _ = graded
    failed = [line.split(" - ")[0] for line in result.stdout.split("\n") if line.startswith("FAILED exercises/untouched")]
    assert failed == [f"FAILED exercises/untouched.ipynb::Cell {number}" for number in (2, 4)]
    assert "Not written yet: a cell, line 2, in add." in result.stdout


@pytest.mark.slow
def test_the_table_has_a_row_for_each_check_and_the_totals(graded):
    _, rows = graded
    assert [*rows[0]] == ["notebook", "check", "points", "max_points"]
    of = {name: [row for row in rows if row["notebook"] == f"exercises/{name}.ipynb"] for name in NOTEBOOKS}
    assert of["walkthrough"] == []
    assert [row["check"] for row in of["half"]] == [*CHECKS, "total"]
    assert [(row["points"], row["max_points"]) for row in of["half"]] == [("2", "2"), ("0", "3"), ("2", "5")]
    assert {name: rows[-1]["points"] for name, rows in of.items() if rows} == {
        "solved": "5",
        "untouched": "0",
        "half": "2",
        "emptied": "0",
        "formula": "0",
    }


@pytest.mark.slow
def test_no_cell_of_the_table_is_a_formula(graded):
    _, rows = graded
    assert [row["check"] for row in rows if "formula" in row["notebook"]] == ["'=HYPERLINK(A1)", CHECKS[1], "total"]


@pytest.mark.slow
def test_a_check_that_does_not_end_gets_no_points_and_the_others_theirs(tmp_path):
    notebook = solved_notebook(answer="def add(a, b):\n    while True:\n        pass\n\n\ndef twice(a):\n    return 2 * a\n")
    nbformat.write(notebook, tmp_path / "slow.ipynb")
    result = run_pytest(tmp_path, "-p", "nbval.plugin", "--nbval", "--nbval-cell-timeout=3", "slow.ipynb")
    assert f"slow.ipynb: 3 of 5 points; failed: {CHECKS[0]}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nbval", "--grades", "nowhere/grades.csv"], "it must be a file in an existing folder"),
        (["--nbval", "--grades", "folder.csv"], "it must be a file in an existing folder"),
        (["--nbval", "--grades", "grades.txt"], "must end in .csv, but grades.txt does not"),
        (["--grades", "grades.csv"], "needs --nbval"),
        (["--nbval", "--grades", "grades.csv", "-n", "2"], "omit -n"),
    ],
)
def test_grades_that_cannot_be_written_are_refused_at_the_start(arguments, says, pytester):
    (pytester.path / "folder.csv").mkdir()
    nbformat.write(solved_notebook(), pytester.path / "solved.ipynb")
    result = pytester.runpytest_inprocess("-p", PLUGIN, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.outlines == []
    (said,) = filter(None, result.errlines)
    assert said.startswith("ERROR: --grades ")
    assert says in said


def test_a_run_without_notebooks_is_as_it_was(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import sys\n\n"
        "def test_nothing_heavy_was_imported():\n"
        "    assert not {'torch', 'numpy', 'matplotlib', 'nbgrader', 'minivllm.course.exercise_cells'} & sys.modules.keys()\n"
    )
    result = run_pytest(tmp_path)
    assert result.returncode == 0, result.stdout
    assert "point" not in result.stdout
    assert "1 passed" in result.stdout


@pytest.mark.parametrize("named_too", [False, True])
def test_the_plugin_is_loaded_once_where_minivllm_is_installed(named_too, tmp_path):
    entry_point = re.search(r"^\[project\.entry-points\.pytest11\]\n(.+)\n", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    installed = tmp_path / "installed-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\n" + entry_point.group(1).replace('"', "") + "\n")
    others = {point.name for point in entry_points(group="pytest11")} - {PLUGIN}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--help",
        *(f"-pno:{name}" for name in others),
        *(["-p", PLUGIN] if named_too else []),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--grades=FILE.csv") == 1
