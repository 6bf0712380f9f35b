"""`my_parts`: the learner's classes from solved exercises, the package's where there is none, and always a reason."""

from __future__ import annotations

import os

import nbformat
import pytest
from course_notebooks import cell, of_code, write
from lesson_cells import ROOT
from nbformat.v4 import new_output

from minivllm.core.scheduler import Scheduler
from minivllm.course.parts import SOURCES, load_part, my_parts, package_parts, take_class
from minivllm.errors import CourseError

SCHEDULER = SOURCES["scheduler_cls"]
NAME = "07_the_scheduler"
CHECK = "the same text from the real model"
MINE = "class MyScheduler:\n    "


@pytest.fixture
def hand_in(tmp_path):
    """Writes a notebook of lesson 07 with these cells, and its last check, which has passed or not."""

    def hand_in(*sources, passed=True, name=NAME):
        notebook = of_code(*sources)
        check = f'with check("{CHECK}", points=1):\n    raise RuntimeError("a check must not run here")'
        notebook.cells.append(cell(SCHEDULER.check_id, check, "check", 1))
        notebook.cells[-1].outputs = [new_output("stream", name="stdout", text=f"✓ {CHECK} (1 point)\n")] * passed
        write(tmp_path, notebook, name)
        return tmp_path

    return hand_in


@pytest.fixture
def load(hand_in):
    """The scheduler's class from a notebook with these cells, or why there is none."""
    return lambda *sources: load_part(hand_in(*sources), SCHEDULER)


def test_a_class_is_taken_with_what_it_needs_and_nothing_else_is_run(hand_in):
    folder = hand_in(
        "%matplotlib inline\nimport math\nfrom minivllm.core.scheduler import Scheduler as Base\nraise SystemExit('must not run')",
        "def helper(x):\n    return other(x) + LIMIT",
        "other = lambda x: math.floor(x)\nLIMIT = 3\nLIMIT += 1",
        "print('must not run')\nunused = 1 / 0",
        "class Floor(Base):\n    number = helper(2.5)",
        "class MyScheduler(Floor):\n    pass\n\nMyScheduler.mark = 'mine'",
        "this is ( not Python",
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
        (("import math\nmath.no_such_function()", "class: return math.floor(4.5)"), 4),
        (("output = 1 / 0", "class: output = 5; return output"), 5),  # a local name
        (("import os\nos.environ['SEEN'] = 'yes'", "class: return ENVIRON['SEEN']", "from os import environ as ENVIRON"), "yes"),
        (("from math import *", "class: return floor(2.5)"), 2),
        (("for LIMIT in range(4):\n    pass", "class: return LIMIT"), 3),
        (("TABLE = {}\nTABLE.update(a=1)", "class: return TABLE['a']"), 1),
        (("class MyScheduler:\n    pass", "setattr(MyScheduler, 'value', lambda self: 7)"), 7),
        (("files = !ls\nclass: return 8", "%%writefile x.py\nclass MyScheduler:\n    pass"), 8),
        (("x = await something()\nclass: return 9",), 9),
        (("while (N := globals().get('N', 0) + 1) < 5:\n    pass", "class: return N"), 5),
    ],
)
def test_whatever_a_class_is_made_of_is_found(load, monkeypatch, sources, value):
    monkeypatch.setenv("SEEN", "no")
    assert load(*(source.replace("class: ", f"{MINE}def value(self):\n        ") for source in sources))().value() == value


def test_the_last_definition_counts_and_a_copy_of_the_notebook_does_not(hand_in, load):
    hand_in(f"{MINE}number = 3", name=f"{NAME}-Copy1")
    part = load(f"{MINE}number = 1", "class MyScheduler(MyScheduler):\n    other = 2")
    assert (part.number, part.other) == (1, 2)


def test_what_has_not_passed_is_the_packages(hand_in):
    parts = my_parts(hand_in(f"{MINE}pass", passed=False))
    assert parts.scheduler_cls is Scheduler and parts.mine == ()
    assert parts.reasons["scheduler_cls"] == f"in exercise 07, “{CHECK}” had not passed when it was last saved"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Another:\n    pass", "there is no class MyScheduler in 07_the_scheduler.ipynb"),
        ("class MyScheduler(Missing):\n    pass", "exercise 07 raised NameError: name 'Missing' is not defined"),
        ("MyScheduler = 3", "there is no class MyScheduler in 07_the_scheduler.ipynb"),
        (f"import sys\nx = sys.exit(1)\n{MINE}y = x", "exercise 07 raised SystemExit: 1"),
    ],
)
def test_a_class_that_cannot_be_made_is_the_packages_with_a_reason(load, source, reason):
    assert load(source) == reason


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cells": 3}'])
def test_a_file_that_is_no_notebook_is_told(tmp_path, content):
    (tmp_path / f"{NAME}.ipynb").write_text(content)
    reason = load_part(tmp_path, SCHEDULER)
    assert f"{NAME}.ipynb" in reason or "exercise 07" in reason


def test_parts_can_be_exchanged_and_without_exercises_all_are_the_packages(tmp_path, hand_in):
    assert my_parts(tmp_path) == my_parts(tmp_path / "nowhere") == my_parts(ROOT / "exercises") == package_parts()
    parts = my_parts(hand_in(f"{MINE}pass"))
    assert parts.with_packages(["scheduler_cls"]) == package_parts() != parts
    assert parts.with_packages([]) == parts


def test_an_error_in_a_part_shows_its_cell(hand_in):
    folder = hand_in("x = 1", f"{MINE}def schedule(self):\n        return 1 / 0")
    cell_id = nbformat.read(folder / f"{NAME}.ipynb", 4).cells[1].id
    with pytest.raises(ZeroDivisionError) as failure:
        load_part(folder, SCHEDULER)().schedule()
    place = failure.traceback[-1]
    assert str(place.path).endswith(f"{NAME}.ipynb, cell {cell_id}") and place.lineno == 2
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
