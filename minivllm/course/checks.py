"""A graded check: it runs a learner's code, and prints one line if the code works or a few lines on why it does not.

A check fills a whole cell. A failed check raises, so `pytest --nbval`, `minivllm grade` and nbgrader all agree: the cell ran to its
end, or it did not. A notebook shows only the short message, not the traceback.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from minivllm.course.results import count_points, record

_COURSE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = sorted(
    {str(Path(os.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))},
    key=len, reverse=True,
)  # fmt: skip
"""Where Python and its packages are installed, perhaps in a zip; site-packages often lies inside the standard library's folder, so it comes first."""
_MOST_FRAMES = 6
_Place = tuple[FrameType, int]
"""One entry of a traceback: the frame and its current line."""


class CheckFailed(AssertionError):  # noqa: N818 - a check fails, as a test does
    """A failed check. Its text is what the learner reads: the check's name and points, then what went wrong."""

    __context__ = None  # IPython shows a traceback of its own if it finds an ExceptionGroup there

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        headline, *rest = str(self).split("\n")
        return [f"\033[1;31m{headline}\033[0m", *rest]


@contextmanager
def check(name: str, *, points: int = 1) -> Iterator[None]:
    """Run a check on a learner's code and print `✓ NAME (2 points)` if the block passes.

    Args:
        name: The claim, such as "the table grows at the block boundary".
        points: What it is worth, a whole number of at least 1; a failed check scores 0.

    Raises:
        CheckFailed: The block raised. Shows the message of the check's own assertion, the traceback lines of an error in the
            learner's code, or just "Not written yet" for a body that still is a stub.
        ValueError: The name is empty, or the points are not a whole number of at least 1.

    Example:
        with check("the table grows at the block boundary", points=2):
            lesson_04.check_append(Growing)
    """
    if not isinstance(name, str) or not name.strip() or "\n" in name:
        raise ValueError(f"The name of a check must be a single line of text, but is {name!r}.")
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ValueError(f"The points of a check must be a whole number of at least 1, but those of {name!r} are {points!r}.")
    try:
        yield
    except (Exception, SystemExit) as error:  # an interrupt of the kernel passes through
        record(name, points, passed=False)
        raise CheckFailed(f"✗ {name} (0 of {count_points(points)})\n{_explain(error)}") from None
    record(name, points, passed=True)
    print(f"✓ {name} ({count_points(points)})")


def _explain(error: BaseException) -> str:
    """What went wrong in a check, for the person whose code it ran."""
    # The first entry is the generator above, the second is the cell with the check.
    places = list(traceback.walk_tb(error.__traceback__))[1:]
    check_cell = places[0][0]
    theirs = [place for place in places if place[0] is not check_cell and _is_theirs(place[0])]
    in_check = [place for place in places if place[0] is check_cell or _is_in(place[0], _COURSE)]
    last_said = max((places.index(place) for place in in_check), default=-1)
    is_of_check = not theirs or last_said > places.index(theirs[-1])
    if isinstance(error, AssertionError) and is_of_check:
        return str(error) or f"This assertion failed: {_line(in_check[-1])}"
    if isinstance(error, NotImplementedError) and theirs and places[-1] == theirs[-1]:
        return f"Not written yet: {_describe(theirs[-1])}."
    if isinstance(error, SystemExit):
        problem = "SystemExit: exit() and quit() end a check"
    else:
        problem = "".join(traceback.format_exception_only(type(error), error)).strip()
    if not theirs:
        if isinstance(error, NameError):
            return f"{problem}. Run the cells above this one first."
        hint = (
            "\nSomething of yours is None here: look for a function or a branch without `return`."
            if "NoneType" in problem
            else ""
        )
        return f"The check stopped at `{_line(in_check[-1])}`:{_show_innermost(places, in_check[-1])}\n{problem}{hint}"
    shown = [f"  {_describe(place)}:\n      {_line(place)}" for place in theirs]
    if len(shown) > _MOST_FRAMES:
        left_out = f"  … {len(shown) - _MOST_FRAMES} more calls …"
        shown = [*shown[: _MOST_FRAMES // 2], left_out, *shown[-_MOST_FRAMES // 2 :]]
    return "Your code raised an error:\n" + "\n".join(shown) + f"{_show_innermost(places, theirs[-1])}\n{problem}"


def _show_innermost(places: list[_Place], shown: _Place) -> str:
    """The line that raised, unless it is already the last one shown: often a call with a wrong argument led to it."""
    if places[-1] == shown:
        return ""
    return f"\n  {_describe(places[-1])}:\n      {_line(places[-1])}"


def _is_in(frame: FrameType, folder: str) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(folder)


def _is_theirs(frame: FrameType) -> bool:
    """Whether the learner wrote this code: in a cell, or in a file that belongs neither to this package nor to an installed one."""
    name = frame.f_code.co_filename
    if name.startswith("<"):
        return name.startswith("<ipython-input")
    return not any(_is_in(frame, folder) for folder in (_PACKAGE, *_INSTALLED))


def _describe(place: _Place) -> str:
    """A place in words: "cell In[5], line 12, in Growing.append"."""
    frame, line = place
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")  # Python 3.10 has only the short name
    return f"{describe_file(code.co_filename)}, line {line}" + ("" if function == "<module>" else f", in {function}")


def describe_file(name: str) -> str:
    """A readable name for a source file: "cell In[5]" for a cell, "minivllm/core/scheduler.py" for a file of this package."""
    number = cell_number(name)
    if number is not None:
        # Without a history, as under nbval, every cell is numbered 1.
        return f"cell In[{number}]" if sys.modules["IPython"].get_ipython().execution_count > 1 else "a cell"
    folders = (str(Path(_PACKAGE).parent), *_INSTALLED)
    for folder in sorted(folders, key=len, reverse=True):  # one may contain another
        if Path(name).is_relative_to(folder):
            return Path(name).relative_to(folder).as_posix()
    return Path(name).name


def cell_number(name: str) -> int | None:
    """The execution count of the cell to which IPython gave this file name, or None for a real file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    found = shell and shell.compile.format_code_name(name)  # ("Cell", "In[5]")
    return int(found[1][3:-1]) if found else None


def _line(place: _Place) -> str:
    frame, line = place
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() or "(source not available)"
