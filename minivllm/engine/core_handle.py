"""A running `EngineCoreLoop`, seen from the frontend: in a thread of this process, or in a process of its own.

Both have the same methods. `send` hands over a message, from any thread; it is lost if the core is gone. `receive` waits for the next
message: a `CoreLost` is the last one if the core ended by itself, None if it was shut down. `shutdown` ends the core and waits until it
has ended; safe to call again, from any thread. `ready` is what the core said when it was, `process_id` the process that computes, and
`last_heard` when the core last gave a sign of life, in seconds of `time.monotonic`; None where it cannot fall silent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

import msgspec
import zmq

from minivllm.engine.core_messages import (
    CoreFailed,
    CoreLog,
    CoreLost,
    CoreReady,
    EngineCoreOutputs,
    FromCore,
    Shutdown,
    ToCore,
    decode_from_core,
    encode,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_loop import EngineCoreLoop
from minivllm.engine.engine_core_proc import CoreSetup
from minivllm.errors import EngineDeadError
from minivllm.executor.processes import GRACE_SECONDS, START_SECONDS, ChildProcess

_POLL_MS = 100
"""How long a process may be gone before it is noticed."""


class CoreThread:
    """An engine core in a thread: for notebooks, for classes defined there, and for cores made elsewhere. Nobody else may use the core until
    `shutdown`, which ends it if it is owned.
    """

    def __init__(self, core: EngineCore, *, owns_core: bool = False) -> None:
        self._owned = core if owns_core else None
        loop = EngineCoreLoop(core)
        ready = loop.output_queue.get()
        assert isinstance(ready, CoreReady)
        self.ready, self.process_id = ready, os.getpid()
        self.last_heard: float | None = None
        self._input, self._output = loop.input_queue, loop.output_queue
        self._shut_down = threading.Event()
        self._thread = threading.Thread(target=loop.run_busy_loop, name="minivllm engine core", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, loop.input_queue.put, Shutdown())

    def send(self, message: ToCore) -> None:
        self._input.put(message)

    def receive(self) -> EngineCoreOutputs | CoreLost | None:
        message = self._output.get()
        if isinstance(message, EngineCoreOutputs):
            return message
        if isinstance(message, CoreFailed):
            return CoreLost(message.cause)
        return None if self._shut_down.is_set() else CoreLost("it ended")

    def shutdown(self) -> None:
        self._shut_down.set()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE_SECONDS)
        if self._owned is not None:
            self._owned.shutdown()


class CoreProcess:
    """An engine core in a process of its own, reached through two sockets in a folder that only this user may enter.

    Args:
        num_threads: Threads that it computes with; one for each processor if None.

    Raises:
        ModelLoadError: The model cannot be found or used.
        ConfigError: The configuration cannot work.
        EngineDeadError: The process ended before it was ready.
    """

    def __init__(self, config: EngineConfig, num_threads: int | None = None) -> None:
        packed = config.to_bytes()
        folder = make_socket_folder()
        input_address, output_address = f"ipc://{folder}/to_core", f"ipc://{folder}/from_core"
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._input.bind(input_address)
        self._output = self._context.socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._output.bind(output_address)
        self._lock = threading.Lock()
        """A socket may be used by one thread at a time."""
        self._receiving = threading.Lock()
        """Held while a thread uses the output socket."""
        self.last_heard: float | None = time.monotonic()
        self._shut_down = threading.Event()
        setup = CoreSetup(packed, folder, logging.getLogger().getEffectiveLevel(), input_address, output_address)
        try:
            self._process = ChildProcess("minivllm.engine.engine_core_proc", setup, num_threads)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.process_id = self._process.process_id
        self._end = weakref.finalize(self, _end_core, self._process, self._shut_down, folder)
        """Also called when this object is garbage, or Python exits."""
        try:
            self.ready = self._wait_until_ready()
        except BaseException:
            self._end()
            self.shutdown()
            raise
        # Both sockets are connected now, so their names are no longer needed: whatever kills this process leaves nothing behind.
        self._input.poll(int(GRACE_SECONDS * 1000), zmq.POLLOUT)
        shutil.rmtree(folder, ignore_errors=True)

    def _wait_until_ready(self) -> CoreReady:
        message = self._receive(patience=START_SECONDS)
        if isinstance(message, CoreReady):
            return message
        if isinstance(message, CoreLost):
            raise EngineDeadError(f"The engine could not start: {message.cause}")
        if not isinstance(message, CoreFailed):
            raise EngineDeadError("The engine was shut down while it started.")
        raise message.start_error("The engine")

    def send(self, message: ToCore) -> None:
        data = encode(message)
        with self._lock:
            if not self._input.closed:
                with contextlib.suppress(zmq.Again):  # there is no process at the other end any more
                    self._input.send(data, zmq.NOBLOCK)

    def receive(self) -> EngineCoreOutputs | CoreLost | None:
        message = self._receive()
        if isinstance(message, CoreFailed):
            return CoreLost(message.cause)
        assert not isinstance(message, CoreReady), "it is the first message"
        return message

    def _receive(self, patience: float = math.inf) -> CoreReady | EngineCoreOutputs | CoreFailed | CoreLost | None:
        with self._receiving:
            while not self._shut_down.is_set():
                if self._output.poll(_POLL_MS):
                    message = self._decode(self._output.recv())
                    self.last_heard = time.monotonic()
                    if isinstance(message, CoreLog):
                        message.log()
                    elif isinstance(message, CoreReady | EngineCoreOutputs | CoreFailed):
                        return message
                    continue
                if self._process.kill_if_silent(patience):
                    return CoreLost(f"its process showed no sign of life for {patience:.0f} seconds, and was killed")
                end = self._process.poll()
                if end is not None and not self._output.poll(0):
                    return CoreLost(f"its process {end}")
        return None

    def shutdown(self) -> None:
        self._shut_down.set()
        if self._end.alive:
            self.send(Shutdown())
            self._process.wait(GRACE_SECONDS)
            self._end()
        with self._receiving, self._lock:
            self._context.destroy(linger=0)

    @staticmethod
    def _decode(data: bytes) -> FromCore:
        try:
            return decode_from_core(data)
        except msgspec.DecodeError as error:  # nothing after it can be trusted either
            return CoreFailed(type(error).__name__, str(error))


CoreHandle = CoreThread | CoreProcess


def make_socket_folder() -> str:
    """A new folder that only this user may enter."""
    folder = tempfile.mkdtemp(prefix="minivllm-")
    if len(folder) > 80:  # the path of a socket may have about 100 characters
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="minivllm-", dir="/tmp")
    return folder


def _end_core(process: ChildProcess, shut_down: threading.Event, folder: str) -> None:
    shut_down.set()
    process.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
