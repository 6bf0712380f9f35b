"""Answers stay folded until the learner asks, the last cell leads to the failed checks, a term to the glossary.

In JupyterLab as `make lab` starts it, and in the web pages.

Skipped where there is no Chromium. Screenshots are left in `out/browser/`.
"""

from __future__ import annotations

import shutil
import time

import nbformat
import pytest
from browser import PATIENCE, ROOT, SCREENSHOTS, launch, needs_chromium, open_page, run_all_cells, serve, sync_api
from course_notebooks import solved_notebook
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minivllm.course.exercises import make_exercise
from minivllm.course.folds import cover_answers, is_folded
from minivllm.course.last_cell import renew_last_cell
from minivllm.course.pages import export_pages

pytestmark = [needs_chromium, pytest.mark.slow]
LESSONS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
IN_JUPYTERLAB = [pytest.param(name, marks=() if name == LESSONS[0] else pytest.mark.long) for name in LESSONS]
"""To open one in JupyterLab takes seconds."""


def exercise():
    """An untouched exercise, long enough that its last cell and its checks are not seen together."""
    solution = solved_notebook()
    for number in range(20):
        text = new_markdown_cell("Some text.\n\n" + "- a line\n" * 5, id=f"text-{number}")
        text.metadata["nbgrader"] = solution.cells[0].metadata.nbgrader | {"grade_id": text.id}
        solution.cells.append(text)
    renew_last_cell(solution)
    return make_exercise(solution)


def lesson():
    """A lesson with an answer that is folded."""
    cell = new_code_cell("print('the ' + 'answer')", id="answer", outputs=[new_output("stream", text="the answer\n")])
    cell.metadata["jupyter"] = {"outputs_hidden": True}
    notebook = new_notebook(cells=[new_markdown_cell("> **Predict.** What?"), cell])
    cover_answers(notebook)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", folder / "root", ignore=shutil.ignore_patterns(".*"))
    nbformat.write(exercise(), folder / "root" / "99 adding.ipynb")
    nbformat.write(lesson(), folder / "root" / "98_folded.ipynb")
    with serve(folder) as address:
        yield address


@pytest.fixture
def open_notebook(browser, jupyterlab):
    page = open_page(browser)

    def visit(name):
        page.goto(f"{jupyterlab}/lab/tree/{name}.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        return page

    yield visit
    page.close()


def hidden_cells(name):
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    return [cell for cell in cells if is_folded(cell)]


@pytest.mark.parametrize("name", IN_JUPYTERLAB)
def test_jupyterlab_opens_a_lesson_with_its_answers_folded(open_notebook, name):
    page = open_notebook(name)
    folded = hidden_cells(name)
    assert folded
    placeholders = page.locator(".jp-Notebook .jp-OutputPlaceholder")
    placeholders.nth(len(folded) - 1).wait_for()
    assert placeholders.count() == len(folded)
    assert "".join(placeholders.all_inner_texts()).strip() == ""
    page.locator(".jp-Notebook .jp-OutputPlaceholder").first.scroll_into_view_if_needed()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}_folded.png")


@pytest.mark.long
def test_running_a_cell_unfolds_its_answer(open_notebook):
    page = open_notebook("98_folded")
    answer = page.locator(".jp-Notebook .jp-CodeCell").get_by_text("the answer")
    assert not any(place.is_visible() for place in answer.all())
    run_all_cells(page)
    page.locator(".jp-Notebook .jp-OutputArea").get_by_text("the answer").wait_for(state="visible")


def test_a_click_unfolds_an_answer_and_shows_nothing_but_it(open_notebook):
    page = open_notebook("98_folded")
    page.locator(".jp-Notebook .jp-OutputPlaceholder").click()
    outputs = page.locator(".jp-Notebook .jp-OutputArea").first
    outputs.get_by_text("the answer").wait_for(state="visible")
    assert outputs.inner_text().strip() == "the answer"


def test_run_all_ends_at_links_that_lead_to_the_failed_checks(open_notebook):
    page = open_notebook("99 adding")
    run_all_cells(page)
    results = page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-OutputArea-output")
    results.get_by_text("These checks failed").wait_for()
    assert results.get_by_text("0 of 5 points.").is_visible()
    check = page.locator(".jp-Notebook .jp-CodeCell").nth(4)
    results.scroll_into_view_if_needed()
    assert not is_seen(page, check)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "results.png")
    results.get_by_role("link", name="a number is doubled, twice").click()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not is_seen(page, check):
        page.wait_for_timeout(100)
    page.screenshot(path=SCREENSHOTS / "results_followed.png")
    assert is_seen(page, check)
    assert "a number is doubled, twice" in check.inner_text()


@pytest.mark.long
def test_a_link_to_the_glossary_opens_it_at_the_term(open_notebook):
    page = open_notebook("00_start_here")
    page.locator(".jp-Notebook a", has_text="kernel").first.click()
    term = page.locator(".jp-MarkdownViewer p", has_text="kernel:").first
    term.wait_for()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not is_seen(page, term):
        page.wait_for_timeout(100)
    page.screenshot(path=SCREENSHOTS / "glossary.png")
    assert is_seen(page, term)
    assert not is_seen(page, page.locator(".jp-MarkdownViewer h1").first)


def is_seen(page, element):
    box, height = element.bounding_box(), page.viewport_size["height"]
    return box is not None and 0 <= box["y"] < height - 50


@pytest.mark.long
@pytest.mark.parametrize("name", LESSONS)
def test_a_page_shows_an_answer_when_it_is_asked_for(browser, name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "pages"
    if not folder.exists():
        export_pages(ROOT / "notebooks", folder)
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
    page.goto((folder / f"{name}.html").as_uri(), wait_until="domcontentloaded")
    folds = page.locator("details.folded-output")
    assert folds.count() == len([cell for cell in hidden_cells(name) if cell.outputs])
    for number in range(folds.count()):
        assert not folds.nth(number).locator(".jp-OutputArea").first.is_visible()
    folds.first.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"{name}_page.png")
    folds.first.locator("summary").click()
    assert folds.first.locator(".jp-OutputArea").first.is_visible()
    page.screenshot(path=SCREENSHOTS / f"{name}_page_unfolded.png")
    page.close()
