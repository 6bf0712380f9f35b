"""The live page's modules on their own, in a real browser without a server: the state, the curves, the block map, the streams.

Skipped where there is no Chromium. What the page does with an engine is in test_dashboard_in_browser.py.
"""

from __future__ import annotations

import pytest
from browser import launch, needs_chromium, sync_api

from minivllm.entrypoints.dashboard.app import _FILES, _MEDIA_TYPES

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """The page, in which nothing has been started."""

    def give(route):
        path = _FILES[route.request.url.rpartition("/")[2] or "index.html"]
        route.fulfill(body="" if path.name == "main.js" else path.read_text(), content_type=_MEDIA_TYPES[path.suffix])

    page = browser.new_page()
    page.route("**/*", give)
    page.goto("http://127.0.0.1:9/")
    yield page
    page.close()


FOLLOWED = """async (moments) => {
    const { LiveState } = await import("/dashboard/state.js");
    const { pointsOf } = await import("/dashboard/curves.js");
    const state = new LiveState();
    let clock = 0;
    performance.now = () => 1000 * clock;
    const engine = { num_gpu_blocks: 10 };
    const idle = { num_running: 0, num_waiting: 0, num_swapped: 0, num_used_blocks: 2 };
    const columns = { length: 0.1, phase: "decode", num_tokens: 1, num_generated: 1, num_running: 3, num_waiting: 0, num_swapped: 0,
        num_free_blocks: 6, mean_gap: null, max_gap: null };
    const step = (end) => ({ start: end - 0.1, end, sequences: [], waiting: [], happenings: [], cached: [], uncached: [], shared: {},
        first_tokens: [], num_running: 3, num_waiting: 0, num_swapped: 0, num_free_blocks: 6, error: null,
        curve: { end: [end], ...Object.fromEntries(Object.entries(columns).map(([name, value]) => [name, [value]])) } });
    for (const [pageTime, event, engineTime] of moments) {
        clock = pageTime;
        state.apply(event, event === "engine" ? engine : event === "idle" ? idle : step(engineTime ?? pageTime));
    }
    const line = (fields) => pointsOf(fields, state, state.now()).map(([ago, value]) => [Math.round(ago), value]);
    const rate = line({ of: (bin) => bin.generated, otherwise: 0 });
    const running = line({ of: (bin) => bin.running, otherwise: "last" });
    return { rate, running, now: state.now(), numBins: state.bins.size };
}"""
"""What the curves show after some events, each with the page's time in seconds and, where it differs, the engine's."""


def follow(page, *moments):
    return page.evaluate(FOLLOWED, moments)


def value_at(points, ago):
    return {value for moment, value in points if moment == ago}


def test_where_the_page_did_not_follow_the_curves_have_a_gap(page):
    shown = follow(page, [100, "engine"], [100, "steps"], [101, "steps"], [120, "engine"], [121, "steps"], [130, "steps"])
    for ago in (15, 20, 25):
        assert value_at(shown["rate"], ago) == {None} == value_at(shown["running"], ago), "held, hidden or without a server"
    assert value_at(shown["rate"], 5) == {0} and value_at(shown["running"], 5) == {3}, "followed, but no step ended"


GAPPED = """async () => {
    const { LiveState } = await import("/dashboard/state.js");
    const { Curves } = await import("/dashboard/curves.js");
    const columns = (state) => new Promise((resolve) => {
        document.getElementById("charts").replaceChildren();
        let numSized = 0;
        const curves = new Curves(state, () => {
            numSized += 1;
            if (numSized < document.querySelectorAll("#charts canvas").length) return;
            curves.draw(130);
            resolve([...document.querySelectorAll("#charts canvas")].map((canvas) => {
                const left = 50 * devicePixelRatio, width = canvas.width - 58 * devicePixelRatio;
                const at = (ago) => Math.round(left + width * (1 - ago / 60));
                return [28, 14, 3].map((ago) => [...canvas.getContext("2d").getImageData(at(ago), 0, 1, canvas.height).data].join());
            }));
        });
    });
    const state = new LiveState();
    state.engine = { num_gpu_blocks: 10 };
    const bin = { generated: 5, running: 3, waiting: 0, swapped: 0, used: 0.9, decodeSeconds: 0.1, decodeSteps: 1, prefillSeconds: 0, prefillSteps: 0, gapSeconds: 0, gaps: 0, longestGap: 0 };
    for (let number = 200; number < 210; number += 1) state.bins.set(number, { ...bin });
    state.bins.set(210, { isGap: true });
    for (let number = 250; number < 260; number += 1) state.bins.set(number, { ...bin, used: 0.4 });
    const empty = await columns(new LiveState());
    const drawn = await columns(state);
    return drawn.map((chart, i) => chart.map((column, j) => column === empty[i][j]));
}"""
"""Whether columns of the charts look as in charts without anything: 28 s ago, within a gap 14 s ago, and 3 s ago."""


def test_a_gap_is_blank_and_what_is_before_it_and_after_it_is_filled(page):
    rate, _, cache, *_ = page.evaluate(GAPPED)
    assert rate == cache == [False, True, False]


def test_after_minutes_without_anything_the_curves_still_say_how_things_stand(page):
    shown = follow(page, [100, "engine"], [100, "steps"], [101, "idle"], [400, "idle"])
    assert value_at(shown["running"], 30) == {0} == value_at(shown["rate"], 30)


def test_a_page_that_is_open_for_hours_keeps_little_and_its_clock_stays_right(page):
    hours = [[100, "engine"], *([100 + t, "steps", 5000 + t * (1 - 1e-4)] for t in range(36_000))]
    shown = follow(page, *hours)
    assert shown["numBins"] < 200
    engine_time = hours[-1][2]
    assert abs(shown["now"] - engine_time) < 0.1, "a clock that gains 0.1 ms in a second gains 3.6 s in ten hours"


def test_a_block_is_drawn_again_when_it_changes_hands(page):
    changed = page.evaluate(
        """async () => {
            const { BlockMap } = await import("/dashboard/block_map.js");
            const state = { engine: { block_size: 32 }, numBlocks: 4, numUsedBlocks: 1, shared: new Map(), cached: new Set() };
            const hold = (number, length) => {
                state.sequences = [{ place: "running", number, index: 0, blocks: [0], context_len: length, num_prompt_tokens: 1 }];
            };
            hold(4, 32);
            const map = await new Promise((resolve) => { const map = new BlockMap(state, () => resolve(map)); });
            const canvas = document.getElementById("map-canvas");
            map.draw();
            const before = canvas.toDataURL();
            hold(5, 1);
            map.draw();
            return canvas.toDataURL() !== before;
        }"""
    )
    assert changed, "all 32 slots of #4, and then one of #5"


def test_a_connection_that_breaks_is_told_in_a_sentence(page):
    told = page.evaluate(
        """async () => {
            const { readEvents } = await import("/dashboard/events.js");
            const body = new ReadableStream({ start: (stream) => stream.error(new TypeError("network error")) });
            try { for await (const event of readEvents({ body })); } catch (error) { return error.message; }
        }"""
    )
    assert told == "The connection to the server broke off."


REPLICAS = """async () => {
    const { LiveState } = await import("/dashboard/state.js");
    const { Replicas } = await import("/dashboard/replicas.js");
    const state = new LiveState();
    const chosen = [];
    const panel = new Replicas(state, (rank) => chosen.push(rank));
    const replica = (rank, more) => ({ rank, state: "ready", num_running: 2, num_waiting: 1, num_swapped: 0, num_used_blocks: 5,
        num_gpu_blocks: 20, tokens_per_second: 30.4, ...more });
    const seen = [];
    const look = () => seen.push([...document.querySelectorAll("#replica-cards .replica")].map((card) => card.innerText.split("\\n")));
    const streams = { streams_resumed: 2, streams_lost: 0 };
    const asked = [];
    globalThis.fetch = async (path, options) => (asked.push([path, options.method]), new Response("{}"));
    state.apply("engine", { num_gpu_blocks: 20, num_engines: 4, replica: 0, may_kill: true });
    panel.draw();
    const isHidden = document.getElementById("replicas").hidden;
    state.apply("replicas", { replicas: [0, 1, 2, 3].map((rank) => replica(rank)), ...streams });
    panel.draw();
    look();
    state.apply("replicas", { replicas: [replica(0), replica(1, { state: "gone", tokens_per_second: 0, num_used_blocks: 0 }),
        replica(2, { state: "draining", num_swapped: 2 }), replica(3)], ...streams });
    panel.draw();
    look();
    const kills = [...document.querySelectorAll("#replica-cards .kill")];
    const mayBeKilled = kills.map((button) => !button.hidden && !button.disabled);
    kills[3].click();
    document.querySelectorAll("#replica-cards .replica")[3].click();
    state.numEnded = 7;
    state.showReplica(3);
    panel.draw();
    const pressed = [...document.querySelectorAll("#replica-cards .replica")].map((card) => card.getAttribute("aria-pressed"));
    return { isHidden, seen, chosen, pressed, asked, mayBeKilled, sum: document.getElementById("replica-sum").textContent, numEnded: state.numEnded };
}"""


def test_replicas_stand_side_by_side_and_one_can_be_chosen(page):
    result = page.evaluate(REPLICAS)
    assert result["isHidden"], "with one replica, or before any is told of, there is nothing to choose"
    ready = ["30 tokens/s", "running 2, waiting 1", "5 of 20 blocks"]
    first, second = result["seen"]
    assert first == [[f"Replica {rank}", *ready] for rank in range(4)]
    assert second[1] == ["Replica 1", "gone", "0 of 20 blocks"]
    assert second[2][2] == "running 2, waiting 1, swapped out 2, draining: finishes what it has"
    assert (result["chosen"], result["pressed"]) == ([3], ["false", "false", "false", "true"])
    words = "together 91 tokens/s · streams resumed elsewhere: 2 · lost: 0"
    assert (result["sum"], result["numEnded"]) == (words, 0)
    assert (result["mayBeKilled"], result["asked"]) == ([True, False, True, True], [["replicas/3/kill", "POST"]])
