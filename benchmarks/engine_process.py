"""An engine in a process of its own, so that it loads and compiles once and has its own environment, threads and memory.

The process runs `engine_script.py`; requests and tokens go through its standard input and output, a JSON line each. It is stopped by a
signal while it is not its turn: an engine that waits in a busy loop would take time from the one that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import minivllm
from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError

SCRIPT = Path(__file__).with_name("engine_script.py")


@dataclass(frozen=True)
class EngineSpec:
    """What to start.

    Args:
        name: The engine's name on the command line and in the table.
        kind: One of the script's `ENGINES`.
        python: The interpreter of the environment that has the engine.
        settings: Arguments of the script's class.
        install: How to install the engine: ends the sentence that says it is missing.
        script: The script to run.
        environment: Variables to set for it.
    """

    name: str
    kind: str
    python: str
    settings: dict[str, Any]
    install: str
    script: Path = SCRIPT
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run: seconds from handing over the requests to the last token, and the tokens of each request."""

    seconds: float
    tokens: list[list[int]] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.tokens))


def find_versions(spec: EngineSpec) -> dict[str, str]:
    """The versions of an engine's packages, from its own environment. Loads no model.

    Raises:
        ConfigError: The interpreter does not exist, or does not have the engine.
    """
    command = [spec.python, str(spec.script), spec.kind, "--check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(spec.python), timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        raise ConfigError(f"{spec.name} cannot be started: {spec.python} is not a Python that runs.") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"{spec.name} cannot be started: {spec.python} fails ({_last_line(done.stderr)}).") from None
    if "missing" in answer:
        raise ConfigError(f"{spec.name} cannot be started: {spec.python} has no package {answer['missing']}; {spec.install}.")
    return answer["versions"]


class EngineProcess:
    """A running engine: `load()`, `run()` any number of times, `close()`.

    Attributes:
        load_seconds: How long imports, loading and compiling took, without the start of the interpreter.
        how: How the engine runs requests, in words.
        pid: Of the process.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.load_seconds = 0.0
        self.how = ""
        log, log_name = tempfile.mkstemp(prefix=f"{spec.name}-", suffix=".log")
        self._log = Path(log_name)
        self._process = subprocess.Popen(
            [spec.python, str(spec.script), spec.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(spec.python) | spec.environment,
            start_new_session=True,  # its children can be stopped with it, and Ctrl-C is this process's to handle
        )
        self.pid = self._process.pid
        os.close(log)
        self._failed = False

    def load(self) -> None:
        """Send the settings, wait until the model is loaded, and stop the process.

        Raises:
            ConfigError: The engine could not load it.
        """
        answer = self._ask(self.spec.settings)
        self.load_seconds, self.how = answer["load_seconds"], answer["how"]
        self._signal(signal.SIGSTOP)

    def run(self, requests: list[WorkloadRequest]) -> Run:
        """Continue the process, have it generate, and stop it again.

        Raises:
            ConfigError: The engine failed or exited, or a request got another number of tokens than it asked for.
        """
        self._signal(signal.SIGCONT)
        answer = self._ask([[request.prompt_token_ids, request.output_len] for request in requests])
        self._signal(signal.SIGSTOP)
        run = Run(answer["seconds"], answer["tokens"])
        for i, request in enumerate(requests):
            got = len(run.tokens[i]) if i < len(run.tokens) else 0
            if got != request.output_len:
                self._failed = True
                raise ConfigError(f"{self.spec.name} gave request {i} {got} tokens instead of {request.output_len}.")
        return run

    def peak_memory(self) -> float:
        """Peak memory so far, in MB (10**6 bytes), summed over the process and its children."""
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        return sum(map(_peak_bytes, processes)) / 1e6

    def close(self) -> None:
        """Kill the process and its children. The log is kept only if it failed."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        if not self._failed:
            self._log.unlink()

    def _ask(self, content: Any) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self._failed = True  # until it answers
        with contextlib.suppress(BrokenPipeError):  # it has exited: reported below
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process has ended, {self._how_it_ended()}"}
        if "error" in answer:
            reason = _last_line(answer["error"]) or "no reason given"
            raise ConfigError(f"{self.spec.name} failed ({reason}); its log is {self._log}.")
        self._failed = False
        return answer

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        return signal.Signals(-status).name if status < 0 else f"status {status}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of one that has ended
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def start_all(specs: list[EngineSpec]) -> Iterator[list[EngineProcess]]:
    """Processes for all engines, not loaded yet; killed when the context is left, by SIGTERM and a closed terminal too."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # a stopped process cannot notice that this one is gone
            for number in (signal.SIGTERM, signal.SIGHUP):
                stack.callback(signal.signal, number, signal.signal(number, leave))
        processes = []
        for spec in specs:
            processes.append(EngineProcess(spec))
            stack.callback(processes[-1].close)
        yield processes


def _environment(python: str) -> dict[str, str]:
    """This process's environment, without what minivllm sets. For this Python, the script imports the same minivllm."""
    environment = dict(os.environ)
    if environment.get("GOMP_SPINCOUNT") == minivllm.OPENMP_SPINS:
        del environment["GOMP_SPINCOUNT"]
    if python != sys.executable:
        return environment
    root = str(Path(minivllm.__file__).parents[1])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


def _peak_bytes(process: psutil.Process) -> int:
    """Peak resident memory where the system tracks it (Linux), else current resident memory."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024
    except (OSError, AttributeError):  # no /proc, or a process that has just ended
        with contextlib.suppress(psutil.Error):
            return process.memory_info().rss
        return 0
