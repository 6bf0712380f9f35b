"""Exercises in the browser give the points that Jupyter gives: here in this Python, without torch, and in a browser's.

What is run in a browser is skipped where there is no Chromium, and where `make book` has not been run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
from browser import ROOT, needs_chromium, open_browser, sync_api
from lesson_cells import read_cells, run_cells, untouched, without_earlier_checks
from lesson_checks import read_answers
from nightly import NIGHTLY

from minivllm.entrypoints.playground.exercise import LESSONS, run_check
from minivllm.entrypoints.playground.server import make_server

SITE = ROOT / "out/book/html/playground"
EVERY = 1 if NIGHTLY else 25
ANSWERS = [(number, answer) for number in LESSONS for kind in ("wrong", "right") for answer in read_answers(number, kind)]
WITHOUT_TORCH = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "matplotlib", "numba", "transformers", "tokenizers", "IPython", "zmq", "psutil"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from types import ModuleType
for name in ("zmq", "psutil"):  # as the page's worker does
    sys.modules[name] = ModuleType(name)
from minivllm.entrypoints.playground.exercise import prepare, run_check
prepare()
print(json.dumps([run_check(cells) for cells in json.load(sys.stdin)]))
"""


def checks_of(cells):
    """For each check that needs no model, the cells to run, as the page sends them."""
    runs = {}
    for place, cell in enumerate(cells):
        if cell.kind == "check" and not cell.needs_a_model:
            before = [other for other in cells[:place] if other.kind != "check" and not other.needs_a_model]
            runs[cell.name] = [[one.name, one.source] for one in (*before, cell)]
    return runs


def assert_same(outcome, results):
    """What each check says: `outcome` is Jupyter's, by the check's sentence."""
    passed = [name for name, error in outcome.checks.items() if error is None]
    said = [text.split("✓ ")[1].split(" (")[0] for found in results.values() if found["passed"] for text in [found["text"]]]
    assert sorted(said) == sorted(passed)
    assert len(results) == len(outcome.checks)


@pytest.mark.parametrize("number", LESSONS)
def test_solved_and_untouched_exercises_have_their_points_without_torch(number):
    solved = read_cells(number)
    empty = [cell if cell.kind != "answer" else type(cell)(cell.name, untouched(cell.source), cell.kind) for cell in solved]
    runs = [*checks_of(solved).values(), *checks_of(empty).values()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=json.dumps(runs), capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout)
    half = len(results) // 2
    assert all(found["passed"] for found in results[:half]), [found["text"] for found in results[:half]]
    assert not any(found["passed"] for found in results[half:])
    assert all("Not written yet: cell " in found["text"] for found in results[half:]), [found["text"] for found in results[half:]]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), [pytest.param(*one, id=f"{one[0]}: {one[1].name}") for one in ANSWERS[::EVERY]])
def test_other_answers_have_the_same_points(number, answer):
    solved = read_cells(number)
    cells = without_earlier_checks(solved, answer.make(solved))
    assert_same(run_cells(cells), {name: run_check(run) for name, run in checks_of(cells).items()})


def refused(number):
    """Each wrong answer, and the cells to run for the check that refuses it in Jupyter, up to which all pass: see lesson_checks.py."""
    for answer in read_answers(number, "wrong"):
        cells = answer.make(read_cells(number))
        (name,) = (cell.name for cell in cells if cell.kind == "check" and f'check("{answer.about}"' in cell.source)
        yield answer, checks_of(cells)[name]


def in_a_browser(test):
    is_missing = pytest.mark.skipif(not (SITE / "files.json").exists(), reason="there is no playground: `make book`")
    return pytest.mark.long(pytest.mark.slow(needs_chromium(is_missing(test))))


@pytest.fixture(scope="module")
def page():
    """An exercise in a browser."""
    with make_server(SITE, 0) as server, open_browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/exercise.html#04")
        yield page
        server.shutdown()


def run_in(page, cells):
    """`run_check` in a page."""
    call = "async (check) => { window.python ??= new (await import('./python.js')).Python(); return window.python.call({ check }, 60); }"
    return page.evaluate(call, cells)


@in_a_browser
def test_a_browser_gives_points_and_keeps_them(page):
    sync_api.expect(page.locator("#points")).to_have_text("0 of 19 points (1 more in Jupyter, with the real model)")
    page.locator(".check button").first.click()
    sync_api.expect(page.locator(".check .said").first).to_contain_text("Not written yet: cell pool, line ")
    pool = next(cell for cell in read_cells("04") if cell.name == "pool")
    page.locator(".answer .cm-content").first.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(pool.source)
    page.locator(".check button").first.click()
    sync_api.expect(page.locator(".check .said").first).to_have_text(
        "✓ the pool hands out free blocks and counts tables (3 points)"
    )
    page.reload()
    sync_api.expect(page.locator("#points")).to_contain_text("3 of 19 points")
    sync_api.expect(page.locator(".answer .cm-content").first).to_contain_text("self.free_blocks")


@in_a_browser
@pytest.mark.parametrize("number", LESSONS)
def test_a_browser_refuses_every_wrong_answer_where_and_as_jupyter_does(page, number):
    accepted, said = [], {}
    for answer, cells in refused(number):
        result = run_in(page, cells)
        if result["passed"]:
            accepted.append(answer.name)
        elif answer.words not in result["text"]:
            said[answer.name] = result["text"]
    assert accepted == [] and said == {}


@in_a_browser
def test_all_checks_of_an_answer_have_in_a_browser_the_points_of_jupyter(page):
    """Of right answers and of wrong ones, which may fail later checks, too; but not of one that imports NumPy."""
    portable = [(number, answer) for number, answer in ANSWERS if not any("numpy" in new for _, new in answer.changes)]
    assert len(ANSWERS) - len(portable) == 1
    for number, answer in portable[:: 1 if NIGHTLY else 60]:
        solved = read_cells(number)
        cells = without_earlier_checks(solved, answer.make(solved))
        assert_same(run_cells(cells), {name: run_in(page, run) for name, run in checks_of(cells).items()})
