"""The book as `make book` has built it: no broken link, no page that is too large, nothing that a screen reader stumbles over.

Skipped where it has not been built. That Sphinx warns of nothing is checked by building it.
"""

from __future__ import annotations

import re
import threading
from base64 import b64decode
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from browser import SCREENSHOTS, needs_chromium, open_browser, sync_api

ROOT = Path(__file__).parents[2]
SITE = ROOT / "out/book/html"
AXE = ROOT / "book/node_modules/axe-core/axe.min.js"
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
LOOKED_AT = ("index", f"notebooks/{LESSONS[6]}", "notebooks/glossary", "docs/using", "reference/minivllm.core", "search")
MIB = 2**20
SHOWS_THE_ENGINE = re.compile(r"\b(?:play|play_race)\(|\bknobs\(serve\b")
PLAY_HERE = re.compile(
    r'<p class="play-here" hidden><button type="button">[^<]+</button> <a href="\.\./playground/index\.html#(\d+)">.*?<img [^>]*src="([^"]+)"',
    re.DOTALL,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the book is not built: `make book`"),
]


class Page(HTMLParser):
    """The links and the ids of a page; how many pictures its cells show; and the links of what is said about a lesson."""

    def __init__(self, path):
        super().__init__()
        self.links, self.sources, self.ids, self.about, self.num_pictures = set(), set(), set(), set(), 0
        self._inside = []  # of each open <div>, its classes
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.update(filter(None, (attributes.get("id"), attributes.get("name"))))
        if tag == "div":
            self._inside.append(attributes.get("class") or "")
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])
            if any("about" in classes.split() for classes in self._inside):
                self.about.add(attributes["href"])
        if tag == "link" and attributes.get("rel") in ("stylesheet", "preload", "icon"):
            self.sources.add(attributes["href"])
        if source := attributes.get("src"):
            self.sources.add(source)
        if tag in ("img", "svg") and any("cell_output" in classes.split() for classes in self._inside):
            self.num_pictures += 1

    def handle_endtag(self, tag):
        if tag == "div":
            self._inside.pop()


@pytest.fixture(scope="module")
def pages():
    return {path: Page(path) for path in SITE.rglob("*.html") if "_static" not in path.parts}


def test_no_link_is_broken_and_nothing_is_fetched_from_elsewhere(pages):
    assert len(pages) > 100
    broken, num_inside = [], 0
    for path, page in pages.items():
        for link in page.links | page.sources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.sources and parts.scheme != "data":
                    broken.append((path.name, link))
                continue
            num_inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            is_there = target.exists() and (
                target not in pages or not fragment or fragment in pages[target].ids or "playground" in target.parts
            )
            if not is_there:
                broken.append((path.relative_to(SITE).as_posix(), link))
    assert num_inside > 1000
    assert not broken


def test_the_whole_site_is_small_and_so_is_each_lesson(pages):
    assert sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) < 40e6
    for name in LESSONS:
        path = SITE / f"notebooks/{name}.html"
        images = {(path.parent / source).resolve() for source in pages[path].sources if source.endswith((".png", ".svg", ".gif"))}
        assert sum(file.stat().st_size for file in (path, *images)) < 2e6, name


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_all_its_figures_its_folds_and_what_belongs_to_it(name, pages):
    page = pages[SITE / f"notebooks/{name}.html"]
    text = (SITE / f"notebooks/{name}.html").read_text(encoding="utf-8")
    cells = nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    figures = [output for output in outputs if {"image/png", "image/svg+xml"} & output.get("data", {}).keys()]
    assert page.num_pictures == len(figures)
    folded = [cell for cell in cells if cell.get("metadata", {}).get("jupyter", {}).get("outputs_hidden")]
    assert text.count("Show the output") == sum(
        any(output.get("data") or "text" in output for output in cell.outputs) for cell in folded
    )
    assert "to read and run" in text
    assert (f"../exercises/{name}.html" in page.about) == (ROOT / f"exercises/{name}.ipynb").exists()
    assert (f"../playground/exercise.html#{name[:2]}" in page.about) == (name[:2] in ("04", "07", "10"))
    assert f"http://localhost:8888/lab/tree/notebooks/{name}.ipynb" in page.about and f"{name}.ipynb" in page.about
    stored, shown = (folder / f"notebooks/{name}.ipynb" for folder in (ROOT, SITE))
    assert nbformat.read(shown, 4) == nbformat.read(stored, 4), "to download, without the white space between its parts"


def widgets(name):
    """The pictures beside the widgets of a lesson that show the engine."""
    for cell in nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4).cells:
        for output in cell.get("outputs", []):
            if SHOWS_THE_ENGINE.search(cell.source) and "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield b64decode(output.data["image/png"])


@pytest.mark.parametrize("name", LESSONS)
def test_where_a_widget_shows_the_engine_a_button_brings_a_situation_of_this_lesson_and_the_picture_is_there(name):
    presets = (ROOT / "minivllm/entrypoints/playground/static/presets.js").read_text(encoding="utf-8")
    lessons = re.findall(r"\(Lesson (\d\d)\)", presets)
    found = PLAY_HERE.findall((SITE / f"notebooks/{name}.html").read_text(encoding="utf-8"))
    assert [(SITE / "notebooks" / source).read_bytes() for _, source in found] == list(widgets(name))
    assert {lessons[int(number)] for number, _ in found} <= {name[:2]}
    assert len({number for number, _ in found}) == len(found)


def test_all_lessons_whose_widgets_show_the_engine_are_known():
    assert [name[:2] for name in LESSONS for _ in widgets(name)] == ["00", "04", "07", "07", "08", "09", "10"]


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_and_a_narrow_window_find_no_serious_fault(scheme):
    faults = []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        for name in LOOKED_AT:
            page.goto((SITE / f"{name}.html").as_uri())
            assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, name
            page.add_script_tag(path=AXE)
            for violation in page.evaluate("async () => (await axe.run()).violations"):
                if violation["impact"] in ("serious", "critical"):
                    faults.append((name, violation["id"], violation["nodes"][0]["html"][:200], len(violation["nodes"])))
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SCREENSHOTS / f"book_{name.replace('/', '_')}_{scheme}.png")
    assert not faults


@needs_chromium
def test_an_answer_is_shown_when_it_is_asked_for():
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        for name in LESSONS:
            page.goto((SITE / f"notebooks/{name}.html").as_uri(), wait_until="domcontentloaded")
            folds = page.locator("div.cell details.hide")
            assert folds.count() > 0
            assert not any(fold.locator(".cell_output").first.is_visible() for fold in folds.all())
            folds.first.locator("summary").click()
            assert folds.first.locator(".cell_output").first.is_visible()


@pytest.fixture(scope="module")
def address():
    class Files(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@needs_chromium
@pytest.mark.parametrize(("theme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(28, 31, 36)")])
def test_the_engine_steps_in_the_place_of_a_picture_as_light_or_dark_as_the_book(address, theme, background):
    name, fetched = LESSONS[7], []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="light" if theme == "dark" else "dark")
        page.goto((SITE / f"notebooks/{name}.html").as_uri())
        sync_api.expect(page.locator(".play-here").last).to_be_hidden()  # without a server Python cannot be loaded
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(f"{address}/notebooks/{name}.html")
        page.evaluate("(theme) => { document.body.dataset.theme = theme; }", theme)
        assert not [url for url in fetched if "playground" in url]
        cell = page.locator(".cell_output", has=page.locator(".play-here")).last
        cell.get_by_role("button", name="Play with it here").press("Enter")
        frame = cell.frame_locator("iframe")
        sync_api.expect(frame.locator("body[data-ready]")).to_be_attached()
        frame.locator("#step").click()
        sync_api.expect(frame.locator("#batch-rows tr")).to_have_count(3)
        sync_api.expect(frame.locator("#preset")).to_have_value("three requests, nine blocks")
        height = cell.locator("iframe").bounding_box()["height"]
        for number in range(2, 22):
            frame.locator("#step").click()
            sync_api.expect(frame.locator("#clock")).to_contain_text(f"{number} steps")
        sync_api.expect(frame.locator("#batch-rows tr")).to_have_count(2)
        assert cell.locator("iframe").bounding_box()["height"] == height
        assert frame.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor") == background
        sync_api.expect(cell.locator("img")).to_be_hidden()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        frame.locator("#fold summary").click()
        (inside,) = (one for one in page.frames if "embedded.html" in one.url)
        inside.evaluate(AXE.read_text(encoding="utf-8"))
        violations = inside.evaluate("async () => (await axe.run({ iframes: false })).violations")
        assert not [one["nodes"][0]["html"] for one in violations if one["impact"] in ("serious", "critical")]
        cell.locator("iframe").screenshot(path=SCREENSHOTS / f"book_embedded_{theme}.png")
        cell.get_by_role("button", name="Back to the picture").click()
        sync_api.expect(cell.locator("img")).to_be_visible()
        sync_api.expect(cell.locator("iframe")).to_have_count(0)
