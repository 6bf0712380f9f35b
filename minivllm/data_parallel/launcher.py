"""Starts what data-parallel replicas need: the coordinator, the replicas of this machine or of a Ray cluster, and a folder for sockets."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from minivllm.data_parallel import messages
from minivllm.data_parallel.coordinator import CANNOT_LISTEN, CoordinatorSetup
from minivllm.data_parallel.liveness import HOPELESS
from minivllm.data_parallel.messages import (
    VERSION,
    FromHandshake,
    HelloFrontend,
    HelloNode,
    NodeWelcome,
    Refused,
    hash_config,
)
from minivllm.data_parallel.processes import LocalReplicas, RestartPolicy
from minivllm.data_parallel.ray_replicas import RayReplicas
from minivllm.distributed.sockets import KeyPair, Sockets, check_may_listen, load_key_file, make_key, tcp_address
from minivllm.engine.core_handle import make_socket_folder
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.processes import ChildProcess

logger = logging.getLogger(__name__)

POLL_MS = 20
"""How often to look whether processes have ended."""


class FrontendPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the frontends that send requests to the same replicas, and what it needs to reach them.

    Attributes:
        client_index, client_count: Which of them, and how many there are.
        handshake_address: Where the coordinator takes introductions.
        listen_address: Where this frontend listens; None for files in the folder.
        restarts: Whether a replica that dies is replaced.
    """

    client_index: int
    client_count: int
    handshake_address: str
    listen_address: str | None
    restarts: bool
    folder: str
    key: KeyPair | None

    def address(self, name: str) -> str:
        """Where one of its sockets listens."""
        return self.listen_address or f"ipc://{self.folder}/{name}-{self.client_index}"


class OtherFrontends(Protocol):
    """The frontends besides the first, `num_others` of them, in processes of their own."""

    num_others: int

    def start(self, config: EngineConfig, places: list[FrontendPlace]) -> None:
        """Start them."""

    def poll(self) -> str | None:
        """How one of them has ended, such as "was killed by SIGKILL"; None while all run."""


class ReplicaLauncher:
    """The processes that belong to the first frontend, and end with it: the coordinator, this machine's or a cluster's replicas, and the
    `others`, which it starts, too. With `restart`, it replaces a replica that dies.

    Raises:
        ConfigError: The sockets cannot be made with this configuration.
    """

    def __init__(
        self, config: EngineConfig, restart: bool = False, others: OtherFrontends | None = None, num_threads: int | None = None
    ) -> None:
        self._config, self._restart, self._others, self._num_threads = config, restart, others, num_threads
        self._local: LocalReplicas | None = None
        parallel = config.parallel_config
        key = load_key_file(Path(parallel.data_parallel_key_file)) if parallel.data_parallel_key_file else None
        handshake_address = listen_address = None
        self._cluster = RayReplicas(config) if parallel.data_parallel_backend == "ray" else None
        if self._cluster is not None:
            key, listen_address = make_key(), tcp_address(self._cluster.ip, 0)
            own = dataclasses.replace(parallel, ray_address=None)  # elsewhere it may be another: replicas are told by Ray
            self._config = dataclasses.replace(config, parallel_config=own)
        elif not parallel.is_on_one_machine:
            check_may_listen(parallel.data_parallel_address, key)
            handshake_address = tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
            listen_address = tcp_address(parallel.data_parallel_address, 0)
        folder = make_socket_folder()
        handshake_address = handshake_address or f"ipc://{folder}/handshake"
        client_count = 1 + (others.num_others if others else 0)
        places = [
            FrontendPlace(index, client_count, handshake_address, listen_address, restart, folder, key)
            for index in range(client_count)
        ]
        self.place = places[0]
        self._hash, log_level = hash_config(config), logging.getLogger().getEffectiveLevel()
        self.node_id = uuid.uuid4().hex
        self._setup = CoordinatorSetup(
            handshake_address, self.place.address("reports"), f"ipc://{folder}/loads", key, client_count,
            parallel.data_parallel_size, self._hash, log_level, self.node_id, folder,
        )  # fmt: skip
        self._patience = HOPELESS * parallel.replica_timeout
        self._coordinator_due: float | None = None
        """When to start another coordinator in place of one that has died, in seconds of `time.monotonic`."""
        self._start_coordinator()
        self._coordinator_policy = RestartPolicy(sys.maxsize)
        if others is not None:
            try:
                others.start(config, places[1:])
            except BaseException:
                self.stop([])
                raise

    @property
    def local(self) -> LocalReplicas:
        """The replicas of this machine, which have been started."""
        assert self._local is not None
        return self._local

    def start_replicas(self, sockets: Sockets, handshake: zmq.Socket[bytes]) -> None:
        """Start the replicas of this machine, when all frontends are there. Raises the errors of `FrontendSockets.open`."""
        ranks = list(self._config.parallel_config.local_ranks)
        addresses = self.ask(handshake, HelloNode(VERSION, self._hash, ranks, self.node_id))
        if isinstance(addresses, Refused):
            raise ConfigError(addresses.message)
        assert isinstance(addresses, NodeWelcome)
        self._setup = msgspec.structs.replace(self._setup, report_address=addresses.report_address, known=addresses)
        start, folder = (None, self.place.folder) if self._cluster is None else (self._cluster.start, "")
        self._local = LocalReplicas(
            self._config, addresses, sockets, self.node_id,
            restart=self._restart, num_threads=self._num_threads, start=start, socket_folder=folder,
        )  # fmt: skip

    def scale(self, size: int) -> None:
        """Have so many replicas: see `LocalReplicas.scale`."""
        self._setup = msgspec.structs.replace(self._setup, size=size)
        if self._cluster is not None:
            self._cluster.num_replicas = size
        self.local.scale(size)

    def tend_coordinator(self) -> str | None:
        """Start another coordinator where one has died, at the same addresses. Returns how it has ended, once, in words."""
        now = time.monotonic()
        if self._coordinator_due is None and (end := self._poll_coordinator()):
            self._coordinator_due = now + (self._coordinator_policy.next_pause(now - self._coordinator_since) or 0.0)
            return end
        if self._coordinator_due is not None and now >= self._coordinator_due:
            try:
                self._start_coordinator()
            except OSError as error:  # no memory, no process, no file
                self._coordinator_due = now + (self._coordinator_policy.next_pause(None) or 0.0)
                return f"could not be started again ({error.strerror})"
        return None

    def _start_coordinator(self) -> None:
        self.coordinator = ChildProcess("minivllm.data_parallel.coordinator", self._setup, 1)
        self._coordinator_since, self._coordinator_due = time.monotonic(), None

    def _poll_coordinator(self) -> str | None:
        """How the coordinator has ended; None while it runs. One that shows no sign of life is killed."""
        if self.coordinator.kill_if_silent(self._patience):
            logger.error("The coordinator of the replicas shows no sign of life: it is killed.")
        return self.coordinator.poll()

    def ask(self, handshake: zmq.Socket[bytes], message: HelloFrontend | HelloNode) -> FromHandshake:
        """The coordinator's answer, while all processes run."""
        handshake.send(messages.encode(message))
        while not handshake.poll(POLL_MS):
            self.check_others()
            if end := self._poll_coordinator():
                parallel = self._config.parallel_config
                if parallel.is_on_one_machine or self.coordinator.exit_status != CANNOT_LISTEN:
                    raise EngineDeadError(f"The coordinator of the replicas {end}.")
                port = parallel.data_parallel_rpc_port
                raise ConfigError(
                    f"The coordinator of the replicas {end}: perhaps data_parallel_rpc_port {port} is in use; choose another."
                )
        return messages.decode_from_handshake(handshake.recv())

    def check_others(self) -> None:
        """Raise an EngineDeadError if another frontend has ended."""
        if self._others is not None and (end := self._others.poll()):
            raise EngineDeadError(f"An API server {end}.")

    def stop(self, told: list[int]) -> None:
        """End all processes; some replicas have been told to. Safe to call again."""
        if self._local is not None:
            self._local.shutdown(told)
        self.coordinator.shutdown()
        shutil.rmtree(self.place.folder, ignore_errors=True)
