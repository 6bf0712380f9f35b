"""Choosing tokens where each rank has the logits of some of them only.

Each rank chooses among its own tokens, and the best score wins: the winner of a race (`draw`) has also won its heat. Filters, penalties
and log-probabilities need all logits in one place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.worker.sampler import (
    SamplingRow,
    adjusts_logits,
    apply_temperature,
    argmax,
    as_kernels_take_them,
    exponential_noise,
    load_sampling_ops,
    random_keys,
)
from minivllm.worker.transfer import to_device


def can_choose_in_parts(rows: list[SamplingRow]) -> bool:
    """Whether each rank can choose among its own tokens: true for greedy rows and plain draws."""
    return all(
        row.params.logprobs is None
        and not adjusts_logits(row)
        and (row.params.is_greedy or (row.params.min_p == 0 and row.params.top_k <= 0 and row.params.top_p == 1))
        for row in rows
    )


def choose_in_part(rows: list[SamplingRow], logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """`Sampler.sample` among a range of the tokens, when `can_choose_in_parts`.

    Args:
        rows: What each row is for.
        logits: `[len(rows), tokens]`, of consecutive tokens.
        first: The first of these tokens.

    Returns:
        For each row, the score of its best token, and its id. Of several parts, the token with the best score is the one that `sample`
        chooses: a greedy row's score is the logit; that of a drawn one is the logarithm of one over the time at which the token arrives, up to
        a constant that is the same for all parts.
    """
    ops = load_sampling_ops(logits.device)
    if ops is not None:
        of_rows = [0.0 if row.params.is_greedy else row.params.temperature for row in rows]
        keys, temperature = to_device(random_keys(rows), logits.device), to_device(of_rows, logits.device, torch.float32)
        best, places = ops.draw(as_kernels_take_them(logits), temperature, keys, None, first)
        return best.double(), places + first
    logits = logits.float()
    token_ids = argmax(logits)
    scores = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).double()
    random_rows = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if random_rows:
        drawn = [rows[i] for i in random_rows]
        indices = to_device(random_rows, logits.device)
        temperatures = to_device([row.params.temperature for row in drawn], logits.device).unsqueeze(1)
        part = apply_temperature(logits.index_select(0, indices), temperatures)
        noise = exponential_noise(random_keys(drawn), part.shape[-1], part.device, first)
        best = argmax(part.softmax(dim=-1) / noise).unsqueeze(1)
        token_ids.index_copy_(0, indices, best.squeeze(1))
        drawn_scores = part.gather(1, best).double() - noise.gather(1, best).double().log()
        scores.index_copy_(0, indices, drawn_scores.squeeze(1))
    return scores, token_ids + first
