"""The engine's steps as the live page needs them: the newest in full, the others as points of its curves.

Pure bookkeeping over StepRecords. A page opened in mid-run knows only what later steps reveal.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minivllm.engine.trace import SequenceKey, SequenceStep, StepRecord

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
        arrived: Start of the first step after its arrival; None if it is older than the page.
        num_prompt_tokens: None until its prompt has been computed, or if the page is younger than that.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_generated: Tokens generated; None if the first ones are older than the page.
        context_len: Tokens in the KV cache; None if no step has shown it.
        last_token: When its latest token was generated.
    """

    arrived: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_generated: int | None = None
    context_len: int | None = None
    last_token: float | None = None


class StepView:
    """Takes every step, and reports what changed since the last report.

    Args:
        is_midway: The engine has requests already. The first step lists them as arrived; when they did is unknown.
    """

    def __init__(self, is_midway: bool = False) -> None:
        self._is_midway = is_midway
        self._step: StepRecord | None = None
        self._sequences: dict[SequenceKey, _Sequence] = {}
        self._waiting: dict[SequenceKey, None] = {}
        self._curve: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MOST_HAPPENINGS)
        self._happenings: deque[dict[str, Any]] = deque(maxlen=MOST_HAPPENINGS)
        self._told_tables: dict[SequenceKey, tuple[int, ...]] = {}
        self._told_cached: frozenset[int] = frozenset()

    # -- taking steps -----------------------------------------------------------------------------------------------

    def take(self, step: StepRecord) -> None:
        """Take the next step."""
        self._step = step
        for request_id in step.arrived:
            key = SequenceKey(request_id)
            self._sequences[key] = self._join(key, step) if self._is_midway else _Sequence(arrived=step.start, num_generated=0)
            self._waiting[key] = None
        self._is_midway = False
        self._place(step)
        gaps = [gap for item in step.scheduled if (gap := self._advance(item, step)) is not None]
        self._curve.append(
            {name: getattr(step, name) for name in _COUNTS}
            | {
                "length": step.end - step.start,
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
        self._waiting.clear()
        self._told_tables.clear()

    def _place(self, step: StepRecord) -> None:
        """Update each sequence's queue."""
        for tables in (step.block_tables, step.swapped_tables):
            for key in tables:
                self._waiting.pop(key, None)
                if key not in self._sequences:
                    self._sequences[key] = self._join(key, step)
        for item in step.preempted:
            if item.mode == "recompute":
                key = SequenceKey(*item[:2])
                self._sequences.setdefault(key, _Sequence())
                self._waiting[key] = None
        for key in [key for key in self._waiting if key.request_id in step.aborted]:
            del self._waiting[key]
        while len(self._waiting) > step.num_waiting:  # of a step that was missed
            del self._waiting[next(iter(self._waiting))]

    def _join(self, key: SequenceKey, step: StepRecord) -> _Sequence:
        """A sequence that was not seen waiting: a sibling forked in the last step, or one older than the page."""
        first = self._sequences.get(SequenceKey(key.request_id))
        if key.index and first is not None and first.num_prompt_tokens is not None:
            prompt = first.num_prompt_tokens
            return _Sequence(first.arrived, prompt, first.num_cached_tokens, 1, prompt, first.last_token)
        actions = [item.action for item in step.scheduled if item.key == key]
        waits = not actions and key not in step.block_tables and key not in step.swapped_tables
        return _Sequence(num_generated=0 if waits or "prefill" in actions else None)

    def _advance(self, item: SequenceStep, step: StepRecord) -> float | None:
        """Apply a step to a sequence. Returns its inter-token latency in seconds, if it got a further token."""
        seq = self._sequences.setdefault(item.key, _Sequence())
        is_first_chunk = seq.context_len is None
        seq.context_len = item.context_len
        if item.action == "prefill" and seq.num_generated == 0:
            if is_first_chunk and seq.arrived is not None:
                seq.num_cached_tokens = item.context_len - item.num_tokens
            if item.num_new_tokens:
                seq.num_prompt_tokens = item.context_len
                if seq.arrived is not None:
                    self._first_tokens.append((step.end, step.end - seq.arrived))
        if not item.num_new_tokens:
            return None
        if seq.num_generated is not None:
            seq.num_generated += item.num_new_tokens
        last, seq.last_token = seq.last_token, step.end
        return None if last is None else (step.end - last) / item.num_new_tokens

    def _note_happenings(self, step: StepRecord) -> None:
        def note(what: str, key: SequenceKey, why: str) -> None:
            seq = self._sequences.get(key, _Sequence())
            self._happenings.append(
                {
                    **key._asdict(),
                    "what": what,
                    "why": why,
                    "num_generated": seq.num_generated,
                    "seconds": None if seq.arrived is None else step.end - seq.arrived,
                }
            )

        for item in step.preempted:
            note("preempted", SequenceKey(*item[:2]), item.mode)
        for request_id in step.aborted:
            note("ended", SequenceKey(request_id), "abort")
        for finish in step.finished:
            note("ended", SequenceKey(*finish[:2]), finish.reason)

    def _drop_finished(self, step: StepRecord) -> None:
        ended = {SequenceKey(*finish[:2]) for finish in step.finished}
        living = (step.block_tables.keys() | step.swapped_tables.keys() | self._waiting.keys()) - ended
        if len(self._sequences) == len(living) and not ended:
            return
        # A finished sequence stays until the next step: siblings may have been forked from it.
        self._sequences = {key: seq for key, seq in self._sequences.items() if key in living or key in step.block_tables}

    # -- reporting -------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """What changed since the last report, and the current state, as JSON-ready data; None if no step was taken.

        A block table is reported as `keep`, the number of leading blocks that are unchanged, and `blocks`, those that follow; cached
        blocks as those added and removed. `curve` has a list per quantity, with an entry per step: `length` is its duration, and
        `mean_gap` and `max_gap` its inter-token latencies (None if no sequence has two tokens), all in seconds.
        """
        step = self._step
        if step is None:
            return None
        waiting = islice((key for key in self._sequences if key in self._waiting), MOST_WAITING)
        report = {name: getattr(step, name) for name in (*_COUNTS, "start", "num_tokens", "error")} | {
            "sequences": self._tell_sequences(step),
            "waiting": [{**key._asdict(), "was_preempted": self._sequences[key].context_len is not None} for key in waiting],
            "shared": {block: count for block, count in step.ref_counts.items() if count > 1},
            "cached": list(step.cached_blocks - self._told_cached),
            "uncached": list(self._told_cached - step.cached_blocks),
            "happenings": list(self._happenings),
            "first_tokens": list(self._first_tokens),
            "curve": {name: [point[name] for point in self._curve] for name in self._curve[0]},
        }
        self._told_tables, self._told_cached = step.block_tables | step.swapped_tables, step.cached_blocks
        self._step = None
        for told in (self._curve, self._first_tokens, self._happenings):
            told.clear()
        return report

    def _tell_sequences(self, step: StepRecord) -> list[dict[str, Any]]:
        """All sequences that hold blocks: on the device in batch order, then on the host."""
        parts = {item.key: item for item in step.scheduled}
        told = []
        for tables, place in ((step.block_tables, "running"), (step.swapped_tables, "swapped")):
            for key, table in tables.items():
                seq, before = self._sequences.get(key, _Sequence()), self._told_tables.get(key, ())
                part = parts.get(key)
                keep = len(before) if table[: len(before)] == before else 0
                told.append(
                    {
                        **key._asdict(),
                        "place": place,
                        "action": "stalled" if part is None else part.action,
                        **{name: getattr(part, name, 0) for name in ("num_tokens", "num_drafts", "num_accepted")},
                        **{name: getattr(seq, name) for name in _KNOWN},
                        "keep": keep,
                        "blocks": table[keep:],
                    }
                )
        return told
