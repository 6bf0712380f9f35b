"""Exports the course as an nbgrader course folder, for classes that already use nbgrader.

The solved notebooks already are nbgrader source notebooks, so they are copied to `source/NN_topic/NN_topic.ipynb`; a config sets the
solution markers and the time limit of a cell.
"""

from __future__ import annotations

import json
from pathlib import Path

from minivllm.course.exercise_cells import BEGIN_SOLUTION, END_SOLUTION, STUB, find_problems, is_check, read_notebook
from minivllm.course.exercises import GO_ON
from minivllm.course.first_cells import as_exercise
from minivllm.errors import CourseError

CELL_TIMEOUT = 120
"""Seconds that nbgrader lets one cell of a submission run."""

_CONFIG = f"""\
# How nbgrader handles the exercises of minivllm. In this folder, with the environment activated (nbgrader calls commands that
# are installed with it), for the assignment NN_topic:
#
#   nbgrader generate_assignment NN_topic --create   writes release/, which goes to the learners
#   nbgrader autograde NN_topic --create             grades submitted/LEARNER/NN_topic/NN_topic.ipynb
#   nbgrader generate_feedback NN_topic              writes a page for each learner
#   nbgrader export                                  writes grades.csv
c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "minivllm"

# Replaces the solution in an exercise.
c.ClearSolutions.begin_solution_delimeter = {BEGIN_SOLUTION!r}
c.ClearSolutions.end_solution_delimeter = {END_SOLUTION!r}
c.ClearSolutions.code_stub = {{"python": {STUB!r}}}

# Seconds per cell; a cell that takes longer is interrupted and fails, and the cells after it still run.
c.ExecutePreprocessor.timeout = {CELL_TIMEOUT}
c.ExecutePreprocessor.interrupt_on_timeout = True
"""


def export_course(solutions: Path, folder: Path) -> list[Path]:
    """Write an nbgrader course folder and return the paths of its source notebooks.

    Args:
        solutions: The folder of solved notebooks.
        folder: Where the course goes; new or empty.

    Raises:
        CourseError: There are no solutions, one is not marked properly, or the folder is not empty.
    """
    paths = sorted(solutions.glob("*.ipynb"))
    if not paths:
        raise CourseError(f"There are no notebooks in {solutions}: name the folder of solved notebooks with --solutions.")
    notebooks = [read_notebook(path) for path in paths]
    for path, notebook in zip(paths, notebooks, strict=True):
        problems = find_problems(notebook)
        if problems:
            raise CourseError(f"{path.name}: {problems[0]}")
        for cell in notebook["cells"]:
            cell["source"] = as_exercise(cell.get("id", ""), cell["source"])
            if is_check(cell):
                cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), GO_ON]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CourseError(f"{folder} is not empty: a course must be written to a new or empty folder.")
    sources = [folder / "source" / path.stem / path.name for path in paths]
    for notebook, source in zip(notebooks, sources, strict=True):
        source.parent.mkdir(parents=True)
        source.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "nbgrader_config.py").write_text(_CONFIG, encoding="utf-8")
    return sources
