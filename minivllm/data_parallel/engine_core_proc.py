"""An engine core as one of several replicas, each in a process like `EngineCoreProc`, between API servers and the coordinator.

    API servers ─► DEALER ─► input thread ─► main thread: busy loop ─► output thread ─► PUSH: outputs ─► the API server of each request
                                                                           └─────────► PUSH: load ─► coordinator

SIGTERM lets it leave in order: it gets no new requests, finishes what it has, and ends. Mirrors `DPEngineCoreProc` in
`vllm/v1/engine/core.py`, without waves: those are for mixture-of-experts models, and replicas of a dense model, which are plain
`EngineCoreProc`s with an `engine_index` there, need not step together.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import time

import zmq

from minivllm.data_parallel import messages
from minivllm.data_parallel.messages import LoadReport, NodeWelcome, identity_of, message_header
from minivllm.distributed.sockets import KeyPair, Sockets
from minivllm.engine import core_messages
from minivllm.engine.core_messages import (
    AddRequest,
    CoreFailed,
    CoreReady,
    DeathsExplained,
    Drain,
    EngineCoreOutputs,
    FromCore,
    Heartbeat,
    ReplicaLoad,
    ToCore,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_loop import EngineCoreLoop
from minivllm.engine.engine_core_proc import EngineCoreProc, ProcessSetup
from minivllm.executor.processes import LifeSigns, exit_with_parent, read_setup

MAX_UNREAD = 10_000
"""Messages that wait for an API server which reads nothing. Further ones are lost; it finds out, and sends its requests elsewhere."""


class ReplicaSetup(ProcessSetup):
    """For a replica.

    Attributes:
        incarnation: As in `ReplicaProcess`.
        notes_descriptor: A pipe, into which it writes each `Note` to the command that has started it.
        clock_offset: By how many seconds this machine's clock is ahead of the API servers', in which times are told.
    """

    addresses: NodeWelcome
    key: KeyPair | None
    clock_offset: float
    engine_index: int = 0
    incarnation: int = 0
    notes_descriptor: int = -1


class Note(enum.Enum):
    """What whoever has started a replica must know to judge how it ends."""

    READY = b"r"
    HAS_SUSPECT = b"s"
    """It was given a request of which a replica may have died."""
    DEATHS_EXPLAINED = b"e"
    """Those before it died because of a request that was given up."""
    WORKER_KILLED = b"k"
    """It ends because a worker of it was killed by SIGKILL, or stopped."""
    FAREWELL = b"f"
    """It ends because it was told to."""


class DPEngineCoreProc(EngineCoreProc):
    """The process."""

    def __init__(self, setup: ReplicaSetup) -> None:
        sockets, addresses = Sockets(setup.key), setup.addresses
        self._engine_index, self._incarnation = setup.engine_index, setup.incarnation
        self._notes_descriptor, self._clock_offset = setup.notes_descriptor, setup.clock_offset
        identity = identity_of(setup.engine_index, setup.incarnation)
        # The probe says hello on each new connection: the frontend can send to this identity, and knows that what it had sent may be lost.
        options = {"IDENTITY": identity, "RCVHWM": 0, "PROBE_ROUTER": 1}
        inputs = [sockets.connect(zmq.DEALER, address, **options) for address in addresses.input_addresses]
        outputs = [sockets.connect(zmq.PUSH, address, SNDHWM=MAX_UNREAD) for address in addresses.output_addresses]
        self._num_sent = [0] * len(outputs)
        """Messages to each API server."""
        self._reports = sockets.connect(zmq.PUSH, addresses.report_address, CONFLATE=1)  # only the newest counts
        self._load = ReplicaLoad()
        self._loop: EngineCoreLoop | None = None
        self._start(setup, sockets.context, inputs, outputs)

    def _make_loop(self, core: EngineCore) -> EngineCoreLoop:
        if offset := self._clock_offset:
            core.clock = lambda: time.perf_counter() - offset
        self._loop = loop = EngineCoreLoop(core)
        loop.num_clients = len(self._outputs)
        signal.signal(signal.SIGTERM, lambda number, frame: loop.input_queue.put(Drain()))
        self._write(Note.READY)
        return loop

    def _write(self, note: Note) -> None:
        with contextlib.suppress(OSError):  # who started it is gone
            os.write(self._notes_descriptor, note.value)

    def _note(self, message: ToCore) -> None:
        if isinstance(message, AddRequest) and message.is_suspect:
            self._write(Note.HAS_SUSPECT)
        elif isinstance(message, DeathsExplained):
            self._write(Note.DEATHS_EXPLAINED)

    def _say_farewell(self) -> None:
        self._write(Note.FAREWELL)

    def _send(self, message: FromCore) -> None:
        """Send outputs to the API servers that wait for them, records of steps to the ones that watch, and anything else to all."""
        message.engine_index = self._engine_index
        if not isinstance(message, EngineCoreOutputs):
            if isinstance(message, CoreReady | Heartbeat):
                self._report(self._load)
            elif isinstance(message, CoreFailed) and message.was_killed:
                self._write(Note.WORKER_KILLED)
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

    def _close_outputs(self) -> None:
        self._reports.send(messages.encode(LoadReport(self._engine_index, None)))
        self._reports.close(linger=1000)
        super()._close_outputs()


if __name__ == "__main__":
    LifeSigns()
    setup = read_setup(ReplicaSetup)
    exit_with_parent(setup.socket_folder)
    sys.exit(DPEngineCoreProc(setup).run())
