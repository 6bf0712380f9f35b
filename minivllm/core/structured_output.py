"""Structured outputs: a grammar says which tokens may come next, and only those are sampled.

A request's JSON schema, regular expression, list of choices or grammar is compiled by llguidance
(https://github.com/guidance-ai/llguidance), a parser that walks the bytes of all tokens at once. Here its masks meet the batch: each
sequence has a `StructuredOutputGrammar`, which advances with its tokens, is copied when it forks, looks ahead along draft tokens, and
survives preemption. Mirrors `vllm/v1/structured_output/backend_guidance.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import ModelConfig
from minivllm.errors import RequestError
from minivllm.request import Request
from minivllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ ]?|\n[ \t]{0,16}"}
"""White space allowed in JSON: a space, or a new line and its indentation. Allowed any white space, small models write nothing else."""

LIMITS: Any = {"initial_lexer_fuel": 300_000, "step_lexer_fuel": 10_000, "verbose_errors": False}
"""Limits of llguidance's parser. They keep a mask, for which the whole batch waits, below about 50 ms."""
TRIAL_TOKENS = 4
"""How many tokens a new grammar is tried on."""
MAX_CHARACTERS = 2**17
"""Limit on a schema, a regular expression, a grammar, or all choices together."""


class StructuredOutputGrammar:
    """A sequence's position in its grammar.

    Args:
        matcher: llguidance's.
        forbidden: Tokens to exclude though the grammar allows them: the end-of-sequence tokens, with `ignore_eos`.
    """

    def __init__(self, matcher: LLMatcher, forbidden: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self._forbidden = forbidden

    @property
    def error(self) -> str | None:
        """Why it cannot continue, after a token that it does not allow, or a limit; None if it can."""
        return self._matcher.get_error().splitlines()[0] if self._matcher.is_error() else None

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token. Returns whether another may follow."""
        return self._matcher.consume_token(token_id) and not self.is_terminated

    def count_valid(self, token_ids: list[int]) -> int:
        """How many of these tokens may follow, in this order."""
        allowed = itertools.takewhile(lambda token_id: token_id not in self._forbidden, token_ids)
        return self._matcher.validate_tokens(list(allowed))

    def masks(self, draft_token_ids: tuple[int, ...] = ()) -> list[bytes]:
        """What may follow now, and after each draft token: a bit for each token of the vocabulary, from the lowest bit of the first byte on.

        Raises:
            RuntimeError: A draft token may not follow (`count_valid`).
        """
        masks = [self._mask()]
        num_accepted = 0
        for token_id in draft_token_ids:
            if self.is_terminated:  # later drafts will be dropped
                masks.append(masks[-1])
                continue
            if not self._matcher.consume_token(token_id):
                raise RuntimeError(f"a draft token is not allowed by the grammar ({self.error})")
            num_accepted += 1
            masks.append(masks[-1] if self.is_terminated else self._mask())
        if num_accepted:
            self._matcher.rollback(num_accepted)
        return masks

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if not self._forbidden:
            return mask
        bits = bytearray(mask)
        for token_id in self._forbidden:
            bits[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(bits)

    def fork(self) -> StructuredOutputGrammar:
        """A copy that advances on its own."""
        return StructuredOutputGrammar(self._matcher.deep_copy(), self._forbidden)


class GrammarCompiler:
    """Compiles grammars for the tokens of a model's folder, one at a time in a thread of its own, and caches the latest."""

    CAPACITY = 64
    """Size of the cache."""
    STACK_BYTES = 2**28
    """The thread's stack. llguidance compiles recursively: a chain of a thousand `$ref`s would overflow the usual 8 MiB and end the process."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._compiled: OrderedDict[Any, StructuredOutputGrammar] = OrderedDict()
        self._lock = threading.Lock()
        """Held while grammars are looked up, and never while one is compiled."""
        self._thread: ThreadPoolExecutor | None = None

    def load_tokenizer(self, eos_token_ids: tuple[int, ...]) -> None:
        """Load the tokenizer now, not with the first grammar: it blocks Python for a quarter of a second.

        Raises:
            RequestError: The model has no usable tokenizer.json.
        """
        _load_tokenizer(self._folder, self._vocab_size, eos_token_ids)

    def compile(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], ignore_eos: bool = False
    ) -> StructuredOutputGrammar:
        """A grammar at its beginning; `ignore_eos` excludes the tokens that may end the text.

        Raises:
            RequestError: It cannot be compiled.
        """
        return self.submit(params, eos_token_ids, ignore_eos).result()

    def submit(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], ignore_eos: bool = False
    ) -> Future[StructuredOutputGrammar]:
        """As `compile`, without waiting for it."""
        key = params, eos_token_ids, ignore_eos
        if (grammar := self._look_up(key)) is not None:
            known: Future[StructuredOutputGrammar] = Future()
            known.set_result(grammar)
            return known
        with self._lock:
            self._thread = self._thread or _start_thread(self.STACK_BYTES)
        return self._thread.submit(self._compile_and_remember, *key)

    def shutdown(self) -> None:
        """Cancel what has not started to compile."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, key: Any) -> StructuredOutputGrammar | None:
        with self._lock:
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            return self._compiled[key].fork()

    def _compile_and_remember(self, *key: Any) -> StructuredOutputGrammar:
        if (grammar := self._look_up(key)) is not None:  # since it was submitted
            return grammar
        grammar = self._compile(*key)
        with self._lock:
            self._compiled[key] = grammar
            if len(self._compiled) > self.CAPACITY:
                self._compiled.popitem(last=False)
            return grammar.fork()

    def _compile(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], ignore_eos: bool
    ) -> StructuredOutputGrammar:
        from llguidance import LLMatcher, LLParserLimits

        size = sum(len(text) for text in (params.json, params.regex, params.grammar, *(params.choice or ())) if text is not None)
        if size > MAX_CHARACTERS:
            raise RequestError(f"structured_outputs has {size} characters, but must have at most {MAX_CHARACTERS}.")
        tokenizer = _load_tokenizer(self._folder, self._vocab_size, eos_token_ids)
        matcher = LLMatcher(tokenizer, write_grammar(params), log_level=0, limits=LLParserLimits(**LIMITS))
        grammar = StructuredOutputGrammar(matcher, eos_token_ids if ignore_eos else ())
        if cause := _try(grammar.fork()):
            raise RequestError(f"structured_outputs cannot be compiled: {_explain(matcher.get_error() or cause)}")
        return grammar


class StructuredOutputManager:
    """Holds requests until their grammars are compiled, so that the scheduler only gets requests that can run.

    Mirrors `vllm/v1/structured_output/__init__.py`.

    Attributes:
        compiling: Requests by id, each with its future grammar.
    """

    WAIT_SECONDS = 0.01
    """How long a step with nothing else to do waits for a grammar."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._eos_token_ids = tuple(sorted(model_config.eos_token_ids))
        self._compiler = GrammarCompiler(model_config.path, model_config.vocab_size)
        self.compiling: dict[str, tuple[Request, Future[StructuredOutputGrammar]]] = {}

    def load_tokenizer(self) -> None:
        """Load the tokenizer now, not with the first request, which would delay others."""
        with contextlib.suppress(RequestError):  # the model has none
            self._compiler.load_tokenizer(self._eos_token_ids)

    def add_request(self, request: Request) -> None:
        """Start to compile a request's grammar."""
        params = request.sampling_params
        assert params.structured_outputs is not None
        grammar = self._compiler.submit(params.structured_outputs, request.data.eos_token_ids, params.ignore_eos)
        self.compiling[request.request_id] = request, grammar

    def abort_request(self, request_id: str) -> None:
        """Drop a request that waits."""
        self.compiling.pop(request_id)[1].cancel()

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Remove and return the requests whose grammars are done, each with the error if compilation failed."""
        compiled: list[tuple[Request, str | None]] = []
        for request, grammar in [held for held in self.compiling.values() if held[1].done()]:
            del self.compiling[request.request_id]
            try:
                request.grammar = grammar.result()
            except Exception as error:
                compiled.append((request, str(error)))
            else:
                compiled.append((request, None))
        return compiled

    def wait(self) -> None:
        """Wait a moment for the first grammar."""
        wait([grammar for _, grammar in self.compiling.values()], self.WAIT_SECONDS, FIRST_COMPLETED)

    def shutdown(self) -> None:
        """Cancel what has not started to compile."""
        self._compiler.shutdown()


def _try(grammar: StructuredOutputGrammar) -> str | None:
    """Try a grammar on a few tokens, which triggers most of the limits. Returns why it is unusable, or None."""
    for i in range(TRIAL_TOKENS):
        allowed = int.from_bytes(grammar.masks()[0], "little")
        if grammar.error or (grammar.is_terminated and i == 0):
            return grammar.error or "no text fits it"
        if not allowed or not grammar.accept_token((allowed & -allowed).bit_length() - 1):  # the first that is allowed
            break
    return grammar.error


def _start_thread(stack_bytes: int) -> ThreadPoolExecutor:
    """A thread with a stack of this size."""
    usual = threading.stack_size(stack_bytes)
    try:
        thread = ThreadPoolExecutor(1, "grammars")
        thread.submit(int).result()  # the pool starts its thread with the first task
    finally:
        threading.stack_size(usual)
    return thread


@functools.lru_cache(maxsize=4)
def _load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise RequestError("Structured outputs need a tokenizer.json, which this model does not have.")
    try:
        return LLTokenizer(_rename_special_tokens(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # of many kinds
        raise RequestError(f"Structured outputs cannot use this model's tokenizer: {_as_line(str(error))}") from None


def _rename_special_tokens(path: Path) -> str:
    """A tokenizer.json whose special tokens have names that occur in no text, so that a grammar that demands the text "<|im_end|>" is not
    satisfied by the special token."""
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens = [token for token in content.get("added_tokens") or () if token.get("special")]
    prefix = f"\U0010ffff{secrets.token_hex(8)}-"  # unguessable
    names = {token["content"]: f"{prefix}{token['id']}" for token in tokens}
    for token in tokens:
        token["content"] = names[token["content"]]
    model = content["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(name, name): token_id for name, token_id in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # of pairs with scores
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(content)


def write_grammar(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's language.

    Raises:
        RequestError: The schema is not JSON, or the grammar's language is unknown.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if params.json is not None:
            schema = without_annotations(json.loads(str(params.json)))  # the parameters have made a text of a dict
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_OPTIONS)
        if params.json_object:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', JSON_OPTIONS)
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(with_ascii_classes(params.regex))
        if params.choice is not None:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f") for choice in params.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        assert params.grammar is not None
        return LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
    except Exception as error:  # of many kinds
        raise RequestError(f"structured_outputs cannot be compiled: {_as_line(str(error) or repr(error))}") from None


FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"])
"""The formats of strings that llguidance enforces."""
_VALUES = frozenset(["const", "default", "enum", "examples"])
_BY_NAME = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Keywords with values, and with schemas by names of the user's."""


def without_annotations(schema: Any) -> Any:
    """A JSON schema without what only comments on it, such as {"format": "password"}, which llguidance would refuse."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if (keyword == "format" and isinstance(value, str) and value not in FORMATS) or (
            keyword == "uniqueItems" and value is False
        ):
            continue
        if keyword in _BY_NAME and isinstance(value, dict):
            kept[keyword] = {name: without_annotations(inner) for name, inner in value.items()}
        else:
            kept[keyword] = value if keyword in _VALUES else without_annotations(value)
    return kept


_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def with_ascii_classes(regex: str) -> str:
    r"""A regular expression in which `\d` and `\w` mean what they mean in JSON schemas: ASCII alone, where Rust's also match other scripts."""
    return re.sub(r"\\(.)", lambda escape: _CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def _explain(error: str) -> str:
    """llguidance's error, with the unsupported keywords of a JSON schema by name."""
    if error.startswith("oneOf"):  # it advises an option of its own
        return 'JSON schemas with "oneOf" are not supported if its alternatives may overlap: use "anyOf"'
    unsupported = re.search(r"Unimplemented keys: \[(.*?)\]", error)
    return f"JSON schemas with {unsupported[1]} are not supported" if unsupported else _as_line(error)


def _as_line(message: str) -> str:
    return " ".join(message.split())[:300]
