"""Stored notebooks were run from top to bottom, show no errors, are small, and name files that exist.

That their outputs are right is checked by running them: `pytest --nbval notebooks solutions`, which `make test ARGS=--long` does. That
exercises are those of the solutions is in test_exercises.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from minivllm.course.first_cells import renew_first_cells, repository_address
from minivllm.course.grading.stubs import find_asked
from minivllm.course.last_cell import renew_last_cell
from minivllm.course.sources import find_source

ROOT = Path(__file__).parents[2]
FOLDERS = {folder: sorted((ROOT / folder).glob("*.ipynb")) for folder in ("notebooks", "solutions", "exercises")}
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} | set(FOLDERS)


def notebooks_of(*folders):
    """A test for each notebook in these folders."""
    paths = [path for folder in folders for path in FOLDERS[folder]]
    return pytest.mark.parametrize("path", paths, ids=[f"{path.parent.name}/{path.stem}" for path in paths])


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def headings(path):
    """The headings of a notebook, without those that are comments in code."""
    text = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    return re.findall(r"^#+ .+$", re.sub(r"^```.*?^```", "", "\n".join(text), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def test_there_are_notebooks():
    assert ROOT / "notebooks" / "00_start_here.ipynb" in FOLDERS["notebooks"]


def test_the_same_number_is_the_same_topic():
    topics = {}
    for paths in FOLDERS.values():
        for path in paths:
            assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
            topics.setdefault(path.stem[:2], set()).add(path.stem)
    assert [names for names in topics.values() if len(names) > 1] == []


@notebooks_of("solutions")
def test_a_solution_has_all_points(path):
    """And still has them: nbval runs it and compares."""
    assert "20 of 20 points. All checks passed." in str(code_cells(path)[-1].outputs)
    assert sum(cell.metadata.nbgrader.get("points", 0) for cell in code_cells(path) if "nbgrader" in cell.metadata) == 20


@notebooks_of("notebooks", "solutions")
def test_it_was_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]


SHOWN = [
    pytest.param(path, place, id=f"{path.parent.name}/{path.stem}: {re.search(r'show_source.(.*)[)]', cell.source)[1]}")
    for path in (*FOLDERS["notebooks"], *FOLDERS["solutions"])
    for place, cell in enumerate(code_cells(path))
    if re.search(r"^show_source", cell.source, re.MULTILINE)
]
"""Cells that show source of the package: a notebook, and the cell's place among its code."""


@pytest.mark.parametrize(("path", "place"), SHOWN)
def test_source_that_was_shown_is_still_that_of_the_package(path, place):
    """So whoever changes the engine knows which notebooks to run again."""
    cells = code_cells(path)[: place + 1]
    names = {}
    for cell in cells:
        code = "\n".join(line for line in cell.source.split("\n") if not line.startswith(("%", "!")))
        imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), cell.id, "exec"), names)
    shown = re.findall(r"^show_source\((.*)\)", cells[-1].source, re.MULTILINE)
    stored = [output.data["text/html"] for output in cells[-1].outputs if "text/html" in output.get("data", ())]
    assert stored == [find_source(eval(name, names))._repr_html_() for name in shown]


@notebooks_of("exercises")
def test_an_exercise_was_not_run(path):
    assert [cell for cell in code_cells(path) if cell.execution_count is not None or cell.outputs] == []


@notebooks_of(*FOLDERS)
def test_it_is_valid_and_small(path):
    nbformat.validate(read(path))
    assert path.stat().st_size < 2**20


@notebooks_of(*FOLDERS)
def test_it_names_no_place_on_the_machine_that_ran_it(path):
    assert not re.search(r"(?<![\w.])/(home|root|Users|work|tmp)/", path.read_text(encoding="utf-8"))


@notebooks_of(*FOLDERS)
def test_its_badges_and_install_cell_are_those_of_the_repositorys_address(path):
    stored, renewed = read(path), read(path)
    renew_first_cells(renewed, f"{path.parent.name}/{path.name}", repository_address(ROOT / "pyproject.toml"))
    assert renewed == stored


@notebooks_of("notebooks", "solutions")
def test_its_last_cell_sums_up_its_checks(path):
    stored, renewed = read(path), read(path)
    renew_last_cell(renewed)
    assert renewed == stored


@notebooks_of(*FOLDERS)
def test_the_files_it_names_exist(path):
    missing = [name for cell in read(path).cells for name in named_files(cell.source) if not (ROOT / name).exists()]
    assert missing == []


@notebooks_of(*FOLDERS)
def test_its_links_lead_somewhere(path):
    cells = read(path).cells
    anchors = {heading.lstrip("#").strip().replace(" ", "-") for heading in headings(path)}
    broken = [
        link for cell in cells if cell.cell_type == "markdown" for link in links(cell.source) if not leads(link, path, anchors)
    ]
    assert broken == []


@notebooks_of("notebooks")
def test_it_has_the_parts_of_a_lesson(path):
    assert re.fullmatch(r"# \d\d · .+", headings(path)[0])
    for part in ("## What you have", "## Three questions to think over", "## To read"):
        assert part in headings(path)


@notebooks_of("notebooks", "solutions", "exercises")
def test_its_title_has_its_number(path):
    assert headings(path)[0].startswith(f"# {path.stem[:2]} ")


def named_files(text):
    """The paths of this repository in backticks: `minivllm/core/scheduler.py`, but not `NN_topic` or `vllm/...`."""
    names = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    return [name for name in names if name.split("/")[0] in TOP and "NN" not in name]


def links(text):
    """The targets of Markdown links and pictures, and of HTML's."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r"""(?:href|src)=["']([^"']+)""", prose)


def leads(link, path, anchors):
    """Whether a link is an address of the web, or a heading or a file that is there."""
    target, _, anchor = link.partition("#")
    if re.match(r"[a-z]+:", link):
        return re.match(r"https://[\w.-]+\.[a-z]+(/|$)", link) is not None
    if not target:
        return anchor in anchors
    return (path.parent / target).exists() and ROOT in (path.parent / target).resolve().parents


def test_the_searches_find_what_they_should(tmp_path):
    text = "[a](../docs/step.png) ![b](https://example.org/x 'title') `[no](none.md)` <img src='c.png'> [d](#The-map)"
    assert links(text) == ["../docs/step.png", "https://example.org/x", "#The-map", "c.png"]
    assert named_files("`minivllm/core/scheduler.py`, `exercises/NN_topic.ipynb`, `vllm/v1/x.py`, `tests/`, `a/b`") == [
        "minivllm/core/scheduler.py",
        "tests/",
    ]
    here = ROOT / "notebooks" / "00_start_here.ipynb"
    assert leads("../docs/step.png", here, set())
    assert leads("00_start_here.ipynb#The-map", here, set())
    assert leads("#The-map", here, {"The-map"})
    for link in ("../docs/none.png", "#The-way", "ftp://example.org", "http://example.org", "https://", "../../elsewhere"):
        assert not leads(link, here, {"The-map"})


# Words that codespell takes for misspelled ones.
KNOWN_WORDS = "vor"


def spelling_mistakes(folder):
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", KNOWN_WORDS, "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.splitlines()


def test_words_are_spelled_right(tmp_path):
    """In the text, the code and the shown text of all notebooks, in the pages about the project, and in what checks say."""
    for path in (path for paths in FOLDERS.values() for path in paths):
        cells = read(path).cells
        shown = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
        text = [cell.source for cell in cells] + [output.text for output in shown if output.output_type == "stream"]
        copy = tmp_path / path.relative_to(ROOT).with_suffix(".md")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("\n\n".join(text), encoding="utf-8")
    for path in [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("notebooks/*.md"),
        *ROOT.glob("minivllm/course/**/*.py"),
        *ROOT.glob("minivllm/errors.py"),
    ]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True, parents=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert spelling_mistakes(tmp_path) == []


def test_a_spelling_mistake_is_found(tmp_path):
    (tmp_path / "text.md").write_text("The sheduler recieves a request.\n")
    assert len(spelling_mistakes(tmp_path)) == 2


@notebooks_of("solutions")
def test_there_are_two_folded_hints_for_each_method_to_write(path):
    text, missing = "", []
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            text = cell.source
        for name in find_asked(cell.source) if cell.cell_type == "code" else ():
            for number in (1, 2):
                said = re.search(
                    rf"<details><summary>Hint {number} for <code>{name.split('.')[-1]}</code>.*?</summary>\n\n(.+?)\n\n</details>",
                    text,
                    re.DOTALL,
                )
                if said is None or "`" in said[0].split("</summary>")[0]:
                    missing.append((name, number))
    assert not missing
