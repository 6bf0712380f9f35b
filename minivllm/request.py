"""A request on its way through the engine core: as it arrives (`EngineCoreRequest`), and as the scheduler keeps it (`Request`).

A request has `n` sequences, its continuations. The scheduler moves sequences between its queues; the request holds what they
share. Block tables belong to the BlockSpaceManager. Mirrors `vllm/v1/request.py` and `vllm/v1/engine/__init__.py`.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.outputs import RequestMetrics
from minivllm.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"


@dataclass(frozen=True, slots=True)
class Resumption:
    """The progress that another engine core had made on a request.

    Attributes:
        output_token_ids: The output so far of each unfinished sequence, by index. All siblings have been forked.
        metrics: The request's metrics so far.
    """

    output_token_ids: dict[int, list[int]]
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """A validated, tokenized and seeded request, in token ids only: what the frontend hands to the engine core, and the core to workers.

    Attributes:
        request_id: The caller's name for it, unique among unfinished requests.
        prompt_token_ids: At least one token.
        sampling_params: How to generate. `seed` below takes precedence over the one in here.
        max_num_tokens: The limit on prompt and output together.
        eos_token_ids: Tokens with which the model ends a text.
        seed: Start of the request's random stream.
        arrival_time: Seconds of the engine's clock.
        priority: With the "priority" policy, smaller goes first.
        number: Distinguishes requests that reuse an id. Every output carries it.
        cache_salt: The prefix cache shares blocks only between requests with equal salts; None counts as a salt.
        client_index: The API server that sent it and gets its outputs.
        resumption: Where to continue, if another core has started it.
        data_parallel_rank: The replica to use if it accepts requests; None leaves the choice to the router.
        bad_words: The bad words of the sampling parameters, as token ids.
        special_stops: Stop strings that are the text of a special token, by the token's id: it is not in the text, so the id ends the sequence.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_num_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    number: int = 0
    cache_salt: str | None = None
    client_index: int = 0
    resumption: Resumption | None = None
    data_parallel_rank: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    special_stops: dict[int, str] = field(default_factory=dict)

    @property
    def stop_reasons(self) -> dict[int, int | None]:
        """Tokens that end a sequence, each with the stop reason to report: itself, or None for an end-of-sequence token."""
        params = self.sampling_params
        ends = dict.fromkeys(() if params.ignore_eos else self.eos_token_ids)
        return {t: t for t in params.stop_token_ids or ()} | ends | {t: t for t in self.special_stops}


class Grammar(Protocol):
    """A sequence's position in its grammar; implemented by `core.structured_output.StructuredOutputGrammar`."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot continue; None if it can."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token. Returns whether another may follow."""

    def count_valid(self, token_ids: list[int]) -> int:
        """How many of these tokens may follow, in this order."""

    def masks(self, draft_token_ids: tuple[int, ...] = ()) -> list[bytes]:
        """Which tokens may follow now, and after each draft."""

    def fork(self) -> Grammar:
        """A copy that advances on its own."""


_UNFINISHED = (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of a prompt: its tokens, and how many of them have their keys and values in the cache.

    A step advances `num_computed_tokens`. When it reaches `num_tokens`, the model has seen every known token, and the next one
    is sampled. That one rule covers prefill, decode, chunked prefill, and resuming after a preemption.
    """

    seq_id: int
    request: Request
    index: int = 0
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_placeholders: int = 0
    """Output tokens that steps in flight are sampling; they follow `token_ids`, and count as tokens."""
    num_tokens_in_flight: int = 0
    """Tokens that steps in flight are computing, part of `num_computed_tokens` unless a preemption has lost them."""
    num_unforked_siblings: int = 0
    """Siblings (n - 1) still to be forked from this one, when its prompt has been computed."""
    num_reported_tokens: int = 0
    """Output tokens that the engine core has handed to the frontend."""
    stop_reason: int | str | None = None
    order: tuple[Any, ...] = ()
    """The key by which the scheduler's queues are sorted; set by the scheduler."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids`, extended by `extend_block_hashes`."""
    grammar: Grammar | None = None
    """With structured outputs, the state of the grammar after its output."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far: the known ones, and a placeholder for each that a step in flight samples."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache: 1 for a sequence that decodes."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, with placeholders."""
        return len(self.token_ids) + self.num_placeholders - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, those that are known."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether it is complete."""
        return self.status not in _UNFINISHED

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "error"; None while unfinished."""
        return None if self.status in _UNFINISHED else self.status.value

    def fork(self, seq_id: int, index: int) -> Sequence:
        """A sibling with the same tokens, computed up to the same point."""
        child = Sequence(seq_id, self.request, index)
        child.token_ids = list(self.token_ids)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = list(self.block_hashes)
        child.grammar = self.grammar and self.grammar.fork()
        child.status = self.status
        return child

    def take_new_tokens(self) -> list[int]:
        """Output tokens since the last call."""
        new = self.token_ids[self.num_prompt_tokens + self.num_reported_tokens :]
        self.num_reported_tokens += len(new)
        return new

    def extend_block_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks, each chained to the one before it.

        A block's hash covers its tokens, everything before them, and the request's salt: sequences with equal hashes have equal
        prefixes and may share the block.
        """
        hashes, salt = self.block_hashes, self.request.data.cache_salt
        root = b""
        if salt is not None:
            root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache salt").digest()
        for i in range(len(hashes), len(self.token_ids) // block_size):
            tokens = array("q", self.token_ids[i * block_size : (i + 1) * block_size]).tobytes()
            parent = hashes[-1] if hashes else root
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, {self.num_computed_tokens} computed)"
        )


class Request:
    """A prompt, how to continue it, and the sequences that do.

    Args:
        data: The request as it arrived, which the workers get as well. What is read for every token is repeated here.
    """

    def __init__(self, data: EngineCoreRequest) -> None:
        self.data = data
        self.request_id = data.request_id
        self.prompt_token_ids = data.prompt_token_ids
        self.sampling_params = data.sampling_params
        self.max_num_tokens = data.max_num_tokens
        self.priority = data.priority
        self.stop_reasons = data.stop_reasons
        self.metrics = RequestMetrics(data.arrival_time) if data.resumption is None else data.resumption.metrics.copy()
        self.ordinal = 0
        """How many requests the engine core had received before it."""
        self.grammar: Grammar | None = None
        """With structured outputs, the compiled grammar at its beginning."""
        self.sequences: list[Sequence] = []
        """The sequences made so far: one until the prompt is computed, then n."""

    @property
    def finished(self) -> bool:
        """Whether all its sequences have been forked and have finished."""
        for seq in self.sequences:  # noqa: SIM110 - asked for each token, where all() takes four times as long
            if seq.status in _UNFINISHED or seq.num_unforked_siblings:
                return False
        return True
