"""The checks of lesson 01 for what is done to the logits of a batch, in which every row has different parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.course.observations import fail, require, rounds, seeded
from minivllm.sampling_params import SamplingParams
from minivllm.worker import sampler as package

Function = Callable[..., Tensor]
_ROUNDS = 40


def make_logits(rng: random.Random, num_rows: int, vocab_size: int, *, ties: bool = False) -> Tensor:
    """`[num_rows, vocab_size]`: multiples of 1/4 from -6 to 6, all different within a row unless ties are wanted."""
    steps = range(-24, 25)
    rows = [rng.choices(steps[20:28], k=vocab_size) if ties else rng.sample(steps, vocab_size) for _ in range(num_rows)]
    return torch.tensor(rows, dtype=torch.float32) / 4


def make_batch(rng: random.Random, **options: Any) -> Tensor:
    """The logits of one to five rows and a few tokens."""
    return make_logits(rng, rng.randint(1, 5), rng.randint(4, 9), **options)


def show(values: Any) -> str:
    """Numbers for a message, with only as many digits as a reader needs."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple, set)):
        return f"[{', '.join(show(value) for value in (sorted(values) if isinstance(values, set) else values))}]"
    return f"{values:.4g}" if isinstance(values, float) else str(values)


def call(function: Function, logits: Tensor, *arguments: Any) -> Tensor:
    """Call a learner's function. It must return a new tensor of the same shape and leave its input unchanged."""
    name, before = getattr(function, "__name__", "it"), logits.clone()
    try:
        result = function(logits, *arguments)
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError) as error:  # torch's errors, which do not name the input
        given = f"{len(logits)} rows of {logits.shape[1]} logits and {', '.join(show(argument) for argument in arguments)}"
        fail(f"{name}, given {given}, raised {error!r}. Look at which of these values it cannot handle yet.")
    if not isinstance(result, Tensor):
        fail(f"{name} must return a tensor, but returned {result!r}. Look at its last line.")
    sizes, got = list(logits.shape), list(result.shape)
    require(sizes, got, f"{name} was given logits of shape {sizes} and must return the same shape, but returned {got}. "
            "Parameters come as [rows]: make a column of them, [rows, 1], where each row of logits needs its own.")  # fmt: skip
    require(True, torch.equal(logits, before), f"{name} changed the logits that it was given; expected a new tensor. "
            "Look for an assignment into them, or a method that ends in _.")  # fmt: skip
    require(False, bool(torch.isnan(result).any()), lambda: f"{name} returned NaN (not a number) for logits {show(before)} and {arguments}. "
            "Look for a division by 0, or a difference of infinities.")  # fmt: skip
    return result


def tokens_of(row: Tensor) -> set[int]:
    """The tokens of a row that have not been removed."""
    return {token for token, logit in enumerate(row.tolist()) if logit != -math.inf}


def check_kept(case: str, row: Tensor, result: Tensor, wanted: set[int], hint: Callable[[set[int]], str]) -> None:
    """Exactly the wanted tokens remain in a row, with their logits unchanged. `hint` says where to look, given those that remain."""
    kept = tokens_of(result)
    require(sorted(wanted), sorted(kept), lambda: f"{case}, of a row of logits {show(row)}: expected tokens {show(wanted)} to stay, but "
            f"{show(kept) if kept else 'none'} did. Look at {hint(kept)}.")  # fmt: skip
    for token in wanted:
        before, after = float(row[token]), float(result[token])
        require(before, after, f"{case}: expected the logit of token {token} to stay {before:g}, because it is not removed, but it became "
                f"{after:g}. Look at what is written where: only removed tokens change, to minus infinity.")  # fmt: skip


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
            wanted = package.apply_penalties(logits[row], prompt, output, repetition, presence, frequency).tolist()
            for token, got in enumerate(result[row].tolist()):
                in_output = output.count(token)
                require(wanted[token], got,
                    f"apply_penalties, row {row}, with repetition {repetition:g}, presence {presence:g} and frequency {frequency:g}: token "
                    f"{token} has the logit {before[token]:g} and occurs {prompt.count(token)}× in the prompt and {in_output}× in the output. "
                    f"Expected {wanted[token]:g}, got {got:g}. Look at {_penalty_hint(only, before[token], got, repetition, in_output)}.",
                )  # fmt: skip


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


# -- filters ---------------------------------------------------------------------------------------------------------


def far_from(rng: random.Random, numbers: Tensor) -> float:
    """A limit that none of the numbers comes close to, so that rounding decides nothing."""
    while True:
        limit = round(rng.uniform(0.02, 0.97), 3)
        if all(abs(number - limit) > 1e-4 for number in numbers.tolist()):
            return limit


def _check_filter(function: Function, name: str, logits: Tensor, values: list[Any], hint: Callable[..., str]) -> None:
    """A function that removes tokens, given a parameter for each row. `hint` gets the row, its parameter, and what should remain and does."""
    result = call(function, logits, torch.tensor(values))
    for number, (row, value) in enumerate(zip(logits, values, strict=True)):
        wanted = tokens_of(package.filter_logits(row[None], [SamplingParams(**{name: value})])[0])
        case = f"keep_{name}, {name} = {value:g} in row {number} of {len(values)}"
        check_kept(case, row, result[number], wanted, partial(hint, row, value, wanted))


def _min_p_hint(row: Tensor, min_p: float, wanted: set[int], kept: set[int]) -> str:
    highest = row.softmax(dim=0).max()
    return f"the limit, which is min_p times the highest probability of that row, here {highest:.3f}, not of the batch"


def check_min_p(keep_min_p: Function) -> None:
    """Tokens less likely than `min_p` times the most likely one of their row are removed."""
    for rng in rounds("min-p", _ROUNDS):
        logits = make_batch(rng)
        ratios = (logits - logits.amax(dim=1, keepdim=True)).exp()
        shares = [rng.choice((0.0, far_from(rng, row), far_from(rng, row))) for row in ratios]
        _check_filter(keep_min_p, "min_p", logits, shares, _min_p_hint)


def _top_k_hint(row: Tensor, k: int, wanted: set[int], kept: set[int]) -> str:
    if k <= 0 or k >= len(row):
        return "top_k = 0, -1 and more than there are tokens: all stay"
    return "ties: tokens as likely as the last one that stays must stay, too" if kept < wanted else "each row's own k"


def check_top_k(keep_top_k: Function) -> None:
    """The k largest of each row stay, with ties at the k-th place."""
    for number, rng in enumerate(rounds("top-k", 2 * _ROUNDS)):
        logits = make_batch(rng, ties=number % 2 == 1)
        size = logits.shape[1]
        choices = (0, -1) if number % 7 == 0 else (0, -1, 1, 2, 3, size - 1, size, size + 5)
        _check_filter(keep_top_k, "top_k", logits, [rng.choice(choices) for _ in logits], _top_k_hint)


def _top_p_hint(row: Tensor, p: float, wanted: set[int], kept: set[int]) -> str:
    back = "how the decision goes back from the sorted row to the tokens"
    if p == 1:
        return "top_p = 1, which keeps all"
    if wanted - kept == {min(wanted, key=lambda token: row[token])} and kept <= wanted:
        return f"the token that makes the sum cross top_p: it stays, so at least one does; and at {back}"
    return f"what is summed (the most likely first, each row by itself), and {back}"


def check_top_p(keep_top_p: Function) -> None:
    """The smallest set that reaches p stays, the token that crosses it included."""
    for number, rng in enumerate(rounds("top-p", 2 * _ROUNDS)):
        logits = make_batch(rng)
        if number % 3 == 0:  # minus infinity, as an earlier filter leaves it
            logits[:, rng.randrange(logits.shape[1])] = -math.inf
        sums = logits.softmax(dim=1).sort(dim=1, descending=True).values.cumsum(dim=1)
        limits = [rng.choice((1.0, *(far_from(rng, row) for _ in range(3)))) for row in sums]
        _check_filter(keep_top_p, "top_p", logits, limits, _top_p_hint)
    many = 3 * torch.randn(2, 50_000, generator=torch.Generator().manual_seed(seeded("many").getrandbits(32)))
    removed = int(torch.isinf(call(keep_top_p, many, torch.ones(2))).sum())
    require(0, removed, f"keep_top_p, top_p = 1 in both rows of 50,000 random logits: expected all tokens to stay, but {removed} were removed. "
            "Look at top_p = 1 once more: the rounded sum reaches 1 before the last token, so it must not decide.")  # fmt: skip
