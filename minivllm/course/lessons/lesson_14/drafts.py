"""The checks of lesson 14 for speculative decoding: drafts from the text itself, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from minivllm.core.speculation import NgramIndex, accept_drafts
from minivllm.course.lessons.ranks import situation
from minivllm.course.observations import expect, expect_number, rounds

Row = list[float]


def check_draft(draft: Callable[..., Any]) -> None:
    """What followed the last time that the text ended like this."""
    for rng in rounds("draft", 80):
        shortest = rng.randint(1, 2)
        longest, count = shortest + rng.randint(0, 2), rng.randint(1, 6)
        text = [rng.randrange(rng.choice((2, 3, 5))) for _ in range(rng.randint(1, 14))]
        said = f"draft({text}, longest={longest}, shortest={shortest}, num_tokens={count})."
        right = NgramIndex(shortest, longest).propose(text, count)
        with situation(said):
            got = draft(list(text), longest, shortest, count)
        got = list(got) if isinstance(got, (list, tuple)) else repr(got)[:80]
        expect(said, "drafts", right, got, lambda: _find_draft_mistake(text, longest, shortest, count, right, got))  # noqa: B023


def _find_draft_mistake(text: list[int], longest: int, shortest: int, count: int, right: list[int], got: Any) -> str:
    if right and not got:
        return (
            f"which n-grams are looked up: lengths from {shortest} to {longest}, both included; and they may overlap with the end"
        )
    for wrong, hint in _draft_mistakes(text, longest, shortest, count):
        if wrong == got and wrong != right:
            return hint
    if len(got) < len(right) and got == right[: len(got)]:
        return "the end of the text: the drafts go on there with themselves, as if the text repeated itself"
    if not right:
        return "n-grams that do not occur before the end of the text: then there are no drafts"
    return "the longest n-gram at the end of the text that occurs earlier, its last earlier occurrence, and what followed there"


def _draft_mistakes(text: list[int], longest: int, shortest: int, count: int) -> Iterator[tuple[list[int], str]]:
    def go_on(start: int, extra: int = 0) -> list[int]:
        return [text[start + i % (len(text) - start)] for i in range(count + extra)] if start < len(text) else []

    def find(lengths: Sequence[int], starts: Callable[[int], Sequence[int]], shift: int = 0, extra: int = 0) -> list[int]:
        for n in lengths:
            for start in starts(n):
                if n <= len(text) and text[start : start + n] == text[-n:]:
                    return go_on(max(0, start + n + shift), extra)
        return []

    down, up = range(longest, shortest - 1, -1), range(shortest, longest + 1)

    def latest(n: int) -> Sequence[int]:
        return range(len(text) - n - 1, -1, -1)

    right = find(down, latest)
    for size in range(1, len(right)):
        if text[-size:] == right[:size]:
            yield right[:size], "the end of the text: the drafts go on there with themselves, as if the text repeated itself"
    yield find(down, lambda n: range(len(text) - n)), "which occurrence: the last one, the nearest to the end"
    yield find(up, latest), "which n-gram: try the longest first"
    yield find(down, lambda n: range(len(text) - 2 * n, -1, -1)), "occurrences that overlap with the end: they count, too"
    yield find(range(longest, 0, -1), latest), f"shorter n-grams than shortest={shortest}: they are not looked up"
    yield find(range(longest, shortest, -1), latest), f"the n-grams: length shortest={shortest} is included"
    yield find(range(longest - 1, shortest - 1, -1), latest), f"the n-grams: length longest={longest} is included"
    for n in down:
        yield find(down, latest, -n), "where the drafts begin: after the n-gram, which is not a draft itself"
    yield find(down, latest, 1), "where the drafts begin: directly after the n-gram"
    yield find(down, latest, -1), "where the drafts begin: directly after the n-gram"
    yield find(down, latest, extra=1), f"how many: num_tokens={count}"
    yield right[:-1], f"how many: num_tokens={count}"


def check_verify(verify: Callable[..., Any]) -> None:
    """The tokens of a step with drafts are those of as many steps without."""
    for rng in rounds("verify", 60):
        count, vocab = rng.randint(0, 4), rng.randint(3, 6)
        logits = [[rng.randint(-40, 40) / 10 for _ in range(vocab)] for _ in range(count + 1)]
        noise = [[rng.randint(-20, 20) / 10 for _ in range(vocab)] for _ in range(count + 1)]
        is_sampled = rng.random() < 0.5

        def choose(row: Row, place: int, noise: list[Row] = noise, is_sampled: bool = is_sampled) -> int:
            scores = [a + (b if is_sampled else 0) for a, b in zip(row, noise[place], strict=True)]
            return scores.index(max(scores))

        chosen = [choose(row, place) for place, row in enumerate(logits)]
        drafts = chosen[:count]
        if count and rng.random() < 0.6:
            place = rng.randrange(count)
            drafts[place] = (chosen[place] + rng.randrange(1, vocab)) % vocab
        right = accept_drafts(tuple(drafts), chosen)
        said = (
            f"verify({drafts}, logits, choose): after the text and after each draft, choose, {'sampled' if is_sampled else 'greedy'}, "
            f"gives {chosen}."
        )
        with situation(said):
            got = verify(list(drafts), [list(row) for row in logits], choose)
        got = list(got) if isinstance(got, (list, tuple)) else repr(got)[:80]
        expect(said, "tokens", right, got, lambda: _find_verify_mistake(drafts, chosen, logits, choose, right, got))  # noqa: B023


def _find_verify_mistake(
    drafts: list[int], chosen: list[int], logits: list[Row], choose: Callable[[Row, int], int], right: list[int], got: Any
) -> str:
    accepted = right[:-1]
    shifted = chosen[1:] + chosen[-1:]
    matching = [a for a, b in zip(drafts, chosen, strict=False) if a == b]
    known = [
        (accepted, "the model's own token: a step yields one more than it accepts, in place of a rejected draft or after the last one"),
        (chosen, "the first rejected draft: what comes after it was computed from a wrong text, and is dropped"),
        (
            matching + chosen[-1:] if matching else None,
            "drafts after a rejected one: they are dropped, even if they match",
        ),
        (accept_drafts(tuple(drafts), shifted), "which row belongs to which draft: row 0 is what follows the text, and draft 0 is compared with it"),
        ([*accepted, *drafts[len(accepted) : len(accepted) + 1]], "the rejected draft: the model's token takes its place"),
        (accept_drafts(tuple(drafts), [choose(row, 0) for row in logits]), "place: each place has its own random numbers; row i is chosen with place i"),
        (right[:1], "how many drafts are accepted: all that match, up to the first that does not"),
        (drafts, "the drafts: they are guesses; compare them with the model's tokens"),
    ]  # fmt: skip
    for wrong, hint in known:
        if wrong == got:
            return hint
    return "row i, which gives the token that follows the text and the first i drafts: does it equal draft i?"


def check_draw(draw_after_draft: Callable[..., Any]) -> None:
    """A draft is kept with its own probability; if not, another token takes its place, as probable as it was among the others."""
    for rng in rounds("draw", 80):
        weights = [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]
        probabilities = [weight / sum(weights) for weight in weights]
        token, u, v = rng.randrange(len(weights)), rng.randrange(1, 1009) / 1009, rng.randrange(1, 1009) / 1009
        shown = [round(p, 3) for p in probabilities]
        said = f"draw_after_draft({shown}, draft={token}, u={u:.4f}, v={v:.4f})."
        right = _draw(probabilities, token, u, v)
        with situation(said):
            got = draw_after_draft(list(probabilities), token, u, v)
        expect(said, "token", right, got, lambda: _find_draw_mistake(probabilities, token, u, v, right, got))  # noqa: B023


def _draw(probabilities: Row, token: int, u: float, v: float) -> int:
    if u < probabilities[token]:
        return token
    return _pick([0.0 if i == token else p for i, p in enumerate(probabilities)], v)


def _pick(weights: Row, v: float) -> int:
    total, below = sum(weights), 0.0
    for i, weight in enumerate(weights):
        below += weight
        if v * total < below:
            return i
    return len(weights) - 1


def _find_draw_mistake(probabilities: Row, token: int, u: float, v: float, right: int, got: Any) -> str:
    rest = [0.0 if i == token else p for i, p in enumerate(probabilities)]
    keeps = u < probabilities[token]
    if keeps and got != token:
        return f"when the draft is kept: if u is below its probability, {probabilities[token]:.4f}"
    if got == token:
        return "the other tokens: a draft that was rejected has no second chance, so its probability is 0 there"
    undivided = next((i for i, below in enumerate(accumulate(rest)) if v < below), None)
    if got == undivided:
        return "the probabilities of the others: divided by their sum, or v reaches beyond them"
    if got == _pick(rest, u):
        return "the second random number: u is used up, and is large where a draft is rejected"
    return "the draw: the first token at which the sum of the others' probabilities, divided by their total, exceeds v"


def check_gain(expected_tokens: Callable[..., Any], gain: Callable[..., Any]) -> None:
    """How many tokens a step yields on average, and what remains of that if it takes longer."""
    for rng in rounds("gain", 40):
        rate, count = rng.choice((0.0, 1.0, rng.randint(1, 99) / 100)), rng.randint(1, 8)
        said = f"expected_tokens({rate}, {count})."
        right = sum(rate**i for i in range(count + 1))
        mistakes = {
            "without the model's own token": right - 1,
            "what it would be if a later draft could be accepted after a rejected one": 1 + rate * count,
            "with one draft too many": right + rate ** (count + 1),
            "with one draft too few": right - rate**count,
            "without an end of the drafts": 1 / (1 - rate) if rate < 1 else 0.0,
        }
        known = {name: value for name, value in mistakes.items() if abs(value - right) > 1e-9}
        with situation(said):
            got = expected_tokens(rate, count)
        look = "the chances: one token for certain, a second if the first draft is accepted, a third if the second is, too"
        expect_number(said, "tokens per step", right, got, look, known)
        cost = rng.randint(100, 400) / 100
        said = f"gain({rate}, {count}, cost={cost})."
        with situation(said):
            got = gain(rate, count, cost)
        known = {
            "as if a step with drafts took no longer": right,
            "what comes of a product: a longer step is a loss": right * cost,
        }
        look = "tokens per step, divided by how many times as long a step takes"
        expect_number(said, "times as many tokens per second", right / cost, got, look, known)
