"""The checks of lesson 01 for what is done to the logits of a batch, in which every row has different parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_01.cases import (
    Row,
    call,
    check_kept,
    kept_by_min_p,
    kept_by_top_k,
    kept_by_top_p,
    make_batch,
    make_logits,
    safe_min_p,
    safe_top_p,
    show,
    softmax,
)
from minivllm.course.observations import require, rounds, seeded

Function = Callable[..., Tensor]
_ROUNDS = 40


def check_forbid_stops(forbid_stops: Function) -> None:
    """Rows with fewer than `min_tokens` output tokens cannot end."""
    for rng in rounds("forbid", _ROUNDS):
        logits = make_batch(rng)
        everything = set(range(logits.shape[1]))
        stops = [rng.sample(sorted(everything), rng.randint(0, 3)) for _ in logits]
        min_tokens = [rng.choice((0, 1, 3, 6)) for _ in logits]
        num_outputs = [rng.choice((0, minimum, max(0, minimum - 1), minimum + 2)) for minimum in min_tokens]
        result = call(forbid_stops, logits, stops, num_outputs, min_tokens)
        for row, (ends, length, least) in enumerate(zip(stops, num_outputs, min_tokens, strict=True)):
            wanted = everything - set(ends) if length < least else everything
            case = f"forbid_stops, for a row with min_tokens = {least}, {length} output tokens so far and stop tokens {ends}"
            check_kept(case, logits[row], result[row], wanted, lambda kept: "when a text is still too short to end")


def check_penalties(apply_penalties: Function) -> None:
    """Repetition over prompt and output, presence and frequency over the output, each by its definition."""
    for number, rng in enumerate(rounds("penalties", 3 * _ROUNDS)):
        logits = make_batch(rng)
        prompts, outputs = (
            [rng.choices(range(logits.shape[1]), k=rng.choice(lengths)) for _ in logits]
            for lengths in ((1, 2, 3, 4), (0, 1, 3, 6))
        )
        kinds = ((1.0, 2.0, 4.0, 0.5), (0.0, 0.5, -0.5), (0.0, 0.25, -1.0))
        only = min(3, number // 25)  # first one kind of penalty at a time, so that the message can name it
        values = [[rng.choice(kind) if only in (i, 3) else kind[0] for _ in logits] for i, kind in enumerate(kinds)]
        result = call(apply_penalties, logits, prompts, outputs, *(torch.tensor(value) for value in values))
        for row, (repetition, presence, frequency) in enumerate(zip(*values, strict=True)):
            before, prompt, output = logits[row].tolist(), prompts[row], outputs[row]
            wanted = penalized(before, prompt, output, repetition, presence, frequency)
            for token, got in enumerate(result[row].tolist()):
                in_output = output.count(token)
                require(wanted[token], got,
                    f"apply_penalties, row {row}, with repetition {repetition:g}, presence {presence:g} and frequency {frequency:g}: token "
                    f"{token} has the logit {before[token]:g} and occurs {prompt.count(token)}× in the prompt and {in_output}× in the output. "
                    f"Expected {wanted[token]:g}, got {got:g}. Look at {_penalty_hint(only, before[token], got, repetition, in_output)}.",
                )  # fmt: skip


def penalized(
    row: Row, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """A row of logits after the three penalties."""
    result = list(row)
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token, times in Counter(output).items():
        result[token] -= presence + frequency * times
    return result


def _penalty_hint(kind: int, logit: float, got: float, repetition: float, in_output: int) -> str:
    if kind == 0:
        if logit < 0 and got == logit / repetition:
            return "negative logits: dividing them makes a token likelier, so they are multiplied"
        return "which tokens are repeated: all in prompt and output, each once, however often it occurs"
    if kind == 3:
        return "the order: first repetition, then presence and frequency are subtracted; and each row has its own penalties"
    if not in_output:
        return "which tokens count: only the output's, not the prompt's"
    if kind == 1:
        return "how often presence is subtracted: once, however often the token occurs"
    return "how often frequency is subtracted: for each time; and each row has its own"


def check_temperature(apply_temperature: Function) -> None:
    """Each row is divided by its own temperature; rows with 0 stay."""
    for rng in rounds("temperature", _ROUNDS):
        num_rows = rng.randint(1, 5)
        logits = make_logits(rng, num_rows, num_rows if rng.random() < 0.3 else rng.randint(4, 9))
        temperatures = [rng.choice((0.0, 0.25, 0.5, 1.0, 2.0, 4.0)) for _ in range(num_rows)]
        result = call(apply_temperature, logits, torch.tensor(temperatures))
        for row, temperature in enumerate(temperatures):
            wanted, got = (logits[row] / (temperature or 1.0)).tolist(), result[row].tolist()
            look = "what divides each row" if temperature else "rows with temperature 0: they are greedy and stay as they are"
            require(wanted, got, f"apply_temperature, row {row} of {num_rows} with temperature {temperature:g} and logits {show(logits[row])}: "
                    f"expected {show(wanted)}, got {show(got)}. Look at {look}.")  # fmt: skip


def _check_filter(
    function: Function, logits: Tensor, name: str, values: list[Any], kept_by: Callable[[Row, Any], set[int]], hint: Callable[..., str]
) -> None:  # fmt: skip
    """A function that removes tokens, given a parameter for each row. `hint` gets the row, its parameter, and what should remain and does."""
    result = call(function, logits, torch.tensor(values))
    for number, value in enumerate(values):
        row = logits[number].tolist()
        wanted = kept_by(row, value)
        case = f"keep_{name}, {name} = {value:g} in row {number} of {len(values)}"
        check_kept(case, logits[number], result[number], wanted, partial(hint, row, value, wanted))


def check_min_p(keep_min_p: Function) -> None:
    """Tokens less likely than `min_p` times the most likely one of their row are removed."""

    def hint(row: Row, min_p: float, wanted: set[int], kept: set[int]) -> str:
        return (
            f"the limit, which is min_p times the highest probability of that row, here {max(softmax(row)):.3f}, not of the batch"
        )

    for rng in rounds("min-p", _ROUNDS):
        logits = make_batch(rng)
        shares = [rng.choice((0.0, safe_min_p(rng, row), safe_min_p(rng, row))) for row in logits.tolist()]
        _check_filter(keep_min_p, logits, "min_p", shares, kept_by_min_p, hint)


def check_top_k(keep_top_k: Function) -> None:
    """The k largest of each row stay, with ties at the k-th place."""

    def hint(row: Row, k: int, wanted: set[int], kept: set[int]) -> str:
        if k <= 0 or k >= len(row):
            return "top_k = 0, -1 and more than there are tokens: all stay"
        return "ties: tokens as likely as the last one that stays must stay, too" if kept < wanted else "each row's own k"

    for number, rng in enumerate(rounds("top-k", 2 * _ROUNDS)):
        logits = make_batch(rng, ties=number % 2 == 1)
        size = logits.shape[1]
        choices = (0, -1) if number % 7 == 0 else (0, -1, 1, 2, 3, size - 1, size, size + 5)
        _check_filter(keep_top_k, logits, "top_k", [rng.choice(choices) for _ in logits], kept_by_top_k, hint)


def check_top_p(keep_top_p: Function) -> None:
    """The smallest set that reaches p stays, the token that crosses it included."""
    for number, rng in enumerate(rounds("top-p", 2 * _ROUNDS)):
        logits = make_batch(rng)
        if number % 3 == 0:  # minus infinity, as an earlier filter leaves it
            logits[:, rng.randrange(logits.shape[1])] = -math.inf
        limits = [rng.choice((1.0, *(safe_top_p(rng, row) for _ in range(3)))) for row in logits.tolist()]
        _check_filter(keep_top_p, logits, "top_p", limits, kept_by_top_p, _top_p_hint)
    many = 3 * torch.randn(2, 50_000, generator=torch.Generator().manual_seed(seeded("many").getrandbits(32)))
    removed = int(torch.isinf(call(keep_top_p, many, torch.ones(2))).sum())
    require(0, removed, f"keep_top_p, top_p = 1 in both rows of 50,000 random logits: expected all tokens to stay, but {removed} were removed. "
            "Look at top_p = 1 once more: the rounded sum reaches 1 before the last token, so it must not decide.")  # fmt: skip


def _top_p_hint(row: Row, p: float, wanted: set[int], kept: set[int]) -> str:
    back = "how the decision goes back from the sorted row to the tokens"
    if p == 1:
        return "top_p = 1, which keeps all"
    if wanted - kept == {min(wanted, key=row.__getitem__)} and kept <= wanted:
        return f"the token that makes the sum cross top_p: it stays, so at least one does; and at {back}"
    return f"what is summed (the most likely first, each row by itself), and {back}"
