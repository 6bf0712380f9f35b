"""check() tells a learner in a few lines what went wrong; show_source() shows the code that the engine runs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import pytest
from course_notebooks import of_code

import minivllm
from minivllm.config import EngineArgs
from minivllm.core.block_allocator import BlockAllocator
from minivllm.course import CheckFailed, check, show_source
from minivllm.course.sources import SourceError, find_source
from minivllm.sampling_params import SamplingParams

ROOT = Path(minivllm.__file__).parents[1]
HERE = "tests/course/test_course_checks.py"


class Growing:
    """What a learner may have written."""

    def __init__(self, free=()):
        self.free = list(free)

    def append(self):
        return self.take()

    def take(self):
        return self.free.pop()

    def swap(self):
        raise NotImplementedError("write this")

    def leave(self):
        sys.exit(0)

    def forever(self):
        return self.forever()

    def refuse(self):
        assert self.free, "there are free blocks"

    def sample(self):
        return SamplingParams(n=-1)


def test_a_check_that_passes_prints_one_line(capsys):
    with check("the table grows", points=2):
        pass
    with check("the table shrinks"):
        pass
    assert capsys.readouterr().out == "✓ the table grows (2 points)\n✓ the table shrinks (1 point)\n"


ERROR = r"Your code raised an error:\n(.*\n)?"


@pytest.mark.parametrize(
    ("method", "points", "message"),
    [
        ("append", 2, rf"{ERROR}  {HERE}, line \d+, in (Growing\.)?append:\n      return self\.take\(\)\n"
                      rf"  {HERE}, line \d+, in (Growing\.)?take:\n      return self\.free\.pop\(\)\nIndexError: pop from empty list"),
        ("swap", 1, rf"Not written yet: {HERE}, line \d+, in (Growing\.)?swap\."),
        ("refuse", 2, rf"{ERROR}.*\nAssertionError: there are free blocks.*"),
        ("sample", 2, rf"{ERROR}.*return SamplingParams\(n=-1\).*\n  minivllm/sampling_params.py, line .*RequestError: n is -1, but must be at least 1\."),
        ("leave", 2, rf"{ERROR}.*SystemExit: exit\(\) and quit\(\) end a check"),
        ("forever", 2, rf"{ERROR}.*more calls ….*\nRecursionError[^\n]*"),
    ],
)  # fmt: skip
def test_an_error_of_the_learner_shows_the_learners_lines(capsys, method, points, message):
    with pytest.raises(CheckFailed) as caught, check("the table grows", points=points):
        getattr(Growing(), method)()
    headline, shown = str(caught.value).split("\n", 1)
    assert headline == f"✗ the table grows (0 of {points} point{'s' if points > 1 else ''})"
    assert re.fullmatch(message, shown, flags=re.DOTALL), shown
    assert "minivllm/course" not in shown and shown.count("\n") < 20
    assert capsys.readouterr().out == ""


def test_what_fails_in_the_check_itself_shows_its_line_or_its_message():
    with pytest.raises(CheckFailed) as caught, check("the table grows", points=2):
        assert Growing([7]).take() == 8, "Expected block 8, but got 7. Look at `take`."
    assert str(caught.value).startswith("✗ the table grows (0 of 2 points)\nExpected block 8, but got 7. Look at `take`.")
    with pytest.raises(CheckFailed) as caught, check("the table grows"):
        Growing().take(3)
    stopped = "The check stopped at `Growing().take(3)`:\n"
    assert re.search(re.escape(stopped) + r".*take\(\) takes 1 positional argument but 2 were given$", str(caught.value))
    with pytest.raises(CheckFailed, match="'Growinx' is not defined. Run the cells above this one first."), check("it is there"):
        Growinx()  # noqa: F821
    with pytest.raises(KeyboardInterrupt), check("the table grows"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "points"), [("", 1), ("  ", 1), ("two\nlines", 1), (3, 1), ("it", 0), ("it", -1), ("it", 1.5), ("it", True)]
)
def test_a_check_needs_a_name_and_points(name, points):
    with pytest.raises(ValueError, match=r"check"), check(name, points=points):
        pass


# show_source


class Decorated:
    @functools.lru_cache  # noqa: B019
    def cached(self):
        return 1

    @property
    def held(self):
        return 2

    @staticmethod
    def alone():
        return 3

    @classmethod
    def of_all(cls):
        return 4


@dataclasses.dataclass
class Plain:
    """A class with no method of its own."""

    number: int = 1


@pytest.mark.parametrize(
    ("thing", "place", "begins"),
    [
        (BlockAllocator.__init__, "minivllm/core/block_allocator.py", r"def __init__\(self, num_blocks: int\) -> None:\n    self\.num_blocks = "),
        (Decorated.cached, HERE, r"@functools.lru_cache.*\ndef cached\(.*\n    return 1$"),
        (Decorated.held, HERE, r"@property\ndef held\("),
        (Decorated.alone, HERE, r"@staticmethod\ndef alone\("),
        (Decorated.of_all, HERE, r"@classmethod\ndef of_all\("),
        (Plain, HERE, r"@dataclasses.dataclass\nclass Plain:\n"),
        (EngineArgs, "minivllm/config.py", "@dataclass"),
        (nbclient.NotebookClient, "nbclient/client.py", "class NotebookClient"),
        (dataclasses.dataclass, "dataclasses.py", r"def dataclass\("),
    ],
)  # fmt: skip
def test_code_is_shown_without_its_indentation_and_the_machines_folders(thing, place, begins):
    source = find_source(thing)
    assert source.place == place
    assert re.match(begins, source.code), source.code


def test_a_class_is_shown_under_the_name_of_its_file(capsys):
    show_source(BlockAllocator)
    place, empty, *lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert (place, empty) == ("minivllm/core/block_allocator.py", "")
    text = (ROOT / place).read_text()
    [node] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "BlockAllocator"]
    assert "\n".join(lines) == find_source(BlockAllocator).code == ast.get_source_segment(text, node)


class Awkward:
    def __getattr__(self, name):
        raise RuntimeError("not now")

    __repr__ = __getattr__


@pytest.mark.parametrize(
    "thing",
    [len, int, Plain.__init__, Plain(), minivllm, 3, "text", None, type("Made", (), {}), Awkward()],
    ids=lambda thing: type(thing).__name__,
)
def test_an_object_without_source_is_refused_in_one_sentence(thing):
    with pytest.raises(SourceError) as caught:
        show_source(thing)
    assert "source to show" in str(caught.value) and "\n" not in str(caught.value)
    assert "Awkward" in str(caught.value) or type(thing) is not Awkward
    assert caught.value._render_traceback_() == [f"SourceError: {caught.value}"]


# Both in a notebook


@pytest.fixture(scope="module")
def shown():
    """The outputs of cells that were run in a kernel."""
    notebook = of_code(
        "from minivllm.core.block_allocator import BlockAllocator\nfrom minivllm.course import check, show_source",
        "class Growing:\n    def append(self):\n        return [].pop()",
        "with check('the table grows', points=2):\n    Growing().append()",
        "with check('the table grows', points=2):\n    pass",
        "with check('the table grows', points=2):\n    raise ExceptionGroup('two', [ValueError(1)])",
        "show_source(BlockAllocator)",
        "class Mine:\n    kind = 1\n\nclass Other:\n    def add(self, a):\n        return a < 3\n",
        "show_source(Other)",
        "show_source(Other.add)",
        "show_source(Mine)",
    )
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=60).execute()
    return [cell.outputs[0] for cell in notebook.cells if cell.outputs]


def test_a_notebook_shows_the_short_text_and_no_traceback(shown):
    failed, passed, in_group = shown[:3]
    assert failed.ename == "CheckFailed"
    assert re.fullmatch(
        "\033\\[1;31m✗ the table grows \\(0 of 2 points\\)\033\\[0m\nYour code raised an error:\n"
        r"  cell In\[2\], line 3, in (Growing\.)?append:\n      return \[\]\.pop\(\)\nIndexError: pop from empty list",
        "\n".join(failed.traceback),
    )
    assert passed.text == "✓ the table grows (2 points)\n"
    assert "✗ the table grows" in in_group.traceback[0] and len(in_group.traceback) < 4


def test_a_notebook_shows_source_highlighted_and_as_text(shown):
    package, *mine = (output.data for output in shown[3:])
    assert package["text/plain"] == repr(find_source(BlockAllocator))
    assert package["text/html"].startswith("<div><code>minivllm/core/block_allocator.py</code></div>")
    assert "<span style=" in package["text/html"] and "monospace" in package["text/html"]
    assert "&lt;" in mine[0]["text/html"]
    assert [data["text/plain"].removeprefix("a cell of this notebook\n\n") for data in mine] == [
        "class Other:\n    def add(self, a):\n        return a < 3",
        "def add(self, a):\n    return a < 3",
        "class Mine:\n    kind = 1",
    ]
    assert all(data["text/plain"].startswith("a cell of this notebook") for data in mine)


def test_both_are_quick_to_import():
    heavy = {"torch", "numpy", "matplotlib", "nbgrader", "nbformat", "IPython", "pygments"}
    code = f"import sys, minivllm.course; print({heavy} & sys.modules.keys())"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "set()"
    assert time.perf_counter() - start < 5
