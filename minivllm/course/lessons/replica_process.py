"""The process of a learner's replica: the class comes as bytes, and runs around a real engine core, between real sockets."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

import msgspec
import zmq

from minivllm.engine.core_messages import CoreFailed, KillReplica, ReplicaLoad, encode
from minivllm.engine.engine_core import EngineCore
from minivllm.executor.processes import LifeSigns, exit_with_parent, read_setup

KILL = encode(KillReplica())
CORE, LOAD = b"core", b"load"
"""The first frame of a message says for whom it is: for the client, or for the coordinator."""


class Setup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told at its start: the engine's configuration, the learner's class, both pickled, and where its sockets are."""

    config: bytes
    replica_cls: bytes
    folder: str
    input_address: str
    output_address: str


def run(setup: Setup) -> None:
    """Serve until told to stop."""
    context = zmq.Context()
    inputs: Any = context.socket(zmq.PULL)
    inputs.connect(setup.input_address)
    outputs: Any = context.socket(zmq.PUSH)
    outputs.connect(setup.output_address)

    def send(data: bytes) -> None:
        outputs.send_multipart([CORE, data])

    def report(load: ReplicaLoad) -> None:
        outputs.send_multipart([LOAD, msgspec.msgpack.encode(load)])

    def receive() -> bytes:
        data: bytes = inputs.recv()
        if data == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    try:
        replica_cls = pickle.loads(setup.replica_cls)
        core = EngineCore.from_config(pickle.loads(setup.config))
        replica_cls(core, receive, send, report).run()
        core.shutdown()
    except Exception as error:
        send(encode(CoreFailed(type(error).__name__, str(error))))
    outputs.close(linger=1000)


if __name__ == "__main__":
    LifeSigns()
    setup = read_setup(Setup)
    exit_with_parent(setup.folder)
    run(setup)
    sys.exit(0)
