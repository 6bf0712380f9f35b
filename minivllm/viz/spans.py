"""What each sequence of a trace was doing, from when to when: the bars of every figure with a time axis."""

from __future__ import annotations

from typing import NamedTuple

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, SequenceKey, StepRecord
from minivllm.viz.memo import remembered

STATES = ("waiting", "prefill", "decode", "stalled", "preempted", "swapped")


class Span(NamedTuple):
    """A stretch of time in which a sequence did one thing.

    Attributes:
        request_id, index: The sequence.
        state: One of `STATES`: "waiting" (from its arrival to its first step), "prefill", "decode", "stalled" (it runs and
            holds its blocks, but the step computes others), "preempted" (its blocks are gone; it waits to be computed again),
            "swapped" (its blocks lie on the host).
        start, end: Seconds of the engine's clock.
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
    """What all sequences did, sequence by sequence in the order of arrival, each in the order of time.

    A sequence that lives when the trace ends has spans to its end. Where a trace begins amid a sequence's life, what it did
    before is not known, except that it waited.

    Args:
        trace: Of any engine.
        merge: One span for consecutive steps in which a sequence did the same. Else one for each step that it ran in; the
            time out of the batch ("waiting", "preempted", "swapped") is one span in any case.
    """
    found: dict[SequenceKey, list[Span]] = {}
    outside: dict[SequenceKey, tuple[str, float]] = {}
    """What the sequences do that are not in the batch, and since when."""
    for request in trace.requests.values():
        key, began = SequenceKey(request.request_id), request.first_scheduled_time
        found[key], outside[key] = [], ("waiting", request.arrival_time)
        if began is not None and len(trace) and began < trace[0].start:
            found[key] += [Span(*key, "waiting", request.arrival_time, began)] if began > request.arrival_time else []
            outside[key] = ("preempted", trace[0].start)  # unless the first step tells otherwise
    last_step: dict[SequenceKey, int] = {}
    """The step in which each sequence ran last."""

    def leave(key: SequenceKey, end: float) -> None:
        state, start = outside.pop(key)
        if end > start:
            found.setdefault(key, []).append(Span(*key, state, start, end))

    for number, step in enumerate(trace):
        for request_id in step.aborted:
            for key in [key for key in outside if key.request_id == request_id]:
                leave(key, _end_of_request(trace, request_id, step.start))
        for key in step.swapped_tables:
            if number == 0:
                outside.pop(key, None)
            outside.setdefault(key, ("swapped", step.start))
        for item in step.preempted:
            outside[SequenceKey(item.request_id, item.index)] = ("swapped" if item.mode == "swap" else "preempted", step.start)
        for key, state in running_states(step).items():
            if number == 0 and state != "prefill" and outside.get(key, ("", 0.0))[0] == "waiting":
                del outside[key]
            elif key in outside:
                leave(key, step.start)
            spans = found.setdefault(key, [])
            if merge and last_step.get(key) == number - 1 and spans and spans[-1].state == state:
                spans[-1] = spans[-1]._replace(end=step.end)
            else:
                spans.append(Span(*key, state, step.start, step.end))
            last_step[key] = number
        for finish in step.finished:
            if (finish.request_id, finish.index) in outside:
                leave(SequenceKey(finish.request_id, finish.index), step.end)
    end = trace[-1].end if len(trace) else 0.0
    for key in list(outside):
        leave(key, _end_of_request(trace, key.request_id, end))
    return [span for spans in found.values() for span in spans]


def running_states(step: StepRecord) -> dict[SequenceKey, str]:
    """What each running sequence did in a step: "prefill", "decode" or "stalled"."""
    states = dict.fromkeys(step.block_tables, "stalled")
    for item in step.scheduled:
        states[item.key] = item.action
    return states


def step_times(trace: EngineTrace) -> list[tuple[float, float]]:
    """From when to when the queues and blocks are as each step says, in seconds since `time_origin`.

    That is to the next step's start; or, where a step leaves nothing to do and the engine idles, to its own end.
    """
    origin = time_origin(trace)
    times: list[tuple[float, float]] = []
    for number, (step, following) in enumerate(zip(trace, [*trace.steps[1:], None], strict=False)):
        end = step.end if following is None or trace.is_idle_after(number) else following.start
        times.append((step.start - origin, end - origin))
    return times


@remembered
def sequence_keys(trace: EngineTrace) -> list[SequenceKey]:
    """All sequences: requests in the order of arrival, those that only steps know of after them, siblings by their index."""
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
    """For each step, the tokens whose keys and values each sequence has when the step is done.

    Of running and swapped sequences. One that the step does not compute has what it had before; siblings begin with what the
    step that forked them had computed. Of one that ran before the trace began and has not been computed since, its
    blocks are taken to be full.
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
