"""The check of lesson 11 for the text of a stream."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

from minivllm.course.lessons.lesson_08.situations import END, Letters
from minivllm.course.lessons.lesson_11.situations import iterate, run
from minivllm.course.lessons.streaming import Delta
from minivllm.course.observations import expect, rounds
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.sampling_params import SamplingParams

_HALVES = [28, 29]
"""The tokens of é."""


class Source:
    """Deltas of tokens, of which it is known whether they were closed."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas, self.is_closed = deltas, False

    async def read(self) -> AsyncGenerator[Delta, None]:
        """The deltas."""
        try:
            for delta in self.deltas:
                yield Delta(list(delta.token_ids), delta.finish_reason)
        finally:
            self.is_closed = True


def make_answer(rng: random.Random) -> tuple[list[int], str]:
    """Tokens, and why they end."""
    token_ids: list[int] = []
    for _ in range(rng.randint(1, 9)):
        token_ids += _HALVES if rng.random() < 0.3 else [rng.randint(1, 5)]
    if rng.random() < 0.4:
        visible = rng.random() < 0.5  # ended by the end of text, or by a letter that the request calls a stop token
        return [*token_ids, rng.randint(1, 5) if visible else END], "stop"
    return token_ids + _HALVES[:1] * rng.choice((0, 0, 1)), "length"


def cut(rng: random.Random, token_ids: list[int], reason: str) -> list[Delta]:
    """Tokens in deltas; the last may have none."""
    deltas, rest = [], list(token_ids)
    while rest:
        size = rng.choice((1, 1, 2, 4))
        deltas.append(Delta(rest[:size]))
        rest = rest[size:]
    if reason == "length" and rng.random() < 0.3:
        deltas.append(Delta([]))
    deltas[-1].finish_reason = reason
    return deltas


def expected_deltas(deltas: list[Delta], stop: list[str]) -> list[Delta]:
    """The same deltas with their text, made one token at a time from how much of the whole text is known by then."""
    tokens = [
        (token, delta.finish_reason == "stop" and i == len(delta.token_ids) - 1)
        for delta in deltas
        for i, token in enumerate(delta.token_ids)
    ]
    detokenizer = IncrementalDetokenizer(Letters(), [], SamplingParams(temperature=0, stop=stop))  # type: ignore[arg-type]
    texts, found = [""], None
    for token, ends in tokens:
        found = found or (None if ends else detokenizer.update(token))
        texts.append(detokenizer.text)
        if found:
            break
    is_early, found = found is not None, found or detokenizer.finish()
    results, given, begin, end = [], 0, 0, 0
    for delta in deltas:
        end = min(end + len(delta.token_ids), len(texts) - 1)
        is_last = delta is deltas[-1] or (is_early and end == len(texts) - 1)
        text = detokenizer.text if is_last else texts[end]
        if text[given:] or is_last:
            results.append(Delta([token for token, _ in tokens[begin:end]], None, text[given:]))
            given, begin = len(text), end
        if is_last:
            results[-1].finish_reason = "stop" if found else delta.finish_reason
            break
    return results


def check_with_text(with_text: Any) -> None:
    """Tokens in deltas of any size: half characters, stop strings across deltas, and each way in which an answer can end."""
    for rng in rounds("text", 120):
        deltas = cut(rng, *make_answer(rng))
        stop = rng.choice(([], [], ["ab"], ["é"], ["bc", "ea"], ["abc"], ["\ufffd"]))
        stop = rng.choice((stop, ["\ufffd"], ["".join(rng.choices("abcdeé", k=rng.randint(1, 3)))]))
        source = Source(deltas)
        detokenizer = IncrementalDetokenizer(Letters(), [], SamplingParams(temperature=0, stop=stop))  # type: ignore[arg-type]
        shown = ", ".join(f"{Letters().decode(delta.token_ids)!r} ({delta.token_ids}, {delta.finish_reason})" for delta in deltas)
        said = f"Stop strings {stop}, and deltas {shown}."

        async def read(source: Source = source, detokenizer: Any = detokenizer) -> tuple[list[Any], bool]:
            return [delta async for delta in await iterate(with_text(source.read(), detokenizer))], source.is_closed

        got, is_closed = run(said, read)
        _compare(said, expected_deltas(deltas, stop), got)
        look = "async with aclosing(deltas): a generator that is left early is not closed by itself, at least not at once"
        expect(said, "that `deltas` was closed", True, is_closed, look)

    said = "Three deltas, of which one is read."
    source = Source([Delta([1]), Delta([2]), Delta([3], "length")])
    is_closed = run(said, lambda: _leave(with_text, source))
    expect(
        said, "that `deltas` was closed when the generator was", True, is_closed, "async with aclosing(deltas), around everything"
    )


async def _leave(with_text: Any, source: Source) -> bool:
    detokenizer = IncrementalDetokenizer(Letters(), [], SamplingParams(temperature=0))  # type: ignore[arg-type]
    deltas = await iterate(with_text(source.read(), detokenizer))
    await anext(deltas)
    await deltas.aclose()
    return source.is_closed


def _compare(said: str, expected: list[Delta], got: list[Any]) -> None:
    looks = {
        "text": "what is new in detokenizer.text, which tokens are shown to it, and finish at the end",
        "finish_reason": "how an answer ends: at a stop string (also one that finish returns), or as its last delta says",
        "token_ids": "the tokens of a delta: none after a stop string, and those of deltas that were left out come with the next",
    }
    for name, look in looks.items():
        values = [[getattr(delta, name) for delta in deltas] for deltas in (expected, got)]
        right, mine = [list(map(repr, texts)) for texts in values] if name == "text" else values  # in quotes: some are empty
        expect(said, f"{name} of each delta", right, mine, look)
