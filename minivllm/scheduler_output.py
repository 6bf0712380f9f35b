"""What the scheduler decides, the part of it that goes to the workers, and what they return.

    Scheduler.schedule() ─► SchedulerOutput ─► ExecuteModelRequest ─► Executor ─► [SequenceOutput] ─► Scheduler.update()

`SchedulerOutput` refers to the scheduler's live sequences; `ExecuteModelRequest` is plain data, the same for a worker in this process
or another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from minivllm.outputs import Logprob
from minivllm.request import EngineCoreRequest, Sequence

Phase = Literal["prefill", "decode", "mixed", "idle"]
"""What a step computes; "idle" where it only preempts."""


PLACEHOLDER = -1
"""In the place of a token id: the token that the worker has sampled last for this sequence, which the scheduler does not know yet."""

FREED_BLOCK = -1
"""In a block table, in the place of a block that has been freed because it lies behind the sequence's sliding window. Kernels see block 0 there, and
do not look at it."""

Masks = dict[int, list[bytes]]
"""Of sequences with structured outputs, by their place in the batch: which tokens may follow the last known one, and each draft
(`StructuredOutputGrammar.masks`)."""

RequestT = TypeVar("RequestT")


class SequencePart(msgspec.Struct, Generic[RequestT], array_like=True, forbid_unknown_fields=True, gc=False):
    """A sequence's part in a step: run the model on `token_ids`, then sample.

    Attributes:
        request: What stays the same from step to step; between processes, a number that stands for it.
        seq_id, index: The sequence, in the engine and among the request's `n`.
        token_ids: Tokens to compute: known ones, then `num_drafts` draft tokens. The last may be the `PLACEHOLDER`.
        num_computed_tokens: Position of the first of them.
        block_table: Cache blocks of the sequence, in the order of its tokens; `FREED_BLOCK` for those behind its window.
        num_output_tokens: Output tokens before the step, with placeholders; with it the random stream is keyed.
        output_token_ids: Those tokens, for what depends on them, such as penalties; else empty.
        num_samples: Tokens to sample after the last known one: 0 if it is not computed yet, else 1, plus 1 for each sibling forked now.
        num_drafts: Draft tokens to verify. One more token is sampled after each.
        is_decode: Whether the newest token (and drafts) is computed, not a prompt or tokens lost to preemption.
        masks: With structured outputs, the sequence's `Masks`, which come once the step has been launched; else None.
    """

    request: RequestT
    seq_id: int
    index: int
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    num_output_tokens: int
    output_token_ids: list[int]
    num_samples: int
    num_drafts: int
    is_decode: bool
    masks: list[bytes] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)


class SequenceData(SequencePart[EngineCoreRequest], array_like=True, forbid_unknown_fields=True, gc=False):
    """A sequence's part in a step, as the worker gets it."""


def apply_masks(sequences: list[SequenceData], masks: Masks) -> None:
    """Hand the masks to the sequences of a batch."""
    for i, of_sequence in masks.items():
        sequences[i].masks = of_sequence


@dataclass(slots=True)
class ExecuteModelRequest:
    """A step for the workers. The cache operations come before the computation: swap out, swap in, copy.

    Attributes:
        sequences: What to compute, in the order of the batch.
        blocks_to_swap_out: (device block, host block) pairs.
        blocks_to_swap_in: (host block, device block) pairs.
        blocks_to_copy: (source, destination) pairs on the device, for copy-on-write.
    """

    sequences: list[SequenceData]
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)


class RankTiming(NamedTuple):
    """How one of several workers spent a step. Times are seconds of `time.perf_counter`, a clock that all processes of a machine share. On
    a GPU, those of the communication are when it was launched, not when it finished.

    Attributes:
        start, end: When it received the step, and when it finished.
        num_bytes: Bytes it contributed to collective operations.
        communication: Start and end of each collective operation, waiting included.
    """

    start: float
    end: float
    num_bytes: int
    communication: list[tuple[float, float]]

    @property
    def communication_seconds(self) -> float:
        """Total duration of the collective operations."""
        return sum(end - start for start, end in self.communication)


class ScheduledSequence(msgspec.Struct, gc=False):
    """A sequence's part in a step: compute `num_tokens` tokens, from `seq.num_computed_tokens` on.

    With speculative decoding, the last of them are `draft_token_ids`, which follow the sequence's own tokens. The properties hold until the
    sequence moves on: by the step's results, or by `AsyncScheduler.advance`.
    """

    seq: Sequence
    num_tokens: int
    block_table: list[int]
    draft_token_ids: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it computes only its newest token and drafts: no prompt, nothing lost to preemption."""
        seq = self.seq
        return seq.num_tokens > seq.num_prompt_tokens and self.num_tokens == 1 + len(self.draft_token_ids)

    @property
    def needs_sampling(self) -> bool:
        """Whether the step computes the last token, so that the next one must be sampled."""
        return self.seq.num_computed_tokens + self.num_tokens >= self.seq.num_tokens

    def to_data(self) -> SequenceData:
        """The part that goes to the workers."""
        seq, drafts, num_tokens = self.seq, self.draft_token_ids, self.num_tokens
        start, request, num_known = seq.num_computed_tokens, seq.request.data, len(seq.token_ids) + seq.num_placeholders
        num_output_tokens = num_known - seq.num_prompt_tokens
        token_ids = seq.token_ids[start : start + num_tokens - len(drafts)]
        if drafts:
            token_ids += drafts
        if len(token_ids) < num_tokens:  # the newest token is still being sampled
            token_ids.append(PLACEHOLDER)
        return SequenceData(
            request,
            seq.seq_id,
            seq.index,
            token_ids,
            start,
            self.block_table,
            num_output_tokens,
            seq.output_token_ids if request.sampling_params.needs_output_tokens else [],
            1 + seq.num_unforked_siblings if start + num_tokens >= num_known else 0,  # `needs_sampling`
            len(drafts),
            num_output_tokens > 0 and num_tokens == 1 + len(drafts),  # `is_decode`, from what is known here
        )


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work, as the scheduler decided it. See `ExecuteModelRequest` for the blocks."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_batched_tokens: int = 0
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    num_prefills: int = 0
    """Scheduled sequences that compute a prompt, a chunk of one, or tokens lost to preemption."""

    @property
    def phase(self) -> Phase:
        """What the step computes."""
        if not self.scheduled:
            return "idle"
        if self.num_prefills == 0:
            return "decode"
        return "prefill" if self.num_prefills == len(self.scheduled) else "mixed"

    def masks(self) -> Masks:
        """What grammars allow, once the step has been launched and before the sequences move on."""
        return {
            i: item.seq.grammar.masks(item.draft_token_ids)
            for i, item in enumerate(self.scheduled)
            if item.seq.grammar is not None and item.needs_sampling
        }

    def to_request(self) -> ExecuteModelRequest:
        """The part that goes to the workers. The `masks` follow."""
        sequences = [item.to_data() for item in self.scheduled]
        return ExecuteModelRequest(sequences, self.blocks_to_swap_out, self.blocks_to_swap_in, self.blocks_to_copy)


class SequenceOutput(msgspec.Struct, gc=False):
    """What the model returned for one scheduled sequence.

    Attributes:
        token_ids: One new token, and one for each sibling forked now. Empty after a chunk in the middle of a prompt. With drafts: the
            token sampled after the newest known one, then after each draft; `Scheduler.update` drops what follows a rejected one.
        logprobs: One entry for each of `token_ids`.
        prompt_logprobs: By position in the prompt, an entry for each prompt token that the step's logits predict.
        error: Why the request failed: a function of its own raised, say.
    """

    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    error: str | None = None
