"""Small solved notebooks for the tests of the course's machinery, marked as the real ones are."""

from __future__ import annotations

import nbformat

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
    for made in cells:
        made.source = sources.get(made.id.replace("-", "_"), made.source)
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})
