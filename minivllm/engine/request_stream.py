"""The outputs of one request, or the steps of the core, between the event loop that adds to them and a coroutine that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque

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
        """There was a step. All records of a reader who is too slow are dropped: it needs to be told anew what there is."""
        if len(self.records) == MAX_KEPT_STEPS:
            self.records.clear()
            self.has_missed = True
        self.records.append((engine_index, record))
        self.news.set()

    def fail(self, error: EngineDeadError) -> None:
        """There will be no more."""
        self.failure = error
        self.news.set()
