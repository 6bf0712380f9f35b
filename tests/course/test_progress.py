"""`minivllm course` lists the lessons and what the learner's own exercises came to."""

from __future__ import annotations

import nbclient
import nbformat
import pytest
from course_notebooks import solved_notebook

from minivllm.course.exercises import make_exercise
from minivllm.course.progress import find_progress, format_progress
from minivllm.entrypoints.cli.main import main
from minivllm.errors import CourseError

HALF = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + 1\n"


@pytest.fixture
def folders(tmp_path):
    """Lessons 98, which has no exercise, and 99, which has an untouched one."""
    lessons, exercises = tmp_path / "notebooks", tmp_path / "exercises"
    lessons.mkdir()
    exercises.mkdir()
    for name, title in (("98_reading", "# 98 · Reading"), ("99_adding", "# 99 · Adding")):
        text = f"{title}\n\n" + "word " * 1300
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), lessons / f"{name}.ipynb")
    nbformat.write(make_exercise(solved_notebook()), exercises / "99_adding.ipynb")
    return lessons, exercises


def run_with(answer, path):
    """Run an exercise as a learner does, and save it."""
    notebook = make_exercise(solved_notebook())
    next(cell for cell in notebook.cells if cell.id == "answer").source = answer
    nbclient.NotebookClient(notebook, allow_errors=True).execute()
    nbformat.write(notebook, path)


def test_lessons_have_a_title_and_a_reading_time(folders):
    reading, adding = find_progress(*folders)
    assert (reading.name, reading.title, reading.minutes) == ("98_reading", "Reading", 15)
    assert (adding.title, reading.points, adding.points, adding.most, adding.was_run) == ("Adding", None, 0, 5, False)


@pytest.mark.slow
def test_points_are_those_of_the_checks_that_passed_when_last_run(folders):
    exercise = folders[1] / "99_adding.ipynb"
    run_with(HALF, exercise)
    assert [(lesson.points, lesson.was_run) for lesson in find_progress(*folders)] == [(None, False), (2, True)]
    run_with(HALF.replace("a + 1", "2 * a"), exercise)
    assert find_progress(*folders)[1].points == 5
    notebook = nbformat.read(exercise, as_version=4)
    next(cell for cell in notebook.cells if cell.id == "check-twice").source = "print('✓ a number is doubled, twice (3 points)')"
    nbformat.write(notebook, exercise)
    assert find_progress(*folders)[1].points == 2, "a check that is gone gives nothing"


def test_the_table(folders):
    assert format_progress(find_progress(*folders)).split("\n") == [
        "lesson  topic    to read  points",
        "98      Reading   15 min  no exercise",
        "99      Adding    15 min  0 of 5, not begun",
        "",
        "In all: 0 of 5 points, as the exercises were when last run and saved.",
        "Reading times are estimated from the length; allow an evening or two to build an exercise.",
    ]


def test_the_command_lists_the_projects_lessons(capsys, tmp_path):
    assert main(["course"]) == 0
    printed = capsys.readouterr().out
    assert "00      Start here " in printed
    assert "0 of 20, not begun" in printed
    assert main(["course", "--exercises", str(tmp_path)]) == 0
    assert "0 of 20" not in capsys.readouterr().out


def test_a_folder_without_lessons_is_told(tmp_path):
    with pytest.raises(CourseError, match="There are no lessons in"):
        find_progress(tmp_path, tmp_path)


def test_a_damaged_exercise_is_named(folders, capsys):
    (folders[1] / "99_adding.ipynb").write_text("not JSON")
    with pytest.raises(CourseError, match=r"99_adding\.ipynb is not a notebook"):
        find_progress(*folders)
