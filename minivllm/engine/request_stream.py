"""The outputs of one request, or the steps of the core, between the event loop that adds to them and a coroutine that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from minivllm.engine.output_processor import RequestState
from minivllm.engine.trace import StepRecord
from minivllm.errors import EngineDeadError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind

MAX_KEPT_STEPS = 256
"""Steps kept for a slow reader."""


class RequestStream:
    """Wakes its reader when there is something new. However slow the reader, what accumulates is only the text.

    Used from the event loop alone.

    Args:
        state: The request.
    """

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

    Used from the event loop alone.

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
