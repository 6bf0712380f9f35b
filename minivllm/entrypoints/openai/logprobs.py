"""Log-probabilities in OpenAI's two formats (four lists for completions, a list of entries for chat), and in vLLM's for prompts."""

from __future__ import annotations

from minivllm.engine.detokenizer import DecodeStream
from minivllm.engine.tokenizer import REPLACEMENT, Tokenizer
from minivllm.entrypoints.openai.chat.protocol import ChatLogprobs, TokenLogprob
from minivllm.entrypoints.openai.completions.protocol import CompletionLogprobs
from minivllm.entrypoints.openai.protocol import PromptLogprobs
from minivllm.outputs import Logprob

LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""

Candidates = dict[int, Logprob]
"""At one position: the sampled token and the most likely ones, by token id."""


class TokenOffsets:
    """Where in a growing text each token begins, in characters. A token in the middle of a character begins where the character does.

    The first token begins at `begin`, after `prompt_token_ids`; without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], skip_special_tokens: bool, begin: int) -> None:
        self._stream = tokenizer and DecodeStream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._next = begin

    def add(self, token_ids: list[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(max(0, self._next))
            if self._stream is not None:
                self._next += len(self._stream.step(token_id))
        return offsets


def completion_logprobs(
    token_ids: list[int],
    candidates: list[Candidates | None],
    num_logprobs: int,
    offsets: TokenOffsets,
    first_token: str = "",
    as_token_ids: bool = False,
) -> CompletionLogprobs:
    """The four lists of /v1/completions.

    Args:
        token_ids: The tokens.
        candidates: The candidates at each token; None at the first token of a prompt.
        num_logprobs: Number of most likely candidates to return besides the token itself.
        offsets: Where in the text the tokens begin.
        first_token: The text of a token without candidates.
        as_token_ids: Give tokens as "token_id:5".
    """
    result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": offsets.add(token_ids)}
    for token_id, here in zip(token_ids, candidates, strict=True):
        text = first_token if here is None else here[token_id].decoded_token or ""
        result["tokens"].append(f"token_id:{token_id}" if as_token_ids else text)
        result["token_logprobs"].append(None if here is None else finite(here[token_id].logprob))
        result["top_logprobs"].append(None if here is None else _by_text(token_id, here, num_logprobs, as_token_ids))
    return result


def _by_text(token_id: int, candidates: Candidates, num_logprobs: int, as_token_ids: bool) -> dict[str, float]:
    """Candidates by text. If several have the same (parts of a character, say), the sampled or most likely one counts."""
    texts: dict[str, float] = {}
    for chosen in [token_id, *_most_likely(candidates, num_logprobs)]:
        text = f"token_id:{chosen}" if as_token_ids else candidates[chosen].decoded_token or ""
        texts.setdefault(text, finite(candidates[chosen].logprob))
    return texts


def chat_logprobs(
    token_ids: list[int], candidates: list[Candidates], num_logprobs: int, tokenizer: Tokenizer | None, as_token_ids: bool
) -> ChatLogprobs:
    """The entries of /v1/chat/completions; `as_token_ids` gives tokens as "token_id:5"."""

    def entry(token_id: int, candidate: Logprob) -> TokenLogprob:
        text = candidate.decoded_token or ""
        is_partial = REPLACEMENT in text  # of a character
        token_bytes = tokenizer.token_bytes(token_id) if tokenizer and is_partial else text.encode(errors="replace")
        text = f"token_id:{token_id}" if as_token_ids else text
        return {"token": text, "logprob": finite(candidate.logprob), "bytes": list(token_bytes)}

    content = []
    for token_id, here in zip(token_ids, candidates, strict=True):
        top = [entry(other, here[other]) for other in _most_likely(here, num_logprobs)]
        content.append({**entry(token_id, here[token_id]), "top_logprobs": top})
    return {"content": content}


def _most_likely(candidates: Candidates, num_logprobs: int) -> list[int]:
    """The `num_logprobs` most likely candidates; the sampled token may not be among them."""
    return sorted(candidates, key=lambda token_id: candidates[token_id].rank)[:num_logprobs]


def prompt_logprobs(candidates: list[Candidates | None] | None) -> PromptLogprobs | None:
    """vLLM's format for the tokens of a prompt."""
    if candidates is None:
        return None
    return [
        here
        and {
            str(token_id): {"logprob": finite(c.logprob), "rank": c.rank, "decoded_token": c.decoded_token}
            for token_id, c in here.items()
        }
        for here in candidates
    ]


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return max(logprob, LEAST)
