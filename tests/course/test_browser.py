"""The notebooks in a real browser: lessons run, and their widgets answer. What is folded stays so until the learner asks, the last cell
leads to the failed checks, a term to the glossary.

Skipped where there is no Chromium (Debian: `apt-get install chromium`; or name one in MINIVLLM_CHROMIUM). Screenshots are left in
`out/browser/`.
"""

from __future__ import annotations

import contextlib
import shutil
import time

import nbformat
import pytest
from browser import (
    PATIENCE,
    ROOT,
    needs_chromium,
    open_browser,
    open_page,
    picture,
    run_all_cells,
    screenshot,
    serve,
    sync_api,
    wait_for,
)
from course_notebooks import KERNEL, of_code, solved_notebook, write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minivllm.course.exercises import make_exercise
from minivllm.course.folds import cover_answers, is_folded
from minivllm.course.last_cell import renew_last_cell

pytestmark = [needs_chromium, pytest.mark.slow]
LESSONS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
WITH_WIDGETS = [name for name in LESSONS if "jupyter.widget-view+json" in (ROOT / f"notebooks/{name}.ipynb").read_text("utf-8")]
SHOWN = ("00_start_here", "07_the_scheduler", "10_prefix_caching_and_chunked_prefill")
"""Lessons whose widgets are tried by day."""
UNTIL_RUN = 180
"""Seconds until a lesson must have run, on a busy machine."""

WIDGETS = of_code(
    "from minivllm.simulation.what_if import what_if\n"
    "from minivllm.viz.knobs import knobs\n"
    "from minivllm.viz.player import play\n"
    "trace = what_if(num_requests=12, num_gpu_blocks=48)",
    "play(trace)",
    "knobs(what_if)",
    "from minivllm.engine.trace import EngineTrace\nplay(EngineTrace(trace.config, trace.steps[:1], trace.requests))",
)
PLAYER, KNOBS, ONE_STEP = 1, 2, 3
"""Numbers of its cells."""


def long_exercise():
    """An untouched exercise, long enough that its last cell and its checks are not seen together."""
    solution = solved_notebook()
    for number in range(20):
        text = new_markdown_cell("Some text.\n\n" + "- a line\n" * 5, id=f"text-{number}")
        text.metadata["nbgrader"] = solution.cells[0].metadata.nbgrader | {"grade_id": text.id}
        solution.cells.append(text)
    renew_last_cell(solution)
    return make_exercise(solution)


def folded_lesson():
    """A lesson with an answer that is folded."""
    cell = new_code_cell("print('the ' + 'answer')", id="answer", outputs=[new_output("stream", text="the answer\n")])
    cell.metadata["jupyter"] = {"outputs_hidden": True}
    notebook = new_notebook(cells=[new_markdown_cell("> **Predict.** What?"), cell], metadata={"kernelspec": KERNEL})
    cover_answers(notebook)
    return notebook


def cut_after_last_widget(name):
    """A lesson without what is left to nbval."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    shows = ["application/vnd.jupyter.widget-view+json" in str(cell.get("outputs")) for cell in notebook.cells]
    del notebook.cells[len(shows) - shows[::-1].index(True) :]
    return notebook


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory):
    """The address of a JupyterLab with the lessons, and with notebooks of these tests."""
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", folder / "root", ignore=shutil.ignore_patterns(".*"))
    made = {"99 adding": long_exercise(), "98_folded": folded_lesson(), "widgets": WIDGETS}
    for name, notebook in {**made, **{f"cut_{name}": cut_after_last_widget(name) for name in WITH_WIDGETS}}.items():
        write(folder / "root", notebook, name)
    with serve(folder) as address:
        yield address


def visit(page, jupyterlab, name):
    page.goto(f"{jupyterlab}/lab/tree/{name}.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    return page


@pytest.fixture
def open_notebook(browser, jupyterlab):
    page = open_page(browser)
    yield lambda name: visit(page, jupyterlab, name)
    page.close()


def output(page, cell):
    return page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")


def is_seen(page, element):
    box, height = element.bounding_box(), page.viewport_size["height"]
    return box is not None and 0 <= box["y"] < height - 50


def expect_no_errors(page):
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts() == []
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0


# What is folded


def hidden_cells(name):
    return [cell for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells if is_folded(cell)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != LESSONS[0])) for name in LESSONS])
def test_jupyterlab_opens_a_lesson_with_its_answers_folded(open_notebook, name):
    page = open_notebook(name)
    folded = hidden_cells(name)
    assert folded
    placeholders = page.locator(".jp-Notebook .jp-OutputPlaceholder")
    placeholders.nth(len(folded) - 1).wait_for()
    assert placeholders.count() == len(folded)
    assert "".join(placeholders.all_inner_texts()).strip() == ""
    placeholders.first.scroll_into_view_if_needed()
    screenshot(page, f"{name}_folded")


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


# Where links lead


def test_run_all_ends_at_links_that_lead_to_the_failed_checks(open_notebook):
    page = open_notebook("99 adding")
    run_all_cells(page)
    results = page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-OutputArea-output")
    results.get_by_text("These checks failed").wait_for()
    assert results.get_by_text("0 of 5 points.").is_visible()
    check = page.locator(".jp-Notebook .jp-CodeCell").nth(4)
    results.scroll_into_view_if_needed()
    assert not is_seen(page, check)
    screenshot(page, "results")
    results.get_by_role("link", name="a number is doubled, twice").click()
    wait_for(page, lambda: is_seen(page, check))
    screenshot(page, "results_followed")
    assert "a number is doubled, twice" in check.inner_text()


@pytest.mark.long
def test_a_link_to_the_glossary_opens_it_at_the_term(open_notebook):
    page = open_notebook("00_start_here")
    page.locator(".jp-Notebook a", has_text="kernel").first.click()
    term = page.locator(".jp-MarkdownViewer p", has_text="kernel:").first
    term.wait_for()
    wait_for(page, lambda: is_seen(page, term))
    screenshot(page, "glossary")
    assert not is_seen(page, page.locator(".jp-MarkdownViewer h1").first)


# Widgets


@pytest.fixture(scope="module")
def page(browser, jupyterlab):
    """The widgets' notebook, all cells run."""
    page = visit(open_page(browser), jupyterlab, "widgets")
    run_all_cells(page)
    for cell in (PLAYER, KNOBS, ONE_STEP):
        output(page, cell).locator("img").wait_for()
    yield page
    with contextlib.suppress(sync_api.Error):  # what went wrong before it is what must be told
        screenshot(page, "last")
    page.close()


def wait_for_another(page, cell, old):
    """The picture of a cell when it is no longer the old one."""
    return wait_for(page, lambda: (new := picture(output(page, cell))) != old and new)


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


def shown_step(page):
    return int(output(page, PLAYER).locator(".widget-readout").inner_text())


def knob(page, name):
    """The control of a knob, with its label."""
    return output(page, KNOBS).locator(".widget-gridbox > .widget-hbox", has_text=name)


@pytest.mark.long
class TestWidgets:
    def test_slider_and_buttons_go_one_step_back_and_forward(self, page):
        handle = output(page, PLAYER).locator(".noUi-handle")
        back, forward = (output(page, PLAYER).locator(f"button[title='one step {way}']") for way in ("back", "forward"))
        handle.press("Home")
        first = wait_until_still(page, PLAYER)
        assert first.startswith(b"\x89PNG")
        handle.press("ArrowRight")
        second = wait_for_another(page, PLAYER, first)
        for go, before, after, step in (
            (lambda: handle.press("ArrowLeft"), second, first, 0),
            (forward.click, first, second, 1),
            (back.click, second, first, 0),
        ):
            assert shown_step(page) == 1 - step
            go()
            assert wait_for_another(page, PLAYER, before) == after
            assert shown_step(page) == step

    def test_the_slider_can_be_dragged(self, page):
        old = picture(output(page, PLAYER))
        handle, track = output(page, PLAYER).locator(".noUi-handle"), output(page, PLAYER).locator(".noUi-base").bounding_box()
        handle.hover()
        page.mouse.down()
        page.mouse.move(track["x"] + 0.6 * track["width"], track["y"], steps=10)
        page.mouse.up()
        wait_for_another(page, PLAYER, old)
        assert shown_step(page) > 20
        wait_until_still(page, PLAYER)
        screenshot(output(page, PLAYER), "player")

    def test_it_plays_and_pauses(self, page):
        start, old = shown_step(page), picture(output(page, PLAYER))
        output(page, PLAYER).locator(".widget-play button").first.click()
        for _ in range(3):
            old = wait_for_another(page, PLAYER, old)
        output(page, PLAYER).locator(".widget-play button").first.click()
        still = wait_until_still(page, PLAYER)
        assert shown_step(page) >= start + 3
        page.wait_for_timeout(800)  # more than the time between two steps
        assert picture(output(page, PLAYER)) == still

    def test_a_knob_runs_again(self, page):
        knob(page, "scheduler").get_by_text("continuous").click()
        old = wait_until_still(page, KNOBS)
        knob(page, "max_num_seqs").locator(".noUi-handle").press("ArrowLeft")
        new = wait_for_another(page, KNOBS, old)
        knob(page, "scheduler").get_by_text("static").click()
        wait_for_another(page, KNOBS, new)
        screenshot(output(page, KNOBS), "knobs")

    def test_what_cannot_be_run_is_told_and_the_picture_stays(self, page):
        old = wait_until_still(page, KNOBS)
        handle = knob(page, "num_gpu_blocks").locator(".noUi-handle")
        reason = output(page, KNOBS).get_by_text("the whole cache holds only")
        handle.press("Home")
        reason.wait_for()
        assert picture(output(page, KNOBS)) == old
        screenshot(output(page, KNOBS), "knobs_error")
        handle.press("End")
        wait_for_another(page, KNOBS, old)
        reason.wait_for(state="detached")

    def test_a_trace_of_one_step_is_a_picture(self, page):
        assert picture(output(page, ONE_STEP)).startswith(b"\x89PNG")
        assert not output(page, ONE_STEP).locator(".noUi-handle").count()
        screenshot(output(page, ONE_STEP), "one_step")

    def test_no_cell_failed(self, page):
        expect_no_errors(page)


@pytest.fixture(scope="module")
def lessons_page(browser):
    page = open_page(browser, height=1100)
    page.set_default_timeout(UNTIL_RUN * 1000)
    yield page
    page.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "lesson", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHOWN)) for name in WITH_WIDGETS]
)
def test_a_lesson_runs_and_its_widgets_answer(lessons_page, jupyterlab, lesson):
    page = visit(lessons_page, jupyterlab, f"cut_{lesson}")
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    page.get_by_text("Clear Outputs of All Cells", exact=True).click()
    run_all_cells(page, UNTIL_RUN)
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt").all_inner_texts()
    numbers = [prompt for prompt in prompts if prompt.strip()]
    assert numbers == [f"[{number}]:" for number in range(1, len(numbers) + 1)]
    expect_no_errors(page)
    boxes = page.locator(".jp-OutputArea-output").filter(has=page.locator(".noUi-handle"))
    boxes.first.wait_for()  # a widget is drawn some time after its cell has run
    for number, box in enumerate(boxes.all()):
        old = picture(box)
        box.locator(".noUi-handle").first.press("ArrowRight")
        wait_for(page, lambda: picture(box) != old)  # noqa: B023
        with contextlib.suppress(sync_api.Error):
            box.scroll_into_view_if_needed()
        screenshot(page, f"{lesson}_{number}")
