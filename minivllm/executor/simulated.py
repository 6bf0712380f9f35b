"""A simulated model, driven by the real scheduler on a virtual clock.

Above the executor, everything is the real engine; below it is a formula for the duration of a step. Minutes of load are simulated in
seconds, with the same result every time, on any machine. `simulation/calibrate.py` fits the formula to a measured run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from minivllm.config import check_at_least
from minivllm.errors import ConfigError
from minivllm.executor.base import Executor, PendingStep
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, Masks, RankTiming, SequenceData, SequenceOutput


class VirtualClock:
    """An engine's `clock` that moves only when told to, from `now` seconds on."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance by this many seconds."""
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Advance to a time; no effect if it is in the past."""
        self.now = max(self.now, moment)


class StepWork(NamedTuple):
    """The work of a step.

    Attributes:
        prefill_tokens: Prompt tokens computed, or recomputed after preemption.
        prefill_pairs: Pairs of such a token and a token that it attends to, itself included.
        decode_seqs: Sequences that decode; a draft token counts as one more.
        context_tokens: Tokens whose keys and values the decoding sequences read.
    """

    prefill_tokens: int
    prefill_pairs: int
    decode_seqs: int
    context_tokens: int


def count_work(parts: Iterable[tuple[bool, int, int]]) -> StepWork:
    """Sum up a step. Of each sequence it gets: whether it decodes, the tokens computed, and its context length after the step."""
    prefill_tokens = prefill_pairs = decode_seqs = context_tokens = 0
    for is_decode, num_tokens, context_len in parts:
        if is_decode:
            decode_seqs += num_tokens
            context_tokens += context_len
        else:
            prefill_tokens += num_tokens
            prefill_pairs += num_tokens * context_len - num_tokens * (num_tokens - 1) // 2
    return StepWork(prefill_tokens, prefill_pairs, decode_seqs, context_tokens)


_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: a fixed part, plus a price for each unit of work (`StepWork`).

    Linear layers cost per token, decode attention per context token, prefill attention per pair. Copying and swapping blocks is free.

    Attributes:
        fixed: Per step.
        per_prefill_step: Extra for a step that computes prompts.
        per_prefill_token, per_prefill_pair, per_decode_seq, per_context_token: Per unit.
        decode_curve: (sequences, seconds) points, interpolated linearly, because the cost of a decode is not linear in the batch size.
            `per_decode_seq` applies beyond the last point.
    """

    fixed: _Seconds
    per_prefill_step: _Seconds = 0.0
    per_prefill_token: _Seconds = 0.0
    per_prefill_pair: _Seconds = 0.0
    per_decode_seq: _Seconds = 0.0
    per_context_token: _Seconds = 0.0
    decode_curve: tuple[tuple[Annotated[int, msgspec.Meta(ge=1)], _Seconds], ...] = ()

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
    """Advances the clock by the cost of a step, and makes up its tokens.

    Tokens depend only on the request's seed and their position: finish requests by `max_tokens`, with `ignore_eos`.

    With several steps in flight, the device runs beside the host: it begins a step when it has been launched and the step before has ended.
    Pipeline stages are several such devices. Each computes an equal part of every step, when the stage before it is done with it.

    Args:
        clock: The engine's.
        cost_model: Seconds of a step.
        num_gpu_blocks, num_cpu_blocks: Size of the simulated cache.
        vocab_size: Token ids are below this.
        max_concurrent_batches: How many steps may be in flight.
        num_stages: How many pipeline stages there are. As many steps may be in flight, at least.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost_model: Callable[[StepWork], float],
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        vocab_size: int = 50_000,
        max_concurrent_batches: int = 1,
        num_stages: int = 1,
    ) -> None:
        check_at_least("num_gpu_blocks", num_gpu_blocks, 1)
        check_at_least("num_cpu_blocks", num_cpu_blocks, 0)
        check_at_least("max_concurrent_batches", max_concurrent_batches, 1)
        check_at_least("num_stages", num_stages, 1)
        self.clock = clock
        self.cost_model = cost_model
        self.watch: Callable[[float], None] | None = None
        """Called in each step with its duration, before the clock advances."""
        self.max_concurrent_batches = max(max_concurrent_batches, num_stages)
        self._busy_until = [-math.inf] * num_stages
        """When each stage will have finished all that was launched."""
        self._timing: list[RankTiming] = []
        self._num_blocks = (num_gpu_blocks, num_cpu_blocks)
        self._vocab_size = vocab_size

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self._num_blocks

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """There is no memory to allocate."""

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        seconds = self._cost(request)
        if self.watch is not None:
            self.watch(seconds)
        self.clock.advance(seconds)
        return self._outputs(request)

    def sample_tokens(self, masks: Masks) -> PendingStep:
        if self.max_concurrent_batches == 1:
            return super().sample_tokens(masks)
        request, self._launched = self._launched, None
        assert request is not None, "sample_tokens follows launch_model"
        seconds, outputs = self._cost(request), self._outputs(request)
        stages = self._run_stages(seconds)

        def finish() -> list[SequenceOutput]:
            if self.watch is not None:
                self.watch(seconds)
            self.clock.advance_to(stages[-1].end)
            self._timing = stages if len(stages) > 1 else []
            return outputs

        return finish

    def _run_stages(self, seconds: float) -> list[RankTiming]:
        """When each stage computes its part of a step: once it has received it, and finished the step before."""
        stages, received = [], self.clock()
        for stage, busy_until in enumerate(self._busy_until):
            start = max(received, busy_until)
            received = self._busy_until[stage] = start + seconds / len(self._busy_until)
            stages.append(RankTiming(start, received, 0, []))
        return stages

    def take_timing(self) -> list[RankTiming]:
        """When each of several stages computed the last step, in seconds of the engine's clock."""
        timing, self._timing = self._timing, []
        return timing

    def _cost(self, request: ExecuteModelRequest) -> float:
        parts = [(seq.is_decode, count := len(seq.token_ids), seq.num_computed_tokens + count) for seq in request.sequences]
        return self.seconds_of(count_work(parts))

    def seconds_of(self, work: StepWork) -> float:
        """Seconds of a step."""
        seconds = self.cost_model(work)
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"The cost model returned {seconds} seconds for a step, but must return a finite number >= 0.")
        return seconds

    def _outputs(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        return [SequenceOutput(self._tokens(seq)) if seq.num_samples else SequenceOutput() for seq in request.sequences]

    def _tokens(self, seq: SequenceData) -> list[int]:
        """The next token, one per sibling forked now, and one per draft."""
        num_known = seq.num_computed_tokens + len(seq.token_ids) - seq.num_drafts
        return self.tokens_after(seq.request, seq.index, num_known, seq.num_samples + seq.num_drafts)

    def tokens_after(self, request: EngineCoreRequest, index: int, num_known: int, count: int) -> list[int]:
        """The `count` tokens that follow the `num_known` tokens of a request's sequence."""
        first = (request.seed + 7919 * index + num_known) % self._vocab_size
        last = first + count
        if last <= self._vocab_size:  # nearly always
            return list(range(first, last))
        return [token_id % self._vocab_size for token_id in range(first, last)]
