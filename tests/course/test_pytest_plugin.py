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
from course_notebooks import CHECK_ADD, HALF, exercise, of_code, solved_notebook, write

import minivllm

pytest_plugins = "pytester"
ROOT = Path(minivllm.__file__).parents[1]
CHECKS = ["two numbers are added", "a number is doubled, twice"]
PLUGIN = "minivllm.course.pytest_plugin"
NBVAL = ["-p", "nbval.plugin", "--nbval"]


def run_pytest(folder, *arguments):
    """pytest in a process of its own, without the plugins that happen to be installed here: those take seconds to import."""
    (folder / "pytest.ini").touch()  # the folder is a project of its own
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


ENDLESS = "def add(a, b):\n    while True:\n        pass\n\n\ndef twice(a):\n    return 2 * a\n"


def changed(first="{}", copies=1):
    """A solved notebook whose first check's cell has something around it, or stands there several times."""
    notebook = solved_notebook()
    place, check = next((i, cell) for i, cell in enumerate(notebook.cells) if cell.id == "check-add")
    check.source = first.format(check.source.replace("\n", "\n    ") if first.startswith("if") else check.source)
    notebook.cells[place:place] = [nbformat.from_dict(check | {"id": f"copy-{i}"}) for i in range(copies - 1)]
    return notebook


NOTEBOOKS = {
    "branch": lambda: changed("if False:\n    {}"),
    "caught": lambda: changed("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nelse:\n    check('two numbers are added')"),
    "cell_magic": lambda: changed("%%no_such_magic\n{}"),
    "percent": lambda: changed('text = """\n%d"""\n{}'),
    "same_line": lambda: changed("print(1, end='')\n{}"),
    "copied": lambda: changed(copies=3),
    "emptied": lambda: exercise(check_add="pass"),
    "formula": lambda: exercise(check_add=CHECK_ADD.replace(CHECKS[0], "=HYPERLINK(A1)")),
    "half": lambda: exercise(answer=HALF),
    "magic": lambda: changed("%no_such_magic\n{}"),
    "slow": lambda: exercise(answer=ENDLESS),
    "timed": lambda: changed("%%time\n{}"),
    "solved": solved_notebook,
    "untouched": exercise,
    "walkthrough": lambda: of_code("1 + 1"),
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One run over all the notebooks: what it printed, and the rows of the table."""
    folder = tmp_path_factory.mktemp("graded")
    for name, make in NOTEBOOKS.items():
        write(folder / "exercises", make(), name)
    result = run_pytest(folder, *NBVAL, "--nbval-cell-timeout=10", "exercises", "--grades", "grades.csv")
    with (folder / "grades.csv").open(encoding="utf-8", newline="") as file:
        return result.stdout.split("\n"), list(csv.DictReader(file))


@pytest.mark.slow
def test_each_notebook_with_checks_gets_a_line_with_its_points(graded):
    lines, _ = graded
    assert [line for line in lines if " points" in line and ".ipynb:" in line] == [
        f"exercises/branch.ipynb: 3 of 5 points; failed: {CHECKS[0]}",
        f"exercises/caught.ipynb: 3 of 5 points; failed: {CHECKS[0]}",
        f"exercises/cell_magic.ipynb: 3 of 5 points; failed: {CHECKS[0]}",
        "exercises/copied.ipynb: 5 of 5 points",
        f"exercises/emptied.ipynb: 0 of 5 points; failed: check-add; {CHECKS[1]}",
        f"exercises/formula.ipynb: 0 of 5 points; failed: =HYPERLINK(A1); {CHECKS[1]}",
        f"exercises/half.ipynb: 2 of 5 points; failed: {CHECKS[1]}",
        f"exercises/magic.ipynb: 3 of 5 points; failed: {CHECKS[0]}",
        "exercises/percent.ipynb: 5 of 5 points",
        "exercises/same_line.ipynb: 5 of 5 points",
        f"exercises/slow.ipynb: 3 of 5 points; failed: {CHECKS[0]}",
        "exercises/solved.ipynb: 5 of 5 points",
        "exercises/timed.ipynb: 5 of 5 points",
        f"exercises/untouched.ipynb: 0 of 5 points; failed: {CHECKS[0]}; {CHECKS[1]}",
    ]
    assert "Points written to grades.csv." in lines


@pytest.mark.slow
def test_a_notebook_that_is_not_run_gets_no_line(tmp_path):
    for name in ("half", "untouched"):
        write(tmp_path, NOTEBOOKS[name](), name)
    result = run_pytest(tmp_path, *NBVAL, "-k", "half")
    assert f"half.ipynb: 2 of 5 points; failed: {CHECKS[1]}" in result.stdout
    assert "untouched.ipynb:" not in result.stdout


@pytest.mark.slow
def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(graded):
    failed = [line.split(" - ")[0] for line in graded[0] if line.startswith("FAILED exercises/untouched")]
    assert failed == [f"FAILED exercises/untouched.ipynb::Cell {number}" for number in (2, 4)]
    assert "Not written yet: a cell, line 2, in add." in "\n".join(graded[0])


@pytest.mark.slow
def test_the_table_has_a_row_for_each_check_and_the_totals_and_no_formula(graded):
    _, rows = graded
    assert [*rows[0]] == ["notebook", "check", "points", "max_points"]
    of = {name: [[*row.values()][1:] for row in rows if row["notebook"] == f"exercises/{name}.ipynb"] for name in NOTEBOOKS}
    assert of["half"] == [[CHECKS[0], "2", "2"], [CHECKS[1], "0", "3"], ["total", "2", "5"]]
    totals = {
        "solved": "5",
        "untouched": "0",
        "half": "2",
        "emptied": "0",
        "formula": "0",
        "slow": "3",
        "copied": "5",
        "timed": "5",
        "same_line": "5",
        "percent": "5",
    }
    totals |= dict.fromkeys(("branch", "caught", "cell_magic", "magic"), "3")
    assert {name: rows[-1][1] for name, rows in of.items() if rows} == totals
    assert [check for check, *_ in of["formula"]] == ["'=HYPERLINK(A1)", CHECKS[1], "total"]


@pytest.mark.slow
def test_a_graded_cell_whose_check_did_not_run_is_red(graded):
    printed = "\n".join(graded[0])
    for name in ("magic", "cell_magic", "branch", "caught", "emptied"):
        assert f"FAILED exercises/{name}.ipynb::Cell" in printed
    assert f"The check '{CHECKS[0]}' did not run: restore this cell as the exercise had it." in printed


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
    write(pytester.path)
    result = pytester.runpytest_inprocess("-p", PLUGIN, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.outlines == []
    (said,) = filter(None, result.errlines)
    assert said.startswith("ERROR: --grades ") and says in said


def test_a_run_without_notebooks_is_as_it_was(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import sys\n\ndef test_nothing_heavy_was_imported():\n"
        "    assert not {'torch', 'numpy', 'matplotlib', 'nbgrader', 'minivllm.course.exercise_cells'} & sys.modules.keys()\n"
    )
    result = run_pytest(tmp_path)
    assert result.returncode == 0, result.stdout
    assert "point" not in result.stdout and "1 passed" in result.stdout


@pytest.mark.parametrize("named_too", [False, True])
def test_the_plugin_is_loaded_once_where_minivllm_is_installed(named_too, tmp_path):
    entry_point = re.search(r"^\[project\.entry-points\.pytest11\]\n(.+)\n", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    installed = tmp_path / "installed-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\n" + entry_point.group(1).replace('"', "") + "\n")
    others = {point.name for point in entry_points(group="pytest11")} - {PLUGIN}
    command = [sys.executable, "-m", "pytest", "--help", *(f"-pno:{name}" for name in others), *["-p", PLUGIN] * named_too]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--grades=FILE.csv") == 1
