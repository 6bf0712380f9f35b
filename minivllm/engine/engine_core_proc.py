"""The engine core in a process of its own, between two sockets, so that neither waits for the other: the model for HTTP, nor HTTP for the
model.

    socket ─► input thread: decode ─► input_queue ─► main thread: busy loop ─► output_queue ─► output thread: encode ─► socket

The frontend starts the process as `python -m minivllm.engine.engine_core_proc`, writes one line of JSON to its standard input
(`CoreSetup`), and keeps that pipe open: when it closes, the frontend is gone, and the process exits. Mirrors `EngineCoreProc` in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback

import msgspec
import zmq

from minivllm.engine.core_messages import CoreFailed, CoreLog, FromCore, Heartbeat, KillReplica, ToCore, decode_to_core, encode
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_loop import EngineCoreLoop
from minivllm.executor.processes import ForwardLog, LifeSigns, exit_with_parent, read_setup

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""How often a process sends a heartbeat."""
RETURN_STATUS = 75
"""The exit status of a process in whose place another is to be started."""


class ProcessSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process of a core is told at its start. The config is pickled."""

    config: bytes
    socket_folder: str
    """To be removed if the frontend has had no time to; "" if there is none."""
    log_level: int


class CoreSetup(ProcessSetup):
    """For a core with a frontend of its own."""

    input_address: str
    output_address: str


class EngineCoreProc:
    """The process: a core between two sockets."""

    def __init__(self, setup: CoreSetup) -> None:
        context = zmq.Context()
        from_frontend, to_frontend = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        from_frontend.connect(setup.input_address)
        to_frontend.setsockopt(zmq.SNDHWM, 0)
        to_frontend.connect(setup.output_address)
        self._start(setup, context, [from_frontend], [to_frontend])

    def _start(
        self,
        setup: ProcessSetup,
        context: zmq.Context[zmq.Socket[bytes]],
        inputs: list[zmq.Socket[bytes]],
        outputs: list[zmq.Socket[bytes]],
    ) -> None:
        self._config, self._context, self._inputs, self._outputs = setup.config, context, inputs, outputs
        self._poller = zmq.Poller()
        for socket in inputs:
            self._poller.register(socket, zmq.POLLIN)
        self._log = ForwardLog(lambda *record: self._send(CoreLog(*record)))
        logging.basicConfig(level=setup.log_level, format="%(message)s", handlers=[self._log])

    def run(self) -> int:
        """Load the model and serve until told to stop. Returns the exit status."""
        try:
            config = pickle.loads(self._config)
            core = EngineCore.from_config(config)
            if config.has_tokenizer:
                core.structured_outputs.load_tokenizer()
        except Exception as error:
            self._send(CoreFailed(type(error).__name__, str(error)))
            self._context.destroy(linger=1000)
            return 1
        loop = self._make_loop(core)
        self._log.put = lambda *record: loop.output_queue.put(CoreLog(*record))  # from here on, the socket is the output thread's
        threading.Thread(target=self._run_input, args=(loop,), daemon=True).start()
        sender = threading.Thread(target=self._run_output, args=(loop,))
        sender.start()
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look through it again and again
        was_told = loop.run_busy_loop()
        core.shutdown()
        sender.join()
        self._context.term()  # returns when the last message has gone out
        if not was_told:
            return 1
        self._say_farewell()
        return RETURN_STATUS if loop.returns else 0

    def _make_loop(self, core: EngineCore) -> EngineCoreLoop:
        return EngineCoreLoop(core)

    def _say_farewell(self) -> None:
        """The process ends because it was told to."""

    def _note(self, message: ToCore) -> None:
        """A message has come for the core."""

    def _run_input(self, loop: EngineCoreLoop) -> None:
        try:
            while True:
                for socket, _ in self._poller.poll():
                    try:
                        message = decode_to_core(socket.recv())
                        if isinstance(message, KillReplica):
                            os.kill(os.getpid(), signal.SIGKILL)
                        self._note(message)
                        loop.input_queue.put(message)
                    except msgspec.DecodeError as error:
                        logger.error("Dropped a message that cannot be decoded: %s", error)
        except zmq.ContextTerminated:
            for socket in self._inputs:
                socket.close(linger=0)
        except Exception:
            _exit_at_once()

    def _run_output(self, loop: EngineCoreLoop) -> None:
        """The output thread: it ends after the core's last message."""
        next_heartbeat = time.monotonic()
        try:
            while True:
                try:
                    message = loop.output_queue.get(timeout=max(0.0, next_heartbeat - time.monotonic()))
                    if message is None:
                        break
                    self._send(message)
                except queue.Empty:
                    pass
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                    if not loop.is_stuck:
                        self._send(Heartbeat(0, loop.core.num_gpu_blocks, os.getpid(), loop.is_draining))
            self._close_outputs()
        except Exception:
            _exit_at_once()

    def _send(self, message: FromCore) -> None:
        self._outputs[0].send(encode(message))

    def _close_outputs(self) -> None:
        for socket in self._outputs:
            socket.close(linger=1000)


def _exit_at_once() -> None:
    """A thread has failed: the frontend sees the process exit, but would wait forever for one that only steps."""
    traceback.print_exc()  # the log's own path may be what failed
    os._exit(1)


if __name__ == "__main__":
    LifeSigns()
    setup = read_setup(CoreSetup)
    exit_with_parent(setup.socket_folder)
    sys.exit(EngineCoreProc(setup).run())
