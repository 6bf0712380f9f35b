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
from course_notebooks import ADD, HALF, cell, solved_notebook, with_sources, write

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
    return write(tmp_path_factory.mktemp("solutions")).parent


def nbgrader(course, *arguments):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it calls the command alembic
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    environment["JUPYTER_CONFIG_DIR"] = str(course / ".jupyter")  # Jupyter's own files stay out of the home folder
    result = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments], cwd=course, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def graded(solutions, tmp_path_factory):
    """A course folder in which four learners were graded."""
    course = tmp_path_factory.mktemp("class") / "course"
    assert main(["course", "export", str(course), "--solutions", str(solutions)]) == 0
    nbgrader(course, "generate_assignment", NAME, "--create")
    handed_in = {
        "untouched": {},
        "half": {"answer": HALF},
        "solved": {"answer": ADD},
        "emptied": {"answer": HALF, "check_twice": "pass"},
    }
    for learner, sources in handed_in.items():
        write(
            course / "submitted" / learner / NAME,
            with_sources(read_notebook(course / "release" / NAME / f"{NAME}.ipynb"), **sources),
        )
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
    points = {"untouched": 0, "half": 2, "solved": 5, "emptied": 2}  # nbgrader puts the check back
    assert {learner: float(row["score"]) for learner, row in rows.items()} == points
    assert {(row["assignment"], float(row["max_score"])) for row in rows.values()} == {(NAME, 5)}


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
    shutil.copytree(solutions, tmp_path / "broken")
    notebook = solved_notebook()
    notebook.cells.append(cell("more", "assert True", "check", 2))
    write(tmp_path / "broken", notebook, "98_more")
    with pytest.raises(CourseError, match=r"98_more.ipynb: Cell 'more': a check cell must call check"):
        export_course(tmp_path / "broken", tmp_path / "course")
    assert not (tmp_path / "course").exists()


def test_the_badges_open_the_exercises(tmp_path):
    notebook = solved_notebook()
    renew_first_cells(notebook, f"solutions/{NAME}.ipynb", "https://github.com/someone/course")
    (source,) = export_course(write(tmp_path / "solutions", notebook).parent, tmp_path / "course")
    text = "\n".join(cell.source for cell in nbformat.read(source, as_version=4).cells)
    assert f"/blob/main/exercises/{NAME}.ipynb" in text and "/solutions/" not in text
