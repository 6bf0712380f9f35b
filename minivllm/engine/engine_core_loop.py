"""Runs an engine core behind two queues: messages come in, outputs go out, and it steps while it has work.

    input_queue ─► handle messages ─► EngineCore.step() ─► output_queue
                        ▲                    │
                        └────────────────────┘

In a thread, or as the main loop of a process (`engine_core_proc.py`). Mirrors `run_busy_loop` in `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from functools import partial

from minivllm.engine.core_messages import (
    AbortClientRequests,
    AbortRequests,
    AddRequest,
    ClientDrained,
    CoreDraining,
    CoreFailed,
    CoreReady,
    Drain,
    DropClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    FromCore,
    RequestsAborted,
    SetTracing,
    Shutdown,
    StopSequences,
    ToCore,
    make_output,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.errors import EngineDeadError, RequestError, WorkerKilledError
from minivllm.request import Request

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Consecutive failed steps before the engine core is declared dead."""
MAX_STEP_SECONDS = 300.0
"""A core whose step takes longer is stuck: vLLM's limit for a step."""
CLIENT_DRAIN_SECONDS = 10.0
"""How long a replica that leaves waits for the `ClientDrained` of an API server that says nothing."""
IDLE_SECONDS = 1.0
"""How long an idle core waits for a message at a time. Python handles a signal that comes just before such a wait only after it."""


class ExecutorFailed:
    """A worker is gone: said by the executor, in the queue of messages to the core, so that one who waits there hears it."""


class EngineCoreLoop:
    """Steps an engine core, which nobody else may use, while it has work, and waits for messages when it has none.

    Attributes:
        input_queue: Messages to the core, from any thread.
        output_queue: Messages from the core; None after the last one.
        num_clients: API servers, each of which must say `ClientDrained` before the loop leaves.
        is_draining: Whether it takes no new requests, and ends when it has finished those it has.
        returns: Whether another core is to be started in its place then.
        watchers: API servers that want to see each step's record.
        dropped: API servers that have died.
    """

    num_clients = 1

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.input_queue: queue.SimpleQueue[ToCore | ExecutorFailed] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[FromCore | None] = queue.SimpleQueue()
        self._num_failed_steps = 0
        self.is_draining, self.returns, self._draining_since = False, False, 0.0
        self._step_since: float | None = None
        self.watchers: frozenset[int] = frozenset()
        self.dropped: frozenset[int] = frozenset()
        self._drained_clients: set[int] = set()
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
                if self._has_drained():
                    self.output_queue.put(CoreDraining(is_drained=True, returns=self.returns))
                    break
            return True
        except EngineDeadError as error:  # the message says all that is known
            self.output_queue.put(CoreFailed("", str(error), was_killed=isinstance(error, WorkerKilledError)))
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

    def _has_drained(self) -> bool:
        """Whether it leaves, has finished what it had, and gets nothing more."""
        if not self.is_draining or self.core.has_unfinished_requests():
            return False
        has_waited = time.monotonic() - self._draining_since > CLIENT_DRAIN_SECONDS
        return has_waited or len(self._drained_clients) == self.num_clients

    def _handle_messages(self) -> bool:
        """Handle all messages there are; wait for one if there is nothing else to do. Returns False after a `Shutdown`."""
        wait, handled = not self.core.has_unfinished_requests(), False
        while True:
            try:
                message = self.input_queue.get(block=wait, timeout=IDLE_SECONDS)
            except queue.Empty:
                break
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
            wait, handled = False, True
        if handled and not self.core.has_unfinished_requests():
            self._send(self.core.report())
        return True

    def _handle(self, message: ToCore | ExecutorFailed) -> None:
        if isinstance(message, AddRequest):
            if message.request.client_index in self.dropped:
                return
            try:
                self.core.add_request(message.request)
            except RequestError as error:  # the frontend has validated it: only a faulty frontend gets here
                self._refused.append(make_output(Request(message.request), [], True, str(error)))
        elif isinstance(message, AbortRequests):
            self.core.abort_requests(message.request_ids)
        elif isinstance(message, StopSequences):
            self.core.stop_sequences(message.sequences)
        elif isinstance(message, ExecutorFailed):
            self.core.executor.check_health()
        elif isinstance(message, Drain):
            self._drain(message)
        elif isinstance(message, ClientDrained):
            self._drained_clients.add(message.client_index)
        elif isinstance(message, AbortClientRequests):
            self.core.abort_requests(self.core.requests_of(message.client_index))
            self.output_queue.put(RequestsAborted(message.client_index, message.number))
        elif isinstance(message, DropClient):
            self._drop_client(message.client_index)
        elif isinstance(message, SetTracing):
            self._set_tracing(message)

    def _drain(self, message: Drain) -> None:
        self.returns = message.returns and (self.returns or not self.is_draining)  # once False, it stays False
        if not self.is_draining:
            self.is_draining, self._draining_since = True, time.monotonic()
            self.output_queue.put(CoreDraining())

    def _drop_client(self, client_index: int) -> None:
        self.core.abort_requests(self.core.requests_of(client_index))
        self._drained_clients.add(client_index)
        self.dropped |= {client_index}
        self._set_tracing(SetTracing(False, client_index))

    def _set_tracing(self, message: SetTracing) -> None:
        if message.on:
            if not self.watchers:
                self.core.start_trace()
            self.core.snapshot_requests()
        self.watchers = self.watchers | {message.client_index} if message.on else self.watchers - {message.client_index}
        if not self.watchers:
            self.core.stop_trace()

    def _step(self) -> None:
        self._step_since = time.monotonic()
        message = self.core.step()
        self._step_since = None
        outputs = message.outputs
        self._send(message)
        if self.core.has_failed is not None:
            self._num_failed_steps = self._num_failed_steps + 1 if self.core.has_failed else 0
        if self._num_failed_steps == MAX_FAILED_STEPS:
            cause = next((output.error for output in reversed(outputs) if output.error), "")
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed. {cause}")

    def _send(self, message: EngineCoreOutputs) -> None:
        message.outputs, self._refused = self._refused + message.outputs, []
        trace = self.core.trace
        if trace is not None:  # given away step by step, or it would grow forever
            message.record = trace.steps.pop(0) if trace.steps else None
            for request_id in [name for name, record in trace.requests.items() if record.finished_time is not None]:
                del trace.requests[request_id]
        self.output_queue.put(message)
