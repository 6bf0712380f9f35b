"""Badges and install cells come from the repository's address in pyproject.toml, and there are none while it has none."""

from __future__ import annotations

import re

import nbformat
import pytest
from course_notebooks import solved_notebook, write

from minivllm.course.exercise_cells import find_problems
from minivllm.course.exercises import make_exercise
from minivllm.course.first_cells import main, renew_first_cells, repository_address
from minivllm.errors import CourseError

ADDRESS = "https://github.com/someone/a.course"
PATH = "solutions/99_adding.ipynb"


def ids(notebook):
    return [cell.id for cell in notebook.cells]


def text(notebook):
    return "\n".join(cell.source for cell in notebook.cells)


def pyproject(folder, urls):
    path = folder / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n{urls}', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("urls", "address"),
    [("", None), ("[project.urls]", None), (f'[project.urls]\nRepository = "{ADDRESS}"', ADDRESS)],
)
def test_the_address_is_read_from_pyproject(tmp_path, urls, address):
    assert repository_address(pyproject(tmp_path, urls)) == address


@pytest.mark.parametrize(
    "address", ["", "https://github.com/someone", "https://example.org/a/b", f"{ADDRESS}/", "someone/course"]
)
def test_an_address_that_colab_and_binder_cannot_open_is_refused(tmp_path, address):
    with pytest.raises(CourseError, match="must look like https://github.com/OWNER/NAME"):
        repository_address(pyproject(tmp_path, f'[project.urls]\nRepository = "{address}"'))


@pytest.fixture
def renewed():
    """A notebook whose first cells were renewed with each of these addresses in turn."""

    def renewed(*addresses):
        notebook = solved_notebook()
        for address in addresses:
            renew_first_cells(notebook, PATH, address)
        return notebook

    return renewed


def test_with_an_address_both_cells_follow_the_title_and_lead_there(renewed):
    notebook = renewed(ADDRESS)
    title, *others = ids(solved_notebook())
    assert ids(notebook) == [title, "badges", "install", *others]
    badges, install = notebook.cells[1:3]
    colab, binder = re.findall(r"\)\]\((https://[^)]+)\)", badges.source)
    assert colab == f"https://colab.research.google.com/github/someone/a.course/blob/main/{PATH}"
    assert binder == f"https://mybinder.org/v2/gh/someone/a.course/main?urlpath=lab/tree/{PATH}"
    assert f'git+{ADDRESS}"' in install.source
    assert find_problems(notebook) == []
    assert "/blob/main/exercises/99_adding.ipynb" in text(make_exercise(notebook)), "an exercise's badges open the exercise"


def test_without_an_address_nothing_is_linked_or_installed_and_a_new_one_takes_the_place_of_the_old(renewed):
    assert renewed(None) == renewed(ADDRESS, None) == solved_notebook()
    moved = "https://github.com/someone-else/moved"
    assert renewed(ADDRESS, moved) == renewed(moved) != renewed(ADDRESS)


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_a_notebook_that_was_run_stays_numbered_from_top_to_bottom(address):
    notebook = solved_notebook()
    for number, cell in enumerate([cell for cell in notebook.cells if cell.cell_type == "code"], start=7):
        cell.execution_count = number
        cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=number)]
    renew_first_cells(notebook, PATH, address)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.execution_count == cell.execution_count for cell in cells for output in cell.outputs)


def test_the_command_renews_every_notebook_and_solution(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", "solutions"):
        write(tmp_path / folder)
    for urls, wanted in ((f'[project.urls]\nRepository = "{ADDRESS}"', True), ("[project.urls]", False)):
        pyproject(tmp_path, urls)
        assert main() == 0
        for folder in ("notebooks", "solutions"):
            notebook = nbformat.read(tmp_path / folder / "99_adding.ipynb", as_version=4)
            assert (f"/blob/main/{folder}/99_adding.ipynb" in text(notebook)) == wanted
    pyproject(tmp_path, '[project.urls]\nRepository = "elsewhere"')
    assert main() == 2
    assert "OWNER/NAME" in capsys.readouterr().err
