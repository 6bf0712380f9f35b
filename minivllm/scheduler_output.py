"""What passes the line between deciding and computing: a step's work one way, its new tokens the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.outputs import Logprob
from minivllm.request import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's part in a step: compute `num_tokens` tokens, from `seq.num_computed_tokens` on.

    With speculative decoding, the last of them are `draft_token_ids`: guesses that follow the tokens of the sequence and
    are not yet among them.
    """

    seq: Sequence
    num_tokens: int
    block_table: list[int]
    draft_token_ids: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it computes its newest token, and drafts after it: no prompt, and nothing that preemption lost."""
        seq = self.seq
        return len(seq.token_ids) > seq.num_prompt_tokens and self.num_tokens == 1 + len(self.draft_token_ids)

    @property
    def needs_sampling(self) -> bool:
        """Whether the step computes the last known token, so that the next one must be sampled."""
        return self.seq.num_computed_tokens + self.num_tokens >= len(self.seq.token_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. The cache operations come before the computation: swap out, swap in, copy."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_batched_tokens: int = 0
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block) pairs."""
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block) pairs."""
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) pairs on the device, for copy-on-write."""
    preempted: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    num_prefills: int = 0
    """How many of the scheduled sequences compute a prompt, a part of one, or recompute what preemption lost."""

    @property
    def phase(self) -> str:
        """ "prefill", "decode", "mixed" or "idle"."""
        if not self.scheduled:
            return "idle"
        if self.num_prefills == 0:
            return "decode"
        return "prefill" if self.num_prefills == len(self.scheduled) else "mixed"


@dataclass(slots=True)
class SequenceOutput:
    """What the model gave for one scheduled sequence.

    `token_ids` holds one new token for the sequence and one more for each sibling that is forked from it now; it is
    empty when the step only computed a part of the prompt. For a sequence with draft tokens it holds the token chosen
    after the newest known one, and then after each draft; those that follow a wrong draft mean nothing, which
    `Scheduler.update` sees to. `logprobs` runs parallel to it. `prompt_logprobs` has, by position in the prompt, an entry
    for each prompt token that the step's logits predict.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
