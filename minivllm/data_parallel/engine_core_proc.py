"""An engine core as one of several replicas, each in a process like `EngineCoreProc`, between API servers and the coordinator.

    API servers ─► DEALER ─► input thread ─► main thread: busy loop ─► output thread ─► PUSH: outputs ─► the API server of each request
                                                                           └─────────► PUSH: load ─► coordinator

SIGTERM lets it leave in order: it gets no new requests, finishes what it has, and ends. Mirrors `DPEngineCoreProc` in
`vllm/v1/engine/core.py`, without waves: those are for mixture-of-experts models, and replicas of a dense model, which are plain
`EngineCoreProc`s with an `engine_index` there, need not step together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import zmq

from minivllm.data_parallel import messages
from minivllm.data_parallel.messages import LoadReport, NodeWelcome, identity_of, message_header
from minivllm.data_parallel.sockets import KeyPair, Sockets
from minivllm.engine import core_messages
from minivllm.engine.core_messages import CoreReady, Drain, EngineCoreOutputs, FromCore, Heartbeat, ReplicaLoad
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_loop import EngineCoreLoop
from minivllm.engine.engine_core_proc import EngineCoreProc, ProcessSetup, run_core

MAX_UNREAD = 10_000
"""Messages that wait for an API server which reads nothing. Further ones are lost; it finds out, and sends its requests elsewhere."""


class ReplicaSetup(ProcessSetup, kw_only=True):
    """For a replica.

    Attributes:
        incarnation: As in `ReplicaProcess`.
        ready_descriptor: A pipe, into which it writes when it is ready.
        clock_offset: By how many seconds this machine's clock is ahead of the API servers', in which times are told.
    """

    engine_index: int = 0
    incarnation: int = 0
    addresses: NodeWelcome
    ready_descriptor: int = -1
    clock_offset: float
    key: KeyPair | None


class DPEngineCoreProc(EngineCoreProc):
    """The process."""

    def __init__(self, setup: ReplicaSetup) -> None:
        sockets = Sockets(setup.key)
        self._context = sockets.context
        self._engine_index, self._incarnation = setup.engine_index, setup.incarnation
        self._ready_descriptor, self._clock_offset = setup.ready_descriptor, setup.clock_offset
        self._inputs, self._poller = [], zmq.Poller()
        identity = identity_of(setup.engine_index, setup.incarnation)
        for address in setup.addresses.input_addresses:
            # The probe says hello on each new connection: the frontend can send to this identity, and knows that what it had sent may be lost.
            socket = sockets.connect(zmq.DEALER, address, IDENTITY=identity, RCVHWM=0, PROBE_ROUTER=1)
            self._inputs.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self._outputs = [sockets.connect(zmq.PUSH, address, SNDHWM=MAX_UNREAD) for address in setup.addresses.output_addresses]
        self._num_sent = [0] * len(self._outputs)
        self._reports = sockets.connect(zmq.PUSH, setup.addresses.report_address, CONFLATE=1)  # only the newest counts
        self._load = ReplicaLoad()
        self._loop: EngineCoreLoop | None = None
        self._start(setup.config, setup.log_level)

    def _make_loop(self, core: EngineCore) -> EngineCoreLoop:
        if offset := self._clock_offset:
            core.clock = lambda: time.perf_counter() - offset
        self._loop = loop = EngineCoreLoop(core)
        loop.num_clients = len(self._outputs)
        signal.signal(signal.SIGTERM, lambda number, frame: loop.input_queue.put(Drain()))
        with contextlib.suppress(OSError):  # who started it is gone
            os.write(self._ready_descriptor, b"r")
        os.close(self._ready_descriptor)
        return loop

    def _receive(self) -> list[bytes]:
        return [socket.recv() for socket, _ in self._poller.poll()]

    def _send(self, message: FromCore) -> None:
        """Send outputs to the API servers that wait for them, records of steps to the ones that watch, and anything else to all."""
        message.engine_index = self._engine_index
        if not isinstance(message, EngineCoreOutputs):
            if isinstance(message, CoreReady | Heartbeat):
                self._report(self._load)
            for client, socket in self._living():
                self._send_numbered(client, socket, message)
            return
        assert self._loop is not None
        if message.stats.load != self._load:
            self._report(message.stats.load)
        outputs, record, watchers = message.outputs, message.record, self._loop.watchers
        for client, socket in self._living():
            message.outputs = [output for output in outputs if output.client_index == client]
            message.record = record if client in watchers else None
            self._send_numbered(client, socket, message)

    def _send_numbered(self, client: int, socket: zmq.Socket[bytes], message: FromCore) -> None:
        """Send a message behind its header. A message that is lost, with a connection or because its receiver reads nothing, leaves a gap
        in the numbers."""
        header = message_header(self._incarnation, self._num_sent[client])
        self._num_sent[client] += 1
        with contextlib.suppress(zmq.Again):
            socket.send_multipart([header, core_messages.encode(message)], zmq.NOBLOCK)

    def _living(self) -> list[tuple[int, zmq.Socket[bytes]]]:
        """The sockets to the API servers that are alive."""
        dropped = self._loop.dropped if self._loop is not None else ()
        return [(client, socket) for client, socket in enumerate(self._outputs) if client not in dropped]

    def _report(self, load: ReplicaLoad) -> None:
        self._load = load
        self._reports.send(messages.encode(LoadReport(self._engine_index, load)))

    def _close_input(self) -> None:
        for socket in self._inputs:
            socket.close(linger=0)

    def _close_output(self) -> None:
        self._reports.send(messages.encode(LoadReport(self._engine_index, None)))
        for socket in (*self._outputs, self._reports):
            socket.close(linger=1000)


if __name__ == "__main__":
    sys.exit(run_core(ReplicaSetup, DPEngineCoreProc))
