"""/v1/chat/completions: answer conversations. Mirrors vllm/entrypoints/openai/serving_chat.py."""

from __future__ import annotations

import asyncio

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.entrypoints.openai.answer import Answer, check_length, make_choice, tokenizer_of
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest, Message
from minivllm.entrypoints.openai.responses import ChatLogprobs, Json
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams


class ChatAnswer(Answer):
    """The next message of a conversation, or `n` alternatives.

    Raises:
        RequestError: Parameters that do not fit together.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, engine: AsyncLLMEngine, body: ChatCompletionRequest) -> None:
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.messages = body.messages
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = SamplingParams(**body.shared_sampling_params(), max_tokens=max_tokens, logprobs=num_logprobs)
        super().__init__(engine, body, params, num_prompts=1)

    async def make_prompts(self) -> list[Prompt]:
        """The conversation with the chat template applied."""
        return [await encode_chat(self.engine, self.messages)]

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Json:
        """A whole message."""
        message = {"role": "assistant", "content": completion.text}
        return make_choice(index, completion, message=message, logprobs=self._logprobs(completion))

    def opening(self, index: int, output: RequestOutput) -> Json:
        """The role."""
        return make_choice(index, None, delta={"role": "assistant", "content": ""}, logprobs=None)

    def delta(self, index: int, completion: CompletionOutput) -> Json:
        """What is new."""
        content = {"content": completion.text} if completion.text or completion.finish_reason is None else {}
        return make_choice(index, completion, delta=content, logprobs=self._logprobs(completion))

    def extras(self, outputs: list[RequestOutput]) -> Json:
        """vLLM's log-probabilities of the prompt."""
        if self.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs)}

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self.params.logprobs is None or completion.logprobs is None:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self.params.logprobs, self.engine.tokenizer)


async def encode_chat(engine: AsyncLLMEngine, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation, encoded in a thread: a long one would block the event loop.

    Raises:
        RequestError: The chat template rejects it, or it is far too long.
    """
    conversation = [message.for_template() for message in messages]
    check_length(len(conversation), "messages", engine)
    check_length(sum(len(message["content"]) for message in conversation), "characters", engine)
    tokenizer = tokenizer_of(engine)
    return await asyncio.to_thread(tokenizer.apply_chat_template, conversation, add_generation_prompt)
