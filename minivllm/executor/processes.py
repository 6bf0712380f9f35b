"""Starting Python processes for the engine core and for workers, and what both need to talk to their parent."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from minivllm import OPENMP_SPINS
from minivllm.errors import ConfigError

_Setup = TypeVar("_Setup", bound=msgspec.Struct)

GRACE_SECONDS = 5.0
"""How long a process may take to finish what it does when told to stop."""
SIGN_SECONDS = 1.0
"""How often a process shows its parent that it lives."""
START_SECONDS = 30.0
"""How long a process may take to show it for the first time, or while it loads: some libraries hold up its other threads for a while."""

_exits_with_parent = False


def start_python(
    module: str,
    setup: msgspec.Struct,
    num_threads: int | None = None,
    descriptors: tuple[int, ...] = (),
    gpus: str | None = None,
    arguments: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Run a module as a process with this one's module path and a pipe as its standard input.

    Args:
        module: Its name.
        setup: Written to the pipe as a line of JSON, for `read_setup`.
        num_threads: Threads to compute with; None means one per processor.
        descriptors: File descriptors to inherit, under the same numbers.
        gpus: The GPUs it sees, as in CUDA_VISIBLE_DEVICES; None means all that this process sees.
        arguments: Of its command line.
    """
    environment = {"PYTHONPATH": _module_path(), "PYTHONSAFEPATH": "1"}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        environment["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=2 if _is_open(2) else subprocess.DEVNULL,  # it may print for people, but not into a pipe
        stderr=None if _is_open(2) else subprocess.DEVNULL,
        env=os.environ | environment,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C goes to this process only, which then ends the other
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended, which is noticed soon
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        process.stdin.flush()
    return process


def _module_path() -> str:
    """Where this process finds modules, as PYTHONPATH says it; that cannot name a folder with a colon in its name."""
    folders = [path for path in sys.path if os.pathsep not in path]
    with contextlib.suppress(FileNotFoundError):  # the working directory is gone
        return os.pathsep.join(path or str(Path.cwd()) for path in folders)
    return os.pathsep.join(filter(None, folders))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class ChildProcess:
    """A process that ends with this one, at the latest, and shows that it lives by `LifeSigns`. The arguments are those of `start_python`."""

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        num_threads: int | None,
        descriptors: tuple[int, ...] = (),
        gpus: str | None = None,
    ) -> None:
        self._signs, theirs = os.pipe()
        weakref.finalize(self, os.close, self._signs)
        try:
            self._process = start_python(module, setup, num_threads, (*descriptors, theirs), gpus, (str(theirs),))
        finally:
            os.close(theirs)
        self._end = weakref.finalize(self, _end_process, self._process)
        os.set_blocking(self._signs, False)
        self._latest_sign = self._latest_look = time.monotonic()
        self._has_begun = self._is_killed_here = False

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still running."""
        self._process.send_signal(number)

    def hang_up(self) -> None:
        """Close its standard input: it exits."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    @property
    def exit_status(self) -> int | None:
        """As in `subprocess`; None while it runs."""
        return self._process.poll()

    def poll(self) -> str | None:
        """How it ended, in words that follow its name; None while it runs."""
        status = self._process.poll()
        return None if status is None else describe_exit(status)

    def kill_if_silent(self, limit: float) -> bool:
        """Kill it if it has shown no sign of life for `limit` seconds, or `START_SECONDS` if it has just been started. True if it was killed now.

        Call this at least once a second: after a longer pause it was perhaps this process that was stopped, or all were.
        """
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            if os.read(self._signs, 4096):
                self._latest_sign, self._has_begun = now, True
        if now - self._latest_look > 2 * SIGN_SECONDS:
            self._latest_sign = now
        self._latest_look = now
        patience = limit if self._has_begun else max(limit, START_SECONDS)
        if now - self._latest_sign <= patience or self._is_killed_here or self.poll() is not None:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill it, without waiting until it has ended."""
        self._is_killed_here = True
        self._process.kill()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, but not for longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def shutdown(self) -> None:
        """End it."""
        self._end()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it has not ended. It exits by itself when its standard input closes."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_classes(*configs: Any) -> None:
    """Raise a ConfigError if a class in these dataclasses is defined where a process that unpickles them cannot import it."""
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                check_classes(value)
            if isinstance(value, type) and (value.__module__ == "__main__" or "<locals>" in value.__qualname__):
                name = "the registered model class" if field.name == "model_cls" else field.name
                raise ConfigError(
                    f"{name} is {value.__qualname__}, which another process cannot import from where it is defined: put the "
                    f"class into a module, or run the engine in this process (in_process=True) with one worker."
                )


def read_setup(kind: type[_Setup]) -> _Setup:
    """What `start_python` has written to standard input. Exits if the parent has already ended."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit(1)
        line += part
    return msgspec.json.decode(line, type=kind)


def exit_with_parent(*folders: str) -> None:
    """Exit when the parent, which alone holds the other end of standard input, closes it or ends. Removes folders that the parent may
    have had no time to remove."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    global _exits_with_parent
    _exits_with_parent = True
    threading.Thread(target=wait, daemon=True).start()


def parent_has_ended() -> bool:
    """Whether the parent that this process exits with has closed standard input, or ended: this process is about to exit."""
    if not _exits_with_parent:
        return False
    closed = select.poll()
    closed.register(0, 0)  # reports POLLHUP whatever is asked for
    return bool(closed.poll(0))


class LifeSigns:
    """Shows the parent that this process lives: from now on, once a second, from a thread, through the pipe of `ChildProcess`."""

    def __init__(self) -> None:
        self._until = math.inf
        if len(sys.argv) > 1:
            threading.Thread(target=self._run, args=(int(sys.argv[1]),), daemon=True).start()

    def vouch(self, seconds: float) -> None:
        """Show no signs after so many seconds, unless this is called again: another thread might hang, and is what counts."""
        self._until = time.monotonic() + seconds

    def _run(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
            while True:
                if time.monotonic() < self._until:
                    with contextlib.suppress(BlockingIOError):  # nobody has looked for hours
                        os.write(descriptor, b".")
                time.sleep(SIGN_SECONDS)


class ForwardLog(logging.Handler):
    """Forwards log records, to be logged by another process: `put` gets the level, the logger's name, and the text, traceback included."""

    def __init__(self, put: Callable[[int, str, str], object]) -> None:
        super().__init__()
        self.put = put

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record."""
        self.put(record.levelno, record.name, self.format(record))


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A message between processes: strict MessagePack, tagged with its type's name; unknown fields are refused."""


class LogMessage(Message):
    """A log record of another process: level and logger name, as in `logging`, and the text."""

    level: int
    logger: str
    text: str

    def log(self, prefix: str = "") -> None:
        """Log it in this process."""
        logging.getLogger(self.logger).log(self.level, "%s%s", prefix, self.text)


def plain_number(value: Any) -> Any:
    """An encoding hook that turns NumPy's numbers, which users' classes may produce, into Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"A message cannot contain a {type(value).__name__}.")


def may_come_from_outside(status: int) -> bool:
    """Whether somebody else may have ended a process with this status: by SIGKILL, as the OOM killer does, or by a signal that asks for it."""
    return -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def describe_exit(status: int) -> str:
    """How a process ended, as a predicate to its name."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
