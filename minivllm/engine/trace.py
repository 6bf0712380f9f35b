"""A record of what the engine did at each step: plain data, for pictures and measurements."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine.

    Attributes:
        start, end: Seconds of the engine's clock.
        phase: "prefill", "decode" or "mixed".
        scheduled: Request id and number of tokens computed, for each sequence in the batch.
        preempted: Request ids of sequences that lost their blocks.
        num_running, num_waiting, num_swapped: Sequences in each queue after the step was scheduled.
        num_free_blocks, num_blocks: Of the device.
        drafts: With speculative decoding, request id, number of guesses among the tokens computed, and how many of them the
            model agreed with, for each sequence that had any.
    """

    start: float
    end: float
    phase: str
    scheduled: list[tuple[str, int]]
    preempted: list[str]
    num_running: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_blocks: int
    drafts: list[tuple[str, int, int]] = field(default_factory=list)
