"""A simulated model: the real scheduler drives it under a virtual clock.

Above the executor, everything is the real engine: queues, blocks, preemption, outputs. Below it is a formula for how long a step takes.
So minutes of load are simulated in seconds, with the same result every time, on any machine. `bench/calibrate.py` fits the formula to a
measured run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from minivllm.errors import ConfigError
from minivllm.executor.base import Executor
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData, SequenceOutput


class VirtualClock:
    """Time that passes only when told to. An engine's `clock`.

    Args:
        now: Where it starts, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass."""
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until a moment; no effect if it is in the past."""
        self.now = max(self.now, moment)


class StepWork(NamedTuple):
    """The work of a step that takes time.

    Attributes:
        prefill_tokens: Tokens of prompts, and those that are recomputed.
        prefill_pairs: Pairs of such a token and one that it attends to, itself included.
        decode_seqs: Sequences that decode; a draft token counts as one more.
        context_tokens: Tokens whose keys and values the decoding sequences read.
    """

    prefill_tokens: int
    prefill_pairs: int
    decode_seqs: int
    context_tokens: int


def count_work(parts: Iterable[tuple[bool, int, int]]) -> StepWork:
    """Sum up a step.

    Args:
        parts: For each sequence whether it decodes, how many tokens are computed, and how many it has when they are.
    """
    prefill_tokens = prefill_pairs = decode_seqs = context_tokens = 0
    for is_decode, num_tokens, context_len in parts:
        if is_decode:
            decode_seqs += num_tokens
            context_tokens += context_len
        else:
            prefill_tokens += num_tokens
            prefill_pairs += num_tokens * context_len - num_tokens * (num_tokens - 1) // 2
    return StepWork(prefill_tokens, prefill_pairs, decode_seqs, context_tokens)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: a fixed part, plus a price for each unit of work (`StepWork`).

    Linear layers cost by token, decode attention by the context it reads, prefill attention by pair. Copying and swapping blocks is free.

    Attributes:
        fixed: For any step.
        per_prefill_step: Extra for a step that computes prompts.
        per_prefill_token, per_prefill_pair, per_decode_seq, per_context_token: For each unit.
        decode_curve: (sequences, seconds) points, interpolated linearly, because the cost of a decode is not linear in the batch size.
            `per_decode_seq` applies beyond the last point.
    """

    fixed: float
    per_prefill_step: float = 0.0
    per_prefill_token: float = 0.0
    per_prefill_pair: float = 0.0
    per_decode_seq: float = 0.0
    per_context_token: float = 0.0
    decode_curve: tuple[tuple[int, float], ...] = ()

    def __call__(self, work: StepWork) -> float:
        """Seconds of a step with this work."""
        seconds = self.fixed + self.decode_seconds(work.decode_seqs) + self.per_context_token * work.context_tokens
        if work.prefill_tokens:
            seconds += self.per_prefill_step
            seconds += self.per_prefill_token * work.prefill_tokens + self.per_prefill_pair * work.prefill_pairs
        return seconds

    def decode_seconds(self, num_seqs: int) -> float:
        """Seconds for decoding this many sequences, context reads excluded."""
        curve = self.decode_curve
        right = bisect_left(curve, (num_seqs,))
        if right == len(curve):
            last, seconds = curve[-1] if curve else (0, 0.0)
            return seconds + self.per_decode_seq * (num_seqs - last)
        left_seqs, left = curve[right - 1] if right else (0, 0.0)
        right_seqs, seconds = curve[right]
        return left + (seconds - left) * (num_seqs - left_seqs) / (right_seqs - left_seqs)


class SimulatedExecutor(Executor):
    """Advances the clock by the time a step would take, and makes up its tokens.

    A request's tokens follow from its seed and their positions, and mean nothing: end requests by `max_tokens`, with `ignore_eos`.

    Args:
        clock: The engine's.
        cost_model: Seconds of a step.
        num_gpu_blocks, num_cpu_blocks: Size of the simulated cache.
        vocab_size: Token ids are below this.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost_model: Callable[[StepWork], float],
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        vocab_size: int = 50_000,
    ) -> None:
        for name, value, low in (("num_gpu_blocks", num_gpu_blocks, 1), ("num_cpu_blocks", num_cpu_blocks, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} is {value!r}, but must be a whole number of at least {low}.")
        self.clock = clock
        self.cost_model = cost_model
        self.watch: Callable[[float], None] | None = None
        """Called in each step with its seconds, before they pass."""
        self._num_blocks = (num_gpu_blocks, num_cpu_blocks)
        self._vocab_size = vocab_size

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self._num_blocks

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """There is no memory to allocate."""

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        seconds = self.cost_model(work_of(request))
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"The cost model says that a step takes {seconds} seconds, but it must take 0 or more, and end.")
        if self.watch is not None:
            self.watch(seconds)
        self.clock.advance(seconds)
        return [SequenceOutput(self._tokens(seq)) if seq.num_samples else SequenceOutput() for seq in request.sequences]

    def _tokens(self, seq: SequenceData) -> list[int]:
        """The next token, one more for each sibling forked now, and one after each draft."""
        num_known = seq.num_computed_tokens + seq.num_tokens - seq.num_drafts
        first = seq.request.seed + 7919 * seq.index + num_known
        return [(first + i) % self._vocab_size for i in range(seq.num_samples + seq.num_drafts)]


def work_of(request: ExecuteModelRequest) -> StepWork:
    """The work of a step."""
    return count_work((seq.is_decode, seq.num_tokens, seq.num_computed_tokens + seq.num_tokens) for seq in request.sequences)
