"""A request, and the sequences (continuations) that it is made of.

The scheduler moves sequences between its queues; the request keeps what they have in common. Where the tokens'
keys and values are stored is not known here: block tables belong to the BlockSpaceManager.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from typing import Any

from minivllm.outputs import RequestMetrics
from minivllm.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"


_UNFINISHED = (SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED)


class Sequence:
    """One continuation of a prompt: its tokens, and how many of them have their keys and values in the cache.

    A step advances `num_computed_tokens`. When it reaches `num_tokens`, the model has seen every token there is, and
    the next one is sampled. That one rule covers prefill, decode, chunks of a prefill, and coming back after a
    preemption with output already there.
    """

    __slots__ = (
        "block_hashes",
        "index",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_unforked_siblings",
        "order",
        "request",
        "seq_id",
        "status",
        "stop_reason",
        "token_ids",
    )  # fmt: skip

    def __init__(self, seq_id: int, request: Request, index: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.status = SequenceStatus.WAITING
        self.num_unforked_siblings = 0
        """How many further sequences (n - 1) will be forked from this one when its prompt has been computed."""
        self.stop_reason: int | str | None = None
        self.order: tuple[Any, ...] = ()
        """The key by which the scheduler's queues are sorted; set by the scheduler."""
        self.block_hashes: list[bytes] = []
        """Hashes of the full blocks of `token_ids`, extended by `extend_block_hashes`."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are not in the cache: 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status not in _UNFINISHED

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "error"; None while it lives."""
        return self.status.value if self.finished else None

    def fork(self, seq_id: int, index: int) -> Sequence:
        """A sibling with the same tokens, computed just as far."""
        child = Sequence(seq_id, self.request, index)
        child.token_ids = list(self.token_ids)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = list(self.block_hashes)
        child.status = self.status
        return child

    def extend_block_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks, each chained to the one before it.

        The hash of a block stands for its tokens and for everything before them, so two sequences that agree on it
        agree on the whole prefix, and may share the block.
        """
        hashes = self.block_hashes
        for i in range(len(hashes), len(self.token_ids) // block_size):
            tokens = array("q", self.token_ids[i * block_size : (i + 1) * block_size]).tobytes()
            parent = hashes[-1] if hashes else b""
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, {self.num_computed_tokens} computed)"
        )


class Request:
    """A prompt, what is wanted of it, and the sequences that continue it.

    Args:
        request_id: The caller's name for it, unique among the requests that live.
        prompt_token_ids: The prompt, at least one token.
        sampling_params: What is wanted.
        max_num_tokens: Prompt and output together never grow beyond this.
        arrival_time: Seconds of the engine's clock.
        eos_token_ids: Tokens with which the model ends a text.
        prompt: The prompt as text, where there is one.
        priority: With the "priority" policy, smaller numbers go first.
        seed: Start of the request's own random stream (`SamplingParams.seed`, or the engine's choice).
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_num_tokens: int,
        arrival_time: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
        prompt: str | None = None,
        priority: int = 0,
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.max_num_tokens = max_num_tokens
        self.priority = priority
        self.seed = seed
        self.metrics = RequestMetrics(arrival_time)
        self.error: str | None = None
        self.sequences: list[Sequence] = []
        """The sequences made so far: one until the prompt is computed, then n."""
        eos = () if sampling_params.ignore_eos else eos_token_ids
        self.stop_reasons: dict[int, int | None] = {t: t for t in sampling_params.stop_token_ids or ()}
        """Tokens that end a sequence, each with the stop reason to report."""
        self.stop_reasons.update(dict.fromkeys(eos))

    @property
    def finished(self) -> bool:
        """Whether all its sequences are there and have ended."""
        return all(seq.finished and seq.num_unforked_siblings == 0 for seq in self.sequences)
