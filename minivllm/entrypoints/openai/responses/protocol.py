"""Request and response of /v1/responses. Mirrors `vllm/entrypoints/openai/responses/protocol.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest, ChatTemplateKwargs, Message
from minivllm.entrypoints.openai.limits import MAX_MESSAGES
from minivllm.entrypoints.openai.protocol import UNSERVED, Body, JsonSchema, PositiveCount, PromptTokensDetails, SamplingBody
from minivllm.errors import RequestError


class InputMessage(Message):
    """A message to /v1/responses: one of a chat, without calls of tools."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    tool_calls: None = None
    tool_call_id: None = None


class TextFormat(JsonSchema):
    """What the text must be, in the form of /v1/responses."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def for_chat(self) -> dict[str, Any]:
        """As `response_format` of /v1/chat/completions."""
        return {"type": self.type} | ({} if self.schema_ is None else {"json_schema": {"schema": self.schema_}})

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise RequestError("text.format must have a schema if, and only if, its type is json_schema.")
        return self


class TextConfig(Body):
    """Settings of the text output."""

    format: TextFormat | None = None


_RESPONSES_FIELDS = {*SamplingBody.model_fields, "chat_template_kwargs", "parallel_tool_calls", "stream_options", "tool_choice"}
"""A chat's fields that /v1/responses has, too."""


class ResponsesRequest(SamplingBody):
    """The body of POST /v1/responses: a chat in the form of OpenAI's Responses API. Text only, and nothing is stored."""

    unserved = (
        dict.fromkeys(ChatCompletionRequest.model_fields.keys() - _RESPONSES_FIELDS, (None,))
        | UNSERVED
        | {
            "background": (None, False),
            "context_management": (None, []),
            "conversation": (None,),
            "image": (None,),
            "include": (None, []),
            "max_tool_calls": (None,),
            "moderation": (None,),
            "n": (None, 1),
            "previous_response_id": (None,),
            "prompt": (None,),
            "top_logprobs": (None, 0),
            "truncation": (None, "disabled"),
        }
    )

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="A text, or the messages of a conversation."
    )
    instructions: str | None = Field(None, description="A system message before them.")
    max_output_tokens: PositiveCount | None = Field(None, description="Tokens to generate (until the context is full).")
    text: TextConfig | None = Field(None, description="What the text must be: JSON that follows a schema, say.")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(None, description="Comes back with the response.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="There are no tools, so this changes nothing.")
    parallel_tool_calls: bool | None = Field(None, description="Nor does this.")
    # vLLM's
    chat_template_kwargs: ChatTemplateKwargs | None = Field(None, description="For the chat template.")

    @model_validator(mode="after")
    def _check_format(self) -> ResponsesRequest:
        form = self.text and self.text.format
        if form and form.type != "text" and self.structured_outputs is not None:
            raise RequestError("text.format and structured_outputs are given: leave one out.")
        return self

    def to_chat(self) -> ChatCompletionRequest:
        """The same as a request to /v1/chat/completions. Messages are not validated a second time, which takes long."""
        messages = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        fields = {name: getattr(self, name) for name in (*SamplingBody.model_fields, "chat_template_kwargs")}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        chat = ChatCompletionRequest(messages=messages, max_completion_tokens=self.max_output_tokens, **fields)
        if self.instructions is not None:
            chat.messages.insert(0, Message(role="system", content=self.instructions))
        return chat


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


class InputTokensDetails(PromptTokensDetails):
    """`cache_write_tokens` is 0: writing to the prefix cache is free here."""

    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """`reasoning_tokens` is 0: reasoning is not counted separately."""

    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    """Tokens of a prompt and of its answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why an answer is incomplete."""

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
