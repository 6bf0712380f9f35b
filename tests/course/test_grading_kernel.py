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
    found = find_imports(sources, "minivllm.course")
    assert found == [
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


def cells(*sources):
    """Cells of a lesson: a source that begins with "with check" is a check, one with "import" is given."""
    made = []
    for number, source in enumerate(sources):
        kind = "check" if source.startswith("with check") else "given" if source.startswith("from minivllm") else "own"
        check = GradedCell(str(number), "x", 1, True) if kind == "check" else None
        made.append(Cell(str(number), kind, "code", source, check))
    return tuple(made)


def run(made, limits=None, stopped=None):
    surroundings = surroundings_of(Lesson("99_x", made), (), ())
    return run_cells(made, surroundings, limits or Limits(), stopped or threading.Event())


def test_functions_behind_checks_are_put_back_before_each_check():
    text = '{"cell_type": "markdown", "metadata": {}}'
    made = cells(
        "from minivllm.course import check\nfrom minivllm.course.exercise_cells import is_check",
        f"with check('a'):\n    assert not is_check({text})",
        "import minivllm.course.exercise_cells as c\nis_check.__code__ = (lambda cell: True).__code__\nc.is_check = is_check = lambda cell: True",
        f"with check('b'):\n    assert not is_check({text})",
        f"with check('c'):\n    assert is_check({text})",
    )
    runs = run(made)
    assert [runs[index].passed for index in (1, 3, 4)] == [True, True, False]


@pytest.mark.slow
def test_time_for_the_whole_notebook_is_limited():
    made = cells(
        "from minivllm.course import check", "import time; time.sleep(1)", "while True: pass", "with check('a'):\n    pass"
    )
    runs = run(made, Limits(cell_seconds=600, total_seconds=4))
    assert [run.status for run in runs.values()] == ["ok", "ok", "late"]


@pytest.mark.slow
def test_a_notebook_that_always_ends_python_is_given_up():
    made = cells(*["import os; os._exit(1)"] * 13, "from minivllm.course import check", "with check('a'):\n    pass")
    runs = run(made)
    assert [run.status for run in runs.values()] == ["dead"] * 12


@pytest.mark.slow
def test_after_a_check_that_hangs_others_get_less_time_and_their_points(monkeypatch):
    monkeypatch.setattr(Surroundings, "seconds_after_a_hang", lambda self, cell: 4)
    hangs, passes, kills = (f"with check('a'):\n    {body}" for body in ("while True: pass", "pass", "import os; os._exit(1)"))
    made = cells("from minivllm.course import check", hangs, passes, kills, hangs, passes)
    runs = run(made, Limits(cell_seconds=6, total_seconds=120))
    assert [run.status for run in runs.values()] == ["ok", "slow", "ok", "dead", "slow", "ok"]
    assert [run.limit for run in runs.values()][1:] == [6, 4, 4, 4, 4]
    assert [index for index, run in runs.items() if run.passed] == [2, 5]


@pytest.mark.slow
def test_grading_that_is_stopped_does_not_wait_for_the_learner():
    stopped = threading.Event()
    threading.Timer(3, stopped.set).start()
    start = time.monotonic()
    with pytest.raises(KernelDidNotStart):
        run(cells("import time; time.sleep(500)"), Limits(cell_seconds=600, total_seconds=600), stopped)
    assert time.monotonic() - start < 120


@pytest.mark.slow
def test_files_of_a_notebook_are_limited():
    made = cells("import time\nfor i in range(600):\n    open(str(i), 'wb').write(b'x' * 5_000_000)\n    time.sleep(0.05)")
    assert run(made, Limits(written_bytes=30_000_000))[0].status == "disk"
