"""check() tells a learner in a few lines what went wrong; show_source() shows the code that the engine runs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import pytest
from course_notebooks import KERNEL

import minivllm
from minivllm.config import EngineArgs
from minivllm.core.block_allocator import BlockAllocator
from minivllm.course import CheckFailed, check, show_source
from minivllm.course.sources import SourceError, find_source
from minivllm.sampling_params import SamplingParams

ROOT = Path(minivllm.__file__).parents[1]


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


def failure(body, points=2):
    """What a learner reads when a check fails."""
    with pytest.raises(CheckFailed) as caught, check("the table grows", points=points):
        body()
    headline, *rest = str(caught.value).split("\n")
    assert headline == f"✗ the table grows (0 of {points} point{'s' if points > 1 else ''})"
    assert "minivllm/course" not in str(caught.value)
    return "\n".join(rest)


def test_a_check_that_passes_prints_one_line(capsys):
    with check("the table grows", points=2):
        pass
    with check("the table shrinks"):
        pass
    assert capsys.readouterr().out == "✓ the table grows (2 points)\n✓ the table shrinks (1 point)\n"


def test_a_failed_assertion_shows_its_message_alone(capsys):
    with pytest.raises(CheckFailed) as caught, check("the table grows", points=2):
        assert Growing([7]).take() == 8, "Expected block 8, but got 7. Look at `take`."
    assert str(caught.value).startswith("✗ the table grows (0 of 2 points)\nExpected block 8, but got 7. Look at `take`.")
    assert capsys.readouterr().out == ""


def test_an_error_of_the_learner_shows_the_learners_lines():
    shown = failure(lambda: Growing().append()).split("\n")
    assert shown[0] == "Your code raised an error:"
    assert shown[-5:] == [
        f"  tests/course/test_course_checks.py, line {line_of('return self.take()')}, in {qualified('append')}:",
        "      return self.take()",
        f"  tests/course/test_course_checks.py, line {line_of('return self.free.pop()')}, in {qualified('take')}:",
        "      return self.free.pop()",
        "IndexError: pop from empty list",
    ]


def line_of(text):
    return Path(__file__).read_text().split("\n").index(f"        {text}") + 1


def qualified(method):
    return f"Growing.{method}" if sys.version_info >= (3, 11) else method


def test_a_body_that_is_not_written_is_told_so():
    assert failure(Growing().swap, points=1).startswith("Not written yet: tests/course/test_course_checks.py, line ")
    assert failure(Growing().swap).endswith(f"in {qualified('swap')}.")


def test_an_assertion_of_the_learner_is_not_one_of_the_check():
    shown = failure(lambda: Growing().refuse())
    assert shown.startswith("Your code raised an error:\n")
    assert "AssertionError: there are free blocks" in shown


def test_an_error_further_down_shows_the_call_and_the_line_that_raised():
    shown = failure(lambda: Growing().sample())
    assert "return SamplingParams(n=-1)" in shown
    assert "minivllm/sampling_params.py, line " in shown
    assert shown.endswith("minivllm.errors.RequestError: n is -1, but must be at least 1.")


def test_a_call_that_does_not_fit_shows_the_line_of_the_check():
    with pytest.raises(CheckFailed) as caught, check("the table grows"):
        Growing().take(3)
    lines = str(caught.value).split("\n")
    assert lines[1] == "The check stopped at `Growing().take(3)`:"
    assert lines[2].endswith("take() takes 1 positional argument but 2 were given")


def test_a_name_that_is_not_there_asks_to_run_the_cells_above():
    with pytest.raises(CheckFailed, match="'Growinx' is not defined. Run the cells above this one first."), check("it is there"):
        Growinx()  # noqa: F821


def test_exit_fails_the_check_and_does_not_end_the_kernel():
    assert failure(lambda: Growing().leave()).endswith("SystemExit: exit() and quit() end a check")


def test_an_endless_recursion_is_shown_in_a_few_lines():
    shown = failure(lambda: Growing().forever())
    assert "more calls …" in shown
    assert len(shown.split("\n")) < 20
    assert "RecursionError" in shown.split("\n")[-1]


def test_an_interrupt_goes_through():
    with pytest.raises(KeyboardInterrupt), check("the table grows"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "points"), [("", 1), ("  ", 1), ("two\nlines", 1), (3, 1), ("it", 0), ("it", -1), ("it", 1.5), ("it", True)]
)
def test_a_check_needs_a_name_and_points(name, points):
    with pytest.raises(ValueError, match=r"check"), check(name, points=points):
        pass


def run_cells(*sources):
    """The outputs of each cell, run in a kernel."""
    cells = [nbformat.v4.new_code_cell(source) for source in ("from minivllm.course import check, show_source", *sources)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=60).execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def test_a_notebook_shows_the_short_text_and_no_traceback():
    _, (failed,), (passed,) = run_cells(
        "class Growing:\n    def append(self):\n        return [].pop()",
        "with check('the table grows', points=2):\n    Growing().append()",
        "with check('the table grows', points=2):\n    pass",
    )
    assert failed.ename == "CheckFailed"
    assert "\n".join(failed.traceback) == (
        "\033[1;31m✗ the table grows (0 of 2 points)\033[0m\n"
        "Your code raised an error:\n"
        f"  cell In[2], line 3, in {qualified('append')}:\n"
        "      return [].pop()\n"
        "IndexError: pop from empty list"
    )
    assert passed.text == "✓ the table grows (2 points)\n"


# show_source


def test_a_class_is_shown_under_the_name_of_its_file(capsys):
    show_source(BlockAllocator)
    place, empty, *lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert (place, empty) == ("minivllm/core/block_allocator.py", "")
    text = Path(sys.modules[BlockAllocator.__module__].__file__).read_text()
    [node] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "BlockAllocator"]
    assert "\n".join(lines) == find_source(BlockAllocator).code == ast.get_source_segment(text, node)


def test_a_method_is_shown_without_its_indentation():
    source = find_source(BlockAllocator.__init__)
    assert source.code.startswith("def __init__(self, num_blocks: int) -> None:\n    self.num_blocks = num_blocks\n")


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


@pytest.mark.parametrize("name", ["cached", "held", "alone", "of_all"])
def test_what_is_decorated_is_shown_with_its_decorator(name):
    code = find_source(getattr(Decorated, name)).code
    assert code.startswith("@")
    assert f"\ndef {name}(" in code


def test_a_class_without_methods_is_found():
    assert find_source(Plain).code.startswith("@dataclasses.dataclass\nclass Plain:\n")
    assert find_source(EngineArgs).place == "minivllm/config.py"


def test_installed_files_are_named_without_the_machines_folders():
    assert find_source(nbclient.NotebookClient).place == "nbclient/client.py"
    assert find_source(dataclasses.dataclass).place == "dataclasses.py"


@pytest.mark.parametrize(
    "thing",
    [len, int, Plain.__init__, Plain(), minivllm, 3, "text", None, type("Made", (), {})],
    ids=lambda thing: repr(thing).split(" at 0x")[0],
)
def test_an_object_without_source_is_refused_in_one_sentence(thing):
    with pytest.raises(SourceError) as caught:
        show_source(thing)
    assert "source to show" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"SourceError: {caught.value}"]


def test_an_object_whose_inspection_fails_is_refused_by_its_class():
    class Awkward:
        def __getattr__(self, name):
            raise RuntimeError("not now")

        def __repr__(self):
            raise RuntimeError("not now either")

    with pytest.raises(SourceError, match="not this `Awkward`"):
        find_source(Awkward())


def test_a_notebook_shows_source_highlighted_and_as_text():
    package, _, (mine,), (method,), (bare,) = run_cells(
        "from minivllm.core.block_allocator import BlockAllocator\nshow_source(BlockAllocator)",
        "class Mine:\n    kind = 1\n\nclass Other:\n    def add(self, a):\n        return a < 3\n",
        "show_source(Other)",
        "show_source(Other.add)",
        "show_source(Mine)",
    )
    data = package[0].data
    assert data["text/plain"] == repr(find_source(BlockAllocator))
    assert data["text/html"].startswith("<div><code>minivllm/core/block_allocator.py</code></div>")
    assert "<span style=" in data["text/html"]
    assert "monospace" in data["text/html"]
    assert mine.data["text/plain"] == ("a cell of this notebook\n\nclass Other:\n    def add(self, a):\n        return a < 3")
    assert "&lt;" in mine.data["text/html"]
    assert method.data["text/plain"] == "a cell of this notebook\n\ndef add(self, a):\n    return a < 3"
    assert bare.data["text/plain"] == "a cell of this notebook\n\nclass Mine:\n    kind = 1"


def test_both_are_quick_to_import():
    code = (
        "import sys, minivllm.course; "
        "print({'torch', 'numpy', 'matplotlib', 'nbgrader', 'nbformat', 'IPython', 'pygments'} & sys.modules.keys())"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "set()"
    assert time.perf_counter() - start < 5
