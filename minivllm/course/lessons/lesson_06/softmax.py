"""The checks of lesson 06 without a cache: attention in pieces, and parts that are merged."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.course.lessons.lesson_06.situations import check_unchanged, compare, state_of
from minivllm.course.observations import expect, fail, require, rounds

_ROUNDS = 30

Piece = tuple[np.ndarray, np.ndarray]


class OnceOnly:
    """Pieces that can be taken one after another, each once: when the next one is taken, the last one is overwritten with NaN."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.num_taken = 0

    def __iter__(self) -> Iterator[Piece]:
        if self.num_taken:
            fail("You iterated over the pieces a second time: each can be taken only once.")
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
        pieces = [(-9000.0 + 1000 * numbers.random((length, 1)), numbers.normal(size=(length, 1))) for length in lengths]
        return np.ones(1), pieces, 1.0
    if order != "any":  # the largest score comes last, or first
        pieces.sort(key=lambda piece: float((piece[0] @ query).max()), reverse=order == "down")
    return query, pieces, rng.choice((1.0, head_dim**-0.5, 0.25))


_LOOKS = {
    "maximum": "the initial value (every score is larger than -infinity), and the scale",
    "total": "the correction: when the maximum grows, the sum so far must shrink by exp(old maximum - new maximum)",
    "output": "the correction, which the output needs as well as the total; and do not divide yet",
}


def check_attend_in_pieces(attend_in_pieces: Any) -> None:
    """The state after all pieces is that of the whole row, and each piece is read once."""
    for number, rng in enumerate(rounds("pieces", _ROUNDS)):
        query, pieces, scale = make_pieces(rng)
        pieces = pieces if number < _ROUNDS - 1 else []
        lengths = [len(keys) for keys, _ in pieces]
        call = f"attend_in_pieces: a query of {len(query)} numbers, pieces of {lengths} keys, scale {scale:.3g}."
        given = OnceOnly(pieces)
        with np.errstate(all="ignore"):
            got = attend_in_pieces(query.copy(), given, scale)
        are_three = isinstance(got, (tuple, list)) and len(got) == 3
        require(True, are_three, f"{call}\nExpected three things: maximum, total, output\nGot: {got!r}")
        expect(call, "output of shape", list(query.shape), list(np.shape(got[2])), "what the output is at first")
        expect(call, "pieces that were taken", len(pieces), given.num_taken, "the loop: it goes over all pieces")
        keys, values = (np.concatenate([piece[i] for piece in pieces]) if pieces else np.zeros((0, len(query))) for i in range(2))
        exact = state_of(torch.as_tensor(keys @ query * scale), torch.as_tensor(values))
        state = [torch.as_tensor(np.asarray(part, dtype=np.float64)) for part in got]
        kept = any(bool(part.isnan().any()) for part in state)
        for (name, look), mine, wanted in zip(_LOOKS.items(), state, exact, strict=True):
            look += ". A piece is NaN as soon as the next one is taken: did you keep it?" if kept else ""
            compare(call, name, mine.reshape(-1), wanted.reshape(-1), ("index",), look)
    _check_memory(attend_in_pieces)


def _check_memory(attend_in_pieces: Any) -> None:
    """Going over many pieces takes no more memory than a few of them."""
    piece = np.ones((200, 32)), np.ones((200, 32))
    tracemalloc.start()
    try:
        attend_in_pieces(np.ones(32), iter([piece] * 100), 0.1)
        held = tracemalloc.get_traced_memory()[1] / (2 * piece[0].nbytes)
    finally:
        tracemalloc.stop()
    said = f"Expected: memory for a few of them\nGot: memory for {held:.0f}\nKeep the state, not the pieces."
    require(True, held < 20, f"attend_in_pieces, 100 pieces.\n{said}")


def make_parts(rng: random.Random) -> tuple[dict[str, Tensor], Tensor]:
    """States of parts, some empty, and the attention over all of them; zeros for a sequence without tokens."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    num_seqs, num_heads, num_parts, head_dim = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6)
    lengths = torch.randint(0, 4, (num_seqs, num_parts), generator=generator)
    if rng.random() < 0.3:
        lengths[-1] = 0
    size = rng.choice((1.0, 20.0, 300.0))
    maxima = torch.zeros(num_seqs, num_heads, num_parts)
    totals, outputs = torch.zeros_like(maxima), torch.zeros(num_seqs, num_heads, num_parts, head_dim)
    expected = torch.zeros(num_seqs, num_heads, head_dim, dtype=torch.float64)
    for seq, counts in enumerate(lengths.tolist()):
        scores = size * torch.randn(num_heads, sum(counts), generator=generator, dtype=torch.float64)
        values = torch.randn(num_heads, sum(counts), head_dim, generator=generator, dtype=torch.float64)
        for part, own in enumerate(zip(scores.split(counts, dim=1), values.split(counts, dim=1), strict=True)):
            maxima[seq, :, part], totals[seq, :, part], outputs[seq, :, part] = state_of(*own)
        expected[seq] = (scores.softmax(dim=1)[..., None] * values).sum(dim=1)
    return {"maxima": maxima, "totals": totals, "outputs": outputs}, expected


def check_merge(merge: Any) -> None:
    """Parts of a context, merged, give the attention over all of it."""
    look = (
        "the weight of a part: multiply its total and its output by exp(its maximum - the largest of all). The division comes last, and where "
        "there is no token at all the output is 0"
    )
    for rng in rounds("merge", _ROUNDS):
        parts, expected = make_parts(rng)
        given = {name: part.clone() for name, part in parts.items()}
        shown = f"maxima {_shorten(parts['maxima'])}, totals {_shorten(parts['totals'])}"
        call = f"merge: {list(parts['maxima'].shape)} sequences, heads, parts; {shown}."
        compare(call, "output", merge(*given.values()), expected, ("sequence", "head", "channel"), look)
        check_unchanged(call, "merge", parts, given)


def _shorten(x: Tensor) -> str:
    return str([[round(number, 2) for number in row] for row in x[0].tolist()]) + (" …" if len(x) > 1 else "")
