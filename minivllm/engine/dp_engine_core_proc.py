"""An engine core as one of several replicas, each in a process like `EngineCoreProc`, between API servers and the coordinator.

    API servers ─► DEALER ─► input thread ─► main thread: busy loop ─► output thread ─► PUSH: outputs ─► the API server of each request
                                                                           └─────────► PUSH: load ─► coordinator

SIGTERM lets it leave in order: it gets no new requests, finishes what it has, and ends. Mirrors `DPEngineCoreProc` in
`vllm/v1/engine/core.py`, without waves: those are for mixture-of-experts models, and replicas of a dense model, which are plain
`EngineCoreProc`s with an `engine_index` there, need not step together.
"""

from __future__ import annotations

import signal
import sys
import threading

import msgspec
import zmq

from minivllm.core.routing import ReplicaLoad
from minivllm.engine import core_messages, dp_messages
from minivllm.engine.core_messages import CoreReady, EngineCoreOutputs, FromCore, Heartbeat
from minivllm.engine.dp_messages import LoadReport, NodeWelcome
from minivllm.engine.dp_sockets import KeyPair, Sockets
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_proc import EngineCoreLoop, EngineCoreProc, Leave, exit_with_the_frontend, read_line


class ReplicaSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told at its start.

    Attributes:
        config: Pickled.
        engine_index: Its rank.
        addresses: Where it connects to.
        key: For the sockets.
        socket_folder: To be removed if the frontend has had no time to; "" if there is none.
        sys_path, log_level: As in `CoreSetup`.
    """

    config: bytes
    engine_index: int
    addresses: NodeWelcome
    key: KeyPair | None
    socket_folder: str
    sys_path: list[str]
    log_level: int


class DPEngineCoreProc(EngineCoreProc):
    """The process.

    Args:
        setup: What the command that started it wrote.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        sockets = Sockets(setup.key)
        self._context = sockets.context
        self._engine_index = setup.engine_index
        self._inputs, self._poller = [], zmq.Poller()
        for address in setup.addresses.input_addresses:
            socket = sockets.connect(zmq.DEALER, address, IDENTITY=identity_of(setup.engine_index), RCVHWM=0)
            socket.send(b"")  # now the frontend can send to this identity
            self._inputs.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self._outputs = [sockets.connect(zmq.PUSH, address, SNDHWM=0) for address in setup.addresses.output_addresses]
        self._reports = sockets.connect(zmq.PUSH, setup.addresses.report_address, CONFLATE=1)  # only the newest counts
        self._reported: ReplicaLoad | None = None
        self._start(setup.config, True, setup.log_level)

    def _make_loop(self, core: EngineCore) -> EngineCoreLoop:
        loop = EngineCoreLoop(core)
        loop.num_clients = len(self._outputs)
        signal.signal(signal.SIGTERM, lambda number, frame: loop.input_queue.put(Leave()))
        return loop

    def _receive(self) -> bytes:
        socket, _ = self._poller.poll()[0]
        data: bytes = socket.recv()
        return data

    def _send(self, message: FromCore) -> None:
        """Outputs go to the API servers that wait for them, anything else to all."""
        message.engine_index = self._engine_index
        if isinstance(message, EngineCoreOutputs):
            self._report(message.stats.load)
            outputs = message.outputs
            for client, socket in enumerate(self._outputs):
                message.outputs = [output for output in outputs if output.client_index == client]
                if message.outputs or client == 0:  # the first keeps account of the state of all replicas
                    socket.send(core_messages.encode(message))
            return
        if isinstance(message, CoreReady | Heartbeat):
            self._report(self._reported or ReplicaLoad(), again=True)
        for socket in self._outputs:
            socket.send(core_messages.encode(message))

    def _report(self, load: ReplicaLoad, again: bool = False) -> None:
        """Tell the coordinator, if anything has changed."""
        if load != self._reported or again:
            self._reported = load
            self._reports.send(dp_messages.encode(LoadReport(self._engine_index, load)))

    def _close_input(self) -> None:
        for socket in self._inputs:
            socket.close(linger=0)

    def _close_output(self) -> None:
        self._reports.send(dp_messages.encode(LoadReport(self._engine_index, None)))
        for socket in (*self._outputs, self._reports):
            socket.close(linger=1000)


def identity_of(engine_index: int) -> bytes:
    """The name by which an API server sends to a replica."""
    return engine_index.to_bytes(2, "little")


def main() -> int:
    """Read the setup from standard input and run."""
    line = read_line()
    if not line:
        return 1
    setup = msgspec.json.decode(line, type=ReplicaSetup)
    sys.path[:] = setup.sys_path
    threading.Thread(target=exit_with_the_frontend, args=(setup.socket_folder,), daemon=True).start()
    return DPEngineCoreProc(setup).run()


if __name__ == "__main__":
    sys.exit(main())
