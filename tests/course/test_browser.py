"""The player and the knobs in JupyterLab, in a real browser: what is clicked changes what is seen.

Skipped where there is no Chromium (Debian: `apt-get install chromium`; or name one in MINIVLLM_CHROMIUM). Screenshots are left in
`out/browser/`.
"""

from __future__ import annotations

import contextlib
import time

import nbformat
import pytest
from browser import PATIENCE, SCREENSHOTS, launch, needs_chromium, open_page, picture, run_all_cells, serve, sync_api

CELLS = (
    "from minivllm.simulation.what_if import what_if\n"
    "from minivllm.viz.knobs import knobs\n"
    "from minivllm.viz.player import play\n"
    "trace = what_if(num_requests=12, num_gpu_blocks=48)",
    "play(trace)",
    "knobs(what_if)",
    "from minivllm.engine.trace import EngineTrace\nplay(EngineTrace(trace.config, trace.steps[:1], trace.requests))",
)

PLAYER, KNOBS, ONE_STEP = 1, 2, 3
"""Numbers of the cells."""

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a JupyterLab with one notebook."""
    folder = tmp_path_factory.mktemp("jupyter")
    root = folder / "root"
    root.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, root / "widgets.ipynb")
    with serve(folder) as address:
        yield address


@pytest.fixture(scope="module")
def page(server):
    """The notebook in a browser, all cells run."""
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        page = open_page(browser)
        try:
            page.goto(f"{server}/lab/tree/widgets.ipynb?reset")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            run_all_cells(page)
            for cell in (PLAYER, KNOBS, ONE_STEP):
                output(page, cell).locator("img").wait_for()
            yield page
        finally:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(sync_api.Error):  # what went wrong before it is what must be told
                page.screenshot(path=SCREENSHOTS / "last.png")
            browser.close()


def output(page, cell):
    return page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")


def wait_for_another(page, cell, old):
    """The picture of a cell when it is no longer the old one."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (new := picture(output(page, cell))) != old:
            return new
        page.wait_for_timeout(50)
    pytest.fail(f"The picture did not change within {PATIENCE} s.")


def screenshot(page, cell, name):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    output(page, cell).screenshot(path=SCREENSHOTS / f"{name}.png")


def shown_step(page):
    return int(output(page, PLAYER).locator(".widget-readout").inner_text())


def test_the_slider_moves_the_picture(page):
    handle = output(page, PLAYER).locator(".noUi-handle")
    handle.press("Home")
    first = wait_until_still(page, PLAYER)
    assert first.startswith(b"\x89PNG")
    handle.press("ArrowRight")
    second = wait_for_another(page, PLAYER, first)
    assert shown_step(page) == 1
    handle.press("ArrowLeft")
    assert wait_for_another(page, PLAYER, second) == first
    assert shown_step(page) == 0


def test_the_slider_can_be_dragged(page):
    old = picture(output(page, PLAYER))
    handle, track = output(page, PLAYER).locator(".noUi-handle"), output(page, PLAYER).locator(".noUi-base").bounding_box()
    handle.hover()
    page.mouse.down()
    page.mouse.move(track["x"] + 0.6 * track["width"], track["y"], steps=10)
    page.mouse.up()
    wait_for_another(page, PLAYER, old)
    assert shown_step(page) > 20
    wait_until_still(page, PLAYER)
    screenshot(page, PLAYER, "player")


def test_it_plays_and_pauses(page):
    start, old = shown_step(page), picture(output(page, PLAYER))
    output(page, PLAYER).locator(".widget-play button").first.click()
    for _ in range(3):
        old = wait_for_another(page, PLAYER, old)
    output(page, PLAYER).locator(".widget-play button").first.click()
    still = wait_until_still(page, PLAYER)
    assert shown_step(page) >= start + 3
    page.wait_for_timeout(800)  # more than the time between two steps
    assert picture(output(page, PLAYER)) == still


def test_it_goes_one_step_back_and_forward(page):
    still = picture(output(page, PLAYER))
    output(page, PLAYER).locator(".noUi-handle").press("ArrowRight")
    old = wait_for_another(page, PLAYER, still)
    start = shown_step(page)
    output(page, PLAYER).locator("button[title='one step back']").click()
    before = wait_for_another(page, PLAYER, old)
    assert shown_step(page) == start - 1
    output(page, PLAYER).locator("button[title='one step forward']").click()
    assert wait_for_another(page, PLAYER, before) == old
    assert shown_step(page) == start


def test_a_knob_runs_again(page):
    knob(page, "scheduler").get_by_text("continuous").click()
    old = wait_until_still(page, KNOBS)
    knob(page, "max_num_seqs").locator(".noUi-handle").press("ArrowLeft")
    new = wait_for_another(page, KNOBS, old)
    knob(page, "scheduler").get_by_text("static").click()
    wait_for_another(page, KNOBS, new)
    screenshot(page, KNOBS, "knobs")


def test_what_cannot_be_run_is_told_and_the_picture_stays(page):
    old = wait_until_still(page, KNOBS)
    handle = knob(page, "num_gpu_blocks").locator(".noUi-handle")
    handle.press("Home")
    output(page, KNOBS).get_by_text("the whole cache holds only").wait_for()
    assert picture(output(page, KNOBS)) == old
    screenshot(page, KNOBS, "knobs_error")
    handle.press("End")
    wait_for_another(page, KNOBS, old)
    output(page, KNOBS).get_by_text("the whole cache holds only").wait_for(state="detached")


def test_a_trace_of_one_step_is_a_picture(page):
    assert picture(output(page, ONE_STEP)).startswith(b"\x89PNG")
    assert not output(page, ONE_STEP).locator(".noUi-handle").count()
    screenshot(page, ONE_STEP, "one_step")


def test_no_cell_failed(page):
    assert not page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count()
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count()


def knob(page, name):
    """The control of a knob, with its label."""
    return output(page, KNOBS).locator(".widget-gridbox > .widget-hbox", has_text=name)


def wait_until_still(page, cell):
    """The picture of a cell when it has not changed for a while."""
    old, since = picture(output(page, cell)), time.monotonic()
    end = since + PATIENCE
    while time.monotonic() < end:
        page.wait_for_timeout(50)
        if (new := picture(output(page, cell))) != old:
            old, since = new, time.monotonic()
        elif time.monotonic() > since + 1.5:
            return old
    pytest.fail(f"The picture did not come to rest within {PATIENCE} s.")
