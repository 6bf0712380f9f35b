"""Badges and install cells come from the repository's address in pyproject.toml, and there are none while it has none."""

from __future__ import annotations

import copy
import re

import nbformat
import pytest
from course_notebooks import solved_notebook

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


def test_with_an_address_both_cells_follow_the_title_and_lead_there():
    notebook = solved_notebook()
    before = ids(notebook)
    renew_first_cells(notebook, PATH, ADDRESS)
    assert ids(notebook) == [before[0], "badges", "install", *before[1:]]
    badges, install = notebook.cells[1:3]
    colab, binder = re.findall(r"\)\]\((https://[^)]+)\)", badges.source)
    assert colab == f"https://colab.research.google.com/github/someone/a.course/blob/main/{PATH}"
    assert binder == f"https://mybinder.org/v2/gh/someone/a.course/main?urlpath=lab/tree/{PATH}"
    assert f'git+{ADDRESS}"' in install.source
    assert find_problems(notebook) == []


def test_without_an_address_nothing_is_linked_or_installed():
    notebook = solved_notebook()
    before = copy.deepcopy(notebook)
    renew_first_cells(notebook, PATH, None)
    assert notebook == before
    renew_first_cells(notebook, PATH, ADDRESS)
    renew_first_cells(notebook, PATH, None)
    assert notebook == before
    assert "github" not in text(notebook)


def test_a_new_address_takes_the_place_of_the_old_one():
    notebook = solved_notebook()
    renew_first_cells(notebook, PATH, ADDRESS)
    renew_first_cells(notebook, PATH, "https://github.com/someone-else/moved")
    assert ids(notebook).count("badges") == ids(notebook).count("install") == 1
    assert "someone/" not in text(notebook)


def test_the_badges_of_an_exercise_open_the_exercise():
    notebook = solved_notebook()
    renew_first_cells(notebook, PATH, ADDRESS)
    assert "/blob/main/exercises/99_adding.ipynb" in text(make_exercise(notebook))


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_a_notebook_that_was_run_stays_numbered_from_top_to_bottom(address):
    notebook = solved_notebook()
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code_cells, start=7):
        cell.execution_count = number
        cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=number)]
    renew_first_cells(notebook, PATH, address)
    numbers = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [cell.outputs[0].execution_count for cell in code_cells] == [cell.execution_count for cell in code_cells]


def test_the_command_renews_every_notebook_and_solution(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", "solutions"):
        (tmp_path / folder).mkdir()
        nbformat.write(solved_notebook(), tmp_path / folder / "99_adding.ipynb")
    for urls, wanted in ((f'[project.urls]\nRepository = "{ADDRESS}"', True), ("[project.urls]", False)):
        pyproject(tmp_path, urls)
        assert main() == 0
        for folder in ("notebooks", "solutions"):
            notebook = nbformat.read(tmp_path / folder / "99_adding.ipynb", as_version=4)
            assert (f"/blob/main/{folder}/99_adding.ipynb" in text(notebook)) == wanted
    pyproject(tmp_path, '[project.urls]\nRepository = "elsewhere"')
    assert main() == 2
    assert "OWNER/NAME" in capsys.readouterr().err
