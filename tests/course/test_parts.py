"""`my_parts`: the learner's classes from solved exercises, the package's where there is none, and always a reason."""

from __future__ import annotations

import os

import nbformat
import pytest
from lesson_cells import ROOT
from nbformat.v4 import new_code_cell, new_notebook, new_output

from minivllm.core.scheduler import Scheduler
from minivllm.course.parts import SOURCES, load_part, my_parts, package_parts, take_class
from minivllm.errors import CourseError

SCHEDULER = SOURCES["scheduler_cls"]


def exercise(*sources, passed=True, name="the same text from the real model"):
    """A notebook of lesson 07 with these cells, and its last check."""
    check = new_code_cell(f'with check("{name}", points=1):\n    raise RuntimeError("a check must not run here")')
    check.metadata["nbgrader"] = {
        "grade": True,
        "solution": False,
        "grade_id": SCHEDULER.check_id,
        "points": 1,
        "schema_version": 3,
    }
    if passed:
        check.outputs = [new_output("stream", name="stdout", text=f"✓ {name} (1 point)\n")]
    return new_notebook(cells=[*(new_code_cell(source) for source in sources), check])


def write(folder, notebook, name="07_the_scheduler.ipynb"):
    nbformat.write(notebook, folder / name)
    return folder


def test_a_class_is_taken_with_what_it_needs_and_nothing_else_is_run(tmp_path):
    folder = write(
        tmp_path,
        exercise(
            "%matplotlib inline\nimport math\nfrom minivllm.core.scheduler import Scheduler as Base\nraise SystemExit('must not run')",
            "def helper(x):\n    return other(x) + LIMIT",
            "other = lambda x: math.floor(x)\nLIMIT = 3\nLIMIT += 1",
            "print('must not run')\nunused = 1 / 0",
            "class Floor(Base):\n    number = helper(2.5)",
            "class MyScheduler(Floor):\n    pass\n\nMyScheduler.mark = 'mine'",
            "this is ( not Python",
        ),
    )
    parts = my_parts(folder)
    assert parts.mine == ("scheduler_cls",)
    assert parts.scheduler_cls.__name__ == "MyScheduler" and issubclass(parts.scheduler_cls, Scheduler)
    assert parts.scheduler_cls.number == 6 and parts.scheduler_cls.mark == "mine"
    assert parts.components == ("Scheduler",)
    assert "yours, MyScheduler of lesson 07" in str(parts) and "there is no exercise 01 in this folder" in str(parts)


@pytest.mark.parametrize(
    ("sources", "value"),
    [
        (("import math\nmath.no_such_function()", "class MyScheduler:\n    def value(self):\n        return math.floor(4.5)"), 4),
        (
            ("output = 1 / 0", "class MyScheduler:\n    def value(self):\n        output = 5\n        return output"),
            5,
        ),  # a local name
        (
            (
                "import os\nos.environ['SEEN'] = 'yes'",
                "class MyScheduler:\n    def value(self):\n        return ENVIRON['SEEN']",
                "from os import environ as ENVIRON",
            ),
            "yes",
        ),
        (("from math import *", "class MyScheduler:\n    def value(self):\n        return floor(2.5)"), 2),
        (("for LIMIT in range(4):\n    pass", "class MyScheduler:\n    def value(self):\n        return LIMIT"), 3),
        (("TABLE = {}\nTABLE.update(a=1)", "class MyScheduler:\n    def value(self):\n        return TABLE['a']"), 1),
        (("class MyScheduler:\n    pass", "setattr(MyScheduler, 'value', lambda self: 7)"), 7),
        (
            (
                "files = !ls\nclass MyScheduler:\n    def value(self):\n        return 8",
                "%%writefile x.py\nclass MyScheduler:\n    pass",
            ),
            8,
        ),
        (("x = await something()\nclass MyScheduler:\n    def value(self):\n        return 9",), 9),
        (
            (
                "while (N := globals().get('N', 0) + 1) < 5:\n    pass",
                "class MyScheduler:\n    def value(self):\n        return N",
            ),
            5,
        ),
    ],
)
def test_whatever_a_class_is_made_of_is_found(tmp_path, monkeypatch, sources, value):
    monkeypatch.setenv("SEEN", "no")
    assert load_part(write(tmp_path, exercise(*sources)), SCHEDULER)().value() == value


def test_a_copy_of_the_notebook_does_not_count(tmp_path):
    write(tmp_path, exercise("class MyScheduler:\n    number = 1"))
    write(tmp_path, exercise("class MyScheduler:\n    number = 2"), "07_the_scheduler-Copy1.ipynb")
    assert load_part(tmp_path, SCHEDULER).number == 1


def test_a_cell_that_ends_python_does_not(tmp_path):
    assert (
        load_part(write(tmp_path, exercise("import sys\nx = sys.exit(1)\nclass MyScheduler:\n    y = x")), SCHEDULER)
        == "exercise 07 raised SystemExit: 1"
    )


def test_the_last_definition_counts(tmp_path):
    notebook = exercise("class MyScheduler:\n    number = 1", "class MyScheduler(MyScheduler):\n    other = 2")
    assert load_part(write(tmp_path, notebook), SCHEDULER).other == 2


def test_what_has_not_passed_is_the_packages(tmp_path):
    folder = write(tmp_path, exercise("class MyScheduler:\n    pass", passed=False))
    parts = my_parts(folder)
    assert parts.scheduler_cls is Scheduler and parts.mine == ()
    assert parts.reasons["scheduler_cls"] == (
        "in exercise 07, “the same text from the real model” had not passed when it was last saved"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Another:\n    pass", "there is no class MyScheduler in 07_the_scheduler.ipynb"),
        ("class MyScheduler(Missing):\n    pass", "exercise 07 raised NameError: name 'Missing' is not defined"),
        ("MyScheduler = 3", "there is no class MyScheduler in 07_the_scheduler.ipynb"),
    ],
)
def test_a_class_that_cannot_be_made_is_the_packages_with_a_reason(tmp_path, source, reason):
    assert load_part(write(tmp_path, exercise(source)), SCHEDULER) == reason


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cells": 3}'])
def test_a_file_that_is_no_notebook_is_told(tmp_path, content):
    (tmp_path / "07_the_scheduler.ipynb").write_text(content)
    assert "07_the_scheduler.ipynb" in load_part(tmp_path, SCHEDULER) or "exercise 07" in load_part(tmp_path, SCHEDULER)


def test_without_exercises_all_parts_are_the_packages(tmp_path):
    assert my_parts(tmp_path) == package_parts()
    assert my_parts(tmp_path / "nowhere") == package_parts()


def test_parts_can_be_exchanged(tmp_path):
    parts = my_parts(write(tmp_path, exercise("class MyScheduler:\n    pass")))
    assert parts.with_packages(["scheduler_cls"]) == package_parts()
    assert parts.with_packages([]) == parts


def test_an_error_in_a_part_shows_its_cell(tmp_path):
    notebook = exercise("x = 1", "class MyScheduler:\n    def schedule(self):\n        return 1 / 0")
    notebook.cells[1].id = "mine"
    with pytest.raises(ZeroDivisionError) as failure:
        load_part(write(tmp_path, notebook), SCHEDULER)().schedule()
    place = failure.traceback[-1]
    assert str(place.path).endswith("07_the_scheduler.ipynb, cell mine") and place.lineno == 2
    assert "return 1 / 0" in str(place.statement)


def test_a_notebook_without_the_class():
    with pytest.raises(CourseError, match="there is no class MyScheduler in x.ipynb"):
        take_class("x.ipynb", [], "MyScheduler")


@pytest.mark.slow
def test_the_solutions_have_all_parts():
    before = dict(os.environ)
    parts = my_parts(ROOT / "solutions")
    assert parts.mine == tuple(SOURCES) and parts.reasons == {}
    assert all(getattr(parts, name).__name__ == source.name for name, source in SOURCES.items())
    assert {name for name in os.environ if os.environ[name] != before.get(name)} <= {"TRITON_INTERPRET"}


def test_untouched_exercises_have_none():
    assert my_parts(ROOT / "exercises") == package_parts()
