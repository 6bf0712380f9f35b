"""The checks of lesson 06 without a cache: attention in pieces, and parts that are merged."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.course.lessons.lesson_06.situations import compare

_ROUNDS = 30

Piece = tuple[np.ndarray, np.ndarray]


class OnceOnly:
    """Pieces that can be taken one after another, each once: when the next one is taken, the last one is overwritten with NaN."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.num_taken = 0

    def __iter__(self) -> Iterator[Piece]:
        assert self.num_taken == 0, "You iterated over the pieces a second time: each can be taken only once."
        for keys, values in self.pieces:
            self.num_taken += 1
            piece = keys.copy(), values.copy()
            yield piece
            for array in piece:
                array.fill(np.nan)


def make_pieces(rng: random.Random) -> tuple[np.ndarray, list[Piece], float]:
    """A query and the keys and values of a context in pieces of any length; the scores are of ordinary size, or very small or large."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    head_dim, size = rng.randint(1, 9), rng.choice((1.0, 30.0, 1e3))
    lengths = [rng.choice((1, 2, rng.randint(1, 7))) for _ in range(rng.randint(1, 6))]
    query = np.abs(numbers.normal(size=head_dim)) + 0.1
    sign = rng.choice((0, -1, 1))
    pieces = []
    for length in lengths:
        keys = size * numbers.normal(size=(length, head_dim))
        pieces.append(((sign * np.abs(keys) if sign else keys), numbers.normal(size=(length, head_dim))))
    order = rng.choice(("up", "down", "any"))
    if rng.random() < 0.15:  # all scores near -10,000
        query, pieces = (
            np.ones(1),
            [(-9000.0 + 1000 * numbers.random((length, 1)), numbers.normal(size=(length, 1))) for length in lengths],
        )
        return query, pieces, 1.0
    if order != "any":  # the largest score comes last, or first
        pieces.sort(key=lambda piece: float((piece[0] @ query).max()), reverse=order == "down")
    return query, pieces, rng.choice((1.0, head_dim**-0.5, 0.25))


def exact_state(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> tuple[float, float, np.ndarray]:
    """The largest score, the sum of exp(score - largest), and the same sum with each value, all from the whole row at once."""
    scores = keys @ query * scale
    maximum = float(scores.max()) if len(scores) else -math.inf
    weights = np.exp(scores - maximum)
    return maximum, float(weights.sum()), weights @ values


def check_attend_in_pieces(attend_in_pieces: Any) -> None:
    """The state after all pieces is that of the whole row, and each piece is read once."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"pieces {seed}")
        query, pieces, scale = make_pieces(rng)
        if seed == _ROUNDS - 1:
            pieces = []
        lengths = [len(keys) for keys, _ in pieces]
        call = f"attend_in_pieces: a query of {len(query)} numbers, pieces of {lengths} keys, scale {scale:.3g}."
        given = OnceOnly(pieces)
        with np.errstate(all="ignore"):
            got = attend_in_pieces(query.copy(), given, scale)
        assert isinstance(got, (tuple, list)) and len(got) == 3, (
            f"{call}\nExpected three things: maximum, total, output\nGot: {got!r}"
        )
        shape = np.shape(got[2])
        assert shape == query.shape, f"{call}\nExpected output of shape {list(query.shape)}\nGot shape: {list(shape)}"
        assert given.num_taken == len(pieces), f"{call}\nExpected to see {len(pieces)} pieces\nGot: {given.num_taken} were taken"
        keys, values = (np.concatenate([piece[i] for piece in pieces]) if pieces else np.zeros((0, len(query))) for i in range(2))
        look = {
            "maximum": "the initial value (every score is larger than -infinity), and the scale",
            "total": "the correction: when the maximum grows, the sum so far must shrink by exp(old maximum - new maximum)",
            "output": "the correction, which the output needs as well as the total; and do not divide yet",
        }
        kept = any(bool(np.isnan(np.asarray(part, dtype=np.float64)).any()) for part in got)
        for (name, where), mine, exact in zip(look.items(), got, exact_state(query, keys, values, scale), strict=True):
            wanted = torch.as_tensor(exact, dtype=torch.float64).reshape(-1)
            given_number = torch.as_tensor(np.asarray(mine, dtype=np.float64)).reshape(-1)
            if kept:
                where += ". A piece is NaN as soon as the next one is taken: did you keep it?"
            compare(call, name, given_number, wanted, ("index",), where)
    _check_memory(attend_in_pieces)


def _check_memory(attend_in_pieces: Any) -> None:
    """Going over many pieces takes no more memory than a few of them."""
    numbers = np.random.default_rng(0)
    piece = numbers.normal(size=(200, 32)), numbers.normal(size=(200, 32))
    tracemalloc.start()
    try:
        attend_in_pieces(np.ones(32), iter([piece] * 100), 0.1)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = most / (2 * piece[0].nbytes)
    assert held < 20, (
        f"attend_in_pieces, 100 pieces.\nExpected: memory for a few of them\nGot: memory for {held:.0f}\nKeep the state, not the pieces."
    )


def make_parts(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States of parts, some empty, and the attention over all of them; zeros for a sequence without tokens."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    num_seqs, num_heads, num_parts, head_dim = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6)
    lengths = torch.randint(0, 4, (num_seqs, num_parts), generator=generator)
    if rng.random() < 0.3:
        lengths[-1] = 0
    size = rng.choice((1.0, 20.0, 300.0))
    maxima = torch.full((num_seqs, num_heads, num_parts), -torch.inf)
    totals, outputs = torch.zeros(num_seqs, num_heads, num_parts), torch.zeros(num_seqs, num_heads, num_parts, head_dim)
    expected = torch.zeros(num_seqs, num_heads, head_dim, dtype=torch.float64)
    for seq in range(num_seqs):
        for head in range(num_heads):
            scores, values = [], []
            for part, length in enumerate(lengths[seq].tolist()):
                score = size * torch.randn(length, generator=generator, dtype=torch.float64)
                value = torch.randn(length, head_dim, generator=generator, dtype=torch.float64)
                scores.append(score)
                values.append(value)
                if length:
                    weights = (score - score.max()).exp()
                    maxima[seq, head, part], totals[seq, head, part] = score.max(), weights.sum()
                    outputs[seq, head, part] = weights @ value
            if lengths[seq].sum():
                expected[seq, head] = torch.cat(scores).softmax(dim=0) @ torch.cat(values)
    return maxima, totals, outputs, expected


def check_merge(merge: Any) -> None:
    """Parts of a context, merged, give the attention over all of it."""
    for seed in range(_ROUNDS):
        maxima, totals, outputs, expected = make_parts(random.Random(f"merge {seed}"))
        given = maxima.clone(), totals.clone(), outputs.clone()
        got = merge(*given)
        call = f"merge: {list(maxima.shape)} sequences, heads, parts; maxima {_shorten(maxima)}, totals {_shorten(totals)}."
        assert isinstance(got, Tensor), f"{call}\nExpected a tensor\nGot: {got!r}"
        look = (
            "the weight of a part: multiply its total and its output by exp(its maximum - the largest of all). The division comes last, and where "
            "there is no token at all the output is 0"
        )
        compare(call, "output", got, expected, ("sequence", "head", "channel"), look)
        for name, before, after in zip(("maxima", "totals", "outputs"), (maxima, totals, outputs), given, strict=True):
            assert torch.equal(before, after), f"{call}\nmerge changed {name}, which it must only read."


def _shorten(x: Tensor) -> str:
    return str([[round(number, 2) for number in row] for row in x[0].tolist()]) + (" …" if len(x) > 1 else "")
