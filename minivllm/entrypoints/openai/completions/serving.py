"""/v1/completions: complete prompts. Mirrors `vllm/entrypoints/openai/completion/serving.py`."""

from __future__ import annotations

import asyncio
from typing import cast

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.entrypoints.openai.answer import Answer, check_length, make_choice, tokenizer_of
from minivllm.entrypoints.openai.completions.protocol import CompletionLogprobs, CompletionRequest
from minivllm.entrypoints.openai.logprobs import TokenOffsets, completion_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import Json
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


class CompletionAnswer(Answer):
    """Continuations of one prompt or several.

    Raises:
        RequestError: Parameters that do not fit together.
    """

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def __init__(self, engine: AsyncLLMEngine, body: CompletionRequest) -> None:
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.shared_sampling_params(engine.model_config.sampling_defaults)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            sampling["prompt_logprobs"] = body.logprobs
        self.prompts = split_prompts(body.prompt)
        self.echo = bool(body.echo)
        self.add_special_tokens = body.add_special_tokens is not False
        self.only_echo = max_tokens == 0
        """The engine still generates one token, which is dropped."""
        self._echoes: list[str] = []
        """The text of each prompt, with `echo`."""
        self._offsets: dict[int, TokenOffsets] = {}
        """For each streamed continuation, by its index."""
        self._prompt_token_ids: dict[int, list[int]] = {}
        """For each that has not begun."""
        params = SamplingParams(**sampling | {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs})
        super().__init__(engine, body, params, len(self.prompts))

    async def make_prompts(self) -> list[Prompt]:
        """The prompts as given; with `echo`, token ids are decoded too."""
        for prompt in self.prompts if self.body.truncate_prompt_tokens is None else ():
            check_length(len(prompt), "characters" if isinstance(prompt, str) else "tokens", self.engine)
        if self.echo:
            for prompt in self.prompts:
                if not isinstance(prompt, str):
                    prompt = await asyncio.to_thread(tokenizer_of(self.engine).decode, prompt, False)
                self._echoes.append(prompt)
        if self.add_special_tokens:
            return list(self.prompts)
        return [{"prompt": prompt, "add_special_tokens": False} if isinstance(prompt, str) else prompt for prompt in self.prompts]

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Json:
        """A whole continuation."""
        if self.only_echo:
            completion = without_tokens(completion)
        echo = self._echoes[index // self.params.n] if self.echo else ""
        logprobs = self._logprobs(completion, self._token_offsets(index, output))
        if self.echo and logprobs is not None:
            logprobs = joined(self._echo_logprobs(index, output), logprobs)
        choice = make_choice(index, completion, text=echo + completion.text, logprobs=logprobs)
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def opening(self, index: int, output: RequestOutput) -> Json | None:
        """The prompt, with `echo`."""
        self._offsets[index] = self._token_offsets(index, output)
        self._prompt_token_ids[index] = output.prompt_token_ids
        if not self.echo:
            return None
        text = self._echoes[index // self.params.n]
        return make_choice(
            index, None, text=text, logprobs=None if self.params.logprobs is None else self._echo_logprobs(index, output)
        )

    def delta(self, index: int, completion: CompletionOutput) -> Json:
        """What is new."""
        if self.only_echo:
            completion = without_tokens(completion)
        logprobs = self._logprobs(completion, self._offsets[index])
        choice = make_choice(index, completion, text=completion.text, logprobs=logprobs)
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self._prompt_token_ids.pop(index, None), "token_ids": completion.token_ids}
        return choice

    def _count(self, output: RequestOutput, is_first: bool) -> None:
        super()._count(output, is_first)
        if self.only_echo:
            self.usage["completion_tokens"], self.usage["total_tokens"] = 0, self.usage["prompt_tokens"]

    def _token_offsets(self, index: int, output: RequestOutput) -> TokenOffsets:
        """For a continuation's tokens, which come after the prompt with `echo`."""
        begin = len(self._echoes[index // self.params.n]) if self.echo else 0
        return TokenOffsets(self.engine.tokenizer, output.prompt_token_ids, self.params.skip_special_tokens, begin)

    def _logprobs(self, completion: CompletionOutput, offsets: TokenOffsets) -> CompletionLogprobs | None:
        if self.params.logprobs is None or completion.logprobs is None:
            return None
        return completion_logprobs(
            completion.token_ids, completion.logprobs, self.params.logprobs, offsets, as_token_ids=self.as_token_ids
        )

    def _echo_logprobs(self, index: int, output: RequestOutput) -> CompletionLogprobs:
        assert self.params.logprobs is not None and output.prompt_logprobs is not None
        tokenizer, token_ids = tokenizer_of(self.engine), output.prompt_token_ids
        first_token = tokenizer.decode(token_ids[:1], skip_special_tokens=False)
        # The tokenizer may have prepended tokens that are not in the text.
        begin = len(self._echoes[index // self.params.n]) - len(tokenizer.decode(token_ids, skip_special_tokens=False))
        offsets = TokenOffsets(tokenizer, [], False, begin)
        return completion_logprobs(
            token_ids, output.prompt_logprobs, self.params.logprobs, offsets, first_token, self.as_token_ids
        )


def split_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts as a list, each a text or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast("str | list[int]", prompt)]
    return list(cast("list[str] | list[list[int]]", prompt))


def without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """An empty continuation, for requests of only the prompt."""
    has_logprobs = completion.logprobs is not None
    return CompletionOutput(completion.index, "", [], logprobs=[] if has_logprobs else None, finish_reason="length")


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate log-probabilities."""
    return cast("CompletionLogprobs", {name: first[name] + second[name] for name in first})  # type: ignore[literal-required]
