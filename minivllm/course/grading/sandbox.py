"""Guards around a learner's code while it is graded: forbidden files and programs, and modules that are restored before each check.

Both run inside the learner's process. They stop what people commonly try: reading the solutions, writing into the project, replacing `check` or
the functions behind it. They do not stop a determined attacker inside the process (through `ctypes`, say): files and processes are
protected by `bubblewrap.py`, and points by `observe.py`.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

_READS = {"os.listdir": (0,), "os.scandir": (0,), "os.chdir": (0,)}
_WRITES = {
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.rename": (0, 1),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),
    "sqlite3.connect": (0,),
}
_INSIDES = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents"})
"""Ways to find the state of these guards."""
_CALLERS = frozenset({"sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile"})
_FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
"""Ways, and attributes, that lead to the frames of those who called."""
_LOOKS = (inspect.__file__, traceback.__file__)
"""Modules that look at frames on behalf of a cell."""
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STANDARD = str(Path(os.__file__).parent)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_BEGIN = (str(Path(__file__).with_name("kernel.py")), "main")
"""Where the kernel begins."""
_STARTERS = ("IPython", "ipykernel", "pexpect", "ptyprocess")
"""Installed packages that start programs on behalf of a cell."""


class Fence:
    """An audit hook that blocks forbidden actions of a submission.

    Args:
        workplace: The submission's own folder, where everything is allowed.
        unreadable: Folders and files that it must not open, list or run.
        unwritable: Folders and files that it must not change, in addition to the unreadable ones.
        writable: Folders inside these that it may change, because it sees its own copy of them.

    Attributes:
        refused: What cells were refused since this list was last cleared, as predicates ("tried to open the solutions ...").
        given: The file names of cells that are part of the lesson: these may start programs, unless a learner's code is on the stack.
        is_checking: Whether a check is running: then the learner's code may not look at who calls it, where the right answers are.
    """

    def __init__(
        self, workplace: str, unreadable: Iterable[str], unwritable: Iterable[str], writable: Iterable[str] = ()
    ) -> None:
        self.refused: list[str] = []
        self.given: set[str] = set()
        self.is_checking = False
        self._writable = (os.path.realpath(workplace), *map(os.path.realpath, writable))
        self._unreadable = tuple(map(os.path.realpath, unreadable))
        self._unwritable = (*map(os.path.realpath, unwritable), *self._unreadable)

    def close(self) -> None:
        """Start blocking, until the process ends: an audit hook cannot be removed."""
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            self._check(path, isinstance(flags, int) and bool(flags & _WRITING))
        elif event in _READS:
            self._check_all(arguments, _READS[event], writes=False)
        elif event in _WRITES:
            self._check_all(arguments, _WRITES[event], writes=True)
        elif event in ("os.kill", "os.killpg"):
            self._check_target(arguments[0], is_group=event == "os.killpg")
        elif event in _INSIDES and _is_from_a_cell():
            self._refuse("tried to look into the grader's memory")
        elif self.is_checking and (event in _CALLERS or (event == "object.__getattr__" and arguments[1] in _FRAMES)):
            self.is_checking = False  # looking for the culprit asks for frames, too
            try:
                if _looks_itself():
                    self._refuse("tried to look at the check that called it")
            finally:
                self.is_checking = True
        elif event in _PROGRAMS and _is_from_a_cell() and not self._is_given():
            self._refuse("tried to start another program")

    def _check_all(self, arguments: tuple, places: tuple[int, ...], writes: bool) -> None:
        for place in places:
            self._check(arguments[place] if place < len(arguments) else None, writes)

    def _check(self, path: Any, writes: bool) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # an open file descriptor
        real = os.path.realpath(os.fsdecode(path))
        if any(_is_in(real, folder) for folder in self._writable):
            return
        if any(_is_in(real, folder) for folder in self._unreadable):
            self._refuse("tried to open the solutions or what was handed in")
        if writes and any(_is_in(real, folder) for folder in self._unwritable):
            self._refuse("tried to write outside of its own folder")

    def _check_target(self, target: int, is_group: bool) -> None:
        """A cell may signal only what it started, which is in the kernel's process group."""
        with suppress(ProcessLookupError):
            group = target if is_group else os.getpgid(target) if target > 0 else target
            if group not in (0, os.getpgrp()):
                self._refuse("tried to end another program")

    def _is_given(self) -> bool:
        """Whether all code on the stack is the lesson's or a package's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _BEGIN:
            name = frame.f_code.co_filename
            if not (name in self.given or _is_packaged(name)):
                return False
            frame = frame.f_back
        return True

    def _refuse(self, what: str) -> None:
        if what not in self.refused and _is_from_a_cell():  # a package's own attempts are not the learner's
            self.refused.append(what)
        raise PermissionError(f"A notebook that is being graded {what}.")


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _looks_itself() -> bool:
    """Whether a cell's code, and not a package that it uses, has just asked for a frame."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _LOOKS:
        frame = frame.f_back
    return frame is not None and not _is_packaged(frame.f_code.co_filename)


def _is_packaged(name: str) -> bool:
    """Whether a file is Python's, an installed package's or this project's."""
    folders = (*_INSTALLED, _STANDARD, str(Path(__file__).parents[2]))
    return name.startswith(("<frozen", *(folder + os.sep for folder in folders)))


def _is_from_a_cell() -> bool:
    """Whether the caller is a cell, and not a package that it uses (Triton starts a compiler, Numba writes a cache)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        folder = next((folder for folder in _INSTALLED if name.startswith(folder + os.sep)), None)
        if folder is not None:
            return Path(name).relative_to(folder).parts[0] in _STARTERS
        if name != __file__ and not name.startswith(("<frozen", _STANDARD + os.sep)):
            return not name.startswith(str(Path(__file__).parents[2]) + os.sep)
        frame = frame.f_back
    return True


_KEPT_WHOLE = ("ast", "contextlib", "random")
_KEPT = ("math", "copy", "itertools", "functools", "collections", "operator", "traceback", "linecache", "numpy", "torch")
_KEPT += ("numpy.testing", "numpy.random", "torch.testing")
_CHANGES_BY_ITSELF = frozenset({"__annotations__", "__annotations_cache__", "__doc__", "__dict__", "__weakref__", "__builtins__"})
_CONTAINERS = (list, dict, set)


class Pristine:
    """A snapshot of the modules that checks depend on.

    Covers all of `minivllm` and the modules that its checks are built on: functions with their code, classes with their methods, and
    the data tables of `minivllm.course`.
    """

    def __init__(self) -> None:
        self._modules = {}
        self._builtins = {name: value for name, value in vars(builtins).items() if name != "_"}
        self._values: list[tuple[dict, str, Any]] = []
        self._classes: dict[type, dict[str, Any]] = {}
        self._functions: dict[FunctionType, tuple] = {}
        self._streams = sys.stdout, sys.stderr
        self._recursion_limit = sys.getrecursionlimit()
        for name, module in list(sys.modules.items()):
            is_whole = name.split(".")[0] == "minivllm" or name in _KEPT_WHOLE
            if isinstance(module, ModuleType) and (is_whole or name in _KEPT):
                self._keep(name, module, is_whole)

    def _keep(self, name: str, module: ModuleType, is_whole: bool) -> None:
        self._modules[name] = (
            module,
            {
                key: value
                for key, value in vars(module).items()
                if callable(value) or isinstance(value, ModuleType) or name.startswith("minivllm.course")
            },
        )
        if not is_whole:
            return
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                self._keep_class(value)
            elif isinstance(value, _CONTAINERS) and name.startswith("minivllm.course") and not key.startswith("__"):
                with suppress(Exception):
                    self._values.append((vars(module), key, copy.deepcopy(value)))
            else:
                self._keep_function(value)

    def _keep_class(self, kept: type) -> None:
        self._classes[kept] = {key: value for key, value in vars(kept).items() if key not in _CHANGES_BY_ITSELF}
        for value in vars(kept).values():
            for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
                self._keep_function(function)

    def _keep_function(self, value: Any) -> None:
        while isinstance(value, FunctionType) and value not in self._functions:
            self._functions[value] = value.__code__, value.__defaults__, copy.copy(value.__kwdefaults__)
            value = getattr(value, "__wrapped__", None)

    def restore(self) -> None:
        """Undo all changes since the snapshot."""
        vars(builtins).update(self._builtins)
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(self._recursion_limit)
        sys.stdout, sys.stderr = self._streams
        for name, (module, contents) in self._modules.items():
            sys.modules[name] = module
            vars(module).update(contents)
        for contents, key, value in self._values:
            contents[key] = copy.deepcopy(value)
        for kept, contents in self._classes.items():
            _restore_class(kept, contents)
        for function, (code, defaults, keyword_defaults) in self._functions.items():
            if function.__code__ is not code:
                function.__code__ = code
            function.__defaults__, function.__kwdefaults__ = defaults, copy.copy(keyword_defaults)


def _restore_class(kept: type, contents: dict[str, Any]) -> None:
    now = dict(vars(kept))
    for key, value in contents.items():
        if now.get(key) is not value:
            with suppress(AttributeError, TypeError):
                type.__setattr__(kept, key, value)
    for key in now.keys() - contents.keys() - _CHANGES_BY_ITSELF:
        if not key.startswith("_abc"):
            with suppress(AttributeError, TypeError):
                type.__delattr__(kept, key)
