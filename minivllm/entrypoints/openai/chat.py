"""/v1/chat/completions: answer conversations. Mirrors vllm/entrypoints/openai/serving_chat.py."""

from __future__ import annotations

import asyncio

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.entrypoints.openai.answer import Answer, check_length, tokenizer_of
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

    def __init__(self, engine: AsyncLLMEngine, model_name: str, body: ChatCompletionRequest) -> None:
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.messages = body.messages
        self.num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self.wants_prompt_logprobs = body.prompt_logprobs is not None
        params = SamplingParams(**body.shared_sampling_params(), max_tokens=max_tokens, logprobs=self.num_logprobs)
        super().__init__(
            engine,
            model_name,
            params,
            num_prompts=1,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            priority=body.priority or 0,
        )

    async def make_prompts(self) -> list[Prompt]:
        """The conversation with the chat template applied."""
        return [await encode_chat(self.engine, self.messages)]

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Json:
        """A whole message."""
        return self._choice(index, completion, {"message": {"role": "assistant", "content": completion.text}})

    def opening(self, index: int, prompt_number: int, output: RequestOutput) -> Json:
        """The role."""
        return self._choice(index, None, {"delta": {"role": "assistant", "content": ""}})

    def delta(self, index: int, completion: CompletionOutput) -> Json:
        """What is new."""
        return self._choice(index, completion, {"delta": {"content": completion.text} if completion.text else {}})

    def extras(self, outputs: list[RequestOutput]) -> Json:
        """vLLM's log-probabilities of the prompt."""
        return {"prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs)} if self.wants_prompt_logprobs else {}

    def _choice(self, index: int, completion: CompletionOutput | None, content: Json) -> Json:
        return {
            "index": index,
            **content,
            "logprobs": completion and self._logprobs(completion),
            "finish_reason": completion and completion.finish_reason,
            "stop_reason": completion and completion.stop_reason,
        }

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if self.num_logprobs is None or completion.logprobs is None:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self.num_logprobs)


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
