"""Inputs for the checks of lesson 01, and the definitions that their results are compared with, one row at a time in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    """The smallest set of most likely tokens whose probabilities reach `p`."""
    if p >= 1:
        return set(range(len(row)))
    kept, total, probs = set(), 0.0, softmax(row)
    for token in sorted(range(len(row)), key=lambda token: -probs[token]):
        kept.add(token)
        total += probs[token]
        if total >= p:
            break
    return kept


def kept_by_min_p(row: Row, min_p: float) -> set[int]:
    """The tokens that are at least `min_p` times as likely as the most likely one."""
    probs = softmax(row)
    return {token for token, prob in enumerate(probs) if prob >= min_p * max(probs)}


def safe_top_p(rng: random.Random, row: Row) -> float:
    """A `p` that no sum of most likely probabilities comes close to."""
    probs = sorted(softmax(row), reverse=True)
    sums = [sum(probs[: count + 1]) for count in range(len(probs))]
    while True:
        p = round(rng.uniform(0.05, 0.99), 3)
        if all(abs(total - p) > MARGIN for total in sums):
            return p


def safe_min_p(rng: random.Random, row: Row) -> float:
    """A `min_p` that no ratio to the highest probability comes close to."""
    highest = max(row)
    ratios = [math.exp(logit - highest) for logit in row]
    while True:
        min_p = round(rng.uniform(0.01, 0.9), 3)
        if all(abs(ratio - min_p) > MARGIN for ratio in ratios):
            return min_p


def make_row(
    params: SamplingParams,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    index: int = 0,
    eos: Sequence[int] = (),
) -> SamplingRow:
    """A row of a batch, as the engine's model runner makes it."""
    request = EngineCoreRequest("r", list(prompt), params, max_num_tokens=1000, eos_token_ids=tuple(eos), seed=seed)
    known = list(output) if params.has_penalties else []  # the engine sends it only where it is needed
    seq = SequenceData(
        request, 0, index, [0], 0, [0], len(output), known, num_samples=1, num_drafts=0, is_decode=True
    )  # fmt: skip
    return SamplingRow(seq, index)


def call(function: Callable[..., Any], logits: Tensor, *arguments: Any) -> Tensor:
    """Call a learner's function, and assert that it returns a new tensor of the same shape and leaves its input unchanged."""
    name, before = getattr(function, "__name__", "it"), logits.clone()
    try:
        result = function(logits, *arguments)
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError) as error:  # torch's errors, which do not name the input
        given = ", ".join(show(argument) for argument in arguments)
        raise AssertionError(
            f"{name}, given {len(logits)} rows of {logits.shape[1]} logits and {given}, raised {error!r}. Look at which of these values it cannot handle yet."
        ) from error
    assert isinstance(result, Tensor), f"{name} must return a tensor, but returned {result!r}. Look at its last line."
    assert result.shape == logits.shape, (
        f"{name} was given logits of shape {list(logits.shape)} and must return the same shape, but returned {list(result.shape)}. "
        f"Parameters come as [rows]: make a column of them, [rows, 1], where each row of logits needs its own."
    )
    assert torch.equal(logits, before), (
        f"{name} changed the logits that it was given; expected a new tensor. Look for an assignment into them, or a method that ends in _."
    )
    assert not torch.isnan(result).any(), (
        f"{name} returned NaN (not a number) for logits {show(before)} and {arguments}. Look for a division by 0, or a difference of infinities."
    )
    return result


def show(values: Any) -> str:
    """Numbers for a message, with only as many digits as a reader needs."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple, set)):
        return f"[{', '.join(show(value) for value in (sorted(values) if isinstance(values, set) else values))}]"
    if isinstance(values, float):
        return f"{values:.4g}"
    return str(values)


def check_kept(name: str, row: Tensor, result: Tensor, wanted: set[int], case: str, hint: str) -> None:
    """Assert that exactly the wanted tokens remain in a row, with their logits unchanged."""
    kept = {token for token, logit in enumerate(result.tolist()) if logit != -math.inf}
    assert kept == wanted, (
        f"{name}, {case}, of a row of logits {show(row)}: expected tokens {show(wanted)} to stay, but {show(kept) if kept else 'none'} did. "
        f"Look at {hint}."
    )
    for token in wanted:
        assert result[token] == row[token], (
            f"{name}, {case}: expected the logit of token {token} to stay {row[token]:g}, because it is not removed, but it became "
            f"{result[token]:g}. Look at what is written where: only removed tokens change, to minus infinity."
        )
