"""The engine's steps as the live page needs them: the newest in full, the others as points of its curves.

Pure bookkeeping over StepRecords. For a page opened mid-run, a record describes the requests that are already there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.engine.trace import RequestSnapshot, SequenceKey, SequenceStep, StepRecord

MOST_STEPS = 2000
"""Latest steps kept for a slow page."""
MOST_HAPPENINGS = 200
"""Latest finishes and preemptions kept for it, and latest first tokens."""
MOST_WAITING = 64
"""Waiting sequences listed one by one, oldest first."""
_COUNTS = ("end", "phase", "num_running", "num_waiting", "num_swapped", "num_free_blocks")
"""Fields of a step that are reported as they are."""
_KNOWN = ("num_prompt_tokens", "num_cached_tokens", "num_generated", "context_len")
"""Likewise of a sequence."""


@dataclass(slots=True)
class _Sequence:
    """What is known of an unfinished sequence.

    Attributes:
        queued: When the engine core got its request.
        num_prompt_tokens: None until its prompt has been computed.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_generated: Tokens generated.
        context_len: Tokens in the KV cache; None if no step has shown it.
        last_token: When its latest token was generated.
    """

    queued: float
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_generated: int = 0
    context_len: int | None = None
    last_token: float | None = None


class StepView:
    """Takes every step, and reports what changed since the last report. Leaves out requests that no record has described yet.

    Args:
        most_happenings: Latest finishes, preemptions and first tokens kept for a report; None for all.
    """

    def __init__(self, most_happenings: int | None = MOST_HAPPENINGS) -> None:
        self._step: StepRecord | None = None
        self._requests: dict[str, RequestSnapshot] = {}
        self._sequences: dict[SequenceKey, _Sequence] = {}
        self._waiting: dict[SequenceKey, None] = {}
        self._curve: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=most_happenings)
        self._happenings: deque[dict[str, Any]] = deque(maxlen=most_happenings)
        self._reported_tables: dict[SequenceKey, tuple[int, ...]] = {}
        self._reported_cached: frozenset[int] = frozenset()

    # -- taking steps -----------------------------------------------------------------------------------------------

    def take(self, step: StepRecord) -> None:
        """Take the next step."""
        if step.describes_all:
            self._forget_all_but({request.request_id for request in step.request_snapshots})
        for request in step.request_snapshots:
            self._add_request(request)
        # It may have been in flight together with the last one.
        start = step.start if self._step is None else max(step.start, self._step.end)
        self._step = step
        self._place(step)
        gaps = [gap for item in step.scheduled if (gap := self._advance(item, step)) is not None]
        self._curve.append(
            {name: getattr(step, name) for name in _COUNTS}
            | {
                "length": step.end - start,
                "num_generated": sum(item.num_new_tokens for item in step.scheduled),
                "mean_gap": sum(gaps) / len(gaps) if gaps else None,
                "max_gap": max(gaps, default=None),
            }
        )
        self._note_happenings(step)
        self._drop_finished(step)

    def forget_sequences(self) -> None:
        """The engine is idle: drop all sequences. Cached blocks stay."""
        self._sequences.clear()
        self._requests.clear()
        self._waiting.clear()
        self._reported_tables.clear()

    def _forget_all_but(self, request_ids: set[str]) -> None:
        """The others ended in steps that were missed."""
        self._requests = {name: request for name, request in self._requests.items() if name in request_ids}
        self._sequences = {key: seq for key, seq in self._sequences.items() if key.request_id in request_ids}
        self._waiting = {key: None for key in self._waiting if key.request_id in request_ids}

    def _add_request(self, request: RequestSnapshot) -> None:
        """Take a new request, perhaps from another engine core, or one that was there before the page."""
        is_new = request.request_id not in self._requests
        self._requests[request.request_id] = request
        for index, (num_computed, num_generated) in request.progress.items():
            key = SequenceKey(request.request_id, index)
            self._waiting[key] = None  # unless the step has blocks of it
            seq = self._sequences.setdefault(key, _Sequence(request.queued_time))
            if num_computed or num_generated:
                seq.num_cached_tokens, seq.num_generated, seq.context_len = request.num_cached_tokens, num_generated, num_computed
                seq.num_prompt_tokens = request.num_prompt_tokens if num_generated else None
        if is_new and request.first_token_time is not None:
            self._first_tokens.append((request.first_token_time, request.first_token_time - request.queued_time))

    def _place(self, step: StepRecord) -> None:
        """Update each sequence's queue."""
        for key in (*step.block_tables, *step.swapped_tables, *(SequenceKey(*item[:2]) for item in step.preempted)):
            self._waiting.pop(key, None)
            if key not in self._sequences and key.request_id in self._requests:
                self._sequences[key] = self._join(key)
        for item in step.preempted:
            key = SequenceKey(*item[:2])
            if item.mode == "recompute" and key in self._sequences:
                self._waiting[key] = None
        for key in _aborted(self._waiting, step):
            del self._waiting[key]
        while len(self._waiting) > step.num_waiting:  # of a step that was missed
            del self._waiting[next(iter(self._waiting))]

    def _join(self, key: SequenceKey) -> _Sequence:
        """A sequence that was not seen waiting: a sibling forked in the last step."""
        first = self._sequences.get(SequenceKey(key.request_id))
        if first is not None and first.num_prompt_tokens is not None:
            prompt = first.num_prompt_tokens
            return _Sequence(first.queued, prompt, first.num_cached_tokens, 1, prompt, first.last_token)
        return _Sequence(self._requests[key.request_id].queued_time)

    def _advance(self, item: SequenceStep, step: StepRecord) -> float | None:
        """Apply a step to a sequence. Returns its inter-token latency in seconds, if it got a further token."""
        seq = self._sequences.get(item.key)
        if seq is None:
            return None
        is_first_chunk = seq.context_len is None
        seq.context_len = item.context_len
        if item.action == "prefill" and seq.num_generated == 0:
            if is_first_chunk:
                seq.num_cached_tokens = item.context_len - item.num_tokens
            if item.num_new_tokens:
                seq.num_prompt_tokens = item.context_len
                self._first_tokens.append((step.end, step.end - seq.queued))
        if not item.num_new_tokens:
            return None
        seq.num_generated += item.num_new_tokens
        last, seq.last_token = seq.last_token, step.end
        return None if last is None else (step.end - last) / item.num_new_tokens

    def _note_happenings(self, step: StepRecord) -> None:
        def note(what: str, key: SequenceKey, why: str) -> None:
            if key not in self._sequences:
                return
            seq = self._sequences[key]
            happening = {"what": what, "why": why, "num_generated": seq.num_generated, "seconds": step.end - seq.queued}
            self._happenings.append(self._name(key) | happening)

        for item in step.preempted:
            note("preempted", SequenceKey(*item[:2]), item.mode)
        for key in _aborted(self._sequences, step):
            note("ended", key, "abort")
        for finish in step.finished:
            note("ended", SequenceKey(*finish[:2]), finish.reason)

    def _drop_finished(self, step: StepRecord) -> None:
        ended = {SequenceKey(*finish[:2]) for finish in step.finished}
        living = (step.block_tables.keys() | step.swapped_tables.keys() | self._waiting.keys()) - ended
        if len(self._sequences) == len(living) and not ended:
            return
        # A finished sequence stays until the next step: siblings may have been forked from it.
        self._sequences = {key: seq for key, seq in self._sequences.items() if key in living or key in step.block_tables}
        unfinished = {key.request_id for key in self._sequences}
        self._requests = {name: request for name, request in self._requests.items() if name in unfinished}

    # -- reporting -------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """What changed since the last report, and the current state, as JSON-ready data; None if no step was taken.

        A block table is reported as `keep`, the number of unchanged leading blocks, and `blocks`, the ones after them; cached blocks as
        the ones added and removed. `curve` has a list per quantity, with an entry per step: `length` is its duration, and
        `mean_gap` and `max_gap` its inter-token latencies (None if no sequence has two tokens), all in seconds.
        """
        step = self._step
        if step is None:
            return None
        waiting = heapq.nsmallest(MOST_WAITING, self._waiting, lambda key: (self._requests[key.request_id].ordinal, key.index))
        report = {name: getattr(step, name) for name in (*_COUNTS, "start", "num_tokens", "error")} | {
            "sequences": self._report_sequences(step),
            "waiting": [self._name(key) | {"was_preempted": self._sequences[key].context_len is not None} for key in waiting],
            "shared": {block: count for block, count in step.ref_counts.items() if count > 1},
            "cached": list(step.cached_blocks - self._reported_cached),
            "uncached": list(self._reported_cached - step.cached_blocks),
            "happenings": list(self._happenings),
            "first_tokens": list(self._first_tokens),
            "curve": {name: [point[name] for point in self._curve] for name in self._curve[0]},
        }
        tables = step.block_tables | step.swapped_tables
        self._reported_tables = {key: table for key, table in tables.items() if key in self._sequences}
        self._reported_cached = step.cached_blocks
        self._step = None
        for reported in (self._curve, self._first_tokens, self._happenings):
            reported.clear()
        return report

    def _name(self, key: SequenceKey) -> dict[str, Any]:
        """A sequence, and the number of its request in the engine, which is the same on every page."""
        return {**key._asdict(), "number": self._requests[key.request_id].ordinal}

    def _report_sequences(self, step: StepRecord) -> list[dict[str, Any]]:
        """All sequences that hold blocks: on the device in batch order, then on the host."""
        parts = {item.key: item for item in step.scheduled}
        sequences = []
        for tables, place in ((step.block_tables, "running"), (step.swapped_tables, "swapped")):
            for key, table in tables.items():
                if key not in self._sequences:
                    continue
                seq, before = self._sequences[key], self._reported_tables.get(key, ())
                part = parts.get(key)
                keep = len(before) if table[: len(before)] == before else 0
                sequences.append(
                    {
                        **self._name(key),
                        "place": place,
                        "action": "stalled" if part is None else part.action,
                        **{name: getattr(part, name, 0) for name in ("num_tokens", "num_drafts", "num_accepted")},
                        **{name: getattr(seq, name) for name in _KNOWN},
                        "keep": keep,
                        "blocks": table[keep:],
                    }
                )
        return sequences


def _aborted(keys: Iterable[SequenceKey], step: StepRecord) -> list[SequenceKey]:
    return [key for key in keys if key.request_id in step.aborted] if step.aborted else []
