"""Response bodies: OpenAI's JSON, and vLLM's extra fields.

TypedDicts are plain dicts at run time: a streamed token costs one small dict and one msgspec call. FastAPI reads the types for
/openapi.json, and tests check responses against them.
"""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict


class ErrorDetail(TypedDict):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The body of every error response, and of the event that ends a failed stream."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of the prompts, each counted once, and of all continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """vLLM's entry for one candidate at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, candidates by token id; None for the first, which nothing predicts."""


class CompletionLogprobs(TypedDict):
    """Four lists with an entry per token; `text_offset` is where the token begins in `text`, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation, or its new part in a stream. `stop_reason` is the stop string or stop token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int]]


class _Head(TypedDict):
    id: str
    created: int
    model: str


class CompletionResponse(_Head):
    """The response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head):
    """An event of a stream of /v1/completions. With include_usage the last has no choices, and `usage`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    """One candidate; `bytes` is its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A sampled token, and the most likely candidates."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """An entry per token."""

    content: list[ChatTokenLogprob]


class FunctionCallDelta(TypedDict):
    """A function's name, and its arguments as JSON; in a stream, the name comes first, and arguments in parts."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A call, or its new part in a stream; only the first part has an id and a type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatMessage(TypedDict):
    """The generated message; without content if it consists of calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChoice(TypedDict):
    """One message. `stop_reason` is the stop string or stop token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletionResponse(_Head):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict, total=False):
    """The new part of a message; the first of each choice has its role."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """The new part of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(_Head):
    """An event of a stream of /v1/chat/completions. With include_usage the last has no choices, and `usage`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class OutputText(TypedDict):
    """The text of a message of /v1/responses."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(TypedDict):
    """A message of /v1/responses."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class InputTokensDetails(TypedDict):
    """`cached_tokens`: found in the prefix cache. What is written to it costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """No reasoning is told apart."""

    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    """Tokens of a prompt and of its answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why an answer has no end."""

    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    """Why there is no answer."""

    code: str
    message: str


class ResponsesResponse(TypedDict):
    """The response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str] | None
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    max_output_tokens: int | None
    usage: ResponsesUsage | None


class ModelCard(TypedDict):
    """A model; `max_model_len` limits prompt and output together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    """The response of /tokenize; `token_strs` if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    """The response of /detokenize."""

    prompt: str


class ReplicaHealth(TypedDict):
    """A replica in the response of /health: its sequences, its cache, tokens per second lately, and how often it has died."""

    rank: int
    state: str
    process_id: int | None
    waiting: int
    running: int
    kv_cache_usage: float
    num_gpu_blocks: int
    num_used_blocks: int
    tokens_per_second: float
    deaths: int


class ReplicasResponse(TypedDict):
    """The response of /replicas."""

    replicas: list[ReplicaHealth]
    streams_resumed: int
    streams_lost: int


class AcceptedResponse(TypedDict):
    """The response to what is done soon."""

    status: Literal["restarting", "killed"]


class HealthResponse(TypedDict):
    """The response of /health; with `replicas` if there are several."""

    status: Literal["ok"]
    replicas: NotRequired[list[ReplicaHealth]]


class LoadResponse(TypedDict):
    """The response of /load."""

    server_load: int


class VersionResponse(TypedDict):
    """The response of /version."""

    version: str


Json = dict[str, Any]
"""Any of the dicts above."""
