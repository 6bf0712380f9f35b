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


def race(page, **changes):
    """Against the run that is set, with other settings."""
    page.click("#keep")
    for name, value in changes.items():
        page.select_option(f"[name={name}]", value)
    page.click("#race")
    expect(page.locator("#race-result")).to_be_visible()


def expect_both(page, selector, texts):
    expect(page.locator(f"#race-runs {selector}")).to_contain_text(texts)


@pytest.mark.parametrize("width", [390, 1400])
def test_both_runs_of_a_race_are_seen_at_one_moment(opened, width):
    page = opened("#1", viewport={"width": width, "height": 900})
    race(page, scheduler="continuous")
    first, second = page.locator("#race-runs > div").all()
    expect(first).to_contain_text("A: static")
    expect(second).to_contain_text("B: continuous")
    expect(page.locator("#race-clock")).to_contain_text("here they part")
    expect(first.locator("#step-sentence")).to_contain_text("decode of")
    expect(second.locator("#step-sentence")).to_contain_text("prefill of")
    expect_both(page, "#waiting-count", ["32", "30"])
    parted = (page.inner_text("#race-clock"), first.inner_text(), second.inner_text())
    page.click("#race-back")
    expect_both(page, "#step-sentence", 2 * ["decode of 16 sequences, 16 tokens, 33 ms; 183 of 256 blocks free"])
    page.locator("#race-moment").focus()
    page.keyboard.press("Home")
    expect(page.locator("#race-clock")).to_have_text("0.000 s")
    expect_both(page, "#ended-count", ["0", "0"])
    expect(page.locator("#race-back")).to_be_disabled()
    page.keyboard.press("ArrowRight")
    expect_both(page, "> div > p", 2 * ["step 1; the last is"])
    page.keyboard.press("End")
    expect(first).to_contain_text("all requests have ended")
    expect_both(page, "#ended-count", ["48", "48"])
    expect(page.locator("#race-step")).to_be_disabled()
    page.click("#race-first")
    expect(page.locator("#race-clock")).to_have_text(parted[0])
    expect_both(page, "#running-count", ["14", "16"])
    assert (first.inner_text(), second.inner_text()) == parted[1:], "going back shows what going there showed"
    above, below = first.bounding_box(), second.bounding_box()
    assert (below["y"] > above["y"]) == (width == 390) and (below["x"] > above["x"]) == (width == 1400)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.locator("#race-result").screenshot(path=SCREENSHOTS / f"race_{width}.png")


def test_a_race_plays_to_its_end_and_its_page_is_seen_whole(opened):
    page = opened("#1")
    race(page, scheduler="continuous")
    page.fill("#speed", "8")
    page.click("#race-play")
    expect(page.locator("#race-play")).to_have_text("Pause")
    expect(page.locator("#race-runs > div").first).to_contain_text("all requests have ended", timeout=20_000)
    expect(page.locator("#race-play")).to_have_text("Play both")
    frame = page.frame_locator("#race-frame").locator("html")
    assert abs(frame.evaluate("(html) => html.scrollHeight") - page.locator("#race-frame").bounding_box()["height"]) <= 1
    page.set_viewport_size({"width": 420, "height": 800})
    expect(page.locator("#race-frame")).not_to_have_css("height", "0px")
    page.wait_for_function(
        "() => { const frame = document.getElementById('race-frame');"
        " return Math.abs(frame.contentDocument.documentElement.scrollHeight - frame.offsetHeight) <= 1; }"
    )


def test_a_race_whose_python_was_stopped_says_so(opened):
    page = opened("#1")
    race(page, scheduler="continuous")
    set_code(page, f"{BASE}    def schedule(self):\n        while True:\n            pass\n")
    page.click("#step")
    expect(page.locator("#problem")).to_contain_text("Is there an endless loop in it?")
    page.click("#race-step")
    expect(page.locator("#problem")).to_contain_text("The runs are gone, because Python was stopped or another race has begun")


def test_steps_of_a_race_that_was_dropped_are_not_shown_as_those_of_the_last_one(opened):
    page = opened("#1")
    race(page, scheduler="continuous")
    page.evaluate("""() => {
        document.getElementById("race").click();
        const field = document.getElementById("settings").elements.num_requests;
        field.value = 30;
        setTimeout(() => field.dispatchEvent(new Event("change", { bubbles: true })));
    }""")
    expect(page.locator("#race")).to_be_enabled()
    page.click("#race-step")
    expect(page.locator("#problem")).to_contain_text("another race has begun: race again.")


def test_a_run_that_cannot_be_is_not_kept(opened):
    page = opened()
    page.evaluate("() => { document.getElementById('settings').elements.num_gpu_blocks.value = 2; }")
    page.click("#keep")
    expect(page.locator("#problem")).to_contain_text("Blocks: ")
    expect(page.locator("#race")).to_be_disabled()


FROM_SOURCE = """
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from minivllm.entrypoints.playground import exercise
from minivllm.course.lessons import lesson_04, lesson_07, lesson_10
def is_compiled(file):
    if file.endswith(".py"):
        return Path(cache_from_source(file)).exists() and Path(cache_from_source(file)).read_bytes()[:4] == MAGIC_NUMBER
    return file.endswith((".pyc", ".so"))
modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
files = [module.__file__ for module in modules if module.__spec__.origin != "frozen"]
print(len(files) > 250, [file for file in files if not is_compiled(file)])
"""


def test_no_module_is_compiled_by_the_browser(opened):
    page = opened()
    set_code(page, f"{BASE}    pass\n")
    race(page)
    set_code(page, f"{FROM_SOURCE}{BASE}    pass\n")
    expect(page.locator("#printed")).to_have_text("True []")


def test_rows_out_of_sight_follow_when_they_come_into_sight_or_nothing_moves(opened):
    page = opened(viewport={"width": 1400, "height": 1000})
    for name, value in {"num_gpu_blocks": 512, "max_num_seqs": 64, "num_requests": 64, "mean_output_len": 200}.items():
        page.fill(f"[name={name}]", str(value))
    page.select_option("[name=arrivals]", "at-once")
    page.select_option("[name=distribution]", "uniform")
    page.fill("#speed", "5")
    page.click("#play")
    expect(page.locator("#batch-rows tr")).to_have_count(64)
    last = page.locator("#batch-rows tr").last
    expect(last).to_have_class("sequence late")
    page.evaluate("() => document.getElementById('batch-frame').scrollTo(0, 1e6)")
    expect(last).to_have_class("sequence")
    expect(page.locator("#batch-rows tr").first).to_have_class("sequence late")
    page.click("#play")
    expect(page.locator("#batch-rows tr.late")).to_have_count(0)
    generated = [int(text.split(" + ")[1]) for text in page.locator(".tokens .count").all_inner_texts()]
    assert len(generated) == 64 and len(set(generated)) == 1, "all have had as many steps"


HOSTILE = """<script>parent.document.title = "changed"</script><img src="x" onerror="parent.document.title = 'changed'">
<meta http-equiv="refresh" content="0; url=exercise.html"><svg onload="parent.document.title = 'changed'"></svg>
<iframe srcdoc="<script>parent.parent.document.title = 'changed'</script>"></iframe><a href="javascript:parent.document.title = 'changed'">here</a>
<style>html { height: 99999px }</style>"""


def test_no_script_runs_in_a_page_that_the_readers_code_has_changed(opened):
    page = opened()
    patch = f"from minivllm.bench import trace_diff\n\ntrace_diff.to_page = lambda *_: {HOSTILE!r}\n"
    set_code(page, patch + f"{BASE}    pass\n")
    title = page.title()
    race(page)
    page.frame_locator("#race-frame").get_by_text("here").click()
    page.wait_for_timeout(300)
    assert page.title() == title
    assert [frame.url for frame in page.frames if frame.url.startswith("http")] == [page.url]
    assert page.locator("#race-frame").bounding_box()["height"] <= 4000


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
