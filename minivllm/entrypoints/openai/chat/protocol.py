"""Request and response of /v1/chat/completions: messages, tools, choices. Mirrors `vllm/entrypoints/openai/chat_completion/protocol.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from minivllm.engine.tokenizer import check_template_kwargs, read_arguments
from minivllm.entrypoints.openai.errors import quoted
from minivllm.entrypoints.openai.limits import EXPECTED, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from minivllm.entrypoints.openai.protocol import (
    Body,
    GenerationBody,
    NumLogprobs,
    PositiveCount,
    PromptLogprobs,
    ResponseHead,
    Usage,
)
from minivllm.errors import RequestError

ChatTemplateKwargs = Annotated[dict[str, Any], AfterValidator(check_template_kwargs)]


class TextPart(Body):
    """A part of a message: "text", or as /v1/responses names the user's and the assistant's."""

    type: Literal["text", "input_text", "output_text"]
    text: str


def _read_arguments(value: Any) -> dict[str, Any]:
    try:
        return read_arguments(value)
    except ValueError:
        raise PydanticCustomError("arguments", "no JSON object") from None


class FunctionCall(Body):
    """A call of a function."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)] = Field(
        default_factory=dict, description="A JSON object, as text or not; null and empty text are one without entries."
    )


class ToolCall(Body):
    """A call that the assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


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
    """A message of a conversation. The role "tool" has the result of one of the assistant's calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    reasoning: str | None = Field(None, description="What the assistant thought before it answered.")
    reasoning_content: str | None = Field(None, description="Another name of reasoning.")
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
        others = ("name", "reasoning", "reasoning_content", "tool_call_id")
        return message | {name: value for name in others if (value := getattr(self, name)) is not None}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateBody(Body):
    """The fields that make a prompt of a conversation, shared by /v1/chat/completions and /tokenize."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="Whether it may, or must (auto, if there are tools). With none, the prompt does not mention them."
    )
    # vLLM's
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the opening of the model's turn (true).")
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens (only to plain prompts).")
    chat_template_kwargs: ChatTemplateKwargs | None = Field(None, description="For the chat template.")

    @model_validator(mode="after")
    def _check_ending(self) -> TemplateBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt are both true: leave one out.")
        return self

    def template_options(self) -> dict[str, Any]:
        """The arguments of `Tokenizer.apply_chat_template` besides the messages."""
        options = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.continue_final_message:
            options["continue_final_message"] = True
        if self.add_special_tokens:
            options["add_special_tokens"] = True
        ends_open = self.add_generation_prompt
        return options | {"add_generation_prompt": not self.continue_final_message if ends_open is None else ends_open}


class ChatCompletionRequest(TemplateBody, GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: PositiveCount | None = Field(None, description="Old name of max_completion_tokens.")
    max_completion_tokens: PositiveCount | None = Field(None, description="Tokens to generate (until the context is full).")
    logprobs: bool | None = Field(None, description="Return the log-probability of each token.")
    top_logprobs: NumLogprobs | None = Field(None, description="Number of candidates per token to return, too.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls in an answer (true).")
    # vLLM's
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        self._check_tools()
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
        if must_call and self.structured_outputs_params() is not None:
            raise RequestError("tool_choice must be auto or none if response_format or structured_outputs is given.")


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


class ChatCompletionResponse(ResponseHead):
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


class ChatCompletionChunk(ResponseHead):
    """An event of a stream of /v1/chat/completions. With include_usage the last has no choices, and `usage`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
