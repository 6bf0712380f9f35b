"""Sampling in plain torch: the part of `reference` that chooses tokens.

All of a row's filters keep the tokens with the largest logits, so together they are one threshold; the draw is a race.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels import checks

MIN_LOGIT = float("-inf")
IN_PROMPT = 2**30
"""Added to a token's count if the prompt has it."""


@checks.PENALIZE
def penalize(
    logits: Tensor, rows: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Make tokens that have occurred less likely, in place: `worker.sampler.apply_penalties` for several rows.

    Args:
        logits: `[num_rows, vocab_size]`, float32.
        rows: `[penalized]`, int64: the rows to change, each once.
        counts: `[num_slots, vocab_size]`, int32: how often each token has occurred in a sequence's output, and `IN_PROMPT` more if it has in
            the prompt.
        slots: `[penalized]`, int64: where the counts of each row's sequence are.
        repetition, presence, frequency: `[penalized]`, float32: see `SamplingParams`.
    """
    repetition, presence, frequency = (column.unsqueeze(1) for column in (repetition, presence, frequency))
    values, of_rows = logits.index_select(0, rows), counts.index_select(0, slots)
    values = torch.where(of_rows != 0, torch.where(values > 0, values / repetition, values * repetition), values)
    times = of_rows % IN_PROMPT
    logits.index_copy_(0, rows, torch.where(times > 0, values - (presence + frequency * times), values))


@checks.DRAW
def draw(
    logits: Tensor, temperature: Tensor, keys: Tensor, thresholds: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """One token per row from the distribution that `logits / temperature` describe; with a temperature of 0, the most likely one.

    A race, as `worker.sampler.draw` describes it: a token with probability p arrives after the time `noise / p`. Here it is run on a logarithmic scale,
    `logit / temperature - log(noise)`, where the first to arrive has the highest score. The sum of all probabilities moves every score alike, so it
    is not needed. With the same `random_uniform` the winner is the same, unless two arrive so close that rounding decides.

    Args:
        logits: `[num_rows, vocab_size]`. A NaN never wins.
        temperature: `[num_rows]`, float32.
        keys: `[num_rows]`, to the random numbers; those of greedy rows are not used.
        thresholds: `[num_rows]`, float32: only tokens with at least this logit take part; None for all.
        first: The id of the first token, for its random number, where logits are those of a part of the vocabulary.

    Returns:
        The winners' scores, `[num_rows]`, float32, and their places in the rows, int64. Of equals, the first wins. If none may win, the score is
        minus infinity, and the place is one that exists.
    """
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), MIN_LOGIT)
    if thresholds is not None:
        scores = scores.masked_fill(scores < thresholds.unsqueeze(1), MIN_LOGIT)
    is_drawn = temperature > 0
    noise = random_uniform(keys, logits.shape[1], first).neg_().log1p_().neg_()
    drawn = scores / torch.where(is_drawn, temperature, 1.0).unsqueeze(1) - noise.log_()
    best = torch.where(is_drawn.unsqueeze(1), drawn, scores).max(dim=1)
    return best.values, best.indices


@checks.FILTER_THRESHOLDS
def filter_thresholds(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that each row's filters keep: min-p, then top-k of what is left, then top-p of what is left. What ties with it is kept.

    Args:
        logits: `[num_rows, vocab_size]`.
        temperature: `[num_rows]`, float32; above 0 where a filter is used.
        min_p: `[num_rows]`, float32: keep tokens at least this many times as likely as the most likely one; 0 keeps all.
        top_k: `[num_rows]`: keep so many; `vocab_size` keeps all.
        top_p: `[num_rows]`, float32: keep the smallest set of most likely tokens whose probabilities reach it; 1 keeps all.

    Returns:
        `[num_rows]`, float32; minus infinity for a row without a filter. Of a row with filters it is finite: a logit of minus infinity is never
        kept.
    """
    logits = logits.float()
    ordered = logits.masked_fill(logits.isnan(), MIN_LOGIT).sort(dim=1, descending=True).values
    highest = ordered[:, :1]
    temperature, min_p, top_k, top_p = (column.unsqueeze(1) for column in (temperature, min_p, top_k, top_p))
    kept = (highest + temperature * min_p.log()).clamp_(min=torch.finfo(torch.float32).min)
    last = ordered.gather(1, top_k.clamp(max=logits.shape[1]) - 1)
    kept = torch.where(top_k < logits.shape[1], kept.maximum(last), kept)
    weights = ((ordered - highest) / torch.where(top_p < 1, temperature, 1.0)).exp().masked_fill(ordered < kept, 0.0)
    before = weights.cumsum(dim=1) - weights
    needed = (before < top_p * weights.sum(dim=1, keepdim=True)) & (weights > 0)
    last = ordered.gather(1, needed.sum(dim=1, keepdim=True).clamp(min=1) - 1)
    kept = torch.where(top_p < 1, kept.maximum(last), kept)
    has_filter = (min_p > 0) | (top_k < logits.shape[1]) | (top_p < 1)
    return torch.where(has_filter, kept, MIN_LOGIT).squeeze(1)


def random_uniform(keys: Tensor, size: int, first: int = 0) -> Tensor:
    """Random numbers between 0 and 1, for each row those of its key: the same in any batch and on any device.

    Number i of a row is a hash of the key and i.

    Args:
        keys: `[rows]`, integers of 32 bits.
        size: How many numbers each row gets.
        first: The number of the first of them; a rank that has a part of the vocabulary needs only the numbers of its tokens.

    Returns:
        `[rows, size]`, float32, above 0 and below 1. The small ones are told apart as finely as the large ones: they may be
        as small as 2**-33.
    """
    numbers = torch.arange(first, first + size, dtype=torch.int32, device=keys.device)
    bits = mix(mix(numbers) + keys.to(torch.int32).unsqueeze(1))
    uniform = bits.float().add_(0.5).mul_(2.0**-32)  # from -1/2 to 1/2, and finest about 0
    uniform -= uniform.floor()
    return uniform.clamp_(max=1 - 2.0**-24)


def mix(bits: Tensor) -> Tensor:
    """Make each bit of int32 numbers depend on all of their bits, in place: `triple32` of C. Wellons' hash-prospector."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        bits ^= shift_right(bits, shift)
        bits *= factor - 2**32 if factor >= 2**31 else factor
    return bits.bitwise_xor_(shift_right(bits, 14))


def shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift int32 numbers as if they had no sign: zeros come in from the left."""
    return (bits >> places) & (2 ** (32 - places) - 1)
