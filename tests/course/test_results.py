"""The learner's points: in the last cell of an exercise, with links to the checks that failed, and in `minivllm course` with the lessons."""

from __future__ import annotations

import contextlib
import copy

import nbclient
import pytest
from course_notebooks import HALF, by_id, exercise, of_code, solved_notebook, write
from nbformat.v4 import new_markdown_cell, new_notebook

from minivllm.course import check, results, show_results
from minivllm.course.exercises import GO_ON, make_exercise
from minivllm.course.grading.submissions import load_lesson
from minivllm.course.last_cell import renew_last_cell
from minivllm.course.progress import find_progress, format_progress
from minivllm.entrypoints.cli.main import main
from minivllm.errors import CourseError


@pytest.fixture
def run(monkeypatch):
    """Runs a check that passes or fails, in a cell with this id."""
    monkeypatch.setattr(results, "_RESULTS", {})

    def run(name, points, passes=True, cell_id=None):
        monkeypatch.setattr(results, "_current_cell_id", lambda: cell_id)
        with contextlib.suppress(AssertionError), check(name, points=points):
            assert passes

    return run


@pytest.mark.parametrize(
    ("checks", "most", "shown"),
    [
        ([("an addition", 2), ("a number", 3)], 5, ["5 of 5 points. All checks passed."]),
        ([("an addition", 2)], 5, ["2 of 5 points.", "Not run yet: checks worth 3 points."]),
        ([("an addition", 2), ("a number", 3, False)], 5, ["2 of 5 points.", "These checks failed:", "✗ a number (3 points)"]),
        ([("an addition", 2, False), ("an addition", 2)], 2, ["2 of 2 points. All checks passed."]),
    ],
    ids=["all passed", "one was not run", "one failed", "one was run again"],
)
def test_the_points_and_the_checks_that_failed_or_were_not_run(run, checks, most, shown):
    for arguments in checks:
        run(*arguments)
    assert repr(show_results(most=most)).split("\n") == shown
    assert (show_results(most=most)._repr_html_() is None) == (len(shown) < 3)


def test_failed_checks_have_links(run, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "exercises/99 adding.ipynb")
    run("a < b", 3, passes=False, cell_id="check-less")
    run("no cell", 1, passes=False)
    page = show_results(most=6)._repr_html_()
    assert '<li><a href="99%20adding.ipynb#cell-id=check-less">a &lt; b</a> (3 points)</li>' in page
    assert "<li>no cell (1 point)</li>" in page


def with_results(**sources):
    """A solved notebook with its last cell."""
    notebook = solved_notebook(**sources)
    renew_last_cell(notebook)
    return notebook


@pytest.mark.slow
def test_an_untouched_exercise_is_run_to_its_last_cell():
    """As by "Run All" in Jupyter: it goes on after a check, which is tagged so, but not after an answer that raises."""
    untouched = make_exercise(with_results())
    assert [name for name, cell in by_id(untouched).items() if GO_ON in cell.metadata.get("tags", [])] == [
        "check-add",
        "check-twice",
    ]
    nbclient.NotebookClient(untouched).execute()
    shown = untouched.cells[-1].outputs[0].data["text/plain"].split("\n")
    assert shown[:2] == ["0 of 5 points.", "These checks failed:"]
    assert shown[2:] == ["✗ two numbers are added (2 points)", "✗ a number is doubled, twice (3 points)"]
    by_id(untouched)["answer"].source = "1 / 0"
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(untouched).execute()


def test_grading_says_where_the_points_are_instead(tmp_path):
    """The grader's own points count; the kernel that it runs is told nothing of them."""
    last = load_lesson(write(tmp_path, with_results())).cells[-1]
    assert (last.cell_type, last.source) == ("markdown", "Your points are at the top of this page.")


def test_the_last_cell_has_the_points_of_the_checks():
    notebook = with_results()
    assert notebook.cells[-1].source == "from minivllm.course import show_results\n\nshow_results(most=5)"
    once = copy.deepcopy(notebook)
    renew_last_cell(notebook)
    assert notebook == once
    lesson = of_code("1 + 1")
    renew_last_cell(lesson)
    assert len(lesson.cells) == 1


@pytest.mark.slow
def test_the_last_cells_stored_output_is_what_a_run_shows():
    notebook = solved_notebook()
    nbclient.NotebookClient(notebook).execute()
    renew_last_cell(notebook)
    stored = copy.deepcopy(notebook.cells[-1])
    nbclient.NotebookClient(notebook).execute()
    del notebook.cells[-1].metadata["execution"]
    assert notebook.cells[-1] == stored


# `minivllm course`


@pytest.fixture
def folders(tmp_path):
    """Lessons 98, which has no exercise, and 99, which has an untouched one."""
    for name, title in (("98_reading", "# 98 · Reading"), ("99_adding", "# 99 · Adding")):
        text = new_markdown_cell(f"{title}\n\n" + "word " * 1300)
        write(tmp_path / "notebooks", new_notebook(cells=[text]), name)
    write(tmp_path / "exercises", exercise())
    return tmp_path / "notebooks", tmp_path / "exercises"


def test_lessons_have_a_title_a_reading_time_and_points(folders):
    assert [lesson.name for lesson in find_progress(*folders)] == ["98_reading", "99_adding"]
    assert format_progress(find_progress(*folders)).split("\n") == [
        "lesson  topic    to read  points",
        "98      Reading   15 min  no exercise",
        "99      Adding    15 min  0 of 5, not begun",
        "",
        "In all: 0 of 5 points, as the exercises were when last run and saved.",
        "Reading times are estimated from the length; allow an evening or two to build an exercise.",
    ]


@pytest.mark.slow
def test_points_are_those_of_the_checks_that_passed_when_last_run(folders):
    for answer, points in ((HALF, 2), (HALF.replace("a + 1", "2 * a"), 5)):
        notebook = exercise(answer=answer)
        nbclient.NotebookClient(notebook, allow_errors=True).execute()
        write(folders[1], notebook)
        assert [(lesson.points, lesson.was_run) for lesson in find_progress(*folders)] == [(None, False), (points, True)]
    by_id(notebook)["check-twice"].source = "print('✓ a number is doubled, twice (3 points)')"
    write(folders[1], notebook)
    assert find_progress(*folders)[1].points == 2, "a check that is gone gives nothing"


def test_the_command_lists_the_projects_lessons(capsys, tmp_path):
    assert main(["course"]) == 0
    printed = capsys.readouterr().out
    assert "00      Start here " in printed and "0 of 20, not begun" in printed
    assert main(["course", "--exercises", str(tmp_path)]) == 0
    assert "0 of 20" not in capsys.readouterr().out


def test_a_folder_without_lessons_is_told_and_a_damaged_exercise_named(folders, tmp_path):
    with pytest.raises(CourseError, match="There are no lessons in"):
        find_progress(tmp_path, tmp_path)
    (folders[1] / "99_adding.ipynb").write_text("not JSON")
    with pytest.raises(CourseError, match=r"99_adding\.ipynb is not a notebook"):
        find_progress(*folders)
