"""Random situations for the checks of lesson 03, correct versions of what a learner builds, and words for messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.padded_steps import PaddedStep
from minivllm.kernels.reference import causal_attention

KVCache = tuple[Tensor, Tensor]


def expect(said: str, what: str, expected: Any, got: Any, look: str) -> None:
    """Unless the two are equal, raise an AssertionError that says what was expected, what was returned, and where to look."""
    if expected != got:
        raise AssertionError(f"{said}\nExpected {what}: {expected}\nGot {what}: {got}\nLook at {look}.")


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


def isolate(cls: Any, **methods: Any) -> Any:
    """A learner's class with correct methods of earlier stages, so that their mistakes fail only their own checks."""
    return type(cls.__name__, (cls,), methods)


def make_attention(cls: Any, num_heads: int = 2, num_kv_heads: int = 2, head_dim: int = 4, scale: float = 0.5) -> Any:
    """An attention of a learner's class, for one layer."""
    return cls(num_heads, num_kv_heads, head_dim, scale)


def make_step(rng: random.Random, num_rows: int, max_len: int, *, decode: bool = False) -> PaddedStep:
    """A step over some of the rows, in any order: prompts, pieces of text and single tokens; with `decode`, single tokens only."""
    rows = rng.sample(range(num_rows), rng.randint(2, num_rows - 1))
    starts, counts = [], []
    for _ in rows:
        new = 1 if decode else rng.choice((1, rng.randint(2, max_len // 2)))
        starts.append(rng.choice((0, rng.randint(1, max_len - new))))
        counts.append(new)
    return PaddedStep(rows, starts, counts)


def make_cache(generator: torch.Generator, num_rows: int, max_len: int, num_kv_heads: int, head_dim: int) -> KVCache:
    """One layer's cache, full of what earlier texts left there."""
    shape = (num_rows, max_len, num_kv_heads, head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def attend_alone(
    query: Tensor, kv_cache: KVCache, step: PaddedStep, scale: float, *, rows: Sequence[int] | None = None, causal: bool = True
) -> Tensor:
    """Attention of each text as if it were alone: no batch, no padding.

    Args:
        query: `[batch, width, num_heads, head_dim]`.
        kv_cache: Keys and values, the new ones included.
        step: The batch.
        scale: The factor for the scores.
        rows: The texts' rows instead of `step.rows`, to produce a wrong answer.
        causal: False lets each token see all of its text and the rest of the row up to the longest: for a wrong answer.

    Returns:
        `[batch, width, num_heads, head_dim]`, zeros where there is padding.
    """
    output, longest = torch.zeros_like(query), num_slots_of(step)
    for i, row in enumerate(step.rows if rows is None else rows):
        start, new = step.starts[i], step.counts[i]
        keys, values = (cache[row, : start + new if causal else longest].transpose(0, 1) for cache in kv_cache)
        if causal:
            output[i, :new] = causal_attention(query[i, :new], keys, values, scale)
        else:
            for j in range(new):
                output[i, j : j + 1] = causal_attention(query[i, j : j + 1], keys, values, scale)
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
    ids = [[*tokens, *[0] * (width - len(tokens))] for tokens in token_lists]
    positions = [
        [*range(start, start + len(tokens)), *[0] * (width - len(tokens))]
        for tokens, start in zip(token_lists, starts, strict=True)
    ]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


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
