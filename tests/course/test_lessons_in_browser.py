"""The lessons in JupyterLab, in a real browser: they run, and their widgets answer. What comes after a lesson's last widget is left to nbval.

Skipped where there is no Chromium. Screenshots are left in `out/browser/`.
"""

from __future__ import annotations

import contextlib
import shutil
import time

import nbformat
import pytest
from browser import ROOT, SCREENSHOTS, launch, needs_chromium, open_page, picture, run_all_cells, serve, sync_api

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.long]
LESSONS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
SHOWN = "10"
"""The lesson that is run in a browser in any case: it has most kinds of widget."""
LESSONS = [pytest.param(name, marks=() if name.startswith(SHOWN) else pytest.mark.long, id=name) for name in LESSONS]
PATIENCE = 180
"""Seconds until a lesson must have run, on a busy machine."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Opens lessons in one browser."""
    folder = tmp_path_factory.mktemp("lessons")
    shutil.copytree(ROOT / "notebooks", folder / "root", ignore=shutil.ignore_patterns(".*"))
    for path in (folder / "root").glob("*.ipynb"):
        cut_after_last_widget(path)
    with serve(folder) as address, sync_api.sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        page = open_page(browser, height=1100)
        page.set_default_timeout(PATIENCE * 1000)

        def visit(lesson):
            page.goto(f"{address}/lab/tree/{lesson}.ipynb?reset")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            clear_and_run(page)
            return page

        try:
            yield visit
        finally:
            browser.close()


def cut_after_last_widget(path):
    notebook = nbformat.read(path, as_version=4)
    shows = ["application/vnd.jupyter.widget-view+json" in str(cell.get("outputs")) for cell in notebook.cells]
    del notebook.cells[len(shows) - shows[::-1].index(True) :]
    nbformat.write(notebook, path)


def clear_and_run(page):
    """Clear what is stored and run all cells: in their order, and with nothing on standard error."""
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    page.get_by_text("Clear Outputs of All Cells", exact=True).click()
    run_all_cells(page, PATIENCE)
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt")
    numbers = [prompt for prompt in prompts.all_inner_texts() if prompt.strip()]
    assert numbers == [f"[{number}]:" for number in range(1, len(numbers) + 1)]
    texts = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
    assert texts == []
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_and_its_widgets_answer(pages, lesson):
    page = pages(lesson)
    boxes = page.locator(".jp-OutputArea-output").filter(has=page.locator(".noUi-handle"))
    assert boxes.count() >= 1, "it has no widget"
    for number in range(boxes.count()):
        box = boxes.nth(number)
        handle = box.locator(".noUi-handle").first
        old = picture(box)
        handle.press("ArrowRight")
        end = time.monotonic() + 30
        while (new := picture(box)) == old and time.monotonic() < end:
            page.wait_for_timeout(50)
        assert new != old, "the slider moved, and the picture did not change"
        with contextlib.suppress(sync_api.Error):
            box.scroll_into_view_if_needed()
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{lesson}_{number}.png")
