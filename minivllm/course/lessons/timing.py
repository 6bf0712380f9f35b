"""What lesson 09 measures: when a request and its tokens arrived, what the device did meanwhile, and an engine that records it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minivllm.bench.trace_summary import is_complete, output_times
from minivllm.bench.workloads import WorkloadRequest
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.errors import ConfigError, MinivllmError
from minivllm.executor.simulated import VirtualClock


@dataclass(frozen=True)
class RequestTimes:
    """A request's raw timestamps, in seconds of one clock.

    Attributes:
        arrival: When its user sent it.
        started: When its first step began.
        tokens: When each of its output tokens came, in order; there is at least one.
    """

    arrival: float
    started: float
    tokens: tuple[float, ...]


@dataclass(frozen=True)
class StepTimes:
    """A step of the device.

    Attributes:
        start, end: In seconds of the same clock.
        num_rows: The sequences that it computed, rows of padding included.
        num_useful: The rows that a user was waiting for.
    """

    start: float
    end: float
    num_rows: int
    num_useful: int


class TimedEngine:
    """An engine, real or simulated, that records times.

    Args:
        engine: An idle engine. A trace being recorded ends.

    Raises:
        ConfigError: It is not idle.
    """

    def __init__(self, engine: LLMEngine) -> None:
        if engine.has_unfinished_requests():
            raise ConfigError(
                "The engine has unfinished requests, whose times would be mixed with the others: finish or abort them first."
            )
        self.engine = engine
        self.trace: EngineTrace = engine.start_trace()
        self._num_added = 0

    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self.engine.clock()

    def wait_until(self, moment: float) -> None:
        """Do nothing until then."""
        clock = self.engine.clock
        if isinstance(clock, VirtualClock):
            clock.advance_to(moment)
        else:
            time.sleep(max(0.0, moment - clock()))

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self.engine.has_unfinished_requests()

    def add(self, request: WorkloadRequest, arrival: float) -> None:
        """Add a request; `arrival` is when its user sent it, which may have been a moment ago."""
        params = request.sampling_params()
        self.engine.add_request(str(self._num_added), request.prompt_token_ids, params, arrival_time=arrival)
        self._num_added += 1

    def step(self) -> int:
        """Advance all running requests by a step, and return how many completed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise MinivllmError(output.error)
        return len(outputs)

    def request_times(self) -> list[RequestTimes]:
        """The timestamps of all answered requests, in the order of their arrival."""
        return request_times(self.trace)

    def step_times(self) -> list[StepTimes]:
        """All steps. The engine computes no padding, so every row is useful."""
        return [StepTimes(step.start, step.end, len(step.scheduled), len(step.scheduled)) for step in self.trace]


def request_times(trace: EngineTrace) -> list[RequestTimes]:
    """The timestamps of all requests of a trace that were answered to their end, in the order of their arrival."""
    tokens = output_times(trace)
    started: dict[str, float] = {}
    for step in trace:
        for part in step.scheduled:
            started.setdefault(part.request_id, step.start)
    answered = ((name, request.arrival_time) for name, request in trace.requests.items() if is_complete(request))
    records = [RequestTimes(arrival, started[name], tuple(tokens[SequenceKey(name, 0)])) for name, arrival in answered]
    return sorted(records, key=lambda times: times.arrival)


@contextmanager
def timed(engine: LLMEngine) -> Iterator[TimedEngine]:
    """A `TimedEngine` for the duration of a block. Requests still unfinished at its end, as after Ctrl-C, are aborted."""
    bench = TimedEngine(engine)
    try:
        yield bench
    finally:
        for number in range(bench._num_added):
            engine.abort_request(str(number))
        engine.stop_trace()
