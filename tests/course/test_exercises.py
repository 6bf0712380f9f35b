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
from course_notebooks import ADD, CHECK_ADD, cell, solved_notebook

from minivllm.course.exercise_cells import find_problems, graded_cells, is_answer, is_check, read_notebook
from minivllm.course.exercises import generate_exercises, main, make_exercise, write_exercises
from minivllm.errors import CourseError

ROOT = Path(__file__).parents[2]

ADD_TO_BE_WRITTEN = """\
def add(a, b):
    raise NotImplementedError("write this")


def twice(a):
    \"\"\"Two times a number.\"\"\"
    raise NotImplementedError("write this")
"""


def by_id(notebook):
    return {cell.id: cell for cell in notebook.cells}


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
    solution = solved_notebook()
    exercise = make_exercise(solution)
    assert by_id(exercise)["answer"].source == ADD_TO_BE_WRITTEN
    assert [cell.id for cell in exercise.cells] == [cell.id for cell in solution.cells]
    for before, after in zip(solution.cells, exercise.cells, strict=True):
        assert after.metadata.nbgrader == before.metadata.nbgrader
        assert after.source == before.source or is_answer(after)


def test_an_exercise_has_no_trace_of_a_run():
    exercise = make_exercise(was_run(solved_notebook()))
    assert exercise == make_exercise(solved_notebook())
    for code in code_cells(exercise):
        assert (code.outputs, code.execution_count) == ([], None)


def test_a_solution_is_left_as_it_is():
    solution = was_run(solved_notebook())
    before = copy.deepcopy(solution)
    make_exercise(solution)
    assert solution == before


def test_every_code_cell_is_tagged_and_keeps_its_other_tags():
    solution = solved_notebook()
    by_id(solution)["imports"].metadata["tags"] = ["nbval-ignore-output", "hide-input"]
    exercise = by_id(make_exercise(solution))
    assert exercise["imports"].metadata.tags == ["hide-input", "nbval-ignore-output"]
    assert exercise["answer"].metadata.tags == ["nbval-ignore-output"]
    assert "tags" not in exercise["title"].metadata


def test_the_same_solution_gives_the_same_bytes(tmp_path):
    for run, text in enumerate((nbformat.writes(solved_notebook()), json.dumps(was_run(solved_notebook())))):
        folder = tmp_path / str(run)
        folder.mkdir()
        (folder / "99_adding.ipynb").write_text(text)
        assert main(["--solutions", str(folder), "--exercises", str(folder / "out")]) == 0
    first, second = ((tmp_path / run / "out" / "99_adding.ipynb").read_bytes() for run in "01")
    assert first == second
    assert first.endswith(b"}\n")
    nbformat.validate(nbformat.reads(first.decode(), as_version=4))


WRONG_MARKERS = {
    "no end": ADD.replace("    ### END SOLUTION\n", "", 1).split("\n\n\n")[0],
    "no begin": ADD.replace("    ### BEGIN SOLUTION\n", "", 1),
    "begun twice": ADD.replace("    ### END SOLUTION\n", "", 1),
    "not Python": "if True:\n    ### BEGIN SOLUTION\n    pass\n    ### END SOLUTION\n  else:\n    pass",
    "outside a function": "### BEGIN SOLUTION\nx = 1\n### END SOLUTION",
    "in an if": "if True:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION",
    "in a class body": "class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION",
    "no marker": "def add(a, b):\n    return a + b",
}
SAYS = {
    "no end": "line 2 lacks an ### END SOLUTION after it",
    "no begin": "line 3 lacks a ### BEGIN SOLUTION before it",
    "begun twice": "line 8 comes before the ### END SOLUTION for line 2",
    "not Python": "it is not valid Python",
    "no marker": "it is an answer, but lacks ### BEGIN SOLUTION",
}


@pytest.mark.parametrize("name", WRONG_MARKERS)
def test_wrong_markers_are_told_in_one_sentence_that_names_the_cell(name):
    with pytest.raises(CourseError) as caught:
        make_exercise(solved_notebook(answer=WRONG_MARKERS[name]))
    assert str(caught.value).startswith("Cell 'answer': ")
    assert SAYS.get(name, "outside a function") in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def remade(change):
    notebook = solved_notebook()
    change(by_id(notebook), notebook)
    return notebook


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
    assert find_problems(solved_notebook()) == []
    (problem,) = find_problems(remade(WRONG_NOTEBOOKS[name]))
    assert problem.endswith(".")
    with pytest.raises(CourseError):
        make_exercise(remade(WRONG_NOTEBOOKS[name]))


def test_the_points_of_a_notebook_are_those_of_its_checks():
    checks = graded_cells(solved_notebook())
    assert [(item.cell_id, item.name, item.points) for item in checks] == [
        ("check-add", "two numbers are added", 2),
        ("check-twice", "a number is doubled, twice", 3),
    ]


@pytest.fixture
def solutions(tmp_path):
    folder = tmp_path / "solutions"
    folder.mkdir()
    nbformat.write(solved_notebook(), folder / "99_adding.ipynb")
    return folder


def test_only_what_changed_is_written(solutions, tmp_path):
    folder = tmp_path / "exercises"
    assert write_exercises(solutions, folder) == [folder / "99_adding.ipynb"]
    assert write_exercises(solutions, folder) == []
    nbformat.write(solved_notebook(between="print('new')"), solutions / "99_adding.ipynb")
    assert write_exercises(solutions, folder) == [folder / "99_adding.ipynb"]


def test_work_in_an_exercise_is_not_written_over(solutions, tmp_path, capsys):
    folder = tmp_path / "exercises"
    write_exercises(solutions, folder)
    path = folder / "99_adding.ipynb"
    nbformat.write(was_run(read_notebook(path)), path)
    mine = path.read_text()
    arguments = ["--solutions", str(solutions), "--exercises", str(folder)]
    assert main(arguments) == 2
    assert "was run, so it may contain work" in capsys.readouterr().err
    assert path.read_text() == mine
    assert main([*arguments, "--force"]) == 0
    assert path.read_text() != mine


def test_without_solutions_there_are_no_exercises(tmp_path, capsys):
    assert generate_exercises(tmp_path) == {}
    assert main(["--solutions", str(tmp_path), "--exercises", str(tmp_path / "out")]) == 0
    assert main(["--solutions", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("exercises: There is no folder ")


@pytest.mark.parametrize("content", ["{", "[]", '{"cells": 3}', ""])
def test_a_file_that_is_no_notebook_is_named(content, tmp_path, capsys):
    (tmp_path / "99_adding.ipynb").write_text(content)
    assert main(["--solutions", str(tmp_path), "--exercises", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "99_adding.ipynb is not a notebook" in message
    assert message.count("\n") == 1


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
def test_without_nbgrader_it_is_told_what_to_install(solutions):
    result = subprocess.run([sys.executable, "-c", WITHOUT_NBGRADER], cwd=solutions.parent, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "exercises: 99_adding.ipynb: Making exercises needs nbgrader: `pip install nbgrader`.\n"


# The real ones.


def test_the_stored_exercises_are_those_of_the_solutions():
    stored = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "exercises").glob("*.ipynb")}
    made = generate_exercises(ROOT / "solutions")
    assert stored.keys() == made.keys()
    different = [name for name in made if stored[name] != made[name]]
    assert different == [], "run `make exercises`"


def test_every_solution_is_marked_as_an_exercise_needs_it():
    for path in (ROOT / "solutions").glob("*.ipynb"):
        notebook = read_notebook(path)
        assert find_problems(notebook) == [], path.name
        assert any(map(is_answer, notebook.cells)), path.name
        assert any(map(is_check, notebook.cells)), path.name


SOLUTIONS = sorted(path.name for path in (ROOT / "solutions").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name[:2] == "02" else pytest.mark.long) for name in SOLUTIONS])
def test_an_untouched_exercise_fails_at_all_its_checks_and_nowhere_else(name):
    exercise = nbformat.reads(generate_exercises(ROOT / "solutions")[name], as_version=4)
    client = nbclient.NotebookClient(
        exercise, allow_errors=True, timeout=120, resources={"metadata": {"path": ROOT / "solutions"}}
    )
    client.execute()
    failed = {cell.id: output.ename for cell in code_cells(exercise) for output in cell.outputs if output.output_type == "error"}
    assert failed == {cell.id: "CheckFailed" for cell in exercise.cells if is_check(cell)}
