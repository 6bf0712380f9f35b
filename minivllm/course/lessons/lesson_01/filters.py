"""The checks of lesson 01 for what is done to the logits of a batch, in which every row has different parameters."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_01.cases import (
    call,
    check_kept,
    kept_by_min_p,
    kept_by_top_k,
    kept_by_top_p,
    make_logits,
    safe_min_p,
    safe_top_p,
    show,
    softmax,
)

Function = Callable[..., Tensor]
_ROUNDS = 40


def check_forbid_stops(forbid_stops: Function) -> None:
    """Rows with fewer than `min_tokens` output tokens cannot end."""
    rng = random.Random(10)
    for _ in range(_ROUNDS):
        num_rows, vocab_size = rng.randint(1, 5), rng.randint(5, 9)
        logits = make_logits(rng, num_rows, vocab_size)
        stops = [rng.sample(range(vocab_size), rng.randint(0, 3)) for _ in range(num_rows)]
        min_tokens = [rng.choice((0, 1, 3, 6)) for _ in range(num_rows)]
        num_outputs = [rng.choice((0, minimum, max(0, minimum - 1), minimum + 2)) for minimum in min_tokens]
        result = call(forbid_stops, logits, stops, num_outputs, min_tokens)
        for row in range(num_rows):
            too_short = num_outputs[row] < min_tokens[row]
            wanted = set(range(vocab_size)) - (set(stops[row]) if too_short else set())
            case = f"for a row with min_tokens = {min_tokens[row]}, {num_outputs[row]} output tokens so far and stop tokens {stops[row]}"
            check_kept("forbid_stops", logits[row], result[row], wanted, case, "when a text is still too short to end")


def check_penalties(apply_penalties: Function) -> None:
    """Repetition over prompt and output, presence and frequency over the output, each by its definition."""
    rng = random.Random(11)
    for number in range(3 * _ROUNDS):
        num_rows, vocab_size = rng.randint(1, 4), rng.randint(6, 9)
        logits = make_logits(rng, num_rows, vocab_size)
        prompts = [rng.choices(range(vocab_size), k=rng.randint(1, 4)) for _ in range(num_rows)]
        outputs = [rng.choices(range(vocab_size), k=rng.choice((0, 1, 3, 6))) for _ in range(num_rows)]
        kinds = ((1.0, 2.0, 4.0, 0.5), (0.0, 0.5, -0.5), (0.0, 0.25, -1.0))
        only = min(3, number // 25)  # first one kind of penalty at a time, so that the message can name it
        values = [[rng.choice(kind) if only in (i, 3) else kind[0] for _ in range(num_rows)] for i, kind in enumerate(kinds)]
        result = call(apply_penalties, logits, prompts, outputs, *(torch.tensor(value) for value in values))
        for row in range(num_rows):
            repetition, presence, frequency = (value[row] for value in values)
            wanted = penalized(logits[row].tolist(), prompts[row], outputs[row], repetition, presence, frequency)
            for token in range(vocab_size):
                in_prompt, in_output = prompts[row].count(token), outputs[row].count(token)
                assert result[row, token] == wanted[token], (
                    f"apply_penalties, row {row}, with repetition {repetition:g}, presence {presence:g} and frequency {frequency:g}: token "
                    f"{token} has the logit {logits[row, token]:g} and occurs {in_prompt}× in the prompt and {in_output}× in the output. "
                    f"Expected {wanted[token]:g}, got {result[row, token]:g}. Look at {_penalty_hint(only, float(logits[row, token]), float(result[row, token]), repetition, in_output)}."
                )


def penalized(
    row: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
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
    rng = random.Random(12)
    for _ in range(_ROUNDS):
        num_rows = rng.randint(1, 5)
        logits = make_logits(rng, num_rows, num_rows if rng.random() < 0.3 else rng.randint(4, 9))
        temperatures = [rng.choice((0.0, 0.25, 0.5, 1.0, 2.0)) for _ in range(num_rows)]
        result = call(apply_temperature, logits, torch.tensor(temperatures))
        for row, temperature in enumerate(temperatures):
            wanted = logits[row] / (temperature or 1.0)
            assert torch.equal(result[row], wanted), (
                f"apply_temperature, row {row} of {num_rows} with temperature {temperature:g} and logits {show(logits[row])}: expected "
                f"{show(wanted)}, got {show(result[row])}. Look at "
                + (
                    "rows with temperature 0: they are greedy and stay as they are."
                    if not temperature
                    else "what divides each row."
                )
            )


def check_min_p(keep_min_p: Function) -> None:
    """Tokens less likely than `min_p` times the most likely one of their row are removed."""
    rng = random.Random(13)
    for _ in range(_ROUNDS):
        logits, num_rows = _logits(rng)
        shares = [rng.choice((0.0, safe_min_p(rng, row), safe_min_p(rng, row))) for row in logits.tolist()]
        result = call(keep_min_p, logits, torch.tensor(shares))
        for row in range(num_rows):
            probs = softmax(logits[row].tolist())
            case = f"min_p = {shares[row]:g} in row {row}, whose most likely token has the probability {max(probs):.3f}"
            hint = "the limit, which is min_p times the highest probability of that row, not of the batch"
            check_kept("keep_min_p", logits[row], result[row], kept_by_min_p(logits[row].tolist(), shares[row]), case, hint)


def check_top_k(keep_top_k: Function) -> None:
    """The k largest of each row stay, with ties at the k-th place."""
    rng = random.Random(14)
    for number in range(2 * _ROUNDS):
        logits, num_rows = _logits(rng, ties=number % 2 == 1)
        vocab_size = logits.shape[1]
        counts = [rng.choice((0, -1, 1, 2, 3, vocab_size - 1, vocab_size, vocab_size + 5)) for _ in range(num_rows)]
        if number % 7 == 0:
            counts = [rng.choice((0, -1)) for _ in counts]
        result = call(keep_top_k, logits, torch.tensor(counts))
        for row, k in enumerate(counts):
            wanted = kept_by_top_k(logits[row].tolist(), k)
            kept = {token for token, logit in enumerate(result[row].tolist()) if logit != -math.inf}
            if k <= 0 or k >= vocab_size:
                hint = "top_k = 0, -1 and more than there are tokens: all stay"
            elif kept < wanted:
                hint = "ties: tokens as likely as the last one that stays must stay, too"
            else:
                hint = "each row's own k"
            check_kept("keep_top_k", logits[row], result[row], wanted, f"top_k = {k} in row {row} of {num_rows}", hint)


def check_top_p(keep_top_p: Function) -> None:
    """The smallest set that reaches p stays, the token that crosses it included."""
    rng = random.Random(15)
    for number in range(2 * _ROUNDS):
        logits, num_rows = _logits(rng)
        if number % 3 == 0:  # minus infinity, as an earlier filter leaves it
            logits[:, rng.randrange(logits.shape[1])] = -math.inf
        limits = [rng.choice((1.0, safe_top_p(rng, row), safe_top_p(rng, row), safe_top_p(rng, row))) for row in logits.tolist()]
        result = call(keep_top_p, logits, torch.tensor(limits))
        for row, p in enumerate(limits):
            values = logits[row].tolist()
            wanted = kept_by_top_p(values, p)
            if p == 1.0:
                wanted = {token for token in wanted if values[token] != -math.inf}
            kept = {token for token, logit in enumerate(result[row].tolist()) if logit != -math.inf}
            hint = "what is summed (the most likely first, each row by itself), and how the decision goes back from the sorted row to the tokens"
            if p == 1:
                hint = "top_p = 1, which keeps all"
            elif wanted - kept == {min(wanted, key=values.__getitem__)} and kept <= wanted:
                hint = (
                    "the token that makes the sum cross top_p: it stays, so at least one does; and at how the decision goes back from the "
                    "sorted row to the tokens"
                )
            check_kept("keep_top_p", logits[row], result[row], wanted, f"top_p = {p:g} in row {row} of {num_rows}", hint)
    many = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(15))
    removed = int(torch.isinf(call(keep_top_p, many, torch.ones(2))).sum())
    assert not removed, (
        f"keep_top_p, top_p = 1 in both rows of 50,000 random logits: expected all tokens to stay, but {removed} were removed. Look at top_p = 1 "
        f"once more: the rounded sum reaches 1 before the last token, so it must not decide."
    )


def _logits(rng: random.Random, **options: Any) -> tuple[Tensor, int]:
    """Logits of a batch of random size, and its number of rows."""
    num_rows = rng.randint(1, 5)
    return make_logits(rng, num_rows, rng.randint(4, 9), **options), num_rows
