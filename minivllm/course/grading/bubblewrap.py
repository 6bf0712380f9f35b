"""The sandbox of a submission's kernel: Linux namespaces, set up by bubblewrap, where that is installed.

Inside are Python with its packages, this package without the project around it, the cached model, and the kernel's own folder, the only
one that can be written to. There is no network, no other process and none of the user's files; when the sandbox ends, so do all processes in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from minivllm.models.gguf_files import cache_folder

_PACKAGE = Path(__file__).resolve().parents[2]
COMPILED = _PACKAGE / "kernels" / "cpu" / "__pycache__"
"""Where Numba keeps the compiled CPU kernels. In the sandbox each grading kernel has its own copy."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "alternatives",
    "fonts",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
)
_VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_PLATFORM_DIRS")
_PREFIXES = ("LC_", "NUMBA_", "OMP_", "GOMP_", "MKL_", "TORCH", "TRITON_", "PYTHON", "PYDEVD_")
_MEMORY_FILES = 2**30
"""Bytes of /tmp and /dev/shm, which are memory."""


@cache
def is_available() -> bool:
    """Whether bubblewrap is installed, this machine lets it make namespaces, and a kernel's Python starts in them."""
    if shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "work").mkdir()
        environment = {**os.environ, "PYTHONPATH": str(_PACKAGE.parent)}
        python = [sys.executable, "-c", "import minivllm.course.grading.kernel"]
        try:
            trial = wrap(python, Path(folder).resolve(), environment)
            return subprocess.run(trial, capture_output=True, timeout=60, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


@cache
def _can_disable_namespaces() -> bool:
    """Whether this bubblewrap knows the option: 0.8 and newer do."""
    return "--disable-userns" in subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


def wrap(command: list[str], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """A command that runs another one in the sandbox.

    Args:
        command: To be run.
        folder: The kernel's own, with `work` in it, where the command starts.
        environment: The variables; only the ones that Python and the engine read are passed on.
    """
    options = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
    if _can_disable_namespaces():
        options += ["--unshare-user", "--disable-userns"]  # in another namespace, there could be memory files without a limit
    options += ["--cap-drop", "ALL"]  # otherwise root keeps them, and could remount read-only mounts as writable
    for place in ("/tmp", "/dev/shm"):
        options += ["--size", str(_MEMORY_FILES), "--tmpfs", place]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            options += ["--ro-bind", str(path), str(path)]
    for name in _SETTINGS:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for path in _readable():
        options += ["--ro-bind-try", path, path]
    work = str(folder / "work")
    options += ["--bind", str(folder), str(folder), *_compiled_kernels(folder)]
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", work]  # these are memory too, without a limit
    kept = {name: value for name, value in environment.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    for name, value in (kept | {"HOME": work, "TMPDIR": work, "MINIVLLM_CACHE": str(cache_folder().absolute())}).items():
        options += ["--setenv", name, value]
    return [*options, "--", *command]


def _readable() -> list[str]:
    """Folders of Python, of its packages, of this package and of the model, a folder before those in it; by all their names."""
    installed = {sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
    packages = {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    paths = {*installed, *packages, str(_PACKAGE), str(cache_folder().absolute())}
    paths |= {os.path.realpath(path) for path in paths}  # a program looks for its libraries where it really is
    return sorted(path for path in paths if not path.startswith("/usr/"))


def _compiled_kernels(folder: Path) -> list[str]:
    """A copy of the compiled CPU kernels, in place of the original: Numba ignores what it cannot write to."""
    if not COMPILED.is_dir():
        return []
    copy = folder / "compiled"
    if not copy.exists():
        shutil.copytree(COMPILED, copy)
    return ["--bind", str(copy), str(COMPILED)]


def kernel_process(process_id: int) -> int:
    """The kernel's own process, below those of bubblewrap, as this machine numbers it; interrupts go there."""
    import psutil

    try:
        family = psutil.Process(process_id).children(recursive=True)
        return next(process.pid for process in family if process.name() != "bwrap")
    except (psutil.Error, StopIteration):
        return process_id
