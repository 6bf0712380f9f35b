"""`minivllm course new` makes a lesson that works: notebook, exercise, nbval, tests of its checks, grade and export."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from minivllm.course.new_lesson import make_lesson
from minivllm.errors import CourseError

ROOT = Path(__file__).parents[2]
NAME = "99_counting_blocks"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the package and of what tests lessons, with no other lesson's notebooks."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("minivllm", "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("notebooks", "solutions"):
        (folder / name).mkdir()
    settings = '[tool.pytest.ini_options]\npythonpath = ["tests/support"]\nmarkers = ["slow", "long"]\n'
    (folder / "pyproject.toml").write_text(settings)
    (folder / "conftest.py").write_text('def pytest_addoption(parser):\n    parser.addoption("--long", action="store_true")\n')
    return folder


def run(project, *command):
    options = {"cwd": project, "env": os.environ | {"PYTHONPATH": str(project)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", *map(str, command)], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_a_new_lesson_works_from_the_notebook_to_the_grade(project):
    said = run(project, "minivllm.entrypoints.cli.main", "course", "new", NAME, "--project", project)
    assert f"notebooks/{NAME}.ipynb" in said and "docs/writing_a_lesson.md" in said
    run(project, "minivllm.course.exercises")
    notebooks = [f"notebooks/{NAME}.ipynb", f"solutions/{NAME}.ipynb"]
    run(project, "nbconvert", "--to", "notebook", "--execute", "--inplace", *notebooks)
    assert "passed" in run(project, "pytest", "-q", "-p", "no:cacheprovider", "--nbval", *notebooks)
    assert "passed" in run(project, "pytest", "-q", "-p", "no:cacheprovider", "tests/course/test_lesson_99.py")
    for learner, source in (("ann", "solutions"), ("bob", "exercises")):
        (project / "handed_in" / learner).mkdir(parents=True)
        shutil.copy(project / source / f"{NAME}.ipynb", project / "handed_in" / learner)
    options = ("--solutions", "solutions", "--output", "grades", "--sandbox", "never")
    run(project, "minivllm.entrypoints.cli.main", "grade", "handed_in", *options)
    with (project / "grades" / "grades.csv").open(encoding="utf-8") as file:
        assert {row["learner"]: float(row["score"]) for row in csv.DictReader(file)} == {"ann": 2, "bob": 0}
    run(project, "minivllm.entrypoints.cli.main", "course", "export", "my_class", "--solutions", "solutions")
    exported = nbformat.read(next((project / "my_class").rglob(f"{NAME}.ipynb")), 4)
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
