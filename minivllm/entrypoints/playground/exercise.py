"""Exercises in the browser: a check, run on the reader's cells, with the message and the points that it has in Jupyter.

The checks of lessons 04, 07 and 10 need no torch, but for those that run the real model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import minivllm

LESSONS = ("04", "07", "10")
"""Whose exercises can be done in the browser."""
MODEL = "smollm2-135m"
"""A cell that names it needs the real model."""


class _NoFigures(MetaPathFinder, Loader):
    """Modules that draw, and those of IPython, where there is no matplotlib: their functions return a sentence."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_figure = fullname.startswith("minivllm.viz.") or fullname.partition(".")[0] == "IPython"
        return ModuleSpec(fullname, self, is_package=fullname == "IPython") if is_figure else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: _no_figure
        vars(module)["get_ipython"] = lambda: None


def _no_figure(*_: Any, **__: Any) -> str:
    return "Jupyter shows a figure here."


class NoModel:
    """Stands for `LLM` where there is no torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("The real model does not run in the browser: run this in Jupyter.")


def prepare() -> None:
    """Let an exercise's imports succeed where there are no figures and no torch."""
    if not _is_there("matplotlib"):
        sys.meta_path.insert(0, _NoFigures())
    if not _is_there("torch"):
        vars(minivllm)["LLM"] = NoModel


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def run_check(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Run cells one after another, the last of which is a check, with nothing left of earlier runs.

    Args:
        cells: Their names and sources.

    Returns:
        `passed`, and `text`: what the cells printed, and why the check failed.
    """
    from minivllm.course.checks import CheckFailed  # not at the top: `prepare` need not wait for it

    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for name, source in cells:
            code = "\n".join("" if line.startswith("%") else line for line in source.split("\n"))
            file = f"cell {name}"
            linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
            try:
                exec(compile(code, file, "exec"), namespace)
            except CheckFailed as failure:
                return {"passed": False, "text": printed.getvalue() + str(failure)}
            except SyntaxError as error:
                return {"passed": False, "text": f"{printed.getvalue()}Line {error.lineno} of the {error.filename}: {error.msg}."}
            except Exception as error:
                return {"passed": False, "text": f"{printed.getvalue()}The {file} raised {type(error).__name__}: {error}"}
    return {"passed": True, "text": printed.getvalue()}
