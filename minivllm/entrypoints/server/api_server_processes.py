"""API servers beside the first, each in a process of its own: they serve the same port with the same replicas, and exit when the first does.

The first starts them as `python -m minivllm.entrypoints.server.api_server_proc`, writes one line of JSON to their standard input (`ApiServerSetup`),
and keeps that pipe open: when it closes, the first is gone, and the others exit. Mirrors `run_multi_api_server` in
`vllm/entrypoints/cli/serve.py`, where the first process serves nobody itself.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

import msgspec

from minivllm.data_parallel.launcher import FrontendPlace
from minivllm.data_parallel.processes import ChildProcess
from minivllm.engine.core_handle import GRACE_SECONDS
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.server.state import ServerSettings

END_NOW = signal.SIGUSR1
"""To an API server beside the first. A second SIGTERM may have been for all processes of a service, as systemd sends it."""


class ApiServerSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told at its start.

    Attributes:
        config: The engine's, pickled.
        seed: As for `AsyncLLMEngine.join`.
        place: Which API server it is.
        settings: How to treat requests.
        listener: The file descriptor of the socket on which it listens.
        sys_path: Where Python finds modules.
        log_level: One of `LOG_LEVELS`.
    """

    config: bytes
    seed: int
    place: FrontendPlace
    settings: ServerSettings
    listener: int
    sys_path: list[str]
    log_level: str


class _ApiServerProcess(ChildProcess):
    """One of them."""

    def __init__(self, setup: ApiServerSetup) -> None:
        super().__init__("minivllm.entrypoints.server.api_server_proc", 1, setup, (setup.listener,))

    def finish(self) -> None:
        """Tell it to finish what it has, and end."""
        self._process.send_signal(signal.SIGTERM)

    def end_now(self) -> None:
        """Tell it to end what it has with an error, and end."""
        self._process.send_signal(END_NOW)

    def shutdown(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._end()


class ApiServerProcesses:
    """The API servers beside the first.

    Args:
        listeners: The sockets on which they listen, one for each. They are theirs from then on.
        settings: How to treat requests, and how many API servers there are in all.
        seed: As for `AsyncLLMEngine.join`.
        log_level: One of `LOG_LEVELS`.

    Attributes:
        num_others: How many there are beside the first.
    """

    def __init__(self, listeners: list[socket.socket], settings: ServerSettings, seed: int, log_level: str) -> None:
        self.num_others = len(listeners)
        self._listeners, self._settings, self._seed, self._log_level = listeners, settings, seed, log_level
        self._processes: dict[int, _ApiServerProcess] = {}
        """Those that run, by `FrontendPlace.client_index`."""

    def start(self, config: EngineConfig, places: list[FrontendPlace]) -> None:
        """Start them."""
        packed = config.to_bytes()
        for place, listener in zip(places, self._listeners, strict=True):
            setup = ApiServerSetup(packed, self._seed, place, self._settings, listener.fileno(), sys.path, self._log_level)
            self._processes[place.client_index] = _ApiServerProcess(setup)
            listener.close()  # or connections would be queued here when the process has closed its own

    def poll(self) -> str | None:
        """How one of them has ended, such as "was killed by SIGKILL"; None while all run."""
        return next((end for process in self._processes.values() if (end := process.poll())), None)

    def find_ended(self) -> tuple[int, str] | None:
        """One that has ended, and how. It is forgotten."""
        for client_index, process in self._processes.items():
            if end := process.poll():
                del self._processes[client_index]
                return client_index, end
        return None

    def finish(self) -> None:
        """Tell them to finish what they have, and end."""
        for process in self._processes.values():
            process.finish()

    def end_now(self) -> None:
        """Tell them to end what they have with an error, and end."""
        for process in self._processes.values():
            process.end_now()

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, but not for longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(process.poll() for process in self._processes.values()):
            time.sleep(0.05)

    def shutdown(self) -> None:
        """End those that have not ended."""
        for process in self._processes.values():
            process.hang_up()
        self.wait(GRACE_SECONDS)
        for process in self._processes.values():
            process.shutdown()
