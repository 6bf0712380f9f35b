"""Points come from a class that works, seen from outside: whatever a notebook does to its checks, an untouched exercise earns nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import minivllm
from minivllm.course.grading.limits import Limits
from minivllm.course.grading.observe import find_difference
from minivllm.course.grading.progress import Progress
from minivllm.entrypoints.cli.main import main

ROOT = Path(minivllm.__file__).parents[1]
LESSONS = {
    "04": "04_paged_kv_cache.ipynb",
}
KEPT = {"check-pool", "check-engine"}
"""The checks of lesson 04 that the tricks are played on: 3 points and 1 point."""


def sources(folder: str, number: str) -> dict[str, str]:
    """The code of a notebook's cells, except checks, by their ids."""
    cells = nbformat.read(ROOT / folder / LESSONS[number], 4).cells
    return {
        cell.id: cell.source for cell in cells if cell.cell_type == "code" and not cell.metadata.get("nbgrader", {}).get("grade")
    }


@pytest.mark.parametrize("nonsense", ["", "[]", "null", "{}", "nan", '"x"', "[" * 100_000, "[[1]]", "7"])
def test_observations_that_are_none_differ(nonsense):
    assert find_difference('[[1, {"a": 2}], 3]', nonsense)


def test_a_difference_is_shown_short():
    assert find_difference('[1, ["b", 3]]', '[1, ["b", 4]]') == 'at observation 2 of 2 it gave ["b", 4] instead of ["b", 3]'
    assert len(find_difference(json.dumps(["x" * 10**5]), json.dumps(["y" * 10**5]))) < 500


def test_numbers_may_be_rounded_where_a_check_says_so():
    def near(numbers, within=0.01):
        return json.dumps([["x", {"near": numbers, "within": within}]])

    assert find_difference(near([0.5, "nan"]), near([0.505, "nan"])) is None
    for other in (near([0.55, "nan"]), near([0.55, "nan"], 9), near([0.5, 1]), near([0.5]), '[["x", [0.5, null]]]'):
        assert find_difference(near([0.5, "nan"]), other)


# -- tricks: cells added to an untouched exercise ---------------------------------------------------------------------

FORGED = "lambda self, source, order: {'status': 'ok', 'receipt': order['receipt'], 'execution_count': 1, 'user_expressions': {}, 'payload': []}"
SILENT = "def silent(*arguments, **options):\n    return None\n"
READER = """
import inspect, sys
def caught():
    try:
        raise KeyError
    except KeyError as error:
        return error.__traceback__.tb_frame
class BlockPool:
    def __init__(self, num_blocks): self.free = list(range(num_blocks))
    def look(self):
        frame, seen = FRAME, {}
        while frame is not None:
            frame, seen = frame.f_back, {**frame.f_locals, **seen}
        return seen
    def allocate(self, count):
        seen = self.look()
        if 'trial' in seen: return seen['right'].get_free_blocks()
        if 'why' in seen: raise ValueError
        blocks, self.free = self.free[:count], seen['right'].get_free_blocks()
        return blocks
    def share(self, blocks):
        seen = self.look()
        if 'why' in seen: raise ValueError
        self.free = seen['right'].get_free_blocks()
    release = share
    num_free = property(lambda self: self.look()['right'].num_free)
    ref_counts = property(lambda self: self.look()['right'].ref_counts)"""
READ_BY = {
    "sys": "sys._getframe()",
    "inspect": "inspect.currentframe()",
    "a traceback": "caught()",
}
"""Ways to the frames of a check, where the right answers are."""
TRICKS = {
    "nothing": "",
    "audit hook that clears the checks": """
import sys
from minivllm.course.lessons import lesson_04
def hook(event, arguments):
    lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None
sys.addaudithook(hook)""",
    "a timer that patches again": """
import signal
from minivllm.course.lessons import lesson_04
def patch(*_):
    lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None
signal.signal(signal.SIGALRM, patch); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)""",
    "a thread that patches again": """
import threading, time
from minivllm.course.lessons import lesson_04
def patch():
    while True:
        lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None
        time.sleep(0)
threading.Thread(target=patch, daemon=True).start()""",
    "the compiler's cache": """
shell = get_ipython()
def cache(source, number=0, raw_code=None):
    shell.user_ns['lesson_04'] = type('Fake', (), {'check_pool': staticmethod(lambda cls: None), 'check_block_manager': staticmethod(lambda cls: None)})
    return '<cell>'
shell.compile.cache = cache""",
    "a namespace of another kind": """
class Namespace(dict):
    def __getitem__(self, name):
        return type('Fake', (), {'check_pool': staticmethod(lambda cls: None), 'check_block_manager': staticmethod(lambda cls: None)}) if name == 'lesson_04' else dict.__getitem__(self, name)
get_ipython().user_ns = Namespace(get_ipython().user_ns)""",
    "no restoring": """
from minivllm.course.lessons import lesson_04
get_ipython().kernel.pristine.restore = lambda: None
get_ipython().kernel.imports = []
lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None""",
    "forged receipts": f"type(get_ipython().kernel)._run_check = {FORGED}",
    "forged receipts and observations": f"""
kernel = type(get_ipython().kernel)
kernel._run_check = {FORGED}
kernel._run_observer = lambda self, order: {{'status': 'ok', 'observations': '[]', 'execution_count': 1, 'user_expressions': {{}}, 'payload': []}}""",
    "forged receipts and no observer": f"""
kernel = type(get_ipython().kernel)
kernel._run_check = {FORGED}
del kernel._run_observer""",
    "an engine that ignores the class": """
import minivllm.simulation.engine as simulation
make = simulation.make_simulated_engine
import threading, time
def patch():
    while True:
        simulation.make_simulated_engine = lambda **options: make(**{**options, 'block_space_manager_cls': __import__('minivllm').core.block_space_manager.BlockSpaceManager})
        time.sleep(0)
threading.Thread(target=patch, daemon=True).start()""",
    "numbers equal to everything": """
class Anything(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
class BlockPool:
    def __init__(self, num_blocks): self.ref_counts = [Anything(0)] * num_blocks; self.n = num_blocks
    num_free = property(lambda self: Anything(0))
    def allocate(self, count):
        if count == 3: raise ValueError
        return [Anything(0)] * count
    def share(self, blocks):
        if 3 in [int(block) for block in blocks]: raise ValueError
    release = share""",
    **{f"answers read off the caller, by {way}": READER.replace("FRAME", frame) for way, frame in READ_BY.items()},
    "asserts taken out": """
class NoAsserts(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
import inspect, minivllm.course.lessons.lesson_04.block_manager as module
tree = ast.fix_missing_locations(NoAsserts().visit(ast.parse(inspect.getsource(module))))
exec(compile(tree, module.__file__, 'exec'), vars(module))""",
    "a class that does everything": "from unittest.mock import MagicMock\nBlockPool = MyBlockSpaceManager = MagicMock",
    "exceptions swallowed": """
import contextlib, threading, time
def patch():
    while True:
        contextlib._GeneratorContextManager.__exit__ = lambda *_: True
        time.sleep(0)
threading.Thread(target=patch, daemon=True).start()""",
    "another function behind the check": """
import ctypes, minivllm.course.lessons.lesson_04.block_manager as module
module.check_pool.__code__ = (lambda pool_class: None).__code__""",
    "the module exchanged": """
import sys, types
fake = types.ModuleType('minivllm.course.lessons.lesson_04'); fake.check_pool = fake.check_block_manager = lambda cls: None
sys.modules['minivllm.course.lessons.lesson_04'] = fake
import minivllm.course.lessons; minivllm.course.lessons.lesson_04 = fake
get_ipython().kernel.pristine._modules.clear()""",
    "no questions": """
import minivllm.course.lessons.lesson_04.block_manager as module, minivllm.course.lessons.lesson_04.engine as other
module.rounds = lambda name, count: iter(()); other._CROWDS = ()
from minivllm.course.lessons import lesson_04
get_ipython().kernel.pristine.restore = lambda: None
lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None""",
    "the same questions every time": """
import random
random.Random = lambda *_: random._inst
get_ipython().kernel.pristine.restore = lambda: None
from minivllm.course.lessons import lesson_04
lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None""",
    "json of one's own": f"""
import json
json.dumps = lambda *_, **__: '[' * 10**6
type(get_ipython().kernel)._run_check = {FORGED}""",
    "long observations": f"""
type(get_ipython().kernel)._run_check = {FORGED}
type(get_ipython().kernel)._run_observer = lambda self, order: {{'status': 'ok', 'observations': '[' + '0,' * 10**6 + '0]'}}""",
    "observations that are no text": f"""
type(get_ipython().kernel)._run_check = {FORGED}
type(get_ipython().kernel)._run_observer = lambda self, order: {{'status': 'ok', 'observations': {{'check': True}}}}""",
    "a startup file for the next kernel": f"""
import os, pathlib
folder = pathlib.Path(os.environ.get('IPYTHONDIR', '.')) / 'profile_default' / 'startup'
folder.mkdir(parents=True, exist_ok=True)
if not (folder / '00.py').exists():
    (folder / '00.py').write_text("type(get_ipython().kernel)._run_check = {FORGED}")
    os._exit(0)""",
    "settings for the next kernel": """
import json, os, pathlib
file = pathlib.Path.cwd().parent / 'settings.json'
settings = json.loads(file.read_text())
settings['preload'] = ['import minivllm.course.lessons.lesson_04 as m; m.check_pool = m.check_block_manager = lambda cls: None']
if 'check_pool' not in file.read_text():
    file.write_text(json.dumps(settings)); os._exit(0)""",
    "a jump over the check": """
import sys
def jump(frame, event, argument):
    if frame.f_code.co_name == 'check_pool' and event == 'line':
        frame.f_lineno = frame.f_code.co_firstlineno + 1
    return jump
import threading; threading.settrace(jump); sys.settrace(jump)
get_ipython().kernel.pristine.restore = lambda: sys.settrace(jump)""",
    "an object that ends the check": """
from minivllm.course.lessons import lesson_04
class Leave(BaseException): pass
import builtins
class BlockPool:
    def __init__(self, num_blocks): raise GeneratorExit""",
}  # fmt: skip


def truncated(notebook, answers: dict[str, str], own: str = "") -> str:
    """A lesson of the answers and two checks, with a cell of the learner's own before and after the answers."""
    kept = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code"
        and cell.metadata.get("nbgrader", {}).get("grade_id") in {*answers, *KEPT} - {"look", "results"}
    ]
    for cell in kept:
        cell.source = answers.get(cell.metadata.nbgrader.grade_id, cell.source)
    if own:
        places = [i for i, cell in enumerate(kept) if cell.metadata.nbgrader.grade_id in KEPT]
        for place in reversed(places):
            kept.insert(place, nbformat.v4.new_code_cell(own))
    made = nbformat.v4.new_notebook(cells=kept, metadata=notebook.metadata)
    return nbformat.writes(made)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All tricks in one run, beside one whose work is done."""
    folder = tmp_path_factory.mktemp("tricks")
    solved, stub = (nbformat.read(ROOT / name / LESSONS["04"], 4) for name in ("solutions", "exercises"))
    (folder / "solutions").mkdir()
    (folder / "solutions" / LESSONS["04"]).write_text(truncated(solved, sources("solutions", "04")))
    cases = {f"trick {number:02}": truncated(stub, sources("exercises", "04"), own) for number, own in enumerate(TRICKS.values())}
    cases["worked"] = truncated(solved, sources("solutions", "04"))
    for learner, text in cases.items():
        (folder / "in" / learner).mkdir(parents=True)
        (folder / "in" / learner / LESSONS["04"]).write_text(text)
    # Tricks that make the kernel deaf are waited for, twice each; meanwhile two others run.
    options = [
        "--solutions",
        folder / "solutions",
        "--output",
        folder / "out",
        "--jobs",
        3,
        "--cell-timeout",
        8,
        "--sandbox",
        "never",
    ]
    assert main(["grade", str(folder / "in"), *map(str, options)]) == 0
    with (folder / "out" / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    return SimpleNamespace(rows=rows)


@pytest.mark.long
@pytest.mark.slow
def test_no_trick_earns_a_point(graded):
    scores = {trick: float(graded.rows[f"trick {number:02}"]["score"]) for number, trick in enumerate(TRICKS)}
    assert scores == dict.fromkeys(TRICKS, 0)
    assert float(graded.rows["worked"]["score"]) == 4


@pytest.mark.long
@pytest.mark.slow
def test_some_tricks_fool_the_check_and_only_the_observer_finds_them(graded):
    """Otherwise the test above would show nothing about the observer."""
    seen = [row["learner"] for row in graded.rows.values() if "when it was run with other input" in row["reason"]]
    assert len(seen) >= 10


def test_equal_numbers_of_another_kind_are_equal():
    assert find_difference("[3, 1]", "[3.0, true]") is None


def test_the_seed_is_kept_beside_the_grades(tmp_path):
    seeds = [
        Progress(tmp_path / name / "grades.jsonl", Limits(), sandboxed=False).seed
        for name in ("a", "a", "b")
        if (tmp_path / name).mkdir(exist_ok=True) is None
    ]
    assert seeds[0] == seeds[1] != seeds[2]
