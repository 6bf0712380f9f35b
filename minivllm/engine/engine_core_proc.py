"""The engine core behind a queue, in a thread or a process of its own, so that neither waits for the other: the model for HTTP, nor HTTP
for the model.

    socket ─► input thread: decode ─► input_queue ─► main thread: busy loop ─► output_queue ─► output thread: encode ─► socket

The frontend starts the process as `python -m minivllm.engine.engine_core_proc`, writes one line of JSON to its standard input
(`CoreSetup`), and keeps that pipe open: when it closes, the frontend is gone, and the process exits. Mirrors `EngineCoreProc` in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import zmq

from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    BeginAnew,
    CoreFailed,
    CoreLeaving,
    CoreLog,
    CoreReady,
    Die,
    DropClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    Farewell,
    FromCore,
    Heartbeat,
    Leave,
    SetTracing,
    Shutdown,
    StopSequences,
    ToCore,
    decode_to_core,
    encode,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.errors import EngineDeadError, RequestError
from minivllm.executor.processes import ForwardLog
from minivllm.outputs import RequestMetrics

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Consecutive failed steps before the engine core is declared dead."""
HEARTBEAT_SECONDS = 1.0
"""How often a process sends a heartbeat."""
MAX_STEP_SECONDS = 300.0
"""A process whose step takes longer is stuck, and sends no heartbeats: vLLM's limit for a step."""
FAREWELL_SECONDS = 10.0
"""How long a replica that leaves waits for the `Farewell` of an API server that says nothing."""
RETURN_STATUS = 75
"""The exit status of a process in whose place another is to be started."""


class ExecutorFailed:
    """A worker is gone: said by the executor, in the queue of messages to the core, so that one who waits there hears it."""


class EngineCoreLoop:
    """Steps an engine core while it has work, and waits for messages when it has none.

    Args:
        core: Used by nobody else while the loop runs.

    Attributes:
        input_queue: Messages to the core, from any thread.
        output_queue: Messages from the core; None after the last one.
        num_clients: API servers, each of which must say `Farewell` before the loop leaves.
        is_leaving: Whether it takes no new requests, and ends when it has finished those it has.
        returns: Whether another core is to be started in its place then.
        watchers: Those that want to see each step's record.
        dropped: API servers that have died.
    """

    num_clients = 1

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.input_queue: queue.SimpleQueue[ToCore | ExecutorFailed] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[FromCore | None] = queue.SimpleQueue()
        self._num_failed_steps = 0
        self.is_leaving, self.returns, self._leaving_since = False, False, 0.0
        self._step_since: float | None = None
        self.watchers: frozenset[int] = frozenset()
        self.dropped: frozenset[int] = frozenset()
        self._farewells: set[int] = set()
        """API servers that send nothing more."""
        self._refused: list[EngineCoreOutput] = []
        """Errors of requests that could not be added; the next message carries them."""
        self.output_queue.put(CoreReady(core.num_gpu_blocks, process_id=os.getpid()))
        core.executor.register_failure_callback(partial(self.input_queue.put, ExecutorFailed()))

    def run_busy_loop(self) -> bool:
        """Handle messages and step, until told to stop, or until the core fails. Returns whether it was told.

        A failed step does not end the loop, only its requests; several in a row do. Remaining requests are aborted.
        """
        core = self.core
        try:
            while self._handle_messages():
                if core.has_unfinished_requests():
                    self._step()
                if self._may_leave():
                    self.output_queue.put(CoreLeaving(has_left=True, returns=self.returns))
                    break
            return True
        except EngineDeadError as error:  # the message says all that is known
            self.output_queue.put(CoreFailed("", str(error)))
            return False
        except Exception as error:
            logger.exception("The engine failed.")
            self.output_queue.put(CoreFailed(type(error).__name__, str(error)))
            return False
        finally:
            core.abort_requests(list(core.scheduler.requests))
            core.stop_trace()
            self.output_queue.put(None)

    @property
    def is_stuck(self) -> bool:
        """Whether the current step takes too long. Asked by another thread."""
        since = self._step_since
        return since is not None and time.monotonic() - since > MAX_STEP_SECONDS

    def _may_leave(self) -> bool:
        """Whether it leaves, has finished what it had, and gets nothing more."""
        if not self.is_leaving or self.core.has_unfinished_requests():
            return False
        has_waited = time.monotonic() - self._leaving_since > FAREWELL_SECONDS
        return has_waited or len(self._farewells) == self.num_clients

    def _handle_messages(self) -> bool:
        """Handle all messages there are; wait for one if there is nothing else to do. Returns False after a `Shutdown`."""
        wait, handled = not self.core.has_unfinished_requests(), False
        while True:
            try:
                message = self.input_queue.get(block=wait, timeout=FAREWELL_SECONDS / 10 if self.is_leaving else None)
            except queue.Empty:
                break
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
            wait, handled = False, True
        if handled and not self.core.has_unfinished_requests():
            self._send(self.core.make_outputs([]))
        return True

    def _handle(self, message: ToCore | ExecutorFailed) -> None:
        if isinstance(message, AddRequest):
            if message.request.client_index in self.dropped:
                return
            try:
                self.core.add_request(message.request)
            except RequestError as error:  # the frontend has validated it: only a faulty frontend gets here
                request_id, number = message.request.request_id, message.request.number
                metrics, client = RequestMetrics(message.request.arrival_time), message.request.client_index
                self._refused.append(
                    EngineCoreOutput(request_id, number, [], True, metrics, error=str(error), client_index=client)
                )
        elif isinstance(message, AbortRequests):
            self.core.abort_requests(message.request_ids)
        elif isinstance(message, StopSequences):
            self.core.stop_sequences(message.sequences)
        elif isinstance(message, ExecutorFailed):
            self.core.executor.check_health()
        elif isinstance(message, Leave):
            self._leave(message)
        elif isinstance(message, Farewell):
            self._farewells.add(message.client_index)
        elif isinstance(message, BeginAnew):
            self._abort_all_of(message.client_index)
        elif isinstance(message, DropClient):
            self._drop_client(message.client_index)
        elif isinstance(message, SetTracing):
            self._set_tracing(message)

    def _leave(self, message: Leave) -> None:
        self.returns = message.returns and (self.returns or not self.is_leaving)  # who wants it to end has the last word
        if not self.is_leaving:
            self.is_leaving, self._leaving_since = True, time.monotonic()
            self.output_queue.put(CoreLeaving())

    def _abort_all_of(self, client_index: int) -> None:
        requests = self.core.scheduler.requests.items()
        self.core.abort_requests([name for name, request in requests if request.data.client_index == client_index])

    def _drop_client(self, client_index: int) -> None:
        self._abort_all_of(client_index)
        self._farewells.add(client_index)
        self.dropped |= {client_index}
        self._set_tracing(SetTracing(False, client_index))

    def _set_tracing(self, message: SetTracing) -> None:
        if message.on and not self.watchers:
            self.core.start_trace()
        self.watchers = self.watchers | {message.client_index} if message.on else self.watchers - {message.client_index}
        if not self.watchers:
            self.core.stop_trace()

    def _step(self) -> None:
        self._step_since = time.monotonic()
        message = self.core.step()
        self._step_since = None
        outputs = message.outputs
        self._send(message)
        failed = bool(outputs) and all(output.error for output in outputs)
        self._num_failed_steps = self._num_failed_steps + 1 if failed else 0
        if self._num_failed_steps == MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed. {outputs[-1].error}")

    def _send(self, message: EngineCoreOutputs) -> None:
        message.outputs, self._refused = self._refused + message.outputs, []
        trace = self.core.trace
        if trace is not None:  # given away step by step, or it would grow forever
            message.record = trace.steps.pop() if trace.steps else None
            for request_id in [name for name, record in trace.requests.items() if record.finished_time is not None]:
                del trace.requests[request_id]
        self.output_queue.put(message)


class ProcessSetup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the process of a core is told at its start.

    Attributes:
        config: Pickled.
        socket_folder: To be removed if the frontend has had no time to; "" if there is none.
        sys_path: Where Python finds modules.
        log_level: As in `logging`.
    """

    config: bytes
    socket_folder: str
    sys_path: list[str]
    log_level: int


class CoreSetup(ProcessSetup, kw_only=True):
    """For a core with a frontend of its own."""

    heartbeats: bool
    input_address: str
    output_address: str


_Setup = TypeVar("_Setup", bound=ProcessSetup)


class EngineCoreProc:
    """The process: a core between two sockets.

    Args:
        setup: What the frontend wrote.
    """

    def __init__(self, setup: CoreSetup) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.connect(setup.input_address)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.connect(setup.output_address)
        self._start(setup.config, setup.heartbeats, setup.log_level)

    def _start(self, config: bytes, heartbeats: bool, log_level: int) -> None:
        self._config = config
        self._heartbeat_seconds = HEARTBEAT_SECONDS if heartbeats else None
        self._log = ForwardLog(lambda *record: self._send(CoreLog(*record)))
        logging.basicConfig(level=log_level, format="%(message)s", handlers=[self._log])

    def run(self) -> int:
        """Load the model and serve until told to stop. Returns the exit status."""
        try:
            core = EngineCore.from_config(pickle.loads(self._config))
        except Exception as error:
            self._send(CoreFailed(type(error).__name__, str(error)))
            self._context.destroy(linger=1000)
            return 1
        loop = self._make_loop(core)
        self._log.put = lambda *record: loop.output_queue.put(CoreLog(*record))  # from here on, the socket is the output thread's
        threading.Thread(target=self._run_input, args=(loop,), daemon=True).start()
        sender = threading.Thread(target=self._run_output, args=(loop,))
        sender.start()
        was_told = loop.run_busy_loop()
        core.shutdown()
        sender.join()
        self._context.term()  # returns when the last message has gone out
        if was_told and loop.returns:
            return RETURN_STATUS
        return 0 if was_told else 1

    def _make_loop(self, core: EngineCore) -> EngineCoreLoop:
        return EngineCoreLoop(core)

    def _run_input(self, loop: EngineCoreLoop) -> None:
        """The input thread."""
        try:
            while True:
                for data in self._receive():
                    try:
                        message = decode_to_core(data)
                        if isinstance(message, Die):
                            os.kill(os.getpid(), signal.SIGKILL)
                        loop.input_queue.put(message)
                    except (msgspec.ValidationError, msgspec.DecodeError) as error:
                        logger.error("Dropped a message that cannot be decoded: %s", error)
        except zmq.ContextTerminated:
            self._close_input()
        except Exception:
            _exit_at_once()

    def _run_output(self, loop: EngineCoreLoop) -> None:
        """The output thread: it ends after the core's last message."""
        next_heartbeat = time.monotonic()
        try:
            while True:
                try:
                    wait = None if self._heartbeat_seconds is None else max(0.0, next_heartbeat - time.monotonic())
                    message = loop.output_queue.get(timeout=wait)
                    if message is None:
                        break
                    self._send(message)
                except queue.Empty:
                    pass
                if self._heartbeat_seconds is not None and time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + self._heartbeat_seconds
                    if not loop.is_stuck:
                        self._send(Heartbeat(0, loop.core.num_gpu_blocks, os.getpid(), loop.is_leaving))
            self._close_output()
        except Exception:
            _exit_at_once()

    def _receive(self) -> list[bytes]:
        return [self._input.recv()]

    def _send(self, message: FromCore) -> None:
        self._output.send(encode(message))

    def _close_input(self) -> None:
        self._input.close(linger=0)

    def _close_output(self) -> None:
        self._output.close(linger=1000)


def _exit_at_once() -> None:
    """A thread has failed: the frontend sees the process exit, but would wait forever for one that only steps."""
    traceback.print_exc()  # the log's own path may be what failed
    os._exit(1)


def exit_with_the_frontend(*folders: str) -> None:
    """Wait until standard input closes: only the frontend holds its other end. It may have had no time to clean up."""
    while os.read(0, 1024):
        pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def read_line() -> bytes:
    """The line that the frontend writes to standard input; empty if it is gone."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            return b""
        line += part
    return line


def run_core(setup_cls: type[_Setup], proc_cls: Callable[[_Setup], EngineCoreProc]) -> int:
    """Read the setup from standard input and run. Returns the exit status."""
    line = read_line()
    if not line:
        return 1
    setup = msgspec.json.decode(line, type=setup_cls)
    sys.path[:] = setup.sys_path
    threading.Thread(target=exit_with_the_frontend, args=(setup.socket_folder,), daemon=True).start()
    return proc_cls(setup).run()


if __name__ == "__main__":
    sys.exit(run_core(CoreSetup, EngineCoreProc))
