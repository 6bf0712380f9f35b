"""Log-probabilities in OpenAI's two formats (four lists for completions, a list of entries for chat), and in vLLM's for prompts."""

from __future__ import annotations

from minivllm.entrypoints.openai.responses import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob
from minivllm.outputs import Logprob

LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""

Candidates = dict[int, Logprob]
"""At one position: the sampled token and the most likely ones, by token id."""


def completion_logprobs(
    token_ids: list[int], candidates: list[Candidates | None], num_logprobs: int, offset: int, first_token: str = ""
) -> CompletionLogprobs:
    """The four lists of /v1/completions.

    Args:
        token_ids: The tokens.
        candidates: The candidates at each token; None at the first token of a prompt.
        num_logprobs: Number of most likely candidates to return besides the token itself.
        offset: Where in the text the first token begins, in characters.
        first_token: The text of a token without candidates.
    """
    result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, here in zip(token_ids, candidates, strict=True):
        text = first_token if here is None else here[token_id].decoded_token or ""
        result["tokens"].append(text)
        result["token_logprobs"].append(None if here is None else finite(here[token_id].logprob))
        result["top_logprobs"].append(None if here is None else _by_text(token_id, here, num_logprobs))
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def _by_text(token_id: int, candidates: Candidates, num_logprobs: int) -> dict[str, float]:
    """Candidates by text. If several have the same (parts of a character, say), the sampled or most likely one counts."""
    texts: dict[str, float] = {}
    for candidate in [candidates[token_id], *_most_likely(candidates, num_logprobs)]:
        texts.setdefault(candidate.decoded_token or "", finite(candidate.logprob))
    return texts


def chat_logprobs(token_ids: list[int], candidates: list[Candidates], num_logprobs: int) -> ChatLogprobs:
    """The entries of /v1/chat/completions."""
    content = []
    for token_id, here in zip(token_ids, candidates, strict=True):
        top = [_entry(candidate) for candidate in _most_likely(here, num_logprobs)]
        content.append({**_entry(here[token_id]), "top_logprobs": top})
    return {"content": content}


def _entry(candidate: Logprob) -> TokenLogprob:
    text = candidate.decoded_token or ""
    return {"token": text, "logprob": finite(candidate.logprob), "bytes": list(text.encode(errors="replace"))}


def _most_likely(candidates: Candidates, num_logprobs: int) -> list[Logprob]:
    """The `num_logprobs` most likely candidates; the sampled token may not be among them."""
    return sorted(candidates.values(), key=lambda candidate: candidate.rank)[:num_logprobs]


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
