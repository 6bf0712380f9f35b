"""Request and response of /v1/completions. Mirrors `vllm/entrypoints/openai/completion/protocol.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import NotRequired, TypedDict

from minivllm.entrypoints.openai.limits import MAX_PROMPTS
from minivllm.entrypoints.openai.protocol import (
    Count,
    GenerationBody,
    NumLogprobs,
    PromptLogprobs,
    ResponseHead,
    TokenId,
    Usage,
)
from minivllm.errors import RequestError

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Prompts = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | Annotated[list[str], _Prompts] | Annotated[list[TokenIds], _Prompts] = Field(
        union_mode="left_to_right", description="Text, token ids, or a list of one of these."
    )
    max_tokens: Count | None = Field(None, description="Tokens to generate (16).")
    logprobs: NumLogprobs | None = Field(None, description="Number of candidates per token to return log-probabilities for.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to a prompt that is text (true)."
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Must be n, if given.")

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} but n is {self.n or 1}: leave best_of out, and choose among n yourself."
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0, so there would be no answer: use at least 1, or set echo to true.")
        return self


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


class CompletionResponse(ResponseHead):
    """The response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(ResponseHead):
    """An event of a stream of /v1/completions. With include_usage the last has no choices, and `usage`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
