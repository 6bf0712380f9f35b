"""The coordinator of data-parallel replicas: a process that tells API servers how busy each replica is, and who belongs together.

    replicas ─► PULL: reports ─► LoadPublisher ─► XPUB: loads, soon after a change ─► API servers
    nodes, API servers ─► ROUTER: handshake

Mirrors `vllm/v1/engine/coordinator.py`, without the waves of mixture-of-experts models.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import zmq

from minivllm.data_parallel.messages import (
    VERSION,
    CoordinatorLog,
    FromHandshake,
    FrontendWelcome,
    HelloFrontend,
    HelloNode,
    Loads,
    NodeAlive,
    NodeWelcome,
    Refused,
    ReplicaDied,
    ScaleReplicas,
    decode_report,
    decode_to_handshake,
    encode,
)
from minivllm.data_parallel.routing import LoadPublisher
from minivllm.distributed.sockets import LOOK_SECONDS, MAX_HANDSHAKE_BYTES, KeyPair, RefusalLog, Sockets
from minivllm.executor.processes import ForwardLog, LifeSigns, exit_with_parent, parent_has_ended, read_setup

logger = logging.getLogger("minivllm.data_parallel.coordinator")  # also as the main module of its process

HELD_SECONDS = 5.0
"""A node that is silent for this long loses its ranks."""
CANNOT_LISTEN = 2
"""Its exit status if somebody else listens there."""


class CoordinatorSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told at its start.

    Attributes:
        handshake_address, report_address, publish_address: Where it listens; port 0 is any free one.
        client_count, size: How many API servers there are, and how many replicas there are to be.
        config_hash: Of the configuration that replicas must have.
        node_id: The node whose ranks nobody else ever gets: that of the API servers.
        socket_folder: Removed if the parent ends without doing so.
        known: If it is started in place of one that has died: the addresses of all API servers, and of the one before.
    """

    handshake_address: str
    report_address: str
    publish_address: str
    key: KeyPair | None
    client_count: int
    size: int
    config_hash: str
    log_level: int
    node_id: str = ""
    socket_folder: str = ""
    known: NodeWelcome | None = None


@dataclass
class _Applicant:
    """A node that wants ranks, since when it has waited for them, and where the answer goes."""

    identity: bytes
    hello: HelloNode
    since: float


class RankHolders:
    """Which node has which ranks: no two have the same. The node `own_id` has its ranks for good."""

    def __init__(self, own_id: str = "") -> None:
        self._own_id = own_id
        self._heard: dict[str, float] = {}
        """By node: when it last said that it is alive."""
        self._ranks: dict[str, set[int]] = {}

    def hear(self, node_id: str, ranks: Collection[int], now: float) -> bool:
        """A node has these ranks, and no others, or so it says. False if another has got some of them: it was silent for too long."""
        if node_id != self._own_id and self._find_holders(node_id, ranks, now):
            self._heard.pop(node_id, None)
            self._ranks.pop(node_id, None)
            return False
        self._heard[node_id], self._ranks[node_id] = now, set(ranks)
        for other in [other for other, heard in self._heard.items() if now - heard > HELD_SECONDS and other != self._own_id]:
            del self._heard[other], self._ranks[other]
        return True

    def may_have(self, node_id: str, ranks: Collection[int], since: float, now: float) -> bool | None:
        """Whether a node may have ranks that it has wanted for a while. None: wait a little, their holder may be gone."""
        holders = self._find_holders(node_id, ranks, now)
        if any(self._heard[other] > since or other == self._own_id for other in holders):
            return False
        return None if holders else True

    def _find_holders(self, node_id: str, ranks: Collection[int], now: float) -> list[str]:
        """Other nodes that have some of these ranks."""
        return [
            other
            for other, held in self._ranks.items()
            if other != node_id and held & set(ranks) and (now - self._heard[other] < HELD_SECONDS or other == self._own_id)
        ]


class DPCoordinatorProc:
    """The process."""

    def __init__(self, setup: CoordinatorSetup) -> None:
        self._setup = setup
        self._sockets = sockets = Sockets(setup.key)
        self._handshake, _ = sockets.bind(zmq.ROUTER, setup.handshake_address, MAXMSGSIZE=MAX_HANDSHAKE_BYTES, ROUTER_HANDOVER=1)
        self._reports, self._report_address = sockets.bind(zmq.PULL, setup.report_address, MAXMSGSIZE=MAX_HANDSHAKE_BYTES)
        self._publish, self._publish_address = sockets.bind(zmq.XPUB, setup.publish_address)
        self._refusals = [RefusalLog(socket) for socket in (self._handshake, self._reports)]
        self._holders, self._start = RankHolders(setup.node_id), time.monotonic()
        self._epoch, self._size = 0, setup.size
        self._frontends: dict[int, HelloFrontend] = {}
        if setup.known is not None:
            addresses = zip(setup.known.input_addresses, setup.known.output_addresses, strict=True)
            self._frontends = {index: HelloFrontend(index, *pair) for index, pair in enumerate(addresses)}
        self._applicants: list[_Applicant] = []
        self._publisher = LoadPublisher(time.monotonic())
        log = ForwardLog(lambda *record: self._publish.send(encode(CoordinatorLog(*record))))
        logging.basicConfig(level=setup.log_level, format="%(message)s", handlers=[log])

    def run(self) -> None:
        """Serve until the process ends."""
        poller = zmq.Poller()
        for socket in (self._handshake, self._reports, self._publish, *(refusals.monitor for refusals in self._refusals)):
            poller.register(socket, zmq.POLLIN)
        while True:
            self._sockets.restore_files(unless=parent_has_ended)  # the first API server, which finds the same, says so
            wait = min(LOOK_SECONDS, max(0.0, self._publisher.due - time.monotonic()))
            if self._applicants or any(refusals.is_full for refusals in self._refusals):
                wait = min(wait, 0.2)
            events = dict(poller.poll(1 + int(1000 * wait)))
            if self._reports in events:
                self._take_reports()
            for refusals in self._refusals:
                refusals.take()
            if self._handshake in events:
                self._shake_hands(self._handshake.recv_multipart())
            self._answer_applicants()
            is_new = self._publish in events and self._publish.recv() == b"\x01"  # an API server subscribes
            if is_new or time.monotonic() >= self._publisher.due:
                self._publish.send(encode(Loads(self._publisher.publish(time.monotonic()), self._size)))

    def _take_reports(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._reports.recv(zmq.NOBLOCK)
                try:
                    report = decode_report(data)
                except msgspec.DecodeError as error:
                    logger.error("Dropped a report that cannot be decoded: %s", error)
                    continue
                if isinstance(report, NodeAlive):
                    if not self._holders.hear(report.node_id, report.ranks, time.monotonic()):
                        self._refuse(report.node_id.encode(), report.ranks, "Another node has got these replicas meanwhile.")
                elif isinstance(report, ReplicaDied):
                    self._publish.send(encode(report))
                    self._publisher.forget(report.engine_index)
                elif report.load is None:
                    self._publisher.forget(report.engine_index)
                elif 0 <= report.engine_index < self._size and 0 <= report.load.kv_cache_usage <= 1:
                    self._publisher.report(report.engine_index, report.load, time.monotonic())

    def _shake_hands(self, frames: list[bytes]) -> None:
        identity, data = frames[0], frames[-1]
        try:
            message = decode_to_handshake(data)
        except msgspec.DecodeError as error:
            logger.warning("Refused a handshake that cannot be decoded: %s", error)
            self._answer(
                identity, Refused(f"It says something that minivllm {VERSION} does not understand: install the same version.")
            )
            return
        if isinstance(message, ScaleReplicas):
            self._size, self._publisher.due = message.size, time.monotonic()
        elif isinstance(message, HelloFrontend):
            if not 0 <= message.client_index < self._setup.client_count or message.client_index in self._frontends:
                logger.warning("Refused an API server with the index %d.", message.client_index)
                self._answer(identity, Refused("There is no place for this API server."))
                return
            self._frontends[message.client_index] = message
            self._answer(identity, FrontendWelcome(self._publish_address))
        elif reason := self._find_fault(message):
            self._refuse(identity, message.ranks, reason)
        else:
            self._applicants.append(_Applicant(identity, message, time.monotonic()))

    def _answer_applicants(self) -> None:
        """Welcome the nodes that may have the ranks that they want, once all API servers are there."""
        now = time.monotonic()
        if not self._applicants or len(self._frontends) < self._setup.client_count:
            return
        if self._setup.known is not None and now - self._start < HELD_SECONDS / 2:
            return  # nodes that have ranks may not have had time to say so
        frontends = [self._frontends[index] for index in sorted(self._frontends)]
        inputs, outputs = [item.input_address for item in frontends], [item.output_address for item in frontends]
        for applicant in list(self._applicants):
            hello = applicant.hello
            may_have = self._holders.may_have(hello.node_id, hello.ranks, applicant.since, now)
            if may_have is None:
                continue
            self._applicants.remove(applicant)
            if may_have:
                self._holders.hear(hello.node_id, hello.ranks, now)
                self._epoch = max(
                    self._epoch + 1, int(1000 * time.time())
                )  # larger than that of a coordinator before this one, too
                welcome = NodeWelcome(inputs, outputs, self._report_address, time.perf_counter(), self._epoch)
                self._answer(applicant.identity, welcome)
            else:
                reason = "Another node has these replicas: choose another --data-parallel-start-rank."
                self._refuse(applicant.identity, hello.ranks, reason)

    def _refuse(self, identity: bytes, ranks: list[int], reason: str) -> None:
        logger.warning("Refused replicas %s: %s", ranks, reason)
        self._answer(identity, Refused(reason))

    def _find_fault(self, hello: HelloNode) -> str | None:
        size = self._size
        if hello.version != VERSION:
            return f"It runs minivllm {hello.version}, but the others run {VERSION}: install the same version."
        if any(not 0 <= rank < size for rank in hello.ranks):
            return f"There are {size} replicas, with the ranks 0 to {size - 1}: check --data-parallel-size and --data-parallel-start-rank."
        if hello.config_hash != self._setup.config_hash:
            return "Its model or its options differ from those of the API server: start it with the same."
        return None

    def _answer(self, identity: bytes, message: FromHandshake) -> None:
        self._handshake.send_multipart([identity, encode(message)])


if __name__ == "__main__":
    LifeSigns()
    setup = read_setup(CoordinatorSetup)
    exit_with_parent(setup.socket_folder)
    try:
        coordinator = DPCoordinatorProc(setup)
    except zmq.ZMQError as error:
        print(f"minivllm: the coordinator cannot listen on {setup.handshake_address}: {error}", file=sys.stderr)
        sys.exit(CANNOT_LISTEN)
    coordinator.run()
