"""What the server answers: the shapes of OpenAI's (and, where it has more, vLLM's) JSON.

They are typed dicts, so at run time plain dicts: a token that streams costs one small dict and one call of msgspec. FastAPI reads the
types for /openapi.json, and tests check answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The body of every answer that is an error, and of an event that ends a stream with one."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """`cached_tokens` is how many the prefix cache spared the request."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of the prompts, each counted once, and of all continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """vLLM's entry for one candidate at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, candidates by token id; None for the first, which nothing predicts."""


class CompletionLogprobs(TypedDict):
    """Four lists with an entry for each token; `text_offset` is where in `text` the token begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class CompletionChoice(_CompletionChoice, total=False):
    """One continuation, or in a stream what is new of it. `stop_reason` is the stop string or stop token that ended it."""

    prompt_logprobs: PromptLogprobs | None


class _CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class CompletionResponse(_CompletionResponse):
    """The answer to /v1/completions."""

    usage: Usage


class CompletionChunk(_CompletionResponse, total=False):
    """An event of a stream of /v1/completions. With include_usage the last has no choices, and `usage`."""

    usage: Usage | None


class TokenLogprob(TypedDict):
    """One candidate; `bytes` is its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token that was chosen, and the most likely ones there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """An entry for each token."""

    content: list[ChatTokenLogprob]


class ChatMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One answer. `stop_reason` is the stop string or stop token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class _ChatResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionResponse(_ChatResponse, total=False):
    """The answer to /v1/chat/completions."""

    prompt_logprobs: PromptLogprobs | None


class ChatDelta(TypedDict, total=False):
    """What is new of a message; the first of each choice has its role."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class _ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]


class ChatCompletionChunk(_ChatChunk, total=False):
    """An event of a stream of /v1/chat/completions. With include_usage the last has no choices, and `usage`."""

    usage: Usage | None


class ModelCard(TypedDict):
    """A model; `max_model_len` is the most tokens of prompt and output together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """The answer to /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    """The answer to /tokenize; `token_strs` if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    """The answer to /detokenize."""

    prompt: str


class HealthResponse(TypedDict):
    """The answer to /health."""

    status: Literal["ok"]


class VersionResponse(TypedDict):
    """The answer to /version."""

    version: str


Json = dict[str, Any]
"""Any of the dicts above, where code does not care which."""
