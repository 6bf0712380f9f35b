"""Random situations for the checks of lesson 03, correct versions of what a learner builds, and words for messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.padded_steps import PaddedStep
from minivllm.course.observations import require
from minivllm.kernels.reference import causal_attention

KVCache = tuple[Tensor, Tensor]
NUM_ROWS, MAX_LEN = 5, 12
"""Of the caches that steps are made for."""


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def describe(step: PaddedStep) -> str:
    """A step as it is written in code."""
    return f"PaddedStep(rows={list(step.rows)}, starts={list(step.starts)}, counts={list(step.counts)})"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, in short: "0 to 4, 7"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "none"


def require_tensor(call: str, got: Any) -> None:
    """Raise an AssertionError unless a call has returned a tensor."""
    require(True, isinstance(got, Tensor), f"{call} must return a tensor, but returned {got!r}.")


def isolate(cls: Any, **methods: Any) -> Any:
    """A learner's class with correct methods of earlier stages, so that their mistakes fail only their own checks."""
    return type(cls.__name__, (cls,), methods)


def make_step(rng: random.Random, max_len: int = MAX_LEN, *, decode: bool = False) -> PaddedStep:
    """A step over some of the rows, in any order: prompts, pieces of text and single tokens; with `decode`, single tokens only."""
    rows = rng.sample(range(NUM_ROWS), rng.randint(2, NUM_ROWS - 1))
    starts, counts = [], []
    for _ in rows:
        new = 1 if decode else rng.choice((1, rng.randint(2, max_len // 2)))
        starts.append(rng.choice((0, rng.randint(1, max_len - new))))
        counts.append(new)
    return PaddedStep(rows, starts, counts)


def make_pair(rng: random.Random, *shape: int) -> KVCache:
    """Keys and values of this shape: of new tokens, or a layer's cache full of what earlier texts left there."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def written(cache: Tensor, new: Tensor, step: PaddedStep) -> Tensor:
    """A copy of the keys' or the values' cache, with new ones in it; `new` has padding."""
    cache = cache.clone()
    for i, (row, start, number) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
        cache[row, start : start + number] = new[i, :number]
    return cache


def attend_alone(
    query: Tensor, kv_cache: KVCache, step: PaddedStep, scale: float, *, rows: Sequence[int] | None = None, causal: bool = True
) -> Tensor:
    """Attention of each text as if it were alone: no batch, and zeros where there is padding.

    Args:
        query, kv_cache, step: As of `attend`; the new keys and values are in the cache.
        scale: The factor for the scores.
        rows, causal: For wrong answers: other rows than `step.rows`; whether each token sees all of its text and the rest of the row up to the longest.
    """
    output, longest = torch.zeros_like(query), num_slots_of(step)
    for i, row in enumerate(step.rows if rows is None else rows):
        start, new = step.starts[i], step.counts[i]
        keys, values = (cache[row, : start + new if causal else longest].transpose(0, 1) for cache in kv_cache)
        for first, last in [(0, new)] if causal else [(j, j + 1) for j in range(new)]:
            output[i, first:last] = causal_attention(query[i, first:last], keys, values, scale)
    return output


def num_slots_of(step: PaddedStep) -> int:
    """The length of the longest text of a step, its new tokens included."""
    return max(start + new for start, new in zip(step.starts, step.counts, strict=True))


def visible(self: Any, step: PaddedStep, num_slots: int) -> Tensor:
    """A correct `visible`."""
    starts = torch.tensor(list(step.starts))
    return torch.arange(num_slots) <= (starts[:, None] + torch.arange(step.width))[:, :, None]


def lay_out(self: Any, token_lists: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A correct `lay_out`."""
    width = max(map(len, token_lists))
    positions = [range(start, start + len(tokens)) for tokens, start in zip(token_lists, starts, strict=True)]
    ids, places = ([[*row, *[0] * (width - len(row))] for row in rows] for rows in (token_lists, positions))
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)


class CorrectCache:
    """The bookkeeping of a correct `RowCache`; a free row is chosen at random.

    Args:
        num_rows: How many texts it keeps.
        rng: Chooses among free rows.
    """

    def __init__(self, num_rows: int, rng: random.Random) -> None:
        self.rng = rng
        self.free_rows = list(range(num_rows))
        self.lengths: dict[int, int] = {}
        self.layers = ["the cache of layer 0", "the cache of layer 1"]

    @property
    def num_free(self) -> int:
        """Rows without a text."""
        return len(self.free_rows)

    def take(self) -> int:
        """A free row, for a new text."""
        if not self.free_rows:
            raise ValueError("take(): no row is free")
        row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
        self.lengths[row] = 0
        return row

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Count tokens that were written."""
        for row, new in zip(rows, counts, strict=True):
            self.lengths[row] += new

    def release(self, row: int) -> None:
        """Make a row free."""
        if row not in self.lengths:
            raise ValueError(f"release({row}): the row is free already")
        del self.lengths[row]
        self.free_rows.append(row)
