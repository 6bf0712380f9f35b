"""Exercises are made from solutions: the same cells without what is to be written, and nothing that a run left."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from course_notebooks import ADD, CHECK_ADD, by_id, cell, solved_notebook, write

from minivllm.course.exercise_cells import find_problems, graded_cells, is_answer, is_check, read_notebook
from minivllm.course.exercises import generate_exercises, main, make_exercise
from minivllm.errors import CourseError

ROOT = Path(__file__).parents[2]

ADD_TO_BE_WRITTEN = """\
def add(a, b):
    raise NotImplementedError("write this")


def twice(a):
    \"\"\"Two times a number.\"\"\"
    raise NotImplementedError("write this")
"""


def code_cells(notebook):
    return [item for item in notebook.cells if item.cell_type == "code"]


def was_run(notebook):
    """The notebook as it is after a run: counts, outputs, times."""
    for count, code in enumerate(code_cells(notebook), start=1):
        code.execution_count = count
        code.outputs = [nbformat.v4.new_output("stream", text="something\n")]
        code.metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    notebook.metadata["language_info"]["version"] = "3.11.7"
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    return notebook


def test_what_is_between_the_markers_is_to_be_written_and_all_else_stays():
    solution = was_run(solved_notebook())
    original = copy.deepcopy(solution)
    exercise = make_exercise(solution)
    assert by_id(exercise)["answer"].source == ADD_TO_BE_WRITTEN
    assert by_id(exercise).keys() == by_id(solution).keys()
    for before, after in zip(solution.cells, exercise.cells, strict=True):
        assert after.metadata.nbgrader == before.metadata.nbgrader
        assert after.source == before.source or is_answer(after)
    assert solution == original


def test_every_code_cell_is_tagged_and_keeps_its_other_tags():
    solution = solved_notebook()
    by_id(solution)["imports"].metadata["tags"] = ["nbval-ignore-output", "hide-input"]
    exercise = by_id(make_exercise(solution))
    assert exercise["imports"].metadata.tags == ["hide-input", "nbval-ignore-output"]
    assert exercise["answer"].metadata.tags == ["nbval-ignore-output"]
    assert "tags" not in exercise["title"].metadata


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ADD.replace("    ### END SOLUTION\n", "", 1).split("\n\n\n")[0], "line 2 lacks an ### END SOLUTION after it"),
        (ADD.replace("    ### BEGIN SOLUTION\n", "", 1), "line 3 lacks a ### BEGIN SOLUTION before it"),
        (ADD.replace("    ### END SOLUTION\n", "", 1), "line 8 comes before the ### END SOLUTION for line 2"),
        ("if True:\n    ### BEGIN SOLUTION\n    pass\n    ### END SOLUTION\n  else:\n    pass", "it is not valid Python"),
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "outside a function"),
        ("if True:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "outside a function"),
        ("class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION", "outside a function"),
        ("def add(a, b):\n    return a + b", "it is an answer, but lacks ### BEGIN SOLUTION"),
    ],
)
def test_wrong_markers_are_told_in_one_sentence_that_names_the_cell(answer, problem):
    with pytest.raises(CourseError) as caught:
        make_exercise(solved_notebook(answer=answer))
    assert str(caught.value).startswith("Cell 'answer': ") and str(caught.value).endswith(".")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


WRONG_NOTEBOOKS = {
    "the metadata has 3 points": lambda cells, _: cells["check-add"].metadata.nbgrader.update(points=3),
    "no points": lambda cells, _: cells["check-add"].metadata.nbgrader.pop("points"),
    "check() has 4 points": lambda cells, _: cells["check-add"].update(source=CHECK_ADD.replace("points=2", "points=4")),
    "points that are computed": lambda cells, _: cells["check-add"].update(source=CHECK_ADD.replace("points=2", "points=1 + 1")),
    "no check in a check cell": lambda cells, _: cells["check-add"].update(source="assert add(1, 2) == 3"),
    "two checks in a cell": lambda cells, _: cells["check-add"].update(source=CHECK_ADD + CHECK_ADD),
    "markers in a check": lambda cells, _: cells["check-add"].update(source=CHECK_ADD + "\n### BEGIN SOLUTION\n### END SOLUTION"),
    "markers in a given cell": lambda cells, _: cells["between"].update(source="### BEGIN SOLUTION\n### END SOLUTION"),
    "a check in a given cell": lambda cells, _: cells["between"].update(source=CHECK_ADD.replace("two", "three")),
    "another grade_id": lambda cells, _: cells["between"].metadata.nbgrader.update(grade_id="other"),
    "no metadata": lambda cells, _: cells["title"].metadata.pop("nbgrader"),
    "an old schema": lambda cells, _: cells["title"].metadata.nbgrader.update(schema_version=2),
    "an answer that is locked": lambda cells, _: cells["answer"].metadata.nbgrader.update(locked=True),
    "graded by hand": lambda cells, _: cells["answer"].metadata.nbgrader.update(grade=True),
    "points for an answer": lambda cells, _: cells["answer"].metadata.nbgrader.update(points=1),
    "the same id twice": lambda cells, notebook: notebook.cells.append(cells["between"]),
    "the same name twice": lambda cells, notebook: notebook.cells.append(cell("again", CHECK_ADD, "check", 2)),
    "text with points": lambda cells, _: cells["title"].metadata.nbgrader.update(grade=True, points=1),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_NOTEBOOKS)
def test_cells_that_do_not_fit_together_are_found(name):
    notebook = solved_notebook()
    assert find_problems(notebook) == []
    WRONG_NOTEBOOKS[name](by_id(notebook), notebook)
    (problem,) = find_problems(notebook)
    assert problem.endswith(".")
    with pytest.raises(CourseError):
        make_exercise(notebook)


def test_the_points_of_a_notebook_are_those_of_its_checks():
    checks = [(item.cell_id, item.name, item.points) for item in graded_cells(solved_notebook())]
    assert checks == [("check-add", "two numbers are added", 2), ("check-twice", "a number is doubled, twice", 3)]


@pytest.fixture
def make(tmp_path):
    """Runs the command on a folder of solutions, and gives its status and what is in the exercise, if there is one."""
    path = tmp_path / "exercises" / "99_adding.ipynb"

    def make(*options):
        status = main(["--solutions", str(tmp_path), "--exercises", str(path.parent), *options])
        return status, path.read_text() if path.exists() else None

    return make


def test_only_what_changed_is_written_and_a_run_of_the_solution_changes_nothing(tmp_path, make, capsys):
    write(tmp_path)
    _, first = make()
    assert first.endswith("}\n")
    nbformat.validate(nbformat.reads(first, as_version=4))
    for notebook, same in ((was_run(solved_notebook()), True), (solved_notebook(between="print('new')"), False)):
        (tmp_path / "99_adding.ipynb").write_text(json.dumps(notebook))
        capsys.readouterr()
        status, text = make()
        assert (status, text == first) == (0, same)
        assert capsys.readouterr().out.endswith(f"{0 if same else 1} of 1 exercises are new or changed.\n")


def test_work_in_an_exercise_is_not_written_over(tmp_path, make, capsys):
    write(tmp_path)
    make()
    path = tmp_path / "exercises" / "99_adding.ipynb"
    nbformat.write(was_run(read_notebook(path)), path)
    mine = path.read_text()
    assert make() == (2, mine)
    assert "was run, so it may contain work" in capsys.readouterr().err
    status, text = make("--force")
    assert status == 0 and text != mine


def test_without_solutions_there_are_no_exercises(tmp_path, make, capsys):
    assert make() == (0, None)
    assert main(["--solutions", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("exercises: There is no folder ")


@pytest.mark.parametrize("content", ["{", "[]", '{"cells": 3}', ""])
def test_a_file_that_is_no_notebook_is_named(content, tmp_path, make, capsys):
    (tmp_path / "99_adding.ipynb").write_text(content)
    assert make() == (2, None)
    message = capsys.readouterr().err
    assert "99_adding.ipynb is not a notebook" in message and message.count("\n") == 1


WITHOUT_NBGRADER = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "nbgrader":
            raise ModuleNotFoundError("No module named 'nbgrader'", name="nbgrader")

sys.meta_path.insert(0, Missing())
from minivllm.course.exercises import main
sys.exit(main())
"""


@pytest.mark.slow
def test_without_nbgrader_it_is_told_what_to_install(tmp_path):
    write(tmp_path / "solutions")
    result = subprocess.run([sys.executable, "-c", WITHOUT_NBGRADER], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "exercises: 99_adding.ipynb: Making exercises needs nbgrader: `pip install nbgrader`.\n"


# The real ones.

SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


def test_the_stored_exercises_are_those_of_the_solutions_which_have_answers_and_checks():
    stored = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "exercises").glob("*.ipynb")}
    made = generate_exercises(ROOT / "solutions")
    assert stored.keys() == made.keys()
    assert [name for name in made if stored[name] != made[name]] == [], "run `make exercises`"
    for path in SOLUTIONS:
        cells = read_notebook(path).cells
        assert any(map(is_answer, cells)) and any(map(is_check, cells)), path.name


WHEN = {"02": (), "08": pytest.mark.long, "14": pytest.mark.long}
"""Lessons whose exercise is run by day. The tests of each lesson judge cells that are left as they are, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(path.name, marks=WHEN.get(path.name[:2], pytest.mark.nightly)) for path in SOLUTIONS]
)
def test_an_untouched_exercise_fails_at_all_its_checks_and_nowhere_else(name):
    exercise = nbformat.reads(generate_exercises(ROOT / "solutions")[name], as_version=4)
    nbclient.NotebookClient(
        exercise, allow_errors=True, timeout=120, resources={"metadata": {"path": ROOT / "solutions"}}
    ).execute()
    failed = {cell.id: output.ename for cell in code_cells(exercise) for output in cell.outputs if output.output_type == "error"}
    assert failed == {cell.id: "CheckFailed" for cell in exercise.cells if is_check(cell)}
