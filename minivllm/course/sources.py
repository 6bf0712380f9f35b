"""Showing the package's own code in a lesson, so that what the lesson builds and what the engine runs never drift apart."""

from __future__ import annotations

import ast
import html
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from minivllm.course.checks import cell_number, describe_file
from minivllm.errors import MinivllmError

_WRAPPERS = ("__wrapped__", "__func__", "fget", "func", "fn", "py_func")
"""Where decorated functions keep the function itself: functools, methods, properties, Triton's and Numba's compilers."""
_GENERATED = "<string>"
"""The file name of functions that dataclasses write: they stand in no file."""


class SourceError(MinivllmError, TypeError):
    """Something has no source that can be shown."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence alone."""
        return [f"SourceError: {self}"]


class Source:
    """Some source code, with where it stands above it: highlighted in a notebook, plain text elsewhere.

    Attributes:
        place: the file, relative to the folder of the package, and the lines: "minivllm/core/scheduler.py, lines 30–77".
        code: the lines, with the indentation of the first one taken off.
    """

    def __init__(self, place: str, code: str) -> None:
        self.place = place
        self.code = code

    def __repr__(self) -> str:
        """The place, an empty line and the code."""
        return f"{self.place}\n\n{self.code}"

    def _repr_html_(self) -> str:
        """The same, highlighted with colours of its own, so that it reads on dark pages and outside JupyterLab too."""
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        formatter = HtmlFormatter(
            noclasses=True,
            cssstyles="color:#000;background:#f8f8f8;padding:0.5em",
            prestyles="margin:0;color:#000;background:#f8f8f8;line-height:1.3;"
            "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)",
        )
        return f"<div><code>{html.escape(self.place)}</code></div>\n{highlight(self.code, PythonLexer(), formatter)}"


def show_source(obj: type | Callable | property) -> None:
    """Show the source of a class, a method or a function, with its file and line numbers above it.

    Args:
        obj: for example `BlockSpaceManager`, `BlockSpaceManager.append_slots` or a class that a cell of the notebook defined.

    Raises:
        SourceError: for anything else, and for what was not written in Python.
    """
    source = find_source(obj)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(source)
    else:
        print(source)


def find_source(obj: type | Callable | property) -> Source:
    """The source of a class, a method or a function, and where it stands; `show_source` says what is raised."""
    inner = _unwrap(obj)
    if not isinstance(inner, type) and not inspect.isroutine(inner):
        hint = "" if inspect.ismodule(inner) else f" Is `{type(inner).__name__}` meant?"
        raise SourceError(f"There is only source to show for a class, a method or a function, not for {_shorten(obj)}.{hint}")
    found = _find_class(inner) if isinstance(inner, type) else _find_function(inner)
    if found is None:
        raise SourceError(f"There is no Python source to show for {_shorten(obj)}: it was not written in a file or in a cell.")
    place, first, lines = found
    code = textwrap.dedent("".join(lines)).rstrip()
    last = first + len(lines) - 1
    return Source(f"{place}, line {first}" if first == last else f"{place}, lines {first}–{last}", code)


def _unwrap(obj: Any) -> Any:
    """The function that a decorator, a method or a property keeps inside."""
    for _ in range(100):
        if isinstance(obj, type) or (inspect.isfunction(obj) and not hasattr(obj, "__wrapped__")):
            break
        try:
            inner = next((value for name in _WRAPPERS if callable(value := getattr(obj, name, None))), None)
        except Exception:  # an object whose __getattr__ fails in a way of its own
            break
        if inner is None:
            break
        obj = inner
    return obj


def _find_function(function: Any) -> tuple[str, int, list[str]] | None:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename == _GENERATED:
        return None
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return None
    return _place(code.co_filename), max(first, 1), lines


def _find_class(cls: type) -> tuple[str, int, list[str]] | None:
    """A class's lines: where its methods stand, else, as `inspect` finds it, in the file of its module."""
    for name, lines in _candidates(cls):
        for node in ast.walk(_parse(lines)):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__ and _holds(node, cls):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return name, first, lines[first - 1 : node.end_lineno]
    return None


def _candidates(cls: type) -> Iterator[tuple[str, list[str]]]:
    """Files and cells in which a class may have been written, each with its lines."""
    names = [code.co_filename for code in _method_codes(cls)]
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file:
        names.append(file)
    elif cls.__module__ == "__main__":
        names += [name for name in reversed(linecache.cache) if cell_number(name) is not None]
    for name in names:
        yield _place(name), linecache.getlines(name)


def _place(name: str) -> str:
    """A file, or the notebook: the count of its cell would be another one in a run that keeps no history."""
    return "a cell of this notebook" if cell_number(name) is not None else describe_file(name)


def _method_codes(cls: type) -> list[CodeType]:
    """The code of what was defined in the body of a class, not of what it inherits or was given later."""
    functions = [_unwrap(value) for value in vars(cls).values()]
    own = [value for value in functions if inspect.isfunction(value) and value.__qualname__.startswith(f"{cls.__qualname__}.")]
    return [function.__code__ for function in own if function.__code__.co_filename != _GENERATED]


def _parse(lines: list[str]) -> ast.Module:
    try:
        return ast.parse("".join(lines))
    except SyntaxError:  # a cell that failed
        return ast.Module(body=[], type_ignores=[])


def _holds(node: ast.ClassDef, cls: type) -> bool:
    """Whether a class statement is the one of a class, where several have its name: its first lines of code are in it."""
    first_lines = [code.co_firstlineno for code in _method_codes(cls)]
    return all(node.lineno <= line <= node.end_lineno for line in first_lines if line)


def _shorten(obj: Any) -> str:
    try:
        name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
        return f"`{name}`" if name else textwrap.shorten(repr(obj), 60, placeholder=" …")
    except Exception:  # a repr that fails
        return f"a `{type(obj).__name__}`"
