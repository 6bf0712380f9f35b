"""The playground in a real browser, offline: the engine steps in a worker, the reader edits it, and an endless loop ends.

Skipped where there is no Chromium, and where `make book` has not been run: it fetches Python for the browser. Screenshots are left in `out/browser/`.
"""

from __future__ import annotations

import re
import threading

import pytest
from browser import ROOT, SCREENSHOTS, needs_chromium, open_browser, sync_api
from test_playground import BASE, LATE_FOR_3

from minivllm.entrypoints.playground.server import make_server

SITE = ROOT / "out/book/html/playground"
AXE = ROOT / "book/node_modules/axe-core/axe.min.js"
pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "files.json").exists(), reason="there is no playground: `make book`"),
]
expect = sync_api.expect


@pytest.fixture(scope="module")
def address():
    with make_server(SITE, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser, address):
    """Opens a page of the playground, which asks nobody but its server and raises nothing."""
    pages, faults = [], []

    def open_page(fragment="", **options):
        page = browser.new_page(**options)
        page.on(
            "request",
            lambda request: faults.append(request.url) if not request.url.startswith((address[:17], "data:", "blob:")) else None,
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address + fragment)
        expect(page.locator("body[data-ready]")).to_be_attached()
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not faults


def set_code(page, code):
    page.evaluate("() => document.getElementById('code').open = true")
    editor = page.locator("#editor .cm-content")
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(code)


def test_it_steps_plays_and_shows_where_it_is(opened):
    page = opened(viewport={"width": 1400, "height": 1000})
    expect(page.locator("#preset-text")).to_contain_text("Lesson 07")
    page.click("#step")
    expect(page.locator("#clock")).to_contain_text("1 step,")
    expect(page.locator("#step-sentence")).to_contain_text("prefill of 1 sequence")
    expect(page.locator("#batch-rows tr")).to_have_count(1)
    page.fill("#speed", "8")
    page.click("#play")
    expect(page.locator("#clock")).to_contain_text("all requests have ended")
    expect(page.locator("#ended-count")).to_have_text("64")
    expect(page.locator("#problem")).to_be_hidden()
    page.select_option("#preset", "the convoy")
    expect(page.locator("#clock")).to_contain_text("0 steps")
    page.click("#step")
    expect(page.locator("#running-count")).to_have_text("16")
    expect(page.locator("#waiting-count")).to_have_text("32")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "playground.png")


def test_a_number_out_of_range_is_told(opened):
    page = opened()
    page.fill("[name=num_gpu_blocks]", "2")
    page.press("[name=num_gpu_blocks]", "Tab")
    expect(page.locator("#problem")).to_contain_text("Blocks:")
    page.fill("[name=num_gpu_blocks]", "64")
    page.press("[name=num_gpu_blocks]", "Tab")
    expect(page.locator("#problem")).to_be_hidden()


def test_who_is_starved_by_the_readers_scheduler_is_named(opened):
    page = opened()
    set_code(page, LATE_FOR_3)
    page.fill("#speed", "8")
    page.click("#play")
    expect(page.locator("#problem")).to_contain_text("Request #3 has waited for its first token while")


def test_an_endless_loop_is_stopped_and_mended_code_runs(opened):
    page = opened()
    set_code(page, f"{BASE}    def schedule(self):\n        while True:\n            pass\n")
    page.click("#step")
    expect(page.locator("#problem")).to_contain_text("Is there an endless loop in it?")
    set_code(page, f"{BASE}    pass\n")
    expect(page.locator("#problem")).to_be_hidden()
    page.click("#step")
    expect(page.locator("#clock")).to_contain_text("1 step,")


def test_a_link_has_the_settings_and_the_code(opened):
    page = opened("#2")
    expect(page.locator("#preset")).to_have_value("a cache that is too small")
    set_code(page, "x = 'ü'")
    page.fill("[name=seed]", "7")
    page.press("[name=seed]", "Tab")
    page.click("#share")
    page.wait_for_url(re.compile("#.{20}"))
    other = opened(page.evaluate("() => location.hash"))
    assert other.input_value("[name=seed]") == "7"
    assert other.input_value("[name=num_gpu_blocks]") == "40"
    expect(other.locator("#preset")).to_have_value("settings of your own")
    expect(other.locator("#editor .cm-content")).to_have_text("x = 'ü'")
    other.click("#step")
    expect(other.locator("#problem")).to_contain_text("there is nothing to run")


@pytest.mark.parametrize("width", [390, 1024])
def test_nothing_is_wider_than_the_window(opened, width):
    page = opened(viewport={"width": width, "height": 800}, color_scheme="dark")
    page.click("#step")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.screenshot(path=SCREENSHOTS / f"playground_{width}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(opened, address, scheme):
    """With the editor and a race open; and on an exercise."""
    page = opened(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
    set_code(page, f"{BASE}    pass\n")
    page.click("#keep")
    page.click("#race")
    expect(page.locator("#race-result")).to_be_visible()
    race = page.frame_locator("#race-frame").locator("table.diff")
    expect(race).to_contain_text("A: your scheduler")
    page.screenshot(path=SCREENSHOTS / f"race_{scheme}.png", full_page=True)
    faults = []
    for _ in range(2):
        page.evaluate(AXE.read_text())  # the page allows no script of others
        for violation in page.evaluate("async () => (await axe.run({ iframes: false })).violations"):
            if violation["impact"] in ("serious", "critical"):
                faults.append((page.url, violation["id"], violation["nodes"][0]["html"][:200]))
        page.goto(address.replace("index.html", "exercise.html#07"))
        expect(page.locator("#points")).to_contain_text("0 of 19")
        page.screenshot(path=SCREENSHOTS / f"exercise_{scheme}.png")
    assert not faults


def test_code_of_a_link_waits_until_it_is_asked_for(opened):
    page = opened()
    set_code(page, f"{BASE}    print('I ran')\n")
    expect(page.locator("#printed")).to_have_text("I ran")
    page.click("#share")
    page.wait_for_url(re.compile("#.{20}"))
    other = opened(page.evaluate("() => location.hash"))
    expect(other.locator("#news")).to_contain_text("This link brings code of its own.")
    expect(other.locator("#printed")).to_be_hidden()
    other.click("#step")
    expect(other.locator("#printed")).to_have_text("I ran")


@pytest.mark.parametrize("fragment", ["#%%%", "#AAAA", "#abc"])
def test_a_damaged_link_is_told(opened, fragment):
    expect(opened(fragment).locator("#problem")).to_have_text("The link is damaged, so the settings are the usual ones.")


def test_code_that_is_mended_before_its_endless_loop_is_stopped_runs(opened):
    page = opened()
    set_code(page, f"{BASE}    def schedule(self):\n        while True:\n            pass\n")
    page.click("#step")
    set_code(page, f"{BASE}    print('mended')\n")
    expect(page.locator("#printed")).to_have_text("mended")
    page.click("#step")
    expect(page.locator("#clock")).to_contain_text("1 step,")
    expect(page.locator("#problem")).to_be_hidden()
