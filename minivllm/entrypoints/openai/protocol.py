"""Request bodies: OpenAI's fields, and vLLM's extra sampling parameters. Mirrors vllm/entrypoints/openai/protocol.py.

pydantic validates types and ranges strictly: "5" is not a number and true is not 1. Fields that OpenAI or vLLM have but this server does
not support (`UNSERVED`) are refused if their value would change the output. Other unknown fields are ignored and logged, as in vLLM.
"""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from minivllm.entrypoints.openai.errors import EXPECTED, quoted
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams

MAX_LOGPROBS = 20
"""The most candidates per token that a client may ask for, as in OpenAI's chat and vLLM."""
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_TOKEN_IDS = 16_384
"""Of allowed_token_ids."""
MAX_MESSAGES = 2048
MAX_PARTS = 4096
"""Per message."""
MAX_PROMPTS = 4096
MAX_CHOICES = 4096
MAX_TOOLS = 128
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

_COMPLETION_UNSERVED = UNSERVED | {"add_special_tokens": (None, True)}
_CHAT_UNSERVED = UNSERVED | {"add_special_tokens": (None, False)}  # templates add special tokens

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


@functools.cache
def _reserved_kwargs() -> frozenset[str]:
    """What transformers' `apply_chat_template` takes for itself, and what it calls the conversation in a template."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"} | {"messages"}


def _check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if reserved := _reserved_kwargs() & kwargs.keys():
        raise RequestError(f"chat_template_kwargs has {min(reserved)}, which is not a variable of the template.")
    return kwargs


ChatTemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]


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
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = Field(
        None, description="The tokens to choose from."
    )
    bad_words: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = (
        Field(None, description="Words whose tokens must not be generated.")
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
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
        None, description="Keep so many tokens at the prompt's end; -1 keeps as many as there is room for."
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

    def shared_sampling_params(self) -> dict[str, Any]:
        """The given fields that `SamplingParams` has too, by name and meaning."""
        names = SamplingParams.__dataclass_fields__.keys() & GenerationBody.model_fields.keys() - {"structured_outputs"}
        shared = {name: value for name in names if (value := getattr(self, name)) is not None}
        return shared | {"structured_outputs": self._structured_outputs()}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
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


class TextPart(Body):
    """A part of a message: "text", or as /v1/responses names the user's and the assistant's."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Body):
    """A call of a function."""

    name: str
    arguments: str = Field(description="A JSON object.")


class ToolCall(Body):
    """A call that the assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, if they are one."""
        try:
            arguments = msgspec.json.decode(self.function.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class FunctionDefinition(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedToolChoice(Body):
    """A function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class Message(Body):
    """A message of a conversation. A tool's has the result of a call of the assistant's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise RequestError(f"content is missing: give {EXPECTED['content']}.")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: one text, the role "system" for OpenAI's "developer", and arguments of calls as objects."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message | {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}


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
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="Whether it may, or must (auto, if there are tools)."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls in an answer (true).")
    # vLLM's
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the opening of the model's turn (true).")
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead.")
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")
    chat_template_kwargs: ChatTemplateKwargs | None = Field(None, description="For the chat template.")

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        self._check_tools()
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt are both true: leave one out.")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is given, but logprobs is not true: set it to true.")
        return self

    def _check_tools(self) -> None:
        choice, names = self.tool_choice, {tool.function.name for tool in self.tools or ()}
        if choice == "required" and not names:
            raise RequestError("tool_choice is required, but there are no tools.")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise RequestError(f"tool_choice is {quoted(choice.function.name)}, but there is no such tool.")
        must_call = choice == "required" or isinstance(choice, NamedToolChoice)
        if must_call and self._structured_outputs() is not None:
            raise RequestError("tool_choice must be auto or none where the text's form is given, too.")


class TokenizeRequest(Body):
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


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
