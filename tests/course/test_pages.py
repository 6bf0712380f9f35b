"""The lessons as web pages: what JupyterLab folds is folded, and links lead to pages."""

from __future__ import annotations

import re

import pytest
from course_notebooks import write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minivllm.entrypoints.cli.main import main

pytestmark = pytest.mark.slow
FOLD = r'<details class="folded-output">.*?</details>'


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    links = "[block](glossary.md#block) [all](glossary.md) [next](98_one.ipynb#There) [work](../exercises/99_two.ipynb)"
    hidden = {"jupyter": {"outputs_hidden": True}}
    cells = [
        new_markdown_cell(f"# 99 · Two\n\n{links}", id="title"),
        new_code_cell("print('seen')", id="seen", outputs=[new_output("stream", text="SEEN\n")]),
        new_code_cell("print('folded')", id="folded", outputs=[new_output("stream", text="FOLDED\n")], metadata=hidden),
        new_code_cell("pass", id="silent", metadata=hidden),
    ]
    write(folder, new_notebook(cells=cells), "99_two")
    write(folder, new_notebook(cells=[new_markdown_cell("# 98 · One", id="title")]), "98_one")
    (folder / "glossary.md").write_text('<a id="block"></a>\n**block**: A piece. See [all](#block).\n')
    assert main(["course", "html", str(folder / "pages"), "--lessons", str(folder)]) == 0
    return folder / "pages"


def test_each_lesson_and_the_glossary_get_a_page(pages):
    assert {path.name for path in pages.iterdir()} == {"98_one.html", "99_two.html", "glossary.html"}
    assert '<a id="block"></a>' in (pages / "glossary.html").read_text(encoding="utf-8")


def test_what_is_hidden_in_jupyterlab_is_folded_all_else_is_not_and_links_between_lessons_lead_to_pages(pages):
    page = (pages / "99_two.html").read_text(encoding="utf-8")
    (fold,) = re.findall(FOLD, page, flags=re.DOTALL)  # a cell without output has nothing to fold
    assert "FOLDED\n" in fold and "<summary>" in fold
    outside = re.sub(FOLD, "", page, flags=re.DOTALL)
    assert "SEEN\n" in outside and "FOLDED\n" not in outside
    for link in ("glossary.html#block", "glossary.html", "98_one.html#There", "../exercises/99_two.ipynb"):
        assert f'href="{link}"' in page


def test_without_lessons_there_are_no_pages(tmp_path, capsys):
    assert main(["course", "html", str(tmp_path / "pages"), "--lessons", str(tmp_path)]) == 2
    assert "There are no notebooks in " in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()
