"""The last cell of an exercise says which checks failed, and leads to them."""

from __future__ import annotations

import copy

import nbclient
import nbformat
import pytest
from course_notebooks import solved_notebook

from minivllm.course import check, results, show_results
from minivllm.course.exercises import GO_ON, make_exercise
from minivllm.course.grading.submissions import load_lesson
from minivllm.course.last_cell import renew_last_cell


@pytest.fixture
def run(monkeypatch):
    """Runs a check that passes or fails, in a cell with this id."""
    monkeypatch.setattr(results, "_RESULTS", {})

    def run(name, points, passes=True, cell_id=None):
        monkeypatch.setattr(results, "_current_cell_id", lambda: cell_id)
        try:
            with check(name, points=points):
                assert passes
        except AssertionError:
            pass

    return run


def test_all_passed(run):
    run("two numbers are added", 2)
    run("a number is doubled", 3)
    assert repr(show_results(most=5)) == "5 of 5 points. All checks passed."
    assert show_results(most=5)._repr_html_() is None


def test_failed_checks_are_named_with_links(run, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "exercises/99 adding.ipynb")
    run("two numbers are added", 2)
    run("a < b", 3, passes=False, cell_id="check-less")
    run("no cell", 1, passes=False)
    assert repr(show_results(most=6)).split("\n") == [
        "2 of 6 points.",
        "These checks failed:",
        "✗ a < b (3 points)",
        "✗ no cell (1 point)",
    ]
    page = show_results(most=6)._repr_html_()
    assert '<li><a href="99%20adding.ipynb#cell-id=check-less">a &lt; b</a> (3 points)</li>' in page
    assert "<li>no cell (1 point)</li>" in page


def test_checks_that_were_not_run_are_told_from_those_that_failed(run):
    run("two numbers are added", 2)
    assert repr(show_results(most=5)) == "2 of 5 points.\nNot run yet: checks worth 3 points."
    run("a number is doubled", 3, passes=False)
    assert "Not run" not in repr(show_results(most=5))


def test_a_check_that_is_run_again_counts_as_it_went_last(run):
    run("two numbers are added", 2, passes=False)
    run("two numbers are added", 2)
    assert repr(show_results(most=2)) == "2 of 2 points. All checks passed."


def exercise_with_results():
    solution = solved_notebook()
    renew_last_cell(solution)
    return make_exercise(solution)


@pytest.mark.slow
def test_an_untouched_exercise_is_run_to_its_last_cell():
    """As by "Run All" in Jupyter: it goes on after a check, which is tagged so, but not after an answer that raises."""
    exercise = exercise_with_results()
    nbclient.NotebookClient(exercise).execute()
    text = exercise.cells[-1].outputs[0].data["text/plain"]
    assert text.split("\n") == [
        "0 of 5 points.", "These checks failed:", "✗ two numbers are added (2 points)", "✗ a number is doubled, twice (3 points)",
    ]  # fmt: skip
    broken = exercise_with_results()
    next(cell for cell in broken.cells if cell.id == "answer").source = "1 / 0"
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(broken).execute()


def test_grading_says_where_the_points_are_instead(tmp_path):
    """The grader's own points count; the kernel that it runs is told nothing of them."""
    solution = solved_notebook()
    renew_last_cell(solution)
    nbformat.write(solution, tmp_path / "99_adding.ipynb")
    last = load_lesson(tmp_path / "99_adding.ipynb").cells[-1]
    assert (last.cell_type, last.source) == ("markdown", "Your points are at the top of this page.")


def test_only_checks_are_tagged_to_go_on():
    cells = make_exercise(solved_notebook()).cells
    assert [item.id for item in cells if GO_ON in item.metadata.get("tags", [])] == ["check-add", "check-twice"]


def test_the_last_cell_has_the_points_of_the_checks():
    notebook = solved_notebook()
    renew_last_cell(notebook)
    assert notebook.cells[-1].source == "from minivllm.course import show_results\n\nshow_results(most=5)"
    once = copy.deepcopy(notebook)
    renew_last_cell(notebook)
    assert notebook == once
    lesson = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
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
