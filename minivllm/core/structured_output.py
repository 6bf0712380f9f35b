"""Structured outputs: a grammar says which tokens may come next, and only those are sampled.

A request's JSON schema, regular expression, list of choices or grammar is compiled by llguidance
(https://github.com/guidance-ai/llguidance), a parser that walks over the bytes of all tokens at once. What is ours is how masks meet the
batch: each sequence has a `StructuredOutputGrammar`, which advances with its tokens, is copied when it forks, looks ahead along draft tokens, and
stays where it is when the sequence is preempted. Mirrors `vllm/v1/structured_output/backend_guidance.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import RequestError
from minivllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class StructuredOutputGrammar:
    """How far one sequence has come in its grammar.

    Args:
        matcher: llguidance's.
        forbidden: Tokens that may not come although the grammar allows them: those that end a text, where they are to be ignored.
    """

    def __init__(self, matcher: LLMatcher, forbidden: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self._forbidden = forbidden

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if it has met a token that it does not allow, or a limit."""
        message = self._matcher.get_error()
        return message.splitlines()[0] if message else None

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token. Returns whether another may follow."""
        return self._matcher.consume_token(token_id) and not self.is_terminated

    def count_valid(self, token_ids: list[int]) -> int:
        """How many of these tokens may follow, one after another."""
        allowed = itertools.takewhile(lambda token_id: token_id not in self._forbidden, token_ids)
        return self._matcher.validate_tokens(list(allowed))

    def masks(self, draft_token_ids: tuple[int, ...] = ()) -> list[bytes]:
        """What may follow now, and after each draft token: a bit for each token of the vocabulary, from the lowest bit of the first byte on.

        Raises:
            RuntimeError: A limit of the parser was met.
        """
        masks = [self._mask()]
        num_accepted = 0
        for token_id in draft_token_ids:
            if self.is_terminated or not self._matcher.consume_token(token_id):
                raise RuntimeError(f"a draft token is not among those that may follow ({self.error})")
            num_accepted += 1
            masks.append(masks[-1] if self.is_terminated else self._mask())  # after the end nothing is kept
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
    """Compiles grammars for a model's tokens.

    Args:
        folder: The model's, with its tokenizer.json.
        vocab_size: Tokens that the model chooses from.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size

    def compile(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], ignore_eos: bool = False
    ) -> StructuredOutputGrammar:
        """A grammar at its beginning.

        Args:
            params: What the text must be.
            eos_token_ids: Tokens that may come at its end.
            ignore_eos: Do without them.

        Raises:
            RequestError: It cannot be compiled, for the reason that the message gives.
        """
        from llguidance import LLMatcher

        tokenizer = _load_tokenizer(self._folder, self._vocab_size, eos_token_ids)
        matcher = LLMatcher(tokenizer, write_grammar(params), log_level=0)
        if error := matcher.get_error():
            raise RequestError(f"structured_outputs cannot be compiled: {_first_lines(error)}")
        return StructuredOutputGrammar(matcher, eos_token_ids if ignore_eos else ())


@functools.lru_cache(maxsize=4)
def _load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise RequestError("Structured outputs need a tokenizer.json, which this model does not have.")
    return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)


def write_grammar(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's language.

    Raises:
        RequestError: The schema is no JSON, or the grammar is in no known language.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if params.json is not None:
            return LLMatcher.grammar_from_json_schema(params.json)
        if params.json_object:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        assert params.grammar is not None
        return LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
    except (ValueError, TypeError) as error:
        raise RequestError(f"structured_outputs cannot be compiled: {_first_lines(str(error))}") from None


def _first_lines(message: str) -> str:
    return " ".join(message.split())[:300]
