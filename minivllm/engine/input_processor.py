"""Validates requests and turns prompts into token ids, once, before the engine core sees them.

A request that passes can be served; one that does not has taken no block. Mirrors `vllm/v1/engine/input_processor.py`.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from minivllm.config import ModelConfig, SchedulerConfig
from minivllm.core.structured_output import GrammarCompiler, StructuredOutputGrammar
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import ContextLengthError, RequestError
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams, check_unicode

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt" or, for a text, "add_special_tokens"."""


@dataclass(frozen=True)
class ProcessedRequest:
    """A request that can be served: its text, if it was given as text, and what the engine core gets."""

    prompt: str | None
    core_request: EngineCoreRequest


class InputProcessor:
    """Checks requests against an engine's limits.

    Args:
        model_config, scheduler_config: The limits.
        tokenizer: None for token ids only.
        cache_tokens: Tokens that the whole KV cache holds.
        seed: Requests without a seed draw theirs from a stream that starts here.
        clock: Gives the arrival time, in seconds.
        in_process: Whether the model runs in this process, so that it can call functions of a request.
        block_size: Of the cache. If given, the sequences of a model whose layers all have windows may be longer than the cache.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer | None,
        cache_tokens: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        *,
        in_process: bool = False,
        block_size: int | None = None,
    ) -> None:
        self.cache_tokens, self.num_engines = cache_tokens, 1
        self._model_config, self._scheduler_config, self._tokenizer = model_config, scheduler_config, tokenizer
        self.clock, self._in_process, self._block_size = clock, in_process, block_size
        self._random = random.Random(seed)
        self._grammar_compiler = GrammarCompiler(model_config.path, model_config.vocab_size)
        eos = set(model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos if 0 <= token_id < model_config.vocab_size))

    @property
    def max_request_tokens(self) -> int:
        """The limit on prompt and output together, of the model and of the cache."""
        return min(self._model_config.max_model_len, self._cache_limit)

    @property
    def _cache_limit(self) -> int:
        config = self._scheduler_config
        if config.window and self._block_size and config.may_exceed_cache(self.cache_tokens, self._block_size):
            return self._model_config.max_model_len + 1
        return self.cache_tokens + 1  # the last token is never fed back, so it needs no slot

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> ProcessedRequest:
        """Validate, tokenize and seed a request.

        Args:
            request_id: The caller's name for it.
            prompt: Text, token ids, or a dict with "prompt" or "prompt_token_ids". With "cache_salt" in it, a non-empty string, the prefix
                cache shares blocks only with requests of the same salt, so that nobody else can tell by timing what the prompt was. With
                "add_special_tokens": False, the tokenizer puts no special tokens around the text.
            params: How to generate; the model's defaults if None.
            arrival_time: Seconds of the engine's clock; now if None.
            priority: With the "priority" policy, smaller goes first.
            data_parallel_rank: The replica that it should go to, if that takes requests; None for the router's choice.

        Raises:
            RequestError: It cannot be served.
        """
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < self.num_engines:
            raise RequestError(f"data_parallel_rank is {data_parallel_rank}, but must be from 0 to {self.num_engines - 1}.")
        if not isinstance(request_id, str) or not request_id or not request_id.isprintable():
            raise RequestError(f"request_id must be a non-empty string of printable characters, not {request_id!r}.")
        params = SamplingParams(**self._model_config.sampling_defaults) if params is None else params
        text, token_ids = self.read_prompt(prompt)
        if isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None:
            room = self.max_request_tokens - min(params.max_tokens or 1, self.max_request_tokens // 2)
            token_ids = token_ids[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]
        max_num_tokens = self._check(len(token_ids), params, arrival_time, priority)
        bad_words = self._tokens_of_bad_words(params)
        request = EngineCoreRequest(
            request_id,
            token_ids,
            params,
            max_num_tokens,
            self._eos_token_ids,
            seed=self._random.getrandbits(64) if params.seed is None else int(params.seed),
            arrival_time=self.clock() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=_read_salt(prompt),
            data_parallel_rank=data_parallel_rank,
            bad_words=bad_words,
            special_stops=self._special_stops(params),
        )
        return ProcessedRequest(text, request)

    def _check(self, num_prompt_tokens: int, params: SamplingParams, arrival_time: float | None, priority: int) -> int:
        """Check the parameters of a request. Returns the limit on its prompt and output together."""
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**63:
            raise RequestError(f"priority must be a whole number of less than 2**63, not {priority!r}.")
        is_number = isinstance(arrival_time, (int, float)) and not isinstance(arrival_time, bool)
        if arrival_time is not None and not (is_number and -math.inf < arrival_time < math.inf):
            raise RequestError(f"arrival_time must be a finite number of seconds, not {arrival_time!r}.")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"The sampling parameters must be a SamplingParams, not {type(params).__name__}.")
        self._check_params(params)
        return self._max_num_tokens(num_prompt_tokens, params)

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text (if given) and the token ids of a prompt.

        Raises:
            RequestError: It is not a prompt, is empty, or has ids outside the model's vocabulary.
        """
        add_special_tokens = True
        if isinstance(prompt, dict):
            add_special_tokens = prompt.get("add_special_tokens", True)
            if not isinstance(add_special_tokens, bool):
                raise RequestError(f"add_special_tokens must be True or False, not {add_special_tokens!r}.")
            known = prompt.keys() & {"prompt", "prompt_token_ids"}
            if len(known) != 1:
                raise RequestError(f"A prompt dict must have 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}.")
            prompt = prompt[known.pop()]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("There is no tokenizer (skip_tokenizer_init=True): give the prompt as token ids.")
            text, token_ids = prompt, self._tokenizer.encode(prompt, add_special_tokens)
        elif isinstance(prompt, (list, tuple)) or hasattr(prompt, "tolist"):  # arrays and tensors too
            text, token_ids = None, prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
            if not isinstance(token_ids, list):
                raise RequestError(f"A prompt must be a string or a list of token ids, not {type(prompt).__name__}.")
        else:
            raise RequestError(f"A prompt must be a string or a list of token ids, not {type(prompt).__name__}.")
        if not token_ids:
            raise RequestError("The prompt is empty: give at least one token.")
        vocab_size = self._model_config.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise RequestError(f"A token id must be a whole number, not {token_id!r}.")
            if not 0 <= token_id < vocab_size:
                what = (
                    f"Token id {token_id}" if text is None else f"Token id {token_id}, which its tokenizer gives for this text,"
                )
                raise RequestError(f"{what} is out of range: this model's ids go from 0 to {vocab_size - 1}.")
        return text, [int(token_id) for token_id in token_ids]

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size = self._model_config.vocab_size
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(f"{name} has token id {token_id}, but this model's ids go from 0 to {vocab_size - 1}.")
        if params.n > self._scheduler_config.max_num_seqs:
            raise RequestError(
                f"n is {params.n}, but at most max_num_seqs = {self._scheduler_config.max_num_seqs} sequences run at once: lower n."
            )
        if params.structured_outputs is not None:
            self.submit_grammar(params).result()
        if params.stop and self._tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and there is none (skip_tokenizer_init=True): use stop_token_ids.")
        if params.logits_processors and not self._in_process:
            raise RequestError(
                "logits_processors are functions of this process, but the model runs in another one: use an LLM without parallelism, "
                "or a sampler of your own (sampler_cls)."
            )

    def _special_stops(self, params: SamplingParams) -> dict[int, str]:
        """The special tokens that stop strings name. They are not in the text, unless it keeps special tokens, so no search would find them."""
        if self._tokenizer is None or not params.stop or not params.skip_special_tokens:
            return {}
        special = {
            self._tokenizer.decode([token_id], skip_special_tokens=False): token_id
            for token_id in self._tokenizer.skipped_token_ids
            if token_id < self._model_config.vocab_size
        }
        for stop in params.stop_strings:
            inside = next((text for text in special if text and text in stop and text != stop), None)
            if inside is not None:
                raise RequestError(
                    f"stop has {stop!r}, in which {inside!r} is a special token, which the text leaves out: set skip_special_tokens to "
                    f"False, or use stop_token_ids ([{special[inside]}])."
                )
        return {special[stop]: stop for stop in params.stop_strings if stop in special}

    def _tokens_of_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as token ids, with a space before it and without; not those with a token that the model has no row for, as it cannot write
        them."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and there is none (skip_tokenizer_init=True): use logit_bias.")
        spellings = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
        words = [tuple(self._tokenizer.encode(word, add_special_tokens=False)) for word in spellings]
        if () in words:
            raise RequestError(f"bad_words has {spellings[words.index(())]!r}, which has no tokens: remove it.")
        return tuple(word for word in dict.fromkeys(words) if max(word) < self._model_config.vocab_size)

    def submit_grammar(self, params: SamplingParams) -> Future[StructuredOutputGrammar]:
        """Begin to compile the grammar of `structured_outputs`, which is remembered then. That can take a second.

        Raises:
            RequestError: There is no tokenizer. The future raises one if the grammar cannot be compiled.
        """
        assert params.structured_outputs is not None
        if self._tokenizer is None:
            raise RequestError("Structured outputs need a tokenizer, and there is none (skip_tokenizer_init=True).")
        return self._grammar_compiler.submit(params.structured_outputs, self._eos_token_ids, params.ignore_eos)

    def load_grammar_tokenizer(self) -> None:
        """Do now what the first request with structured outputs would do, while others wait."""
        if self._tokenizer is not None:
            with contextlib.suppress(RequestError):  # the model has none of the kind that is needed
                self._grammar_compiler.load_tokenizer(self._eos_token_ids)

    def _max_num_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The length that the sequences of a request may reach, prompt included.

        A prompt that leaves no room for a token is refused. `max_tokens` is only a maximum: beyond the room that is left, it is cut, as in
        vLLM's scheduler.
        """
        limit, cache_limit = self._model_config.max_model_len, self._cache_limit
        if num_prompt_tokens >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, the first generated one included, "
                f"but the prompt has {num_prompt_tokens} tokens: shorten it."
            )
        if num_prompt_tokens >= cache_limit:
            raise ContextLengthError(
                f"The maximum context length is {cache_limit} tokens, the first generated one included, as the whole cache holds only "
                f"{self.cache_tokens}, but the prompt has {num_prompt_tokens} tokens: shorten it, or give the cache more memory "
                f"(kv_cache_memory_bytes)."
            )
        if params.max_tokens is None:
            return self.max_request_tokens
        return min(num_prompt_tokens + params.max_tokens, self.max_request_tokens)


def _read_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a non-empty string, not {salt!r}.")
    if salt is not None:
        check_unicode("cache_salt", salt)
    return salt
