"""Exports a trace as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

The format is Google's "Trace Event Format": a JSON object with a list of events. Used here are slices ("X", with a time and a
duration), counters ("C"), instants ("i") and metadata such as row names ("M"); times are in microseconds. The format calls a row a
thread, and a group of rows a process.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, SequenceKey, SequenceStep
from minivllm.viz.spans import find_context_lens, find_spans, running_states, sequence_keys, step_starts

ENGINE, REQUESTS, RANKS = 1, 2, 3
"""Process ids: the engine, with a row of steps and counters; the requests, with a row per sequence; the workers, if there are several."""
STEPS = 4
"""Thread id of the steps; sequences follow. Must differ from the process ids, or Perfetto takes the row for the main thread."""

Event = dict[str, Any]


def to_chrome(trace: EngineTrace) -> dict[str, Any]:
    """The JSON object for Perfetto. It contains ids, lengths and times of the requests, but none of their tokens.

    The process "engine" has a row of steps, named by their phase, and the counters `queues` (sequences running, waiting and swapped),
    `cache blocks` (used and free) and `prefix cache` (blocks whose contents are cached). The process "requests" has a row for each
    sequence, with a slice for each step it was in and each time out of the batch ("waiting", "preempted", "swapped"), and an
    instant for each preemption. With several workers, the process "ranks" has a row for each, with its part of each step, and in it the
    operations in which it waits for the others.

    Args:
        trace: Of any engine. Times count from its first moment (`trace_summary.time_origin`) and are rounded to whole microseconds.
    """
    rows = {key: number for number, key in enumerate(sequence_keys(trace), start=STEPS + 1)}
    clock = _Clock(time_origin(trace))
    events = [
        *_process(ENGINE, "engine"),
        *_thread(ENGINE, STEPS, "steps"),
        *_process(REQUESTS, "requests"),
        *(event for key, row in rows.items() for event in _thread(REQUESTS, row, _name(key, rows))),
        *_engine_events(trace, clock),
        *_sequence_events(trace, clock, rows),
        *_rank_events(trace, clock),
    ]
    config = trace.config
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": config.model,
            "scheduler": config.scheduler,
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "num_cpu_blocks": config.num_cpu_blocks,
        },
    }


class _Clock:
    """Converts the engine's seconds to whole microseconds; slices that touch still touch after rounding."""

    def __init__(self, origin: float) -> None:
        self._origin = origin

    def __call__(self, time: float) -> int:
        return round((time - self._origin) * 1e6)

    def slice(self, name: str, process: int, row: int, start: float, end: float, args: dict[str, Any]) -> Event:
        ts = self(start)
        return {"ph": "X", "name": name, "pid": process, "tid": row, "ts": ts, "dur": self(end) - ts, "args": args}


def _process(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}


def _thread(process: int, row: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": row, "args": {"sort_index": row}}


def _name(key: SequenceKey, keys: Container[SequenceKey]) -> str:
    """A request's id, with the sequence's index if the request has several."""
    return f"{key.request_id}/{key.index}" if key.index or SequenceKey(key.request_id, 1) in keys else key.request_id


def _engine_events(trace: EngineTrace, clock: _Clock) -> Iterator[Event]:
    for number, (step, start) in enumerate(zip(trace, step_starts(trace), strict=True)):
        args: dict[str, Any] = {"step": number, "tokens": step.num_tokens, "sequences": len(step.scheduled)}
        args |= {name: len(value) for name in ("preempted", "swapped_in", "finished") if (value := getattr(step, name))}
        args |= {"error": step.error} if step.error is not None else {}
        yield clock.slice(step.phase, ENGINE, STEPS, start, step.end, args)
        counters = {
            "queues": {"running": step.num_running, "waiting": step.num_waiting, "swapped": step.num_swapped},
            "cache blocks": {"used": trace.config.num_gpu_blocks - step.num_free_blocks, "free": step.num_free_blocks},
            "prefix cache": {"blocks": len(step.cached_blocks)},
        }
        for name, values in counters.items():
            yield {"ph": "C", "name": name, "pid": ENGINE, "tid": STEPS, "ts": clock(step.start), "args": values}


def _sequence_events(trace: EngineTrace, clock: _Clock, rows: dict[SequenceKey, int]) -> Iterator[Event]:
    context_lens = find_context_lens(trace)
    items = [{item.key: item for item in step.scheduled} for step in trace]
    steps_of: dict[SequenceKey, list[int]] = {}
    """The steps that each sequence ran in: one per slice in the batch, in the same order."""
    for number, step in enumerate(trace):
        for key in running_states(step):
            steps_of.setdefault(key, []).append(number)
        for item in step.preempted:
            key = SequenceKey(item.request_id, item.index)
            yield {
                "ph": "i", "s": "t", "name": f"preempted by {item.mode}", "pid": REQUESTS, "tid": rows[key], "ts": clock(step.start),
                "args": {"step": number, "mode": item.mode},
            }  # fmt: skip
    numbers = {key: iter(of_key) for key, of_key in steps_of.items()}
    for span in find_spans(trace, merge=False):
        args: dict[str, Any] = {}
        if span.state in ("prefill", "decode", "stalled"):
            number = next(numbers[span.key])
            args = {"step": number, "context_len": context_lens[number].get(span.key, 0)} | _work(items[number].get(span.key))
        elif span.state == "waiting" and span.request_id in trace.requests:
            args = {"prompt_tokens": trace.requests[span.request_id].num_prompt_tokens}
        yield clock.slice(span.state, REQUESTS, rows[span.key], span.start, span.end, args)


def _rank_events(trace: EngineTrace, clock: _Clock) -> Iterator[Event]:
    num_ranks = max((len(step.ranks) for step in trace), default=0)
    if num_ranks:
        yield from _process(RANKS, "ranks")
    for rank in range(num_ranks):
        row = STEPS + 1 + rank
        yield from _thread(RANKS, row, f"rank {rank}")
        for number, step in enumerate(trace):
            for timing in step.ranks[rank : rank + 1]:
                yield clock.slice(step.phase, RANKS, row, timing.start, timing.end, {"step": number, "bytes": timing.num_bytes})
                for start, end in timing.communication:
                    yield clock.slice("communication", RANKS, row, start, end, {"step": number})


def _work(item: SequenceStep | None) -> dict[str, int]:
    """Details of what a step computed for a sequence."""
    if item is None:
        return {"tokens": 0}
    drafts = {"drafts": item.num_drafts, "accepted": item.num_accepted} if item.num_drafts else {}
    return {"tokens": item.num_tokens, "new_tokens": item.num_new_tokens} | drafts
