"""Further API servers, each in a process of its own: they serve the same port and the same replicas, and exit with the first.

The first starts them as `python -m minivllm.entrypoints.server.api_server_proc`, writes one line of JSON to their standard input
(`ApiServerSetup`), and keeps that pipe open: when it closes, the first is gone, and they exit. Mirrors `run_multi_api_server` in
`vllm/entrypoints/cli/serve.py`, where the first process serves no requests itself.
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
"""Tells a further API server to end its requests now. A second SIGTERM would not do: systemd sends SIGTERM to all processes."""


class ApiServerSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process gets at its start.

    Attributes:
        config: The engine's, pickled.
        place: Which API server it is.
        settings: How to treat requests.
        listener: The file descriptor of the socket on which it listens.
        sys_path: Where Python finds modules.
    """

    config: bytes
    place: FrontendPlace
    settings: ServerSettings
    listener: int
    sys_path: list[str]


class _ApiServerProcess(ChildProcess):
    """A further API server."""

    def __init__(self, setup: ApiServerSetup) -> None:
        super().__init__("minivllm.entrypoints.server.api_server_proc", 1, setup, (setup.listener,))

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def shutdown(self) -> None:
        """Kill it, if it is still running."""
        self._process.kill()
        self._end()


class ApiServerProcesses:
    """The further API servers.

    Args:
        listeners: One socket to listen on for each, which they take over.
        settings: How to treat requests, and how many API servers there are in all.

    Attributes:
        num_others: How many there are.
    """

    def __init__(self, listeners: list[socket.socket], settings: ServerSettings) -> None:
        self.num_others = len(listeners)
        self._listeners, self._settings = listeners, settings
        self._processes: dict[int, _ApiServerProcess] = {}
        """The running ones, by `FrontendPlace.client_index`."""

    def start(self, config: EngineConfig, places: list[FrontendPlace]) -> None:
        """Start them."""
        packed = config.to_bytes()
        for place, listener in zip(places, self._listeners, strict=True):
            setup = ApiServerSetup(packed, place, self._settings, listener.fileno(), sys.path)
            self._processes[place.client_index] = _ApiServerProcess(setup)
            listener.close()  # or connections would queue here after the process has closed its own

    def poll(self) -> str | None:
        """How one of them has ended, such as "was killed by SIGKILL"; None while all run."""
        return next((end for process in self._processes.values() if (end := process.poll())), None)

    def find_ended(self) -> tuple[int, str] | None:
        """One that has ended, and how. Forgets it."""
        for client_index, process in self._processes.items():
            if end := process.poll():
                del self._processes[client_index]
                return client_index, end
        return None

    def send_signal(self, number: int) -> None:
        """Send them a signal: SIGTERM lets them finish their requests, `END_NOW` ends these with an error."""
        for process in self._processes.values():
            process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, for at most this long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(process.poll() for process in self._processes.values()):
            time.sleep(0.05)

    def shutdown(self) -> None:
        """End them all, by force if need be."""
        for process in self._processes.values():
            process.hang_up()
        self.wait(GRACE_SECONDS)
        for process in self._processes.values():
            process.shutdown()
