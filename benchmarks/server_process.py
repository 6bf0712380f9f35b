"""A server to measure: started on a free port, monitored while it runs, and stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

import minivllm
from minivllm.errors import ConfigError

START_SECONDS = 180.0
END_SECONDS = 60.0
PROGRAM = ("-m", "minivllm.entrypoints.cli.main")
"""The arguments of Python that run `minivllm`."""


class ServerProcess:
    """A server that is ready.

    Attributes:
        port: Its port, at 127.0.0.1.
        base_url: Its URL.
        pid: The process id of the API server.
    """

    def __init__(self, pid: int, port: int) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.pid = pid

    def processes(self) -> list[psutil.Process]:
        """The API server, then its children."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def num_file_descriptors(self) -> int:
        """Open file descriptors of all its processes."""
        return sum(process.num_fds() for process in self.processes())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its processes meanwhile: one that waits in a busy loop would take time from what is measured."""
        processes = self.processes()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name, summed over labels."""
        from prometheus_client.parser import text_string_to_metric_families

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


@contextlib.contextmanager
def start_server(*options: str, program: Sequence[str] = PROGRAM) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and stop it when the context is left.

    Args:
        options: The arguments of `minivllm serve`, without the port.
        program: The arguments of Python that run `minivllm`.

    Raises:
        ConfigError: It exited, or was not ready in time.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *options, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().split("\n")
                    how = "is not ready after three minutes" if process.poll() is None else f"ended with status {process.poll()}"
                    raise ConfigError(f"`minivllm serve {' '.join(options)}` {how}: {lines[-1]}")
                time.sleep(0.1)
            yield ServerProcess(process.pid, port)
        finally:
            _end(process)


def is_healthy(port: int, timeout: float = 10.0) -> bool:
    """Whether /health of a local server answers with status 200, on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class HealthProbe:
    """Polls a server's /health in a thread while the context is open.

    A request that is late because the answer before it was slow is timed from when it was due. Otherwise a second without answers would be
    one slow answer among many quick ones, and no percentile would show it (coordinated omission).

    Args:
        port: The port of the server on this machine.
        interval: Seconds between requests.

    Attributes:
        seconds: How long each answer took, from when its request was due.
        failures: Requests without an answer of status 200.
    """

    def __init__(self, port: int, interval: float) -> None:
        self.port = port
        self.interval = interval
        self.seconds: list[float] = []
        self.failures = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        asked = time.perf_counter()
        while not self._end.is_set():
            self.failures += not is_healthy(self.port)
            now = time.perf_counter()
            self.seconds.append(now - asked)
            asked += self.interval
            if asked > now:
                self._end.wait(asked - now)
                asked = time.perf_counter()


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def _environment() -> dict[str, str]:
    """This process's environment, for the same minivllm and without an API key."""
    root = str(Path(minivllm.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    environment.pop("MINIVLLM_API_KEY", None)
    return environment


def _end(process: subprocess.Popen) -> None:
    """Stop the server by SIGTERM, or kill it with its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()
