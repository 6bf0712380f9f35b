"""What OpenAI's endpoints share: the fields of a request, with vLLM's extra sampling parameters, and parts of a response.

Mirrors `vllm/entrypoints/openai/engine/protocol.py`; each endpoint's own fields are in the `protocol.py` of its folder.

pydantic validates requests strictly: "5" is not a number and true is not 1. Fields that OpenAI or vLLM have but this server does not
support (`UNSERVED`) are refused if their value would change the output. Other unknown fields are ignored and logged, as in vLLM.

Responses are TypedDicts, plain dicts at run time: a streamed token costs one small dict and one msgspec call. FastAPI reads the types
for /openapi.json, and tests check responses against them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from minivllm.entrypoints.openai.errors import quoted
from minivllm.entrypoints.openai.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams

_ONLY_NULL = (
    "audio", "web_search_options", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "prompt_embeds", "chat_template", "logprob_token_ids", "repetition_detection",
    "watermarking", "thinking_token_budget",
)  # fmt: skip
_ONLY_EMPTY = ("tools", "functions", "tool_calls", "logits_processors", "documents")
_ONLY_FALSE = ("use_beam_search", "return_token_offsets", "return_prompt_text")
UNSERVED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONLY_NULL, (None,)),
    **dict.fromkeys(_ONLY_EMPTY, (None, [])),
    **dict.fromkeys(_ONLY_FALSE, (None, False)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "spaces_between_special_tokens": (None, True),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "truncation_side": (None, "left"),
}
"""Fields that would change the output, each with the values that would not."""

WholeNumber = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _check_num_biases(value: Any) -> Any:
    """Runs before pydantic validates each entry: listing a hundred thousand wrong ones would take it a second."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries, but must have at most {MAX_LOGIT_BIAS}.")
    return value


# -- requests ------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """Shared by all requests: strict types, and the treatment of unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = UNSERVED

    @model_validator(mode="after")
    def _refuse_unserved(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name in self.unserved and value not in self.unserved[name]:
                raise RequestError(f"{name} is {quoted(value)}, but this server does not support that: leave {name} out.")
        return self

    @property
    def ignored_fields(self) -> list[str]:
        """Names of ignored fields, escaped and shortened for the log."""
        return [ascii(name)[1:41].rstrip("'") for name in list(self.model_extra or {})[:20]]


class StreamOptions(Body):
    """Streaming options."""

    include_usage: bool | None = Field(None, description="End with a usage event.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in each event, as in vLLM."
    )


class StructuredOutputs(Body):
    """vLLM's structured outputs: exactly one of these."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        None, description="The texts to choose from."
    )
    grammar: str | None = Field(None, description="A grammar in Lark's language or llama.cpp's (GBNF).")
    json_object: bool | None = Field(None, description="Any JSON object.")

    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
    }


class JsonSchema(Body):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The answer follows the schema in any case.")


class ResponseFormat(Body):
    """OpenAI's structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError("response_format must have json_schema if, and only if, its type is json_schema.")
        return self


class SamplingBody(Body):
    """The fields that all generating routes share. Null means the default."""

    model: str | None = Field(None, description="The model of /v1/models; it may be left out.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="0 is greedy (1).")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Nucleus sampling (1).")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_num_biases)] | None = Field(
        None, description="Token ids (as strings) to numbers from -100 to 100."
    )
    seed: WholeNumber | None = Field(None, description="Makes sampling reproducible.")
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 and -1 keep all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Count | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None = (
        Field(None, description="The tokens to choose from.")
    )
    bad_words: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = (
        Field(None, description="Words whose tokens must not be generated.")
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: WholeNumber | None = Field(None, description="With the priority policy, smaller goes first (0).")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="The prefix cache shares blocks only between requests with the same salt."
    )


class GenerationBody(SamplingBody):
    """The fields that /v1/completions and /v1/chat/completions share."""

    n: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="Continuations per prompt (1).")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="What the text must be: JSON that follows a schema, say.")
    # vLLM's
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Keep this many tokens at the prompt's end; -1 keeps as many as there is room for."
    )
    return_token_ids: bool | None = Field(None, description="Return the ids of prompt and answer, too.")
    return_tokens_as_token_ids: bool | None = Field(None, description='With log-probabilities: tokens as "token_id:5".')
    prompt_logprobs: NumLogprobs | None = None

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

    def shared_sampling_params(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The given fields that `SamplingParams` has too, by name and meaning, and the model's `defaults` for others."""
        names = SamplingParams.__dataclass_fields__.keys() & GenerationBody.model_fields.keys() - {"structured_outputs"}
        shared = {name: value for name in names if (value := getattr(self, name)) is not None}
        return defaults | shared | {"structured_outputs": self.structured_outputs_params()}

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """What constrains the text, from `response_format` or `structured_outputs`.

        Raises:
            RequestError: Both are given.
        """
        wanted, form = self.structured_outputs, self.response_format
        if form is None or form.type == "text":
            if wanted is None:
                return None
            return StructuredOutputsParams(wanted.schema_, wanted.regex, wanted.choice, wanted.grammar, wanted.json_object)
        if wanted is not None:
            raise RequestError("response_format and structured_outputs are given: leave one out.")
        if form.json_schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=form.json_schema.schema_)


# -- responses -----------------------------------------------------------------------------------------------------

Json = dict[str, Any]
"""Any of the dicts below, or an endpoint's."""
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def encode_line(content: Any) -> bytes:
    """JSON on one line, for whatever a client takes for a line's end: Python's `splitlines`, for one, also splits at U+0085, U+2028 and U+2029."""
    line = msgspec.json.encode(content)
    for end, escaped in _LINE_ENDS:
        line = line.replace(end, escaped)
    return line


_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]
"""What JSON need not escape. The other ends of lines are control characters, which it must."""


def sse(content: Any, name: str | None = None) -> bytes:
    """A server-sent event with this content as JSON, and perhaps a name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode_line(content) + b"\n\n"


class ResponseHead(TypedDict):
    """The first fields of a response, or of each event of a stream."""

    id: str
    created: int
    model: str


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
