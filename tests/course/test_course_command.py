"""`minivllm course`: `new` makes a lesson that works from notebook to grade, `export` a course that goes through nbgrader, `html` the lessons as pages."""

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
from minivllm.course.new_lesson import make_lesson
from minivllm.entrypoints.cli.main import main
from minivllm.errors import CourseError

ROOT = Path(minivllm.__file__).parents[1]
NAME = "99_adding"
NEW = "99_counting_blocks"


def run(folder, *command, root=ROOT):
    """What a Python module prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls the command alembic
    environment = os.environ | {"PYTHONPATH": str(root), "PATH": path}
    environment["JUPYTER_CONFIG_DIR"] = str(folder / ".jupyter")  # Jupyter's own files stay out of the home folder
    command = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# new


@pytest.fixture
def project(tmp_path):
    """A copy of the package and of what tests lessons, with no other lesson's notebooks."""
    for name in ("minivllm", "tests/support"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("notebooks", "solutions"):
        (tmp_path / name).mkdir()
    settings = '[tool.pytest.ini_options]\npythonpath = ["tests/support"]\nmarkers = ["slow", "long"]\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "conftest.py").write_text('def pytest_addoption(parser):\n    parser.addoption("--long", action="store_true")\n')
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
def test_a_new_lesson_works_from_the_notebook_to_the_grade(project):
    def here(*command):
        return run(project, *command, root=project)

    command, test = "minivllm.entrypoints.cli.main", ("pytest", "-q", "-p", "no:cacheprovider")
    said = here(command, "course", "new", NEW, "--project", project)
    assert f"notebooks/{NEW}.ipynb" in said and "docs/writing_a_lesson.md" in said
    here("minivllm.course.exercises")
    notebooks = [f"notebooks/{NEW}.ipynb", f"solutions/{NEW}.ipynb"]
    here("nbconvert", "--to", "notebook", "--execute", "--inplace", *notebooks)
    assert "passed" in here(*test, "--nbval", *notebooks)
    assert "passed" in here(*test, "tests/course/test_lesson_99.py")
    for learner, source in (("ann", "solutions"), ("bob", "exercises")):
        (project / "handed_in" / learner).mkdir(parents=True)
        shutil.copy(project / source / f"{NEW}.ipynb", project / "handed_in" / learner)
    here(command, "grade", "handed_in", "--solutions", "solutions", "--output", "grades", "--sandbox", "never")
    with (project / "grades" / "grades.csv").open(encoding="utf-8") as file:
        assert {row["learner"]: float(row["score"]) for row in csv.DictReader(file)} == {"ann": 2, "bob": 0}
    here(command, "course", "export", "my_class", "--solutions", "solutions")
    exported = nbformat.read(next((project / "my_class").rglob(f"{NEW}.ipynb")), 4)
    assert [cell.metadata.nbgrader.points for cell in exported.cells if cell.metadata.nbgrader.grade] == [2]


def test_a_name_that_is_taken_or_has_another_form_is_refused(tmp_path):
    with pytest.raises(CourseError, match="two digits and words"):
        make_lesson("async engine", tmp_path)
    with pytest.raises(CourseError, match="make lessons in a copy of the repository"):
        make_lesson("11_async_engine", tmp_path)
    for folder in ("notebooks", "solutions"):
        (tmp_path / folder).mkdir()
    make_lesson("11_async_engine", tmp_path)
    with pytest.raises(CourseError, match="There is a lesson 11 already"):
        make_lesson("11_other", tmp_path)


# export


@pytest.fixture
def solutions(tmp_path):
    return write(tmp_path / "solutions").parent


@pytest.mark.long
@pytest.mark.slow
def test_nbgrader_makes_the_same_exercise_and_gives_each_learner_the_points_of_the_checks(solutions, tmp_path):
    course = tmp_path / "course"
    assert main(["course", "export", str(course), "--solutions", str(solutions)]) == 0
    run(course, "nbgrader", "generate_assignment", NAME, "--create")
    release = course / "release" / NAME / f"{NAME}.ipynb"
    (text,) = generate_exercises(solutions).values()
    exercise = nbformat.reads(text, as_version=4)
    assert [(cell.id, cell.source) for cell in read_notebook(release).cells] == [
        (cell.id, cell.source) for cell in exercise.cells
    ]
    for learner, sources in {
        "untouched": {},
        "half": {"answer": HALF},
        "solved": {"answer": ADD},
        "emptied": {"answer": HALF, "check_twice": "pass"},
    }.items():
        write(course / "submitted" / learner / NAME, with_sources(read_notebook(release), **sources))
    run(course, "nbgrader", "autograde", NAME, "--create")
    run(course, "nbgrader", "export")
    with (course / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    points = {"untouched": 0, "half": 2, "solved": 5, "emptied": 2}  # nbgrader puts the check back
    assert {learner: float(row["score"]) for learner, row in rows.items()} == points
    assert {(row["assignment"], float(row["max_score"])) for row in rows.values()} == {(NAME, 5)}


def test_the_export_says_what_it_wrote_and_what_comes_next(solutions, tmp_path, capsys):
    assert main(["course", "export", str(tmp_path / "course"), "--solutions", str(solutions)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(str(tmp_path / "course" / "source" / NAME / f"{NAME}.ipynb"))
    assert f"nbgrader generate_assignment {NAME} --create" in printed


def test_a_folder_in_use_is_left_alone(solutions, capsys):
    assert main(["course", "export", str(solutions), "--solutions", str(solutions)]) == 2
    assert capsys.readouterr().err == f"minivllm: {solutions} is not empty: a course must be written to a new or empty folder.\n"
    assert [path.name for path in solutions.iterdir()] == [f"{NAME}.ipynb"]


def test_without_notebooks_nothing_is_written(tmp_path, capsys):
    assert main(["course", "export", str(tmp_path / "made"), "--solutions", str(tmp_path)]) == 2
    assert "There are no notebooks in " in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_solution_that_is_marked_wrong_is_named(solutions, tmp_path):
    notebook = solved_notebook()
    notebook.cells.append(cell("more", "assert True", "check", 2))
    write(solutions, notebook, "98_more")
    with pytest.raises(CourseError, match=r"98_more.ipynb: Cell 'more': a check cell must call check"):
        export_course(solutions, tmp_path / "course")
    assert not (tmp_path / "course").exists()


def test_the_badges_open_the_exercises(tmp_path):
    notebook = solved_notebook()
    renew_first_cells(notebook, f"solutions/{NAME}.ipynb", "https://github.com/someone/course")
    (source,) = export_course(write(tmp_path / "solutions", notebook).parent, tmp_path / "course")
    text = "\n".join(cell.source for cell in nbformat.read(source, as_version=4).cells)
    assert f"/blob/main/exercises/{NAME}.ipynb" in text and "/solutions/" not in text
