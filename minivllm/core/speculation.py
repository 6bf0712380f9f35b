"""Speculative decoding, the scheduler's side: which sequences verify draft tokens in a step, and which drafts are kept.

`prompt_lookup.py` proposes the drafts; the model computes the newest token and the drafts together; the ones it agrees with are
kept here. Mirrors what `vllm/v1/core/sched/scheduler.py` does with `spec_token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.prompt_lookup import PromptLookup, accept_drafts
from minivllm.request import Sequence
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput


class SpeculativeDecoding:
    """Adds draft tokens to steps, and applies the results of such steps.

    Args:
        config: The scheduler's; `num_speculative_tokens` must be at least 1.
        block_manager: The scheduler's.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockSpaceManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.proposer = PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)

    def add_drafts(self, output: SchedulerOutput) -> None:
        """Let decoding sequences verify drafts, with the budget and the blocks that everything else has left.

        Not for requests with penalties, bad words or logits processors: their next token depends on which drafts are right.
        """
        for item in output.scheduled:
            seq, request = item.seq, item.seq.request
            if seq.num_uncomputed_tokens > 1 or seq.num_unforked_siblings or request.sampling_params.needs_output_tokens:
                continue
            budget = self.config.max_num_batched_tokens - output.num_batched_tokens
            room = request.max_num_tokens - seq.num_tokens - 1  # the model adds a token of its own
            drafts = self.proposer.propose(seq, min(self.config.num_speculative_tokens, budget, room))
            if seq.grammar is not None:
                drafts = drafts[: seq.grammar.count_valid(drafts)]
            num_drafts = self.block_manager.append_draft_slots(seq, len(drafts)) if drafts else 0
            item.draft_token_ids = tuple(drafts[:num_drafts])
            item.num_tokens += num_drafts
            output.num_batched_tokens += num_drafts

    def update(self, scheduled: ScheduledSequence, token_ids: list[int], append_token: Callable[[Sequence, int], None]) -> None:
        """Apply a step with drafts as the sequence of decodes that it replaces.

        Keys and values of rejected drafts stay in the cache beyond `num_computed_tokens`; they are never read, and the next step
        overwrites them.

        Args:
            scheduled: The sequence's part in the step.
            token_ids: What the model chose after the newest known token, and after each draft.
            append_token: Appends a token to a sequence, which may finish it.
        """
        seq, metrics = scheduled.seq, scheduled.seq.request.metrics
        accepted = accept_drafts(scheduled.draft_token_ids, token_ids)
        metrics.num_draft_tokens += len(scheduled.draft_token_ids)
        metrics.num_accepted_tokens += len(accepted) - 1
        for token_id in accepted:
            seq.num_computed_tokens += 1
            self.block_manager.cache_full_blocks(seq)
            append_token(seq, token_id)
            if seq.finished:
                return
        self.block_manager.free_draft_slots(seq)

    def forget(self, seq: Sequence) -> None:
        """A sequence has finished."""
        self.proposer.forget(seq)
