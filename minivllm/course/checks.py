"""A graded check: what a learner wrote is tried, and one line says that it works, or a few lines say why not.

A check is the whole of a cell. If it fails it raises, so `pytest --nbval`, `minivllm grade` and nbgrader all see the same
thing: the cell ran to its end, or it did not. In a notebook only the short text is shown, not the traceback of the check.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_COURSE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len, reverse=True)
"""Where Python and packages are; site-packages is often a folder in that of the standard library, so it comes first."""
_MOST_FRAMES = 6
_Place = tuple[FrameType, int]
"""One entry of a traceback: the frame, and the line that it had come to."""


class CheckFailed(AssertionError):  # noqa: N818 - a check fails, as a test does
    """A check that did not pass. Its text is what a learner reads: the check's name and points, then what went wrong."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        headline, *rest = str(self).split("\n")
        return [f"\033[1;31m{headline}\033[0m", *rest]


@contextmanager
def check(name: str, *, points: int = 1) -> Iterator[None]:
    """Try what a learner wrote; print `✓ NAME (2 points)` when the block under it passes.

    Args:
        name: what is claimed, as in "the table grows at the block boundary".
        points: what it counts when it passes, a whole number from 1 on; a failed check counts 0.

    Raises:
        CheckFailed: when the block raises. For an assertion of the check it shows the assertion's message, for an error in
            the learner's own code the lines that led to it, and for a body that is still to be written just that.
        ValueError: for a name that is empty or points that are no whole number from 1 on.

    Example:
        with check("the table grows at the block boundary", points=2):
            lesson_04.check_append(Growing)
    """
    if not isinstance(name, str) or not name.strip() or "\n" in name:
        raise ValueError(f"A check has a name of one line, but this one has {name!r}.")
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ValueError(f"The points of a check are a whole number from 1 on, but those of {name!r} are {points!r}.")
    try:
        yield
    except (Exception, SystemExit) as error:  # what interrupts the kernel goes through
        raise CheckFailed(f"✗ {name} (0 of {count_points(points)})\n{_explain(error)}") from None
    print(f"✓ {name} ({count_points(points)})")


def count_points(points: float) -> str:
    """Points with their word: "1 point", "2 points"."""
    return f"{points:g} point" + ("" if points == 1 else "s")


def _explain(error: BaseException) -> str:
    """What went wrong in a check, for the person whose code it tried."""
    # The first entry is the generator above, the second the cell with the check.
    places = list(traceback.walk_tb(error.__traceback__))[1:]
    check_cell = places[0][0]
    theirs = [place for place in places if place[0] is not check_cell and _is_theirs(place[0])]
    in_check = [place for place in places if place[0] is check_cell or _is_in(place[0], _COURSE)]
    last_said = max((places.index(place) for place in in_check), default=-1)
    is_of_check = not theirs or last_said > places.index(theirs[-1])
    if isinstance(error, AssertionError) and is_of_check:
        return str(error) or f"This does not hold: {_line(in_check[-1])}"
    if isinstance(error, NotImplementedError) and theirs and places[-1] == theirs[-1]:
        return f"Not written yet: {_describe(theirs[-1])}."
    if isinstance(error, SystemExit):
        problem = "SystemExit: a check does not go on after exit() or quit()"
    else:
        problem = "".join(traceback.format_exception_only(type(error), error)).strip()
    if not theirs:
        if isinstance(error, NameError):
            return f"{problem}. Run the cells above this one first."
        return f"The check came no further than `{_line(in_check[-1])}`:{_show_innermost(places, in_check[-1])}\n{problem}"
    shown = [f"  {_describe(place)}:\n      {_line(place)}" for place in theirs]
    if len(shown) > _MOST_FRAMES:
        left_out = f"  … {len(shown) - _MOST_FRAMES} more calls …"
        shown = [*shown[: _MOST_FRAMES // 2], left_out, *shown[-_MOST_FRAMES // 2 :]]
    return "Your code raised an error:\n" + "\n".join(shown) + f"{_show_innermost(places, theirs[-1])}\n{problem}"


def _show_innermost(places: list[_Place], shown: _Place) -> str:
    """The line that raised, when it is not the last one that is shown anyway: often a call with a wrong argument led to it."""
    if places[-1] == shown:
        return ""
    return f"\n  {_describe(places[-1])}:\n      {_line(places[-1])}"


def _is_in(frame: FrameType, folder: str) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(folder)


def _is_theirs(frame: FrameType) -> bool:
    """Whether the learner wrote this code: in a cell, or in a file that is neither of this package nor installed."""
    name = frame.f_code.co_filename
    if name.startswith("<"):
        return name.startswith("<ipython-input")
    return not any(_is_in(frame, folder) for folder in (_PACKAGE, *_INSTALLED))


def _describe(place: _Place) -> str:
    """Where that is: "cell In[5], line 12, in Growing.append"."""
    frame, line = place
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")  # Python 3.10 knows the short name only
    return f"{describe_file(code.co_filename)}, line {line}" + ("" if function == "<module>" else f", in {function}")


def describe_file(name: str) -> str:
    """A name for a file of code: "cell In[5]" for a cell that ran, "minivllm/core/scheduler.py" for one of this package."""
    number = cell_number(name)
    if number is not None:
        # What runs without a history, as nbval does, counts every cell as the first.
        return f"cell In[{number}]" if sys.modules["IPython"].get_ipython().execution_count > 1 else "a cell"
    folders = (str(Path(_PACKAGE).parent), *_INSTALLED)
    for folder in sorted(folders, key=len, reverse=True):  # one may lie in another
        if Path(name).is_relative_to(folder):
            return Path(name).relative_to(folder).as_posix()
    return Path(name).name


def cell_number(name: str) -> int | None:
    """The execution count of the cell that has been given this file name by IPython, or None for a real file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    found = shell and shell.compile.format_code_name(name)  # ("Cell", "In[5]")
    return int(found[1][3:-1]) if found else None


def _line(place: _Place) -> str:
    frame, line = place
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() or "(a line that is not to be had)"
