"""The outputs of the engine: plain data, whether streamed step by step or returned at the end.

What is made for every token is a `msgspec.Struct`, which is several times as fast to make and to copy as a dataclass. `msgspec.structs.replace` and
`msgspec.structs.asdict` do for it what those of `dataclasses` do. With `gc=False` the garbage collector does not look at it: nothing that it holds
refers back to it, so counting references is enough to free it.
"""

from __future__ import annotations

import msgspec


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token: natural logarithm, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct, gc=False):
    """A request's times, in seconds of the engine's clock, and its counters. `queued_time` is when the (first) engine core got it.

    `num_preemptions` counts how often one of its sequences lost its blocks; `num_cached_tokens` is the number of prompt tokens found
    in the prefix cache at its first admission. With speculative decoding, `num_accepted_tokens` of `num_draft_tokens` were accepted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    queued_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    def copy(self) -> RequestMetrics:
        """A snapshot of the current values."""
        return msgspec.structs.replace(self)


class CompletionOutput(msgspec.Struct, gc=False):
    """One continuation of a prompt.

    `finish_reason` is None while it runs, then "stop" (an end-of-sequence or stop token, or a stop string), "length" (max_tokens, or the
    context is full), "error", or "abort" (`AsyncLLMEngine.abort`). `stop_reason` is the stop string or stop token id that ended
    it; None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """A request and its output so far.

    `prompt_logprobs` has an entry per prompt token, None for the first (nothing predicts it). If the request failed, `error` is set and
    `outputs` may be empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return 0 if self.metrics is None else self.metrics.num_cached_tokens
