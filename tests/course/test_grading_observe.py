"""Points come from a class that works, seen from outside: whatever a notebook does to its checks, an untouched exercise earns nothing."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from submissions import Case, grade_class, written

ROOT = Path(__file__).parents[2]
NAME = "04_paged_kv_cache"
KEPT = {"check-pool", "check-engine"}
"""The checks of lesson 04 that the tricks are played on: 3 points and 1 point."""

# Pieces of tricks: cells added to an untouched exercise.

FORGED = "lambda self, source, order: {'status': 'ok', 'receipt': order['receipt'], 'execution_count': 1, 'user_expressions': {}, 'payload': []}"
FORGED_CHECK = f"type(get_ipython().kernel)._run_check = {FORGED}"
UNRESTORED = "get_ipython().kernel.pristine.restore = lambda: None"
PATCH = "from minivllm.course.lessons import lesson_04; lesson_04.check_pool = lesson_04.check_block_manager = lambda cls: None"
FAKE = "type('Fake', (), {'check_pool': staticmethod(lambda cls: None), 'check_block_manager': staticmethod(lambda cls: None)})"


def forged(observations):
    """A check and an observer that pass and give these."""
    return f"{FORGED_CHECK}\ntype(get_ipython().kernel)._run_observer = lambda self, order: {{'status': 'ok', 'observations': {observations}}}"


def again_and_again(line):
    """A thread that never stops running a line."""
    loop = f"def patch():\n    while True:\n        {line}\n        time.sleep(0)"
    return f"import threading, time\n{loop}\nthreading.Thread(target=patch, daemon=True).start()"


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
TRICKS = {
    "nothing": "",
    "audit hook that clears the checks": f"""
import sys
def hook(event, arguments):
    {PATCH}
sys.addaudithook(hook)""",
    "a timer that patches again": f"""
import signal
def patch(*_):
    {PATCH}
signal.signal(signal.SIGALRM, patch); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)""",
    "a thread that patches again": again_and_again(PATCH),
    "the compiler's cache": f"""
shell = get_ipython()
def cache(source, number=0, raw_code=None):
    shell.user_ns['lesson_04'] = {FAKE}
    return '<cell>'
shell.compile.cache = cache""",
    "a namespace of another kind": f"""
class Namespace(dict):
    def __getitem__(self, name):
        return {FAKE} if name == 'lesson_04' else dict.__getitem__(self, name)
get_ipython().user_ns = Namespace(get_ipython().user_ns)""",
    "no restoring": f"{UNRESTORED}\nget_ipython().kernel.imports = []\n{PATCH}",
    "forged receipts": FORGED_CHECK,
    "forged receipts and observations": forged("'[]', 'execution_count': 1, 'user_expressions': {}, 'payload': []"),
    "forged receipts and no observer": f"{FORGED_CHECK}\ndel type(get_ipython().kernel)._run_observer",
    "an engine that ignores the class": "import minivllm, minivllm.simulation.engine as simulation\nmake = simulation.make_simulated_engine\n" + again_and_again(
        "simulation.make_simulated_engine = lambda **options: make(**{**options, 'block_space_manager_cls': minivllm.core.block_space_manager.BlockSpaceManager})"),
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
    "answers read off the caller, by sys": READER.replace("FRAME", "sys._getframe()"),
    "answers read off the caller, by inspect": READER.replace("FRAME", "inspect.currentframe()"),
    "answers read off the caller, by a traceback": READER.replace("FRAME", "caught()"),
    "asserts taken out": """
import ast, inspect, minivllm.course.lessons.lesson_04.block_manager as module
class NoAsserts(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
tree = ast.fix_missing_locations(NoAsserts().visit(ast.parse(inspect.getsource(module))))
exec(compile(tree, module.__file__, 'exec'), vars(module))""",
    "a class that does everything": "from unittest.mock import MagicMock\nBlockPool = MyBlockSpaceManager = MagicMock",
    "exceptions swallowed": "import contextlib\n" + again_and_again("contextlib._GeneratorContextManager.__exit__ = lambda *_: True"),
    "another function behind the check": """
import ctypes, minivllm.course.lessons.lesson_04.block_manager as module
module.check_pool.__code__ = (lambda pool_class: None).__code__""",
    "the module exchanged": """
import sys, types
fake = types.ModuleType('minivllm.course.lessons.lesson_04'); fake.check_pool = fake.check_block_manager = lambda cls: None
sys.modules['minivllm.course.lessons.lesson_04'] = fake
import minivllm.course.lessons; minivllm.course.lessons.lesson_04 = fake
get_ipython().kernel.pristine._modules.clear()""",
    "no questions": f"""
import minivllm.course.lessons.lesson_04.block_manager as module, minivllm.course.lessons.lesson_04.engine as other
module.rounds = lambda name, count: iter(()); other._CROWDS = ()
{UNRESTORED}
{PATCH}""",
    "the same questions every time": f"""
import random
random.Random = lambda *_: random._inst
{UNRESTORED}
{PATCH}""",
    "json of one's own": f"import json\njson.dumps = lambda *_, **__: '[' * 10**6\n{FORGED_CHECK}",
    "long observations": forged("'[' + '0,' * 10**6 + '0]'"),
    "observations that are no text": forged("{'check': True}"),
    "a startup file for the next kernel": f"""
import os, pathlib
folder = pathlib.Path(os.environ.get('IPYTHONDIR', '.')) / 'profile_default' / 'startup'
folder.mkdir(parents=True, exist_ok=True)
if not (folder / '00.py').exists():
    (folder / '00.py').write_text("{FORGED_CHECK}")
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
class BlockPool:
    def __init__(self, num_blocks): raise GeneratorExit""",
}  # fmt: skip


def lesson(folder, own=""):
    """Lesson 04 with two of its checks, and a cell of the learner's own before each."""
    notebook, cells = nbformat.read(ROOT / folder / f"{NAME}.ipynb", 4), []
    for cell in notebook.cells:
        is_check = cell.metadata.get("nbgrader", {}).get("grade")
        if cell.id in KEPT or (cell.cell_type == "code" and is_check is False and cell.id not in ("look", "results")):
            cells += [nbformat.v4.new_code_cell(own)] * bool(own and is_check) + [cell]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


@pytest.mark.long
@pytest.mark.slow
def test_no_trick_earns_a_point(tmp_path):
    """All tricks in one run, beside one whose work is done."""
    cases = {trick: Case(written(lesson("exercises", own)), 0) for trick, own in TRICKS.items()}
    cases["worked"] = Case(written(lesson("solutions")), 4)
    # Tricks that make the kernel deaf are waited for, twice each; meanwhile two others run.
    options = ["--jobs", 3, "--cell-timeout", 8, "--sandbox", "never"]
    graded = grade_class(tmp_path, cases, *options, lesson=NAME, solution=lesson("solutions"))
    assert graded.find_wrong() == {}
    # Some fool the check, and only the observer finds them: otherwise this would show nothing about the observer.
    assert len([row for row in graded.rows.values() if "when it was run with other input" in row["reason"]]) >= 10
