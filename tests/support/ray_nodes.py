"""A Ray cluster whose nodes are processes of this machine: they come, and go as machines do, with all that runs on them.

A test file that uses it begins with `pytest.importorskip("ray", reason=WHY_NOT)`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from unittest import mock

import psutil

WHY_NOT = "Ray is not installed: `pip install 'minivllm[ray]'`"
OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes is 75 MiB."""

START_SECONDS, NUM_ATTEMPTS = 60, 3


class RayNodes:
    """A head node without room for actors, and `count` nodes with `num_cpus` places each.

    Attributes:
        address: Of the head node.
    """

    def __init__(self, count: int, num_cpus: int = 1) -> None:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", str(START_SECONDS))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        self._num_cpus = num_cpus
        # Linux ends a node's processes with the thread that has started them.
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._cluster = Cluster(shutdown_at_exit=True)
        self._add(num_cpus=0, include_dashboard=False, no_monitor=True)
        self.address = self._cluster.address
        for _ in range(count):
            self.add()

    def _add(self, **options):
        return self._thread.submit(self._start, **options).result()

    def _start(self, **options):
        from ray._private import services, utils

        get_node = services.get_node

        def patient(*arguments):
            """Ray waits for 30 seconds, which are not enough beside other tests."""
            end = time.monotonic() + START_SECONDS
            while True:
                try:
                    return get_node(*arguments)
                except RuntimeError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)

        minimal = mock.patch.object(utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard in tests"))
        no_handlers = mock.patch.object(signal, "signal", lambda *given: None)  # those are for the main thread
        with mock.patch.object(services, "get_node", patient), minimal, no_handlers:  # agents of nodes import half as much
            for attempt in range(NUM_ATTEMPTS):  # with too little time from the processors, a node ends while it starts
                with contextlib.suppress(Exception) if attempt + 1 < NUM_ATTEMPTS else contextlib.nullcontext():
                    return self._cluster.add_node(
                        object_store_memory=OBJECT_STORE_BYTES, include_log_monitor=False, wait=False, **options
                    )
        raise AssertionError("unreachable")

    def add(self) -> str:
        """Another node. Returns its id."""
        return self._add(num_cpus=self._num_cpus).node_id

    @property
    def ids(self) -> list[str]:
        """The nodes that have room for actors."""
        return [node.node_id for node in self._cluster.worker_nodes]

    def processes(self, node_id: str, module: str) -> list[psutil.Process]:
        """The processes of a node that run a module."""
        found = []
        for process in self._descendants(self._find(node_id)):
            with contextlib.suppress(psutil.Error):
                found += [process] if any(module in part for part in process.cmdline()) else []
        return found

    def kill(self, node_id: str) -> None:
        """All of a node's processes are gone at once."""
        node = self._find(node_id)
        victims = self._descendants(node)
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        psutil.wait_procs(victims, timeout=10)

    def kill_raylet(self, node_id: str) -> None:
        """A node's Ray is gone, and nothing else of it."""
        self._cluster.remove_node(self._find(node_id), allow_graceful=False)

    def close(self) -> None:
        """End it, and this process's connection to it."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        self._thread.shutdown()

    def _find(self, node_id):
        return next(node for node in self._cluster.worker_nodes if node.node_id == node_id)

    @staticmethod
    def _descendants(node) -> list[psutil.Process]:
        found = []
        for kind in ("raylet", "dashboard_agent", "runtime_env_agent"):
            for started in node.all_processes.get(kind, ()):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(started.process.pid)
                    found += [process, *process.children(recursive=True)]
        return found


def becomes(condition, seconds=60.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)
