"""Inputs for the checks of lesson 01, and the definitions that their results are compared with, one row at a time in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minivllm.course.observations import fail, require
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SequenceData
from minivllm.viz.tokens import byte_alphabet
from minivllm.worker.sampler import SamplingRow

MARGIN = 1e-4
"""No probability in a check is as close as this to a limit, so that rounding decides nothing."""
Row = Sequence[float]


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token in a byte-level vocabulary."""
    token = tokenizer.hf_tokenizer.convert_ids_to_tokens(token_id)
    if token_id in tokenizer.hf_tokenizer.added_tokens_decoder:
        return str(token).encode()
    alphabet = byte_alphabet()
    return bytes(alphabet[character] for character in token)


def make_logits(rng: random.Random, num_rows: int, vocab_size: int, *, ties: bool = False) -> Tensor:
    """`[num_rows, vocab_size]`: multiples of 1/4 from -6 to 6, all different within a row unless ties are wanted."""
    steps = range(-24, 25)
    rows = [rng.choices(steps[20:28], k=vocab_size) if ties else rng.sample(steps, vocab_size) for _ in range(num_rows)]
    return torch.tensor(rows, dtype=torch.float32) / 4


def make_batch(rng: random.Random, **options: Any) -> Tensor:
    """The logits of one to five rows and a few tokens."""
    return make_logits(rng, rng.randint(1, 5), rng.randint(4, 9), **options)


def softmax(row: Row) -> list[float]:
    """The probabilities of a row of logits."""
    highest = max(row)
    weights = [math.exp(logit - highest) for logit in row]
    return [weight / sum(weights) for weight in weights]


def kept_by_top_k(row: Row, k: int) -> set[int]:
    """The `k` most likely tokens and any that tie with the last of them; all for 0 and -1."""
    if k <= 0 or k >= len(row):
        return set(range(len(row)))
    last = sorted(row, reverse=True)[k - 1]
    return {token for token, logit in enumerate(row) if logit >= last}


def kept_by_top_p(row: Row, p: float) -> set[int]:
    """The smallest set of most likely tokens whose probabilities reach `p`; for 1, all that have not been removed before."""
    if p >= 1:
        return {token for token, logit in enumerate(row) if logit > -math.inf}
    probs = softmax(row)
    order = sorted(range(len(row)), key=lambda token: -probs[token])
    sums = accumulate(probs[token] for token in order)
    return set(order[: 1 + next(place for place, total in enumerate(sums) if total >= p)])


def kept_by_min_p(row: Row, min_p: float) -> set[int]:
    """The tokens that are at least `min_p` times as likely as the most likely one."""
    probs = softmax(row)
    return {token for token, prob in enumerate(probs) if prob >= min_p * max(probs)}


def safe_top_p(rng: random.Random, row: Row) -> float:
    """A `p` that no sum of most likely probabilities comes close to."""
    return _far_from(rng, list(accumulate(sorted(softmax(row), reverse=True))))


def safe_min_p(rng: random.Random, row: Row) -> float:
    """A `min_p` that no ratio to the highest probability comes close to."""
    return _far_from(rng, [math.exp(logit - max(row)) for logit in row])


def _far_from(rng: random.Random, numbers: list[float]) -> float:
    while True:
        limit = round(rng.uniform(0.02, 0.97), 3)
        if all(abs(number - limit) > MARGIN for number in numbers):
            return limit


def make_row(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, seed: int = 0, index: int = 0, eos: Sequence[int] = ()
) -> SamplingRow:  # fmt: skip
    """A row of a batch, as the engine's model runner makes it."""
    request = EngineCoreRequest("r", list(prompt), params, max_num_tokens=1000, eos_token_ids=tuple(eos), seed=seed)
    known = list(output) if params.has_penalties else []  # the engine sends it only where it is needed
    seq = SequenceData(request, 0, index, [0], 0, [0], len(output), known, num_samples=1, num_drafts=0, is_decode=True)
    return SamplingRow(seq, index)


def call(function: Callable[..., Any], logits: Tensor, *arguments: Any) -> Tensor:
    """Call a learner's function. It must return a new tensor of the same shape and leave its input unchanged."""
    name, before = getattr(function, "__name__", "it"), logits.clone()
    try:
        result = function(logits, *arguments)
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError) as error:  # torch's errors, which do not name the input
        given = ", ".join(show(argument) for argument in arguments)
        fail(
            f"{name}, given {len(logits)} rows of {logits.shape[1]} logits and {given}, raised {error!r}. Look at which of these values it cannot handle yet."
        )
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


def show(values: Any) -> str:
    """Numbers for a message, with only as many digits as a reader needs."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple, set)):
        return f"[{', '.join(show(value) for value in (sorted(values) if isinstance(values, set) else values))}]"
    return f"{values:.4g}" if isinstance(values, float) else str(values)


def check_kept(case: str, row: Tensor, result: Tensor, wanted: set[int], hint: Callable[[set[int]], str]) -> None:
    """Exactly the wanted tokens remain in a row, with their logits unchanged. `hint` says where to look, given those that remain."""
    kept = {token for token, logit in enumerate(result.tolist()) if logit != -math.inf}
    require(sorted(wanted), sorted(kept), lambda: f"{case}, of a row of logits {show(row)}: expected tokens {show(wanted)} to stay, but "
            f"{show(kept) if kept else 'none'} did. Look at {hint(kept)}.")  # fmt: skip
    for token, before, after in zip(range(len(row)), row.tolist(), result.tolist(), strict=True):
        if token in wanted:
            require(before, after, f"{case}: expected the logit of token {token} to stay {before:g}, because it is not removed, but it became "
                    f"{after:g}. Look at what is written where: only removed tokens change, to minus infinity.")  # fmt: skip
