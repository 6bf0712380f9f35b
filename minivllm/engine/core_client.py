"""The frontend's end of the line to an `EngineCore`: in a thread of this process, or in a process of its own.

Both give the same: `send` a message, get each message from the core by a callback, in a thread of the client's. The last one is a
`CoreFailed`, when the core has gone without being asked to. Mirrors `vllm/v1/engine/core_client.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from weakref import WeakMethod

import msgspec
import zmq

from minivllm.config import EngineArgs
from minivllm.engine.core_messages import CoreFailed, CoreLog, CoreReady, FromCore, Shutdown, ToCore, decode_from_core, encode
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_proc import CoreSetup, pack_engine_args
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError

OnMessage = Callable[[FromCore], None]

_POLL_MS = 100
"""How long the process may be gone before it is noticed."""
_GRACE_S = 5.0
"""How long the core may take to end its last step when it is told to stop."""


class CoreClient(ABC):
    """A core that is ready, and the way to it.

    Attributes:
        ready: What the core said when it was.
        process_id: Of the process that computes.
    """

    ready: CoreReady
    process_id: int

    @abstractmethod
    def start(self, on_message: OnMessage) -> None:
        """Give each message from the core to a function, from now on, in a thread of the client's."""

    @abstractmethod
    def send(self, message: ToCore) -> None:
        """Hand over a message, from any thread. It is lost if the core has gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the core, and wait until it has ended. Safe to call again."""


class InProcessClient(CoreClient):
    """A core in a thread: for notebooks, for scheduler classes defined there, and for engines that are made elsewhere."""

    def __init__(self, engine: LLMEngine) -> None:
        self._core = EngineCore(engine)
        ready = self._core.output_queue.get()
        assert isinstance(ready, CoreReady)
        self.ready, self.process_id = ready, os.getpid()
        self._thread = threading.Thread(target=self._core.run_busy_loop, name="minivllm engine", daemon=True)
        self._stop = weakref.finalize(self, self._core.input_queue.put, Shutdown())
        """Also called when nobody has this client any more: its threads hold the core, and not the client."""

    def start(self, on_message: OnMessage) -> None:
        self._thread.start()
        receive = self._core.output_queue.get
        threading.Thread(target=_forward, args=(receive, WeakMethod(on_message)), name="minivllm outputs", daemon=True).start()

    def send(self, message: ToCore) -> None:
        self._core.input_queue.put(message)

    def shutdown(self) -> None:
        self._stop()
        if self._thread.ident is not None:
            self._thread.join(_GRACE_S)


class ProcessClient(CoreClient):
    """A core in a process of its own, reached through two sockets in a folder that only this user may enter.

    Args:
        args: The engine's.
        num_threads: Threads that it computes with; one for each processor if None.

    Raises:
        ModelLoadError: The model cannot be found or used.
        ConfigError: The arguments cannot work together.
        EngineDeadError: The process ended before it was ready.
    """

    def __init__(self, args: EngineArgs, num_threads: int | None = None) -> None:
        packed = pack_engine_args(args)
        folder = _make_socket_folder()
        addresses = [f"ipc://{folder}/{name}" for name in ("to_core", "from_core")]
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._input.bind(addresses[0])
        output = self._context.socket(zmq.PULL)
        output.setsockopt(zmq.RCVHWM, 0)
        output.bind(addresses[1])
        self._lock = threading.Lock()
        """A socket may be used by one thread at a time."""
        self._process = _start_process(num_threads)
        self.process_id = self._process.pid
        self._ends = threading.Event()
        self._outputs = _Outputs(output, self._process, self._ends)
        self._receiver: threading.Thread | None = None
        self._stop = weakref.finalize(self, _end_process, self._process, self._ends, folder)
        """Also called when nobody has this client any more, or Python ends."""
        setup = CoreSetup(
            packed, folder, *addresses, sys_path=sys.path, log_level=logging.getLogger().getEffectiveLevel()
        )  # fmt: skip
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
            self._process.stdin.flush()
            self.ready = self._wait_until_ready()
        except BaseException:
            self._stop()
            self.shutdown()
            raise

    def _wait_until_ready(self) -> CoreReady:
        message = self._outputs.receive()
        if isinstance(message, CoreReady):
            return message
        assert isinstance(message, CoreFailed)
        if kind := {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}.get(message.error_type):
            raise kind(message.message)
        raise EngineDeadError(f"The engine could not start: {message.error_type}: {message.message}")

    def start(self, on_message: OnMessage) -> None:
        target = (self._outputs.receive, WeakMethod(on_message))
        self._receiver = threading.Thread(target=_forward, args=target, name="minivllm outputs", daemon=True)
        self._receiver.start()

    def send(self, message: ToCore) -> None:
        data = encode(message)
        with self._lock:
            if not self._input.closed:
                with contextlib.suppress(zmq.Again):  # there is no process at the other end any more
                    self._input.send(data, zmq.NOBLOCK)

    def shutdown(self) -> None:
        self._ends.set()
        if self._stop.alive:
            self.send(Shutdown())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
            self._stop()
        if self._receiver is not None and self._receiver is not threading.current_thread():
            self._receiver.join()
        with self._lock:
            self._context.destroy(linger=0)


class _Outputs:
    """The messages of a core in a process; that it has ended is the last one."""

    def __init__(self, socket: zmq.Socket, process: subprocess.Popen, ends: threading.Event) -> None:
        self._socket = socket
        self._process = process
        self._ends = ends

    def receive(self) -> FromCore | None:
        """The next message; None when no more are wanted."""
        while not self._ends.is_set():
            if self._socket.poll(_POLL_MS):
                message = decode_from_core(self._socket.recv())
                if not isinstance(message, CoreLog):
                    return message
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
                continue
            status = self._process.poll()
            if status is not None and not self._socket.poll(0):
                return CoreFailed("", f"its process {_describe_exit(status)}")
        return None


def _forward(receive: Callable[[], FromCore | None], on_message: WeakMethod) -> None:
    """The thread of the outputs: give each message to whoever still wants it, until the last one."""
    while True:
        try:
            message = receive()
        except Exception as error:  # something that is no message: what comes after it cannot be trusted either
            message = CoreFailed(type(error).__name__, str(error))
        method = on_message()
        if message is None or method is None:
            return
        method(message)
        del method
        if isinstance(message, CoreFailed):
            return


def _start_process(num_threads: int | None) -> subprocess.Popen:
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    if num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}
    return subprocess.Popen(
        [sys.executable, "-m", "minivllm.engine.engine_core_proc"],
        stdin=subprocess.PIPE,
        stdout=2,  # whatever it prints is for people, not for a pipe
        env=os.environ | environment,
        start_new_session=True,  # Ctrl-C in the terminal is for the frontend, which then ends this process
    )


def _make_socket_folder() -> str:
    folder = tempfile.mkdtemp(prefix="minivllm-")
    if len(folder) > 80:  # the path of a socket may have about 100 characters
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="minivllm-", dir="/tmp")
    return folder


def _end_process(process: subprocess.Popen, ends: threading.Event, folder: str) -> None:
    """End a process, if it has not ended, and remove its sockets. It ends by itself when its standard input closes."""
    ends.set()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
