"""A headless node of replicas on this machine, for lesson 13: `minivllm serve --headless` in a process of its own, which ends with this one."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

GRACE_SECONDS = 5.0
"""How long a node may take to end its replicas."""


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _end(process: subprocess.Popen[str]) -> None:
    """Let a node end its replicas; kill it if it does not."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class HeadlessNode:
    """The process. It is ended by `end`, when this object is garbage, and when this process ends, however that comes about.

    Args:
        model: As in `LLM`.
        start_rank: Of its first replica.
        **options: `EngineArgs`, the same as those of the API server.
    """

    def __init__(self, model: str, start_rank: int, **options: Any) -> None:
        command = [sys.executable, "-m", "minivllm.course.lessons.nodes", "serve", model, "--headless", "--no-restart-engine"]
        for name, value in {**options, "data_parallel_start_rank": start_rank}.items():
            flag = name.replace("_", "-")
            command += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_for_end(self, seconds: float = 60.0) -> str:
        """What it has said, when it has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            assert self._process.stdout is not None
            return self._process.stdout.read().strip()
        return ""

    def end(self) -> None:
        """End it, and its replicas."""
        self._finalizer()


def _end_with_parent() -> None:
    """End like after SIGTERM when the parent, which alone holds the other end of standard input, has ended."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("minivllm.entrypoints.cli.main", run_name="__main__")
