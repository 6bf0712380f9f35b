"""The state of each sequence over time: the bars of every figure with a time axis."""

from __future__ import annotations

import math
from typing import NamedTuple

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, SequenceKey, StepRecord
from minivllm.viz.memo import remembered

STATES = ("waiting", "prefill", "decode", "stalled", "preempted", "swapped")


class Span(NamedTuple):
    """A period in which a sequence was in one state.

    Attributes:
        request_id, index: The sequence.
        state: One of `STATES`: "waiting" (from arrival to its first step), "prefill", "decode", "stalled" (running, but not
            computed in this step), "preempted" (its blocks are freed; it waits to be recomputed), "swapped" (its blocks are on the
            host).
        start, end: In seconds of the engine's clock.
    """

    request_id: str
    index: int
    state: str
    start: float
    end: float

    @property
    def key(self) -> SequenceKey:
        """The sequence."""
        return SequenceKey(self.request_id, self.index)


def find_spans(trace: EngineTrace, merge: bool = True) -> list[Span]:
    """The spans of all sequences, in order of arrival, each sequence's in order of time.

    An unfinished sequence has spans up to the end of the trace. Of a sequence that began before the trace, only its time in the queue
    is known.

    Args:
        trace: Of any engine.
        merge: Merge consecutive steps with the same state into one span. Otherwise each step is a span of its own; time out of the
            batch ("waiting", "preempted", "swapped") is one span either way.
    """
    found: dict[SequenceKey, list[Span]] = {}
    outside: dict[SequenceKey, tuple[str, float]] = {}
    """The states of sequences outside the batch, and since when."""
    for request in trace.requests.values():
        key, began = SequenceKey(request.request_id), request.first_scheduled_time
        found[key], outside[key] = [], ("waiting", request.arrival_time)
        if began is not None and len(trace) and began < trace[0].start:
            found[key] += [Span(*key, "waiting", request.arrival_time, began)] if began > request.arrival_time else []
            outside[key] = ("preempted", trace[0].start)  # unless the first step says otherwise
    last_step: dict[SequenceKey, int] = {}
    """The last step in which each sequence ran."""

    def leave(key: SequenceKey, end: float) -> None:
        state, start = outside.pop(key)
        if end > start:
            found.setdefault(key, []).append(Span(*key, state, start, end))

    for number, (step, start) in enumerate(zip(trace, step_starts(trace), strict=True)):
        for request_id in step.aborted:
            for key in [key for key in outside if key.request_id == request_id]:
                leave(key, _end_of_request(trace, request_id, start))
        for key in step.swapped_tables:
            if number == 0:
                outside.pop(key, None)
            outside.setdefault(key, ("swapped", start))
        for item in step.preempted:
            outside[SequenceKey(item.request_id, item.index)] = ("swapped" if item.mode == "swap" else "preempted", start)
        for key, state in running_states(step).items():
            if number == 0 and state != "prefill" and outside.get(key, ("", 0.0))[0] == "waiting":
                del outside[key]
            elif key in outside:
                leave(key, start)
            spans = found.setdefault(key, [])
            if merge and last_step.get(key) == number - 1 and spans and spans[-1].state == state:
                spans[-1] = spans[-1]._replace(end=step.end)
            else:
                spans.append(Span(*key, state, start, step.end))
            last_step[key] = number
        for finish in step.finished:
            if (finish.request_id, finish.index) in outside:
                leave(SequenceKey(finish.request_id, finish.index), step.end)
    end = trace[-1].end if len(trace) else 0.0
    for key in list(outside):
        leave(key, _end_of_request(trace, key.request_id, end))
    return [span for spans in found.values() for span in spans]


def step_starts(trace: EngineTrace) -> list[float]:
    """When each step begins in a figure: when its scheduling began or, of steps in flight, when the one before ended."""
    ends = [-math.inf, *(step.end for step in trace)]
    return [max(step.start, end) for step, end in zip(trace, ends, strict=False)]


def running_states(step: StepRecord) -> dict[SequenceKey, str]:
    """The state of each running sequence in a step: "prefill", "decode" or "stalled"."""
    states = dict.fromkeys(step.block_tables, "stalled")
    for item in step.scheduled:
        states[item.key] = item.action
    return states


def step_times(trace: EngineTrace) -> list[tuple[float, float]]:
    """For each step, the period in which the queues and blocks are as it records, in seconds since `time_origin`.

    It lasts until the next step starts or, if the engine then idles, until the step ends.
    """
    origin = time_origin(trace)
    times: list[tuple[float, float]] = []
    for number, (step, following) in enumerate(zip(trace, [*trace.steps[1:], None], strict=False)):
        end = step.end if following is None or trace.is_idle_after(number) else following.start
        times.append((step.start - origin, end - origin))
    return times


@remembered
def sequence_keys(trace: EngineTrace) -> list[SequenceKey]:
    """All sequences, ordered by their requests' arrival, then by index; sequences that appear only in steps come last."""
    keys = dict.fromkeys(SequenceKey(request_id) for request_id in trace.requests)
    for step in trace:
        keys.update(dict.fromkeys(step.block_tables))
        keys.update(dict.fromkeys(step.swapped_tables))
        keys.update(dict.fromkeys(item.key for item in step.scheduled))
        keys.update(dict.fromkeys(SequenceKey(item.request_id, item.index) for item in step.preempted))
    order = {request_id: i for i, request_id in enumerate(dict.fromkeys(key.request_id for key in keys))}
    return sorted(keys, key=lambda key: (order[key.request_id], key.index))


@remembered
def find_context_lens(trace: EngineTrace) -> list[dict[SequenceKey, int]]:
    """For each step, how many tokens of each running or swapped sequence are in the cache at its end.

    A sequence that the step does not compute keeps its length; a sibling starts with that of the sequence it was forked from. For one
    that ran before the trace began and has not been computed since, blocks are assumed to be full.
    """
    block_size = trace.config.block_size
    all_lens: list[dict[SequenceKey, int]] = []
    before: dict[SequenceKey, int] = {}
    for step in trace:
        lens: dict[SequenceKey, int] = {}
        for tables in (step.block_tables, step.swapped_tables):
            for key, table in tables.items():
                known = before.get(key)
                if known is None and key.index:
                    known = before.get(SequenceKey(key.request_id))
                lens[key] = len(table) * block_size if known is None else known
        for item in step.scheduled:
            lens[item.key] = item.context_len
        all_lens.append(lens)
        before = lens
    return all_lens


def _end_of_request(trace: EngineTrace, request_id: str, otherwise: float) -> float:
    request = trace.requests.get(request_id)
    return otherwise if request is None or request.finished_time is None else request.finished_time
