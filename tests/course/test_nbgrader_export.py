"""The exported course goes through nbgrader: assignment, submissions, grades, table."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from course_notebooks import cell, solved_notebook

import minivllm
from minivllm.course.exercise_cells import read_notebook
from minivllm.course.exercises import generate_exercises
from minivllm.course.first_cells import renew_first_cells
from minivllm.course.nbgrader_export import export_course
from minivllm.entrypoints.cli.main import main
from minivllm.errors import CourseError

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(minivllm.__file__).parents[1]
NAME = "99_adding"


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("solutions")
    nbformat.write(solved_notebook(), folder / f"{NAME}.ipynb")
    return folder


def nbgrader(course, *arguments):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # it calls the command alembic
        "JUPYTER_CONFIG_DIR": str(course / ".jupyter"),  # Jupyter's own files stay out of the home folder
    }
    result = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments], cwd=course, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result


def with_answer(notebook, source):
    next(cell for cell in notebook.cells if cell.id == "answer").source = source
    return notebook


def submit(course, learner, notebook):
    folder = course / "submitted" / learner / NAME
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{NAME}.ipynb")


HALF = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + 1\n"


@pytest.fixture(scope="module")
def graded(solutions, tmp_path_factory):
    """A course folder in which three learners were graded."""
    course = tmp_path_factory.mktemp("class") / "course"
    assert main(["course", "export", str(course), "--solutions", str(solutions)]) == 0
    nbgrader(course, "generate_assignment", NAME, "--create")
    release = course / "release" / NAME / f"{NAME}.ipynb"
    answer = solved_notebook().cells[2].source
    submit(course, "untouched", read_notebook(release))
    submit(course, "half", with_answer(read_notebook(release), HALF))
    submit(course, "solved", with_answer(read_notebook(release), answer))
    emptied = with_answer(read_notebook(release), HALF)
    next(cell for cell in emptied.cells if cell.id == "check-twice").source = "pass"
    submit(course, "emptied", emptied)
    nbgrader(course, "autograde", NAME, "--create")
    nbgrader(course, "export")
    return course


def test_nbgrader_makes_the_same_exercise(graded, solutions, tmp_path):
    (text,) = generate_exercises(solutions).values()
    exercise = nbformat.reads(text, as_version=4)
    release = read_notebook(graded / "release" / NAME / f"{NAME}.ipynb")
    assert [(cell.id, cell.source) for cell in release.cells] == [(cell.id, cell.source) for cell in exercise.cells]


def test_nbgrader_gives_each_learner_the_points_of_the_checks(graded):
    with (graded / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    assert {learner: (float(row["score"]), float(row["max_score"])) for learner, row in rows.items()} == {
        "untouched": (0, 5),
        "half": (2, 5),
        "solved": (5, 5),
        "emptied": (2, 5),  # nbgrader puts the check back
    }
    assert {row["assignment"] for row in rows.values()} == {NAME}


def test_the_export_says_what_it_wrote_and_what_comes_next(solutions, tmp_path, capsys):
    assert main(["course", "export", str(tmp_path / "course"), "--solutions", str(solutions)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(str(tmp_path / "course" / "source" / NAME / f"{NAME}.ipynb"))
    assert f"nbgrader generate_assignment {NAME} --create" in printed


def test_a_folder_in_use_is_left_alone(solutions, tmp_path, capsys):
    (tmp_path / "thesis.txt").touch()
    assert main(["course", "export", str(tmp_path), "--solutions", str(solutions)]) == 2
    assert capsys.readouterr().err == f"minivllm: {tmp_path} is not empty: a course must be written to a new or empty folder.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_without_solutions_there_is_nothing_to_export(tmp_path, capsys):
    assert main(["course", "export", str(tmp_path / "course"), "--solutions", str(tmp_path / "nowhere")]) == 2
    assert "There are no notebooks in " in capsys.readouterr().err
    assert not (tmp_path / "course").exists()


def test_a_solution_that_is_marked_wrong_is_named(solutions, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(solutions, broken)
    notebook = solved_notebook()
    notebook.cells.append(cell("more", "assert True", "check", 2))
    nbformat.write(notebook, broken / "98_more.ipynb")
    with pytest.raises(CourseError, match=r"98_more.ipynb: Cell 'more': a check cell must call check"):
        export_course(broken, tmp_path / "course")
    assert not (tmp_path / "course").exists()


def test_the_badges_open_the_exercises(tmp_path):
    notebook = solved_notebook()
    renew_first_cells(notebook, f"solutions/{NAME}.ipynb", "https://github.com/someone/course")
    (tmp_path / "solutions").mkdir()
    nbformat.write(notebook, tmp_path / "solutions" / f"{NAME}.ipynb")
    (source,) = export_course(tmp_path / "solutions", tmp_path / "course")
    text = "\n".join(cell.source for cell in nbformat.read(source, as_version=4).cells)
    assert f"/blob/main/exercises/{NAME}.ipynb" in text
    assert "/solutions/" not in text
