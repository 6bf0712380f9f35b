"""Shared by the generating endpoints: prompts go to the engine, and outputs become one response or a stream of chunks.

A subclass of `Answer` knows one endpoint's JSON; `answer_response.py` delivers it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.engine.tokenizer import Tokenizer
from minivllm.entrypoints.openai.errors import ApiError
from minivllm.entrypoints.openai.protocol import DONE, GenerationBody, Json, Usage, encode_line, sse
from minivllm.errors import ContextLengthError, RequestError
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

_Made = TypeVar("_Made")
MAX_CHARACTERS_PER_TOKEN = 16
"""Texts with more characters than this per token of context are refused before tokenization.

Prose has three to five characters a token, deeply indented code up to eight. A text above 16 is mostly runs of one character, and
tokenizing megabytes of it only to refuse it would waste CPU time."""


def salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """A prompt with the salt for its blocks in the prefix cache, if there is one."""
    if cache_salt is None:
        return prompt
    if not isinstance(prompt, dict):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    return prompt | {"cache_salt": cache_salt}


class Answer(ABC):
    """One request and its results; `num_prompts` is how many prompts `make_prompts` will return.

    Attributes:
        as_token_ids: Whether log-probabilities name tokens by their ids.
        num_sequences: Continuations of all prompts together.
        usage: Tokens so far.
        time_to_first_token: Seconds from the request to the first output; None before.
        data_parallel_rank: As for `AsyncLLMEngine.generate`.
        cache_salt: For all prompts.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, engine: AsyncLLMEngine, body: GenerationBody, params: SamplingParams, num_prompts: int) -> None:
        self.engine = engine
        self.body = body
        self.stream = bool(body.stream)
        self.as_token_ids = bool(body.return_tokens_as_token_ids)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        self.params = dataclasses.replace(params, output_kind=kind)
        self.num_sequences = num_prompts * params.n
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        name = self.chunk_name if self.stream else self.object_name
        self.head: Json = {"id": self.id, "object": name, "created": int(time.time()), "model": engine.model_config.name}
        """The first fields of the response, or of each chunk."""
        self.usage: Usage = {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self.time_to_first_token: float | None = None
        self.data_parallel_rank: int | None = None
        self.cache_salt = body.cache_salt
        self._begin = time.perf_counter()

    # -- what an endpoint knows ------------------------------------------------------------------------------------

    @abstractmethod
    async def make_prompts(self) -> list[Prompt]:
        """The prompts for the engine, their lengths checked. Raises RequestError."""

    @abstractmethod
    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Json:
        """A continuation in a response that does not stream."""

    @abstractmethod
    def opening(self, index: int, output: RequestOutput) -> Json | None:
        """The chunk before the first token of a continuation, if any."""

    @abstractmethod
    def delta(self, index: int, completion: CompletionOutput) -> Json:
        """The new part of a continuation, in a stream."""

    def extras(self, outputs: list[RequestOutput]) -> Json:
        """Further fields of a response that does not stream."""
        return {}

    def opening_extras(self, output: RequestOutput) -> Json:
        """Further fields of the chunks before the first token."""
        return {}

    # -- from outputs to JSON --------------------------------------------------------------------------------------

    async def response(self) -> Json:
        """Generate to the end, and return the response. Raises RequestError, EngineDeadError or ApiError."""
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._outputs()) as stream:
            async for number, output in stream:
                first = output.metrics and output.metrics.time_to_first_token
                if first is not None:
                    self.time_to_first_token = min(first, self.time_to_first_token or first)
                self._count(output, is_first=True)
                outputs[number] = output
        return await self._aside(lambda: self._whole(outputs))

    def _whole(self, outputs: dict[int, RequestOutput]) -> Json:
        n = self.params.n
        choices = [
            self.choice(number * n + completion.index, completion, output)
            for number, output in sorted(outputs.items())
            for completion in output.outputs
        ]
        extras = self.extras([output for _, output in sorted(outputs.items())])
        return {**self.head, "choices": choices, "usage": self.usage, **extras}

    async def _aside(self, work: Callable[[], _Made]) -> _Made:
        """What some work makes: in a thread if it has log-probabilities, of which a second's worth would block the event loop."""
        has_many = self.params.logprobs is not None or self.params.prompt_logprobs is not None
        return await asyncio.to_thread(work) if has_many else work()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate, and yield the server-sent events of each output: a chunk per choice. The fields they share are encoded once.

        Raises as `response` does; before the first event if the request is invalid.
        """
        head = b"data: " + encode_line(self.head)[:-1] + b","
        tail = b',"usage":null}\n\n' if self.body.include_usage else b"}\n\n"
        async with aclosing(self._chunks()) as outputs:
            async for chunks in outputs:
                if self.body.continuous_usage:
                    tail = b',"usage":' + msgspec.json.encode(self.usage) + b"}\n\n"
                yield b"".join(head + encode_line(chunk)[1:-1] + tail for chunk in chunks)

    def last_events(self) -> bytes:
        """The events after all output."""
        if not self.body.include_usage:
            return DONE
        return sse({**self.head, "choices": [], "usage": self.usage}) + DONE

    def error_events(self, error: ApiError) -> bytes:
        """The events that end a stream which has begun."""
        return sse(error.body) + DONE

    async def _chunks(self) -> AsyncGenerator[list[Json], None]:
        """The chunks of each output, without `head`."""
        begun: set[int] = set()
        n = self.params.n
        async with aclosing(self._outputs()) as stream:
            async for number, output in stream:
                chunks: list[Json] = []
                is_first = number not in begun
                if is_first:
                    begun.add(number)
                    if self.time_to_first_token is None:
                        self.time_to_first_token = time.perf_counter() - self._begin
                    openings = await self._aside(functools.partial(self._openings, number, output))
                    extras = self.opening_extras(output)
                    chunks += [{"choices": [opening]} | extras for opening in openings if opening is not None]
                self._count(output, is_first)
                for completion in output.outputs:
                    chunks.append({"choices": [self.delta(number * n + completion.index, completion)]})
                if chunks:
                    yield chunks

    def _openings(self, number: int, output: RequestOutput) -> list[Json | None]:
        return [self.opening(number * self.params.n + i, output) for i in range(self.params.n)]

    def _count(self, output: RequestOutput, is_first: bool) -> None:
        usage = self.usage
        if is_first:
            usage["prompt_tokens"] += len(output.prompt_token_ids)
            usage["prompt_tokens_details"]["cached_tokens"] += output.num_cached_tokens
        usage["completion_tokens"] += sum(len(completion.token_ids) for completion in output.outputs)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, with the prompt's number. All prompts are validated before generation starts."""
        self.engine.check_takes_requests()
        requests = [
            await self.engine.process_inputs(
                salted(prompt, self.cache_salt),
                self.params,
                f"{self.id}-{i}",
                priority=self.body.priority or 0,
                arrival_time=self._begin,
                data_parallel_rank=self.data_parallel_rank,
            )
            for i, prompt in enumerate(await self.make_prompts())
        ]
        streams = [self.engine.generate(request) for request in requests]
        async with aclosing(merged(streams)) as outputs:
            async for number, output in outputs:
                if output.error is not None:
                    if is_limit_of_grammar(output.error):  # the request's own, which it would meet again
                        raise ApiError(400, output.error, param="structured_outputs", headers={"x-should-retry": "false"})
                    raise ApiError(500, output.error)
                if any(completion.finish_reason == "abort" for completion in output.outputs):
                    raise ApiError(503, "The server aborted the request: try again.")
                yield number, output


def is_limit_of_grammar(error: str) -> bool:
    """Whether a request failed because its grammar became too large, and not because a sampler chose a token that it does not allow."""
    return error.startswith("structured_outputs") and "doesn't satisfy" not in error


def make_choice(index: int, completion: CompletionOutput | None, **content: Any) -> Json:
    """A continuation, or its new part, as OpenAI's JSON; `completion` is None before the first token."""
    return {
        "index": index,
        **content,
        "finish_reason": completion and completion.finish_reason,
        "stop_reason": completion and completion.stop_reason,
    }


async def merged(streams: list[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Merge streams: outputs as they come, each with its stream's number. Closes all of them at the end, or when one fails."""
    if len(streams) == 1:  # the usual case needs no queue
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def forward(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await news.put((number, output))
            await news.put((number, None))
        except Exception as error:
            await news.put((number, error))

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            number, item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tokenizer_of(engine: AsyncLLMEngine) -> Tokenizer:
    """The model's tokenizer. Raises RequestError if the server runs without one."""
    if engine.tokenizer is None:
        raise RequestError("This server has no tokenizer (skip_tokenizer_init): use /v1/completions with token ids.")
    return engine.tokenizer


def check_length(count: int, unit: str, engine: AsyncLLMEngine) -> None:
    """Refuse what cannot fit, before tokenizing or scanning it. Units are "characters", "tokens" or "messages" (at least a token each).

    Raises:
        ContextLengthError: There are too many.
    """
    limit = engine.model_config.max_model_len
    if count > limit * (MAX_CHARACTERS_PER_TOKEN if unit == "characters" else 1):
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but the prompt has {count} {unit}: shorten it."
        )
