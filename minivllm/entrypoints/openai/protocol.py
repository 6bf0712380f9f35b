"""Request bodies: OpenAI's fields, and vLLM's extra sampling parameters. Mirrors vllm/entrypoints/openai/protocol.py.

pydantic validates types and ranges strictly: "5" is not a number and true is not 1. Fields that OpenAI or vLLM have but this server does
not support (`UNSERVED`) are refused if their value would change the output. Other unknown fields are ignored and logged, as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from minivllm.entrypoints.openai.errors import quoted
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams

MAX_LOGPROBS = 20
"""The most candidates per token that a client may ask for, as in OpenAI's chat and vLLM."""
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 4096
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Per message."""
MAX_PROMPTS = 4096

_ONLY_NULL = (
    "audio", "web_search_options", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "allowed_token_ids", "prompt_embeds", "truncate_prompt_tokens", "chat_template",
)  # fmt: skip
_ONLY_EMPTY = ("tools", "functions", "tool_calls", "bad_words", "logits_processors", "documents")
_ONLY_FALSE = ("use_beam_search", "include_stop_str_in_output", "return_token_ids", "continue_final_message")
UNSERVED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONLY_NULL, (None,)),
    **dict.fromkeys(_ONLY_EMPTY, (None, [])),
    **dict.fromkeys(_ONLY_FALSE, (None, False)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
}
"""Fields that would change the output, each with the values that would not."""

_COMPLETION_UNSERVED = UNSERVED | {"add_special_tokens": (None, True)}
_CHAT_UNSERVED = UNSERVED | {"add_special_tokens": (None, False), "echo": (None, False)}  # templates add special tokens

WholeNumber = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _check_num_biases(value: Any) -> Any:
    """Before pydantic validates each: it lists all that are wrong, which takes a second for a hundred thousand."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries, but must have at most {MAX_LOGIT_BIAS}.")
    return value


class _Body(BaseModel):
    """Shared by all requests: strict types, and the treatment of unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = UNSERVED

    @model_validator(mode="after")
    def _refuse_unserved(self) -> _Body:
        for name, value in (self.model_extra or {}).items():
            if name in self.unserved and value not in self.unserved[name]:
                raise RequestError(f"{name} is {quoted(value)}, but this server does not support that: leave {name} out.")
        return self

    @property
    def ignored_fields(self) -> list[str]:
        """Names of ignored fields, escaped and shortened for the log."""
        return [ascii(name)[1:41].rstrip("'") for name in list(self.model_extra or {})[:20]]


class StreamOptions(_Body):
    """Streaming options."""

    include_usage: bool | None = Field(None, description="End with a usage event.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in each event, as in vLLM."
    )


class GenerationBody(_Body):
    """The fields that /v1/completions and /v1/chat/completions share. Null means the default."""

    model: str | None = Field(None, description="The model of /v1/models; it may be left out.")
    n: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="Continuations per prompt (1).")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="0 is greedy (1).")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Nucleus sampling (1).")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_num_biases)] | None = Field(
        None, description="Token ids (as strings) to numbers from -100 to 100."
    )
    seed: WholeNumber | None = Field(None, description="Makes sampling reproducible.")
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 and -1 keep all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    priority: WholeNumber | None = Field(None, description="With the priority policy, smaller goes first (0).")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="The prefix cache shares blocks only between requests with the same salt."
    )

    @model_validator(mode="after")
    def _check_stream_fields(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is given, but stream is not true: leave it out, or set stream to true.")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs does not work with stream: set stream to false.")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def shared_sampling_params(self) -> dict[str, Any]:
        """The given fields that `SamplingParams` has too, by name and meaning."""
        names = SamplingParams.__dataclass_fields__.keys() & GenerationBody.model_fields.keys()
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unserved = _COMPLETION_UNSERVED

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(union_mode="left_to_right", description="Text, token ids, or a list of one of these.")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, description="Tokens to generate (16).")
    logprobs: NumLogprobs | None = Field(None, description="Number of candidates per token to return log-probabilities for.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
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


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: one text, and the role "system" for OpenAI's "developer"."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unserved = _CHAT_UNSERVED

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description="Old name of max_completion_tokens.")
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Tokens to generate (until the context is full)."
    )
    logprobs: bool | None = Field(None, description="Return the log-probability of each token.")
    top_logprobs: NumLogprobs | None = Field(None, description="Number of candidates per token to return, too.")

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is given, but logprobs is not true: set it to true.")
        return self


class TokenizeRequest(_Body):
    """The body of POST /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="Add special tokens to a prompt; chat templates add their own.")
    add_generation_prompt: bool = Field(True, description="End messages with the opening of the model's turn.")
    return_token_strs: bool = Field(False, description="Return tokens as strings, too.")

    @model_validator(mode="after")
    def _check_combinations(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt or messages must be given, and not both.")
        return self


class DetokenizeRequest(_Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
