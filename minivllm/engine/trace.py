"""A record of what the engine did at each step: plain data, for pictures and measurements."""

from __future__ import annotations

from dataclasses import dataclass


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
        num_draft_tokens, num_accepted_tokens: With speculative decoding, the guesses among the tokens computed, and how
            many of them the model agreed with.
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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
