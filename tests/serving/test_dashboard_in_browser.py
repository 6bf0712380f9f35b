"""The live page in a real browser, over an engine that runs: it moves, it answers, and it asks nobody but its server.

Skipped where there is no Chromium (see test_browser.py). Screenshots, light and dark, wide and narrow, are left in `out/browser/`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
import urllib.request

import pytest
import uvicorn
from browser import PATIENCE, SCREENSHOTS, needs_chromium, open_browser, sync_api
from test_serving import KEY, ServeProcess
from watched_engine import MODEL, make_app, make_engine

pytestmark = [needs_chromium, pytest.mark.slow]
expect = sync_api.expect

WIDE = {"width": 1400, "height": 900}
NARROW = {"width": 420, "height": 900}
ENLARGED = {"width": 700, "height": 450}
"""What a window of 1400 x 900 is to the page at 200 %."""


class Server:
    """The page's app in a thread, and its engine, which can be ended and replaced."""

    def __init__(self):
        self.engine = self.new_engine()
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(make_app(lambda: self.engine), port=0, log_level="warning", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.uvicorn.run)
        self.thread.start()
        end = time.monotonic() + PATIENCE
        while not self.uvicorn.started and time.monotonic() < end:
            time.sleep(0.02)
        self.address = f"http://127.0.0.1:{self.uvicorn.servers[0].sockets[0].getsockname()[1]}"

    def new_engine(self):
        return make_engine(num_blocks=256, seconds=0.02, max_num_seqs=64, enable_prefix_caching=True)

    def restart(self):
        self.engine = self.new_engine()

    def close(self):
        self.uvicorn.should_exit = True
        self.engine.shutdown()
        self.thread.join()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser, server):
    """Open the page. All that is not local is blocked; that it was asked for, or that anything complained, fails the test."""
    complaints, contexts = [], []

    def guard(route):
        if route.request.url.startswith(f"{server.address}/"):
            route.continue_()
        else:
            complaints.append(f"asked for {route.request.url}")
            route.abort()

    def open_page(viewport=WIDE, color_scheme="light"):
        context = browser.new_context(viewport=viewport, color_scheme=color_scheme)
        context.set_default_timeout(PATIENCE * 1000)
        contexts.append(context)
        context.route("**/*", guard)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(server.address)
        expect(page.locator("#model")).to_have_text(MODEL)
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        with contextlib.suppress(sync_api.Error):
            context.close()
    until(lambda: server.engine.num_unfinished_requests() == 0)
    assert complaints == []


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def send(page, prompt, button="Send", max_tokens=64, kind="chat"):
    page.get_by_role("textbox", name="Prompt").fill(prompt)
    page.get_by_role("spinbutton", name="Max tokens").fill(str(max_tokens))
    page.get_by_role("radio", name=kind).check()
    page.get_by_role("button", name=button, exact=True).click()


def map_picture(page):
    return page.locator("#map-canvas").evaluate("canvas => canvas.toDataURL()")


def screenshot(page, name):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=page.viewport_size == NARROW)


def test_before_the_first_request_it_says_what_to_do(open_page):
    page = open_page()
    expect(page.locator("#status")).to_contain_text("idle")
    expect(page.locator("#batch-empty")).to_contain_text("Press Send")
    expect(page.locator("#map-detail")).to_contain_text("0 of 256 blocks in use")
    expect(page.locator("#facts")).to_contain_text("256 blocks of 16 tokens")
    screenshot(page, "dashboard_empty")


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_box_streams_an_answer_that_has_the_colour_of_its_blocks(open_page, kind):
    page = open_page()
    send(page, "a lighthouse keeper", kind=kind)
    answer = page.locator(".answer").first
    expect(answer.locator(".answered")).to_contain_text("word")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    begun = len(answer.locator(".answered").inner_text())
    expect(answer.locator(".note")).to_contain_text("ended: length")
    assert answer.locator(".answered").inner_text().count("word") == 64 > begun // 5
    expect(answer.locator(".chip")).to_have_text(re.compile(r"#\d+"))
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.locator("#running-count")).to_have_text("0")


@pytest.mark.long
def test_eight_at_once_share_the_steps(open_page):
    page = open_page()
    before = map_picture(page)
    send(page, "tell me a story", "Send 8 at once", max_tokens=200)
    expect(page.locator("#running-count")).to_have_text("8")
    expect(page.locator(".sequence")).to_have_count(8)
    expect(page.locator("#step-sentence")).to_contain_text("decode of 8 sequences, 8 tokens")
    expect(page.locator("figure").first.locator("output")).to_have_text(re.compile("[1-9]"))
    during = map_picture(page)
    assert during != before
    until(lambda: map_picture(page) != during)
    expect(page.locator("#prompt-status")).to_have_text("All 8 answers are complete.")
    expect(page.locator("#batch-empty")).to_be_visible()
    expect(page.locator("#ended-count")).to_have_text("8")
    expect(page.locator("#map-detail")).to_contain_text("0 of 256 blocks in use")


def test_stop_gives_up_what_runs(open_page, server):
    page = open_page()
    send(page, "tell me a story", "Send 8 at once", max_tokens=2000)
    expect(page.locator("#running-count")).to_have_text("8")
    page.get_by_role("button", name="Stop").click()
    until(lambda: server.engine.num_unfinished_requests() == 0)
    expect(page.locator(".answer .note")).to_have_text(["Stopped."] * 8)
    expect(page.locator("#status")).to_contain_text("idle")


def test_what_others_write_stays_text(open_page):
    page = open_page()
    send(page, "<img src=x onerror=alert(1)> <b>bold</b>", max_tokens=1)
    expect(page.locator(".answer .asked").first).to_contain_text("<img src=x onerror=alert(1)> <b>bold</b>")
    assert page.locator(".answer img, .answer b").count() == 0


def test_the_first_token_is_timed_from_the_request_not_from_what_the_page_asks_before_it(open_page):
    page = open_page()

    def answer_late(route):
        time.sleep(2)
        route.continue_()

    page.route("**/v1/models", answer_late)
    send(page, "are you there", max_tokens=2)
    note = page.locator(".answer .note")
    expect(note).to_contain_text("ended: length")
    assert re.match(r"first token after \d+ ms, all after \d+ ms; ended", note.inner_text()), "and not after seconds"


def test_an_error_is_shown_as_its_sentence(open_page):
    page = open_page()
    send(page, "wrong")
    expect(page.locator(".answer .note")).to_have_text("The prompt is <b>wrong</b>: say something else.")
    expect(page.locator("#prompt-status")).to_have_text("The prompt is <b>wrong</b>: say something else.")
    open_page.complaints[:] = [text for text in open_page.complaints if "400 (Bad Request)" not in text]


def test_a_block_says_what_it_holds_to_the_pointer_and_to_the_keyboard(open_page):
    page = open_page()
    send(page, "one two three", max_tokens=400, kind="completion")
    expect(page.locator(".sequence")).to_have_count(1)
    page.locator(".sequence .block").first.wait_for()
    block = int(page.locator(".sequence .block").first.inner_text())
    page.locator("#map-canvas").focus()
    page.keyboard.press("Home")
    expect(page.locator("#map-say")).to_contain_text("Block 0:")
    for _ in range(block):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#map-say")).to_have_text(re.compile(rf"Block {block}: request #\d+, tokens 0 to \d+"))
    expect(page.locator("#map-cursor")).to_be_visible()
    page.locator("#map-canvas").hover(position={"x": 60, "y": 8})
    expect(page.locator("#map-detail")).to_contain_text("Block 0:")
    page.get_by_role("button", name="Stop").click()


def test_a_paused_picture_stands_still_while_the_engine_goes_on(open_page, server):
    page = open_page()
    send(page, "tell me a story", "Send 8 at once", max_tokens=2000)
    expect(page.locator(".sequence")).to_have_count(8)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status")).to_contain_text("paused")
    page.wait_for_timeout(100)
    still, sentence, steps = map_picture(page), page.locator(".tokens").first.inner_text(), server.engine.stats.num_steps
    until(lambda: server.engine.stats.num_steps > steps + 20)
    assert (map_picture(page), page.locator(".tokens").first.inner_text()) == (still, sentence)
    page.locator(".sequence").first.hover()
    until(lambda: map_picture(page) != still)
    page.mouse.move(5, 5)
    until(lambda: map_picture(page) == still)
    numbers = page.locator(".sequence .chip").all_inner_texts()
    resume = page.get_by_role("button", name="Resume")
    assert resume.get_attribute("aria-pressed") is None, "its words say what it does: it is not 'Resume, pressed'"
    resume.click()
    until(lambda: map_picture(page) != still)
    assert page.locator(".sequence .chip").all_inner_texts() == numbers, "they keep their numbers and colours"
    page.get_by_role("button", name="Stop").click()


CURVES = "() => [...document.querySelectorAll('#charts canvas')].map((canvas) => canvas.toDataURL())"


@pytest.mark.long
def test_curves_stand_still_while_there_is_no_server_to_follow(open_page):
    page = open_page()
    send(page, "are you there", max_tokens=20)
    expect(page.locator(".answer .note")).to_contain_text("ended: length")
    page.route("**/live?*", lambda route: route.abort())
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#status")).to_contain_text("The server cannot be reached: is it still running? Trying again in")
    page.wait_for_timeout(700)  # the next frame is half a second away at most
    still = page.evaluate(CURVES)
    page.wait_for_timeout(1200)
    assert page.evaluate(CURVES) == still
    blank = page.evaluate("() => { const other = document.createElement('canvas'); return other.toDataURL(); }")
    page.set_viewport_size(NARROW)
    page.wait_for_timeout(300)
    resized = page.evaluate(CURVES)
    assert resized != still and blank not in resized
    open_page.complaints[:] = [text for text in open_page.complaints if "ERR_FAILED" not in text]


def complete(server, num_prompts, max_tokens):
    """An answer that is only begun to be read."""
    body = json.dumps({"prompt": [[1] * 20] * num_prompts, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"{server.address}/v1/completions", body, {"Content-Type": "application/json"})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE)


CHIPS = "() => [...document.querySelectorAll('.sequence .chip')].map((chip) => [chip.innerText, getComputedStyle(chip).backgroundColor])"


@pytest.mark.long
def test_a_request_has_the_same_number_and_colour_in_every_window(open_page, server):
    first = open_page()
    send(first, "one request before the others, which the second window never sees", max_tokens=2)
    expect(first.locator(".answer .note")).to_contain_text("ended: length")
    with complete(server, 5, 400):
        expect(first.locator(".sequence")).to_have_count(5)
        second = open_page(NARROW)
        expect(second.locator(".sequence")).to_have_count(5)
        seen = first.evaluate(CHIPS)
        assert second.evaluate(CHIPS) == seen
        numbers = [int(text.removeprefix("#")) for text, _ in seen]
        assert numbers == list(range(numbers[0], numbers[0] + 5)) and numbers[0] > 0
        label = second.locator("#charts canvas").nth(4).get_attribute("aria-label")
        assert (
            label.startswith("Time to first token, in the engine, in the last minute: ")
            and ": last " in label
            and ", between " in label
        )


QUEUES = """() => Object.fromEntries(["running", "waiting"].map((name) => {
    const list = document.getElementById(`${name}-chips`);
    const box = list.getBoundingClientRect();
    const last = list.lastElementChild.getBoundingClientRect();
    const fits = last.bottom <= box.bottom + 1 && last.right <= box.right + 1;
    return [name, [list.querySelectorAll(".chip").length, list.querySelector(".more")?.innerText ?? null, fits]];
}))"""
"""Of each queue, at one moment: how many chips it shows, how many more it says there are, and whether the last of it can be seen."""


@pytest.mark.parametrize("viewport", [NARROW, WIDE])
def test_how_many_more_there_are_can_be_read(open_page, server, viewport):
    page = open_page(viewport)
    with complete(server, 70, 150):
        expect(page.locator("#running-count")).to_have_text("64")
        expect(page.locator("#running-chips .more")).to_have_count(1)
        seen = page.evaluate(QUEUES)
        for name, count in (("running", 64), ("waiting", 6)):
            shown, more, fits = seen[name]
            assert fits and more == (f"and {count - shown} more" if shown < count else None)
        assert 4 < seen["running"][0] < 64
        screenshot(page, f"dashboard_more_{viewport['width']}")


@pytest.mark.long
def test_it_keeps_up_with_64_that_run(open_page, server):
    page = open_page()
    with complete(server, 64, 150):
        expect(page.locator("#running-count")).to_have_text("64")
        expect(page.locator(".sequence")).to_have_count(64)
        frames = page.evaluate(
            """() => new Promise((resolve) => {
                const times = [];
                const note = (time) => { times.push(time); time - times[0] < 2000 ? requestAnimationFrame(note) : resolve(times); };
                requestAnimationFrame(note);
            })"""
        )
    gaps = sorted(after - before for before, after in itertools.pairwise(frames))
    print(f"{len(gaps)} frames in 2 s, the longest pause {gaps[-1]:.0f} ms")
    assert gaps[len(gaps) // 2] < 100, "half of the frames come within a tenth of a second"
    assert gaps[-1] < 1000, "the tab never hangs"


@pytest.mark.parametrize("viewport,name", [(NARROW, "narrow"), pytest.param(WIDE, "wide", marks=pytest.mark.long)])
@pytest.mark.parametrize("color_scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_it_is_light_or_dark_and_fits_the_window(open_page, viewport, name, color_scheme):
    page = open_page(viewport, color_scheme)
    send(
        page,
        "Tell me a short story about a lighthouse keeper who collects letters that the sea brings to the shore.",
        max_tokens=80,
    )
    page.wait_for_timeout(500)
    send(page, "Once upon a time there was a scheduler", "Send 8 at once", max_tokens=300)
    expect(page.locator(".sequence")).to_have_count(9)
    page.wait_for_timeout(2500)
    screenshot(page, f"dashboard_{name}_{color_scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))[:3]
    )
    assert (red + green + blue < 200) == (color_scheme == "dark")
    page.get_by_role("button", name="Stop").click()


def test_at_twice_the_size_all_can_be_reached(open_page):
    page = open_page(ENLARGED)
    assert page.evaluate("document.documentElement.scrollWidth") <= ENLARGED["width"]
    for name in ("Pause", "Send", "Send 8 at once"):
        button = page.get_by_role("button", name=name, exact=True)
        button.scroll_into_view_if_needed()
        expect(button).to_be_in_viewport()


def test_a_dead_engine_is_told_and_the_next_one_is_found(open_page, server):
    page = open_page()
    send(page, "tell me a story", "Send 8 at once", max_tokens=2000)
    expect(page.locator("#running-count")).to_have_text("8")
    server.engine.shutdown()
    expect(page.locator("#status")).to_contain_text("The engine has ended: it was shut down. Trying again in")
    server.restart()
    expect(page.locator("#status")).to_contain_text("idle")
    expect(page.locator(".sequence")).to_have_count(0)
    send(page, "are you there", max_tokens=3)
    expect(page.locator(".answer .note").first).to_contain_text("ended: length")
    open_page.complaints[:] = [text for text in open_page.complaints if "ERR_INCOMPLETE_CHUNKED_ENCODING" not in text]


@pytest.mark.long
def test_a_browser_that_is_asked_for_the_key_shows_the_page_of_the_real_server(browser, tmp_path):
    served = ServeProcess(log=tmp_path / "log")
    try:
        context = browser.new_context(viewport=WIDE, http_credentials={"username": "anybody", "password": KEY})
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        assert page.goto(served.url).status == 200
        expect(page.locator("#model")).to_have_text("smollm2-135m")
        page.get_by_label("Temperature").fill("0")
        send(page, "The capital of France is", max_tokens=24, kind="completion")
        expect(page.locator("body")).to_contain_text("Paris.")
        context.close()
        stranger = browser.new_context()
        assert stranger.request.get(served.url).status == 401
        stranger.close()
    finally:
        assert served.end() == 0
