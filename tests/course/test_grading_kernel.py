"""The kernel of a submission: receipts come from inside checks, modules are restored, and the total time is limited."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import time
from types import ModuleType

import pytest

from minivllm.course.exercise_cells import GradedCell
from minivllm.course.grading.grader import surroundings_of
from minivllm.course.grading.kernel import find_imports, with_receipt
from minivllm.course.grading.kernel_client import KernelDidNotStart, run_cells
from minivllm.course.grading.limits import Limits, Surroundings
from minivllm.course.grading.sandbox import Pristine
from minivllm.course.grading.submissions import Cell, Lesson

LESSON = """
import math
CASES = [1, 2]
TABLE = {"a": [1]}
def check_it(value, *, most=3):
    assert value in CASES and value < most and math.floor(value) == value
class Base:
    @property
    def size(self): return 1
    @staticmethod
    def make(): return Base()
    def grow(self): return 2
"""


def run_with_receipt(source, **names):
    given = []
    exec(compile(with_receipt(source, "receipt"), "cell", "exec"), {"receipt": lambda: given.append(1), **names})
    return len(given)


@contextlib.contextmanager
def swallows(name, points=1):
    with contextlib.suppress(Exception):
        yield


@pytest.mark.parametrize(
    ("source", "receipts"),
    [
        ("with check('x', points=2):\n    assert True", 1),
        ("with check('x', points=2):\n    assert False", 0),
        ("a = 1\nwith check('x'):\n    assert a == 2\nprint()", 0),
        ("with course.check('x'):\n    pass", 1),
        ("with course.check('x'):\n    1 / 0", 0),
        ("assert True", 1),
        ("", 1),
    ],
)
def test_a_receipt_is_given_inside_of_the_check_even_when_that_swallows_errors(source, receipts):
    course = ModuleType("course")
    course.check = swallows
    assert run_with_receipt(source, check=swallows, course=course) == receipts


def test_the_lesson_s_imports_of_the_course_are_found():
    sources = [
        "from minivllm.course.lessons import lesson_04\nimport torch\nx = 1",
        "%matplotlib inline\nfrom minivllm.course import show_source as show\n!ls",
        "def",
        "if True:\n    import minivllm.course.checks as c",
        "from minivllm.core import scheduler",
        "from minivllm.courses import x",
    ]
    assert find_imports(sources, "minivllm.course") == [
        "from minivllm.course.lessons import lesson_04",
        "from minivllm.course import show_source as show",
        "import minivllm.course.checks as c",
    ]
    assert len(find_imports(sources, "minivllm")) == 5


@pytest.fixture
def lesson(monkeypatch):
    """A module of checks."""
    module = ModuleType("minivllm.course.lesson_of_a_test")
    exec(LESSON, vars(module))
    for name in ("Base", "check_it"):
        getattr(module, name).__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        "lesson.check_it = print",
        "lesson.check_it.__code__ = (lambda value, *, most=3: None).__code__",
        "lesson.check_it.__kwdefaults__['most'] = 99",
        "lesson.CASES.append(7)",
        "lesson.CASES = range(100)",
        "lesson.TABLE['a'].append(3)",
        "lesson.math = None",
        "lesson.Base.grow = lambda self: 3",
        "lesson.Base.grow.__code__ = (lambda self: 3).__code__",
        "lesson.Base.size = 4",
        "lesson.Base.__eq__ = lambda self, other: True",
        "lesson.Base.make = None",
        "del lesson.Base.grow",
        "del lesson.check_it",
        "sys.modules[lesson.__name__] = None",
        "import builtins; builtins.len = lambda x: 0",
        "import random; random.randint = lambda a, b: a",
        "import contextlib; contextlib._GeneratorContextManager.__exit__ = lambda *a: True",
    ],
)
def test_what_a_cell_changed_is_put_back(lesson, change):
    def state():
        base = lesson.Base()
        function = lesson.check_it
        return (
            function, function.__code__, dict(function.__kwdefaults__), copy.deepcopy((lesson.CASES, lesson.TABLE)), lesson.math, base.grow(), base.size,
            lesson.Base.make, lesson.Base() == base, sys.modules[lesson.__name__], len("abc"), random.randint,
            contextlib._GeneratorContextManager.__exit__,
        )  # fmt: skip

    pristine = Pristine()
    before = state()
    exec(change, {"lesson": lesson, "sys": sys})
    pristine.restore()
    assert state() == before


IMPORT = "from minivllm.course import check"


def run(*sources, stopped=None, **limits):
    """Run cells of a lesson: a source that begins with "with check" is a check, one with "from minivllm" is given."""
    made = []
    for number, source in enumerate(sources):
        kind = "check" if source.startswith("with check") else "given" if source.startswith("from minivllm") else "own"
        check = GradedCell(str(number), "x", 1, True) if kind == "check" else None
        made.append(Cell(str(number), kind, "code", source, check))
    surroundings = surroundings_of(Lesson("99_x", tuple(made)), (), ())
    return run_cells(tuple(made), surroundings, Limits(**limits), stopped or threading.Event())


def test_functions_behind_checks_are_put_back_before_each_check():
    text = '{"cell_type": "markdown", "metadata": {}}'
    passes, fails = (f"with check('a'):\n    assert {word} is_check({text})" for word in ("not", ""))
    imports = f"{IMPORT}\nfrom minivllm.course.exercise_cells import is_check"
    patches = "import minivllm.course.exercise_cells as c\nis_check.__code__ = (lambda cell: True).__code__\nc.is_check = is_check = lambda cell: True"
    runs = run(imports, passes, patches, passes, fails)
    assert [runs[index].passed for index in (1, 3, 4)] == [True, True, False]


PASSES, HANGS, KILLS = (f"with check('a'):\n    {body}" for body in ("pass", "while True: pass", "import os; os._exit(1)"))
WRITES = "import time\nfor i in range(600):\n    open(str(i), 'wb').write(b'x' * 5_000_000)\n    time.sleep(0.05)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "limits", "statuses"),
    [
        ([IMPORT, "import time; time.sleep(1)", "while True: pass", PASSES], {"total_seconds": 4}, "ok ok late"),
        ([*["import os; os._exit(1)"] * 13, IMPORT, PASSES], {}, "dead " * 12),
        ([WRITES], {"written_bytes": 30_000_000}, "disk"),
    ],
    ids=["runs long", "always ends Python", "writes much"],
)
def test_a_notebook_that_runs_out_of_something_is_given_up(sources, limits, statuses):
    assert [run.status for run in run(*sources, **limits).values()] == statuses.split()


@pytest.mark.slow
@pytest.mark.long
def test_after_a_check_that_hangs_others_get_less_time_and_their_points(monkeypatch):
    monkeypatch.setattr(Surroundings, "seconds_after_a_hang", lambda self, cell: 4)
    runs = run(IMPORT, HANGS, PASSES, KILLS, HANGS, PASSES, cell_seconds=6, total_seconds=120)
    assert [run.status for run in runs.values()] == ["ok", "slow", "ok", "dead", "slow", "ok"]
    assert [run.limit for run in runs.values()][1:] == [6, 4, 4, 4, 4]
    assert [index for index, run in runs.items() if run.passed] == [2, 5]


@pytest.mark.slow
def test_grading_that_is_stopped_does_not_wait_for_the_learner():
    stopped = threading.Event()
    threading.Timer(3, stopped.set).start()
    start = time.monotonic()
    with pytest.raises(KernelDidNotStart):
        run("import time; time.sleep(500)", stopped=stopped, cell_seconds=600, total_seconds=600)
    assert time.monotonic() - start < 120
