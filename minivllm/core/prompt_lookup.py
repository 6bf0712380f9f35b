"""Speculative decoding by prompt lookup: guess the next tokens from the text itself, verify them in one step.

A decode reads all weights to make one token; to compute a few tokens more costs it little. So the scheduler guesses
("drafts") how the text goes on, the model computes the newest token and the drafts together, and the drafts that it agrees
with are had for the price of one step. Where the answer repeats the prompt, as in rewriting, summarizing and code,
the guess is simple: what followed the last time. Nothing is learned and no second model runs.

Verifying is that of Leviathan et al., 2023 (arXiv:2211.17192). They accept a draft with probability p(draft) if it is
the only one that the drafter could propose, and else draw from what remains of p. Here each position's random number
belongs to the request and to the position (`worker/sampler.py`), so the token that it draws from p is there to compare
with: it equals the draft with probability p(draft), and else is drawn from the rest. That is the same rule, and more: the tokens
are those, one by one, that decoding without speculation gives, greedy or sampled.

Mirrors `vllm/v1/spec_decode/ngram_proposer.py`.
"""

from __future__ import annotations

from minivllm.request import Sequence


class NgramIndex:
    """Where in a growing list of tokens each n-gram occurred last.

    Args:
        min_n, max_n: Tokens in the shortest and the longest n-gram.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._ends: dict[tuple[int, ...], int] = {}
        """N-gram to the position after its last occurrence that another token follows."""
        self._num_indexed = 1

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """How the text went on after the last earlier occurrence of its end, `num_tokens` tokens; empty if there is none.

        The longest end (`max_n` tokens) that occurred before counts. Where the text after it is too short, it is read
        over again: at "a b a b" the next tokens are "a b a b a b ...".

        Args:
            token_ids: All tokens. Since the last call, some may have been added at the end and nothing else.
            num_tokens: How many to propose.
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
    """Proposes draft tokens for sequences, and keeps an index of each one's tokens.

    A step costs a few dictionary operations for each new token, however long the text is. Preemption leaves a sequence's
    tokens as they are, so its index too; a forked sibling gets one of its own.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Draft tokens to follow the sequence's own: `num_tokens`, or none."""
        if num_tokens < 1:
            return []
        index = self._indexes.get(seq.seq_id)
        if index is None:
            index = self._indexes[seq.seq_id] = NgramIndex(self.min_n, self.max_n)
        return index.propose(seq.token_ids, num_tokens)

    def forget(self, seq: Sequence) -> None:
        """Drop the index of a sequence that has ended."""
        self._indexes.pop(seq.seq_id, None)


def accept_drafts(draft_token_ids: tuple[int, ...], chosen: list[int]) -> list[int]:
    """The tokens that a step with drafts has won: the drafts that were right, and one more.

    Args:
        draft_token_ids: The drafts.
        chosen: What the model chose after the newest known token, and then after each draft: one more than there are
            drafts.

    Returns:
        `chosen` up to and with its first token that differs from the draft in its place: the drafts after that one, and
        what was chosen after them, follow a text that is not to be. At least one token.
    """
    for i, draft in enumerate(draft_token_ids):
        if chosen[i] != draft:
            return chosen[: i + 1]
    return chosen
