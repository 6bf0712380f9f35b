"""A frontend's sockets: to the replicas, from the replicas, and from the coordinator."""

from __future__ import annotations

import logging

import msgspec
import zmq

from minivllm.config import ParallelConfig
from minivllm.data_parallel import messages
from minivllm.data_parallel.launcher import POLL_MS, FrontendPlace, ReplicaLauncher
from minivllm.data_parallel.messages import (
    FrontendWelcome,
    HelloFrontend,
    Published,
    Refused,
    ScaleReplicas,
    decode_published,
    identity_of,
    read_header,
    read_identity,
)
from minivllm.distributed.sockets import RefusalLog, Sockets
from minivllm.engine.core_messages import FromCore, ToCore, decode_from_core, encode
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.processes import parent_has_ended

logger = logging.getLogger(__name__)


class FrontendSockets:
    """Introduces a frontend to the coordinator, and talks with replicas, which are started then if that is this frontend's task.

    requests ─► ROUTER ─► the replica's DEALER
    outputs  ◄─ PULL   ◄─ all replicas
    loads    ◄─ SUB    ◄─ the coordinator
    """

    def __init__(self, place: FrontendPlace, launcher: ReplicaLauncher | None) -> None:
        self._place, self._launcher = place, launcher
        self._sockets = Sockets(place.key)
        self._poller = zmq.Poller()

    def open(self, parallel: ParallelConfig) -> None:
        """Listen, say so to the coordinator, and start the replicas of this machine, if that is this frontend's task.

        Raises:
            ConfigError, EngineDeadError: This machine cannot listen there, or a process that is needed has ended.
        """
        options = {"SNDHWM": 0, "ROUTER_MANDATORY": 1, "ROUTER_HANDOVER": 1}
        try:
            input_address = self._place.address("requests")
            self._requests, input_address = self._sockets.bind(zmq.ROUTER, input_address, **options)
        except zmq.ZMQError as error:
            host = parallel.data_parallel_address
            where = (
                f"data_parallel_address is {host}"
                if parallel.data_parallel_backend == "mp"
                else f"Ray says that this node is at {input_address}"
            )
            raise ConfigError(f"{where}, where this machine cannot listen ({error.strerror}).") from None
        self._outputs, output_address = self._sockets.bind(zmq.PULL, self._place.address("outputs"), RCVHWM=0)
        self._refusals = [RefusalLog(socket) for socket in (self._requests, self._outputs)] if self._place.key else []
        hello = HelloFrontend(self._place.client_index, input_address, output_address)
        self._handshake = handshake = self._sockets.connect(zmq.DEALER, self._place.handshake_address)
        if self._launcher is not None:
            welcome = self._launcher.ask(handshake, hello)
        else:
            handshake.send(messages.encode(hello))
            welcome = messages.decode_from_handshake(handshake.recv())
        if isinstance(welcome, Refused):
            raise EngineDeadError(welcome.message)
        assert isinstance(welcome, FrontendWelcome)
        self._loads = self._sockets.connect(zmq.SUB, welcome.publish_address, SUBSCRIBE=b"")
        for socket in (self._outputs, self._loads):
            self._poller.register(socket, zmq.POLLIN)
        if self._launcher is not None:
            self._launcher.start_replicas(self._sockets, handshake)

    def scale(self, size: int) -> None:
        """Tell the coordinator how many replicas there are to be; as soon as it is there, if it is gone."""
        self._handshake.send(messages.encode(ScaleReplicas(size)))

    def send(self, rank: int, incarnation: int, message: ToCore) -> bool:
        """Send a message to a process. False if there is no connection: it has died, will be connected again, or is silent. One of these
        is noticed soon."""
        try:
            self._requests.send_multipart([identity_of(rank, incarnation), encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> tuple[Published | None, tuple[int, int, FromCore] | None]:
        """Wait for a moment. Returns what the coordinator has published, and a replica's message behind its incarnation and its number."""
        events = dict(self._poller.poll(POLL_MS))
        published = decode_published(self._loads.recv()) if self._loads in events else None
        return published, self._receive_output() if self._outputs in events else None

    def _receive_output(self) -> tuple[int, int, FromCore] | None:
        try:
            header, data = self._outputs.recv_multipart()
            return *read_header(header), decode_from_core(data)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Dropped a message of a replica that cannot be decoded: %s", error)
            return None

    def take_hellos(self) -> list[tuple[int, int]]:
        """The rank and the incarnation of each process that has connected since the last call."""
        for refusals in self._refusals:
            refusals.take()
        hellos = []
        while self._requests.poll(0):
            if (identity := read_identity(self._requests.recv_multipart()[0])) is not None:
                hellos.append(identity)
        return hellos

    def restore_files(self) -> None:
        """Listen again on files that somebody has removed. Call this often."""
        if (said := self._sockets.restore_files(unless=parent_has_ended)) and self._launcher is not None:
            logger.warning(said)

    def close(self) -> None:
        """Close all sockets."""
        self._sockets.close()
