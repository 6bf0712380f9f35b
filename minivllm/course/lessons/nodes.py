"""A headless node of replicas on this machine, for lesson 13: `minivllm serve --headless` in a process of its own, which ends with this one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
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
    if process.stdout is not None:
        process.stdout.close()


class HeadlessNode:
    """The process. It is ended by `end`, when this object is garbage, and when Python exits.

    Args:
        model: As in `LLM`.
        start_rank: Of its first replica.
        **options: `EngineArgs`, the same as those of the API server.
    """

    def __init__(self, model: str, start_rank: int, **options: Any) -> None:
        command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "serve", model, "--headless", "--no-restart-engine"]
        for name, value in {**options, "data_parallel_start_rank": start_rank}.items():
            flag = name.replace("_", "-")
            command += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_for_end(self, seconds: float = 60.0) -> str:
        """What it has said, when it has ended by itself."""
        said = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self._process.communicate(timeout=seconds)
        return said.strip()

    def end(self) -> None:
        """End it, and its replicas."""
        self._finalizer()
