"""Small solved notebooks for the tests of the course's machinery, marked as the real ones are."""

from __future__ import annotations

import nbformat

from minivllm.course.exercises import make_exercise

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
ADD = """\
def add(a, b):
    ### BEGIN SOLUTION
    return a + b
    ### END SOLUTION


def twice(a):
    \"\"\"Two times a number.\"\"\"
    ### BEGIN SOLUTION
    result = 2 * a
    return result
    ### END SOLUTION
"""
CHECK_ADD = """\
with check("two numbers are added", points=2):
    assert add(2, 3) == 5, f"Expected add(2, 3) to be 5, but it is {add(2, 3)}. Look at `add`."
"""
CHECK_TWICE = """\
with check("a number is doubled, twice", points=3):
    assert twice(twice(4)) == 16, f"Expected 16, but got {twice(twice(4))}. Look at `twice`."
"""
HALF = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a + 1\n"
"""An answer of which the first function is right."""


def cell(name, source, kind="given", points=None):
    """A cell: "text", "given", "answer" or "check"."""
    made = nbformat.v4.new_markdown_cell(source) if kind == "text" else nbformat.v4.new_code_cell(source)
    made.id = name
    data = {"grade": kind == "check", "solution": kind == "answer", "locked": kind != "answer", "task": False}
    made.metadata["nbgrader"] = data | {"schema_version": 3, "grade_id": name}
    if points is not None:
        made.metadata["nbgrader"]["points"] = points
    return made


def solved_notebook(**sources):
    """A solved exercise of 5 points in two checks; a cell's source can be given by its name."""
    cells = [
        cell("title", "# 99 · Adding\n\nWrite two functions.", "text"),
        cell("imports", "from minivllm.course import check"),
        cell("answer", ADD, "answer"),
        cell("check-add", CHECK_ADD, "check", 2),
        cell("between", "print('between')"),
        cell("check-twice", CHECK_TWICE, "check", 3),
    ]
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})
    return with_sources(made, **sources)


def exercise(**sources):
    """The exercise for it, untouched but for sources that are given."""
    return with_sources(make_exercise(solved_notebook()), **sources)


def with_sources(notebook, **sources):
    """A notebook with other sources in the cells with these names; "_" stands for "-"."""
    for name, source in sources.items():
        by_id(notebook)[name.replace("_", "-")].source = source
    return notebook


def by_id(notebook):
    """The cells of a notebook by their names."""
    return {made.id: made for made in notebook.cells}


def of_code(*sources, **metadata):
    """A notebook of code cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, **metadata})


def write(folder, notebook=None, name="99_adding"):
    """Write a notebook, or else the solved one, to a folder, which is made; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook or solved_notebook(), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"
