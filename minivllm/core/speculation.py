"""Speculative decoding by prompt lookup: draft the next tokens from the text itself, verify them in one step.

A decode step reads all weights to generate one token; computing a few more tokens costs little. So the scheduler proposes draft tokens,
the model computes the newest token and the drafts together, and each accepted draft saves a step. Where the output repeats the prompt,
as in rewriting, summarizing and code, the draft is simple: what followed the last time. Nothing is learned, and no second model runs.

Verification follows Leviathan et al., 2023 (arXiv:2211.17192): a draft that is the drafter's only candidate is accepted with
probability p(draft), and otherwise replaced by a sample from the rest of p. Here each position's random numbers depend only on the
request and the position (`worker/sampler.py`), so the token sampled from p is simply compared with the draft. It equals the draft with
probability p(draft): the same rule, and the tokens are exactly those of decoding without speculation, greedy or sampled.

Mirrors `vllm/v1/spec_decode/ngram_proposer.py`, and what `vllm/v1/core/sched/scheduler.py` does with `spec_token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.request import Sequence
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput


class NgramIndex:
    """The last occurrence of each n-gram of `min_n` to `max_n` tokens in a growing list of tokens."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._ends: dict[tuple[int, ...], int] = {}
        """N-gram to the position of the token that followed it last."""
        self._num_indexed = 1

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The `num_tokens` tokens that followed the last earlier occurrence of the text's suffix; empty if there is none.

        The longest suffix that occurred before counts. If too few tokens follow it, they are repeated: "a b a b" continues with
        "a b a b a b ...".

        Args:
            token_ids: All tokens. Since the last call, tokens may only have been appended.
            num_tokens: Number of tokens to propose.
        """
        lengths = range(self.min_n, self.max_n + 1)
        for end in range(self._num_indexed, len(token_ids)):
            for n in lengths:
                if n <= end:
                    self._ends[tuple(token_ids[end - n : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))
        for n in reversed(lengths):
            start = self._ends.get(tuple(token_ids[-n:]))
            if start is not None:
                period = len(token_ids) - start
                return [token_ids[start + i % period] for i in range(num_tokens)]
        return []


class PromptLookup:
    """Proposes draft tokens, with an index of each sequence's tokens.

    A step costs a few dictionary operations per new token, however long the text is. Preemption keeps a sequence's tokens, and so its
    index; a forked sibling gets its own.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Draft tokens for a sequence: `num_tokens`, or none."""
        if num_tokens < 1:
            return []
        index = self._indexes.get(seq.seq_id)
        if index is None:
            index = self._indexes[seq.seq_id] = NgramIndex(self.min_n, self.max_n)
        return index.propose(seq.token_ids, num_tokens)

    def forget(self, seq: Sequence) -> None:
        """Drop the index of a finished sequence."""
        self._indexes.pop(seq.seq_id, None)


def accept_drafts(draft_token_ids: tuple[int, ...], chosen: list[int]) -> list[int]:
    """The tokens that a step with drafts generates: the accepted drafts, and one more.

    Args:
        draft_token_ids: The drafts.
        chosen: The model's token after the newest known one, and after each draft: one more than there are drafts.

    Returns:
        `chosen` up to and including its first token that differs from its draft: what follows was computed after a rejected draft.
    """
    for i, draft in enumerate(draft_token_ids):
        if chosen[i] != draft:
            return chosen[: i + 1]
    return chosen


class SpeculativeDecoding:
    """The scheduler's side: which sequences verify draft tokens in a step, and which drafts are kept."""

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
        if self.config.window:
            self.block_manager.free_blocks_behind_window(seq)
