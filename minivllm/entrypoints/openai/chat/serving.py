"""/v1/chat/completions: answer conversations. Mirrors `vllm/entrypoints/openai/chat_completion/serving.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.entrypoints.openai.answer import Answer, check_length, make_choice, tokenizer_of
from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest, ChatLogprobs, Message, ToolCallDelta
from minivllm.entrypoints.openai.chat.tool_calls import NamedCall, ToolCallParser, make_parser, schema_of_calls
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import Json
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams


class ChatAnswer(Answer):
    """The next message of a conversation, or `n` alternatives.

    Raises:
        RequestError: Parameters that do not fit together.
    """

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, engine: AsyncLLMEngine, body: ChatCompletionRequest) -> None:
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.chat = body
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.shared_sampling_params({"max_tokens": None} | engine.model_config.sampling_defaults) | {
            "logprobs": num_logprobs
        }
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if (schema := schema_of_calls(body)) is not None:
            sampling["structured_outputs"] = StructuredOutputsParams(json=schema)
        if body.tools and body.tool_choice in (None, "auto"):
            sampling["skip_special_tokens"] = False  # a call may begin with one
        self._parsers: dict[int, ToolCallParser] = {}
        """For each streamed answer, by its index."""
        super().__init__(engine, body, SamplingParams(**sampling), num_prompts=1)

    async def make_prompts(self) -> list[Prompt]:
        """The conversation with the chat template applied."""
        is_cut = self.chat.truncate_prompt_tokens is not None
        return [await encode_chat(self.engine, self.chat.messages, self.chat.template_options(), is_cut=is_cut)]

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Json:
        """A whole message."""
        parser = make_parser(self.chat)
        content, calls = parser.update(completion.text, is_last=True)
        calls = self._wanted(calls)
        message: Json = {"role": "assistant", "content": self._echo + content}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return self._choice(index, completion, parser, message=message)

    def opening(self, index: int, output: RequestOutput) -> Json:
        """The role, and the last message with `echo`."""
        return make_choice(index, None, delta={"role": "assistant", "content": self._echo}, logprobs=None)

    def opening_extras(self, output: RequestOutput) -> Json:
        """vLLM's ids of the prompt."""
        return {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}

    def delta(self, index: int, completion: CompletionOutput) -> Json:
        """What is new."""
        parser = self._parsers.get(index) or self._parsers.setdefault(index, make_parser(self.chat))
        content, calls = parser.update(completion.text, is_last=completion.finish_reason is not None)
        calls = self._wanted(calls)
        delta: Json = {"tool_calls": calls} if calls else {}
        if content or (completion.finish_reason is None and not calls):
            delta["content"] = content
        return self._choice(index, completion, parser, delta=delta)

    def _wanted(self, calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
        return calls if self.chat.parallel_tool_calls is not False else [call for call in calls if call["index"] == 0]

    @property
    def _echo(self) -> str:
        """With `echo`, the last message, if it is the assistant's."""
        last = self.chat.messages[-1]
        return last.for_template()["content"] if self.chat.echo and last.role == "assistant" else ""

    def _choice(self, index: int, completion: CompletionOutput, parser: ToolCallParser, **content: Json) -> Json:
        """A choice. If it calls a function its finish reason is "tool_calls", unless the request named the function: then "stop", as in OpenAI's API."""
        choice = make_choice(index, completion, **content, logprobs=self._logprobs(completion))
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if choice["finish_reason"] == "stop" and parser.num_calls and not isinstance(parser, NamedCall):
            choice["finish_reason"] = "tool_calls"
        return choice

    def extras(self, outputs: list[RequestOutput]) -> Json:
        """vLLM's log-probabilities and ids of the prompt."""
        extras: Json = {}
        if self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = outputs[0].prompt_token_ids
        return extras

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self.params.logprobs is None or completion.logprobs is None:
            return None
        num_logprobs, tokenizer = self.params.logprobs, self.engine.tokenizer
        return chat_logprobs(completion.token_ids, completion.logprobs, num_logprobs, tokenizer, self.as_token_ids)


async def encode_chat(
    engine: AsyncLLMEngine, messages: Sequence[Message], options: dict[str, Any], *, is_cut: bool = False
) -> list[int]:
    """The token ids of a conversation, encoded in a thread: a long one would block the event loop.

    `options` are those of `Tokenizer.apply_chat_template`. With `is_cut`, the prompt is truncated later, so it may be longer than the context.

    Raises:
        RequestError: The chat template rejects it, or it is far too long.
    """
    await asyncio.sleep(0)  # let others run: validating the messages may have taken long
    conversation = [message.for_template() for message in messages]
    if not is_cut:
        check_length(len(conversation), "messages", engine)
        check_length(sum(len(message["content"]) for message in conversation), "characters", engine)
    tokenizer = tokenizer_of(engine)
    return await asyncio.to_thread(tokenizer.apply_chat_template, conversation, **options)
