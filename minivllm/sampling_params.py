"""How the tokens of one request are sampled.

Names and meanings are vLLM's (`vllm/sampling_params.py`). Values are validated on construction, so that an error points to
the line that made them.
"""

from __future__ import annotations

import enum
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from minivllm.errors import RequestError

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy: dividing logits by less overflows float32."""
MAX_FACTOR = 1e6
"""The most by which a request may scale logits, up or down: far beyond use, and far from the ends of float32."""

MAX_LOGPROBS = 1000
"""The most log-probabilities per token that a request may ask for."""


class RequestOutputKind(enum.Enum):
    """Which outputs of a request the engine returns."""

    CUMULATIVE = "cumulative"
    """With each token, all output so far."""
    DELTA = "delta"
    """With each token, what is new since the last output, for the sequences that have something new. Prompt log-probabilities come with
    the first output."""
    FINAL_ONLY = "final only"
    """One output, when the request finishes."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of a request must match: exactly one of these.

    Args:
        json: A JSON schema, as text or as a dict.
        regex: A regular expression (Rust's syntax) that the whole text matches.
        choice: The texts to choose from.
        grammar: A grammar in Lark's language, or in llama.cpp's (GBNF).
        json_object: Any JSON object.

    Raises:
        RequestError: There is not exactly one, or its type is wrong.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            has = f"has {' and '.join(given)}" if given else "is empty"
            raise RequestError(
                f"structured_outputs {has}, but must have exactly one of json, regex, choice, grammar and json_object."
            )
        if isinstance(self.json, dict):
            object.__setattr__(self, "json", _as_json(self.json))
        for name in ("json", "regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise RequestError(f"structured_outputs must have {name} as text, not {text!r}.")
        if self.choice is not None:
            choice = self.choice
            if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(text, str) and text for text in choice):
                raise RequestError(f"structured_outputs must have choice as a list of texts, not {choice!r}.")
            object.__setattr__(self, "choice", tuple(choice))


def _as_json(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs has a schema that is not JSON: {error}.") from None
    except RecursionError:
        raise RequestError("structured_outputs has a schema that is nested too deeply.") from None


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of text generation for one request.

    Args:
        n: How many continuations of the prompt to return. They share the prompt's KV-cache blocks.
        temperature: Divides the logits. 0 is greedy: always the most likely token. At most 1e6.
        top_p: Keep the smallest set of most likely tokens whose probabilities reach `top_p`. In (0, 1]; 1 keeps all.
        top_k: Keep the `top_k` most likely tokens. 0 or -1 keeps all.
        min_p: Keep tokens at least `min_p` times as likely as the most likely one. In [0, 1]; 0 keeps all.
        repetition_penalty: Above 1, makes tokens in the prompt or the output less likely (CTRL paper). From 1e-6 to 1e6.
        presence_penalty: Subtracted from the logit of each token in the output. In [-2, 2].
        frequency_penalty: Subtracted once for each occurrence of the token in the output. In [-2, 2].
        seed: Makes the request reproducible: alone or in any batch, it draws the same random numbers.
        max_tokens: The most tokens to generate; fewer if the context, `max_model_len` or what the whole cache holds, is full before. None:
            until it is full.
        min_tokens: Before this many tokens, end-of-sequence tokens, stop tokens and stop strings have no effect.
        stop: Strings that end the generation. They are not part of the text.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, at the end of the text.
        stop_token_ids: Tokens that end the generation.
        ignore_eos: Continue after the end-of-sequence token (for benchmarks).
        logprobs: Return log-probabilities of this many most likely tokens at each step, and of the sampled token: 0 returns the
            latter alone, None none. They are of the model's own distribution, before penalties, temperature and filters.
        prompt_logprobs: The same, for the tokens of the prompt.
        allowed_token_ids: The tokens to choose from.
        bad_words: Words not to generate, with and without a leading space: the last token of each is banned when the tokens before it
            have just been generated. They have no effect where a grammar or `allowed_token_ids` leaves nothing else.
        logit_bias: Added to the logits of the tokens named, token id to bias in [-100, 100].
        logits_processors: Functions that take the output's token ids so far and the logits (`[vocab_size]`, float32), or the prompt's token
            ids before these, and return the new logits. A request whose function fails ends with an error. Only where the model runs in this
            process.
        truncate_prompt_tokens: Keep only this many tokens at the end of the prompt; -1 keeps as many as fit next to max_tokens, and
            at least half of the context.
        skip_special_tokens: Keep special tokens such as `<|im_end|>` out of the text.
        structured_outputs: What the text must match, such as a JSON schema.
        output_kind: Which outputs the engine returns; `LLM` always uses FINAL_ONLY.

    Raises:
        RequestError: A value is out of range; the message says which, and what to change.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Any] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _check_int("n", self.n, low=1)
        _check_float("temperature", self.temperature, low=0.0, high=MAX_FACTOR)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, which keeps no token at all: use a value in (0, 1], or temperature=0 for greedy.")
        _check_int("top_k", self.top_k, low=-1, hint="use 0 or -1 to keep all tokens")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0, but logits are divided by it: use 1.0 for no penalty.")
        _check_float("repetition_penalty", self.repetition_penalty, low=1 / MAX_FACTOR, high=MAX_FACTOR)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _check_int("seed", self.seed)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1, hint="use None for as many as the context holds")
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} but max_tokens is only {self.max_tokens}: lower min_tokens.")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}.")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            given = type(self.structured_outputs).__name__
            raise RequestError(f"structured_outputs must be a StructuredOutputsParams, not {given}.")
        object.__setattr__(self, "stop", _checked_stop_strings(self.stop))
        object.__setattr__(self, "bad_words", _checked_bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _checked_logits_processors(self.logits_processors))
        object.__setattr__(self, "stop_token_ids", _checked_token_ids("stop_token_ids", self.stop_token_ids) or ())
        object.__setattr__(self, "allowed_token_ids", _checked_token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty, which allows no token at all: leave it out.")
        if self.truncate_prompt_tokens not in (None, -1):
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, low=1, hint="use -1 for as many as fit")
        object.__setattr__(self, "logit_bias", _checked_logit_bias(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there are none."""
        return tuple(self.stop or ())

    @cached_property  # asked for every token
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that have occurred are penalized."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def needs_output_tokens(self) -> bool:
        """Whether sampling depends on earlier output tokens."""
        return self.has_penalties or bool(self.bad_words or self.logits_processors)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before temperature and filters, at every position."""
        return self.needs_output_tokens or bool(self.logit_bias or self.allowed_token_ids)


def _check_int(name: str, value: Any, low: int | None = None, high: int | None = None, hint: str = "") -> None:
    suffix = f" ({hint})" if hint else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be a whole number, not {value!r}{suffix}.")
    value = int(value)
    if abs(value) >= 2**63:
        raise RequestError(f"{name} is {value}, but must be less than 2**63{suffix}.")
    if low is not None and value < low:
        raise RequestError(f"{name} is {value}, but must be at least {low}{suffix}.")
    if high is not None and value > high:
        raise RequestError(f"{name} is {value}, but must be at most {high}{suffix}.")


def _check_float(name: str, value: Any, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {value!r}.")
    value = float(value)
    if not math.isfinite(value) or not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} is {value}, but must be a finite number {bounds}.")


def _checked_stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"stop must be a string or a list of strings, not {stop!r}.")
    for string in strings:
        check_unicode("stop", string)
    if "" in strings:
        raise RequestError("stop contains an empty string, which would end every text at once: remove it.")
    return tuple(strings)


def check_unicode(name: str, text: str) -> None:
    """Raise a RequestError if a text has half a character, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has {text!r}, which is not valid Unicode.") from None


def _checked_bad_words(bad_words: object) -> tuple[str, ...]:
    if bad_words is None:
        return ()
    if not isinstance(bad_words, (list, tuple)) or not all(isinstance(word, str) and word.strip() for word in bad_words):
        raise RequestError(f"bad_words must be a list of words, not {bad_words!r}.")
    for word in bad_words:
        check_unicode("bad_words", word)
    return tuple(dict.fromkeys(bad_words))


def _checked_logits_processors(processors: object) -> tuple[Callable[..., Any], ...]:
    if processors is None:
        return ()
    if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
        raise RequestError(f"logits_processors must be a list of functions, not {processors!r}.")
    for process in processors:
        if num_parameters(process) not in (2, 3):
            name = getattr(process, "__name__", type(process).__name__)
            raise RequestError(
                f"logits_processors has {name}, but must have functions of two parameters, the output's token ids and the logits, "
                f"or three, with the prompt's token ids before them."
            )
    return tuple(processors)


def num_parameters(function: Callable[..., Any]) -> int:
    """How many positional arguments a function requires; 0 if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of the interpreter's own
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in positional and item.default is item.empty for item in parameters)


def _checked_token_ids(name: str, token_ids: object) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    if not isinstance(token_ids, (list, tuple, set, frozenset)):
        raise RequestError(f"{name} must be a list of token ids, not {token_ids!r}.")
    if not all(type(token_id) is int and 0 <= token_id < 2**63 for token_id in token_ids):  # the usual case is quick
        for token_id in token_ids:
            _check_int(f"a token id in {name}", token_id, low=0)
    return tuple(token_ids)


def _checked_logit_bias(logit_bias: object) -> dict[int, float] | None:
    if not logit_bias:
        return None
    if not isinstance(logit_bias, dict):
        raise RequestError(f"logit_bias must map token ids to numbers, not be {logit_bias!r}.")
    checked = {}
    for token_id, bias in logit_bias.items():
        if isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 20:  # JSON has only string keys
            token_id = int(token_id)
        _check_int("a token id in logit_bias", token_id[:20] if isinstance(token_id, str) else token_id, low=0)
        _check_float(f"the logit_bias of token {token_id}", bias, low=-100.0, high=100.0)
        checked[token_id] = float(bias)
    return checked
