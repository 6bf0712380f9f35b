"""From the client's messages to the streams that wait for them.

    client's thread: receive() ─► event loop: OutputProcessor ─► RequestStream.notify()
                                            └► Metrics, StepWatchers

Mirrors the output handler of `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from minivllm.data_parallel.client import DPLBAsyncMPClient
from minivllm.engine.core_client import AsyncMPClient
from minivllm.engine.core_messages import CoreLost, EngineCoreOutputs, ReplicaChanged, RequestsFailed, SetTracing, ToFrontend
from minivllm.engine.input_processor import ProcessedRequest
from minivllm.engine.metrics import Metrics
from minivllm.engine.output_processor import OutputProcessor, RequestState
from minivllm.engine.trace import StepRecord
from minivllm.errors import EngineDeadError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

MAX_KEPT_STEPS = 256
"""Steps kept for a slow reader."""


class RequestStream:
    """The outputs of one request: wakes its reader when there is something new. However slow the reader, what accumulates is only the text."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self._news = asyncio.Event()
        self._failure: EngineDeadError | None = None

    def notify(self) -> None:
        """The request's state has changed."""
        if self.state.finished or self.state.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        """Nothing more will come."""
        self._failure = type(error)(str(error))  # one for each stream: a traceback grows with every raise
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output, as `SamplingParams.output_kind` says.

        Raises:
            EngineDeadError: The engine has failed.
        """
        await self._news.wait()
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        return self.state.make_output()


class StepQueue:
    """Steps for one reader."""

    def __init__(self) -> None:
        self.records: deque[tuple[int, StepRecord]] = deque()
        self.has_missed = False
        self.failure: EngineDeadError | None = None
        self.news = asyncio.Event()

    def put(self, engine_index: int, record: StepRecord) -> None:
        """There was a step. A reader that is too slow loses all records, and needs a new description of all requests."""
        if len(self.records) == MAX_KEPT_STEPS:
            self.records.clear()
            self.has_missed = True
        self.records.append((engine_index, record))
        self.news.set()

    def fail(self, error: EngineDeadError) -> None:
        """There will be no more."""
        self.failure = error
        self.news.set()


class StepWatchers:
    """The readers of the core's steps. The core records its steps while there are any.

    Args:
        set_tracing: Tells the core to record steps, and to describe all requests in the next record; or to stop.
    """

    def __init__(self, set_tracing: Callable[[bool], None]) -> None:
        self._set_tracing = set_tracing
        self._queues: set[StepQueue] = set()

    async def watch(self) -> AsyncGenerator[tuple[int, StepRecord], None]:
        """The steps from now on, each with the rank of its replica. A slow reader misses some."""
        queue = StepQueue()
        self._set_tracing(True)
        self._queues.add(queue)
        try:
            while True:
                await queue.news.wait()
                if queue.has_missed:
                    queue.has_missed = False
                    self._set_tracing(True)
                while queue.records:
                    yield queue.records.popleft()
                if queue.failure is not None:
                    raise queue.failure
                queue.news.clear()
        finally:
            if queue in self._queues:  # not if the core has died, or another event loop has taken over
                self._queues.remove(queue)
                if not self._queues:
                    self._set_tracing(False)

    def put(self, engine_index: int, record: StepRecord) -> None:
        """There was a step."""
        for queue in self._queues:
            queue.put(engine_index, record)

    def fail(self, error: EngineDeadError) -> None:
        """There will be no more steps."""
        queues, self._queues = self._queues, set()
        for queue in queues:
            queue.fail(error)

    def clear(self) -> None:
        """Forget the readers: their event loop was closed."""
        if self._queues:
            self._queues.clear()
            self._set_tracing(False)


class OutputHandler:
    """Used from the event loop, except for `receive`.

    Attributes:
        streams: The unfinished ones, by request id.
        dead_error: Why the engine has failed for good; None while it has not.
    """

    def __init__(self, client: AsyncMPClient | DPLBAsyncMPClient, output_processor: OutputProcessor, metrics: Metrics) -> None:
        self._client, self._output_processor, self._metrics = client, output_processor, metrics
        self.streams: dict[str, RequestStream] = {}
        self.watchers = StepWatchers(lambda on: client.send(SetTracing(on)))
        self.dead_error: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death = asyncio.Event()
        """Set when the event loop hears of `dead_error`, which is known before that."""

    # -- streams -------------------------------------------------------------------------------------------------

    def open(self, request: ProcessedRequest) -> RequestStream:
        """A stream for a new request, which is sent to the core."""
        stream = RequestStream(self._output_processor.add_request(request))
        self.streams[request.core_request.request_id] = stream
        try:
            stream.state.engine_index = self._client.add_request(stream.state.request)
        except BaseException:
            self.abort(stream)
            raise
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Give up a stream, if it has not finished."""
        request_id = stream.state.request.request_id
        if self.streams.get(request_id) is stream:
            self._close(stream, "abort")
            self._client.abort_requests([request_id])

    def finish(self, request_id: str) -> None:
        """End a stream with the finish reason "abort"."""
        stream = self.streams.get(request_id)
        if stream is not None:
            self.abort(stream)
            stream.state.abort()
            stream.notify()

    def bind_to_loop(self) -> None:
        """Streams belong to the running event loop; those of an earlier one, which was closed, have no reader any more.

        Raises:
            RequestError: The earlier one is running.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RequestError("This engine serves another event loop: use it from one thread.")
        self._loop, is_dead = loop, self._death.is_set()
        self._death = asyncio.Event()
        if is_dead:
            self._death.set()
        self.watchers.clear()
        for stream in list(self.streams.values()):
            self.abort(stream)

    def check_alive(self) -> None:
        """Raise an EngineDeadError if the engine has failed for good."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))

    async def wait_dead(self) -> EngineDeadError:
        """Return the reason when the engine has failed for good."""
        self.bind_to_loop()
        await self._death.wait()
        assert self.dead_error is not None
        return self.dead_error

    # -- messages ------------------------------------------------------------------------------------------------

    def receive(self, message: ToFrontend) -> None:
        """Take a message from another thread to the event loop."""
        if isinstance(message, CoreLost) and self.dead_error is None:
            self.dead_error = message.error  # known at once, whatever the event loop does
        loop = self._loop
        if loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                loop.call_soon_threadsafe(self._handle, message)
                return
        self._handle(message)  # there is no event loop whose streams it could disturb

    def _handle(self, message: ToFrontend) -> None:
        if isinstance(message, CoreLost):
            self._end(message.error)
        elif self._death.is_set():
            return
        elif isinstance(message, EngineCoreOutputs):
            try:
                self._handle_outputs(message)
            except Exception as error:  # the requests of this step have lost tokens: go no further
                logger.exception("The outputs of a step could not be processed.")
                threading.Thread(target=self._client.shutdown).start()
                self.receive(CoreLost(f"{type(error).__name__}: {error}"))
        elif isinstance(message, RequestsFailed):
            for request_id, number in message.requests:
                stream = self.streams.get(request_id)
                if stream is not None and stream.state.request.number == number:
                    if message.engine_index is not None:
                        stream.state.engine_index = message.engine_index
                    self._fail(stream, message.error)
        elif isinstance(message, ReplicaChanged):
            self._metrics.record_change(message)
        else:
            self._metrics.record_resumptions(message)

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._metrics.set_stats(outputs.engine_index, outputs.stats)
        processed = self._output_processor.process_outputs(outputs)
        self._client.stop_sequences(processed.stopped)
        self._metrics.record_outputs(outputs.engine_index, processed.updated, time.perf_counter(), outputs.timestamp)
        for state in processed.updated:
            self.streams[state.request.request_id].notify()
            if state.finished:
                del self.streams[state.request.request_id]
        if outputs.record is not None:
            self.watchers.put(outputs.engine_index, outputs.record)

    def _close(self, stream: RequestStream, reason: str) -> None:
        request_id = stream.state.request.request_id
        del self.streams[request_id]
        self._output_processor.abort_request(request_id)
        self._metrics.record_finish(stream.state, reason, time.perf_counter())

    def _fail(self, stream: RequestStream, error: EngineDeadError) -> None:
        self._close(stream, "error")
        self._metrics.record_lost_request(stream.state)
        stream.fail(error)

    def _end(self, error: EngineDeadError) -> None:
        """No core is left, and none will come: fail all streams."""
        self._metrics.set_idle()
        for stream in list(self.streams.values()):
            self._fail(stream, error)
        self.watchers.fail(error)
        self._death.set()
