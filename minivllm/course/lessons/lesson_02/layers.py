"""The checks of the three operations on their own: norm, rotary positions, causal attention of a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.situations import make_ragged, make_tensor, randomize
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds

_ROUNDS = 12


@torch.no_grad()
def check_norm(cls: type) -> None:
    """`RMSNorm`: `forward` in any shape and dtype, and `add_and_norm`."""
    for number, rng in enumerate(rounds("norm", _ROUNDS)):
        size, leading = rng.choice((6, 16)), rng.choice(((4,), (3, 5)))
        eps, scale = ((1e-3, 0.03), (1e-6, 1.0), (1e-3, 4.0))[number % 3]
        norm = cls(size, eps)
        randomize(norm, rng)
        x = make_tensor(rng, *leading, size, scale=scale)
        expect_close(
            f"x is {list(x.shape)} in float32, eps {eps:g}.", "RMSNorm(x)", reference.Norm.forward(norm, x), norm(x.clone()),
            "the mean of the squares over the last dimension, eps, the root, the weight", _norm_suspects(x, norm.weight, eps), 3e-5,
        )  # fmt: skip
        half = make_tensor(rng, *leading, size, scale=400.0).to(torch.float16)
        expect_close(
            "x is in float16, and its numbers are around 400, so that their squares are larger than the largest number of float16.",
            "RMSNorm(x)", reference.Norm.forward(norm, half.float()).to(half.dtype), norm(half.clone()),
            "the precision of the norm: float32, whatever x is", tolerance=3e-3,
        )  # fmt: skip
        for residual in (make_tensor(rng, 4, size), None):
            _check_add_and_norm(norm, make_tensor(rng, 4, size), residual)


def _norm_suspects(x: Tensor, weight: Tensor, eps: float) -> list[Suspect]:
    squares = x.pow(2)
    mean = squares.mean(-1, keepdim=True)
    normed, over_last = x * torch.rsqrt(mean + eps), "the mean: it is taken over the last dimension"
    return [
        (x / (mean.sqrt() + eps) * weight, "where eps is added: to the mean, inside the root"),
        (x / mean.sqrt() * weight, "eps: it is missing"),
        (x * torch.rsqrt(squares.sum(-1, keepdim=True) + eps) * weight, "the mean: you divide by the root of the sum"),
        (x * torch.rsqrt(squares.mean() + eps) * weight, f"{over_last} only, one for each row"),
        (x * torch.rsqrt(squares.mean(0, keepdim=True) + eps) * weight, over_last),
        (normed, "the weight: it is not multiplied"),
        (normed * (1 + weight), "the weight: you multiply by 1 + weight"),
        (F.layer_norm(x, x.shape[-1:], weight, eps=eps), "the mean of x, which an RMSNorm does not take off"),
        (x / (mean + eps) * weight, "the root: it is missing"),
        (x * (mean + eps).sqrt() * weight, "the division: you multiply by the root"),
    ]


def _check_add_and_norm(norm: Any, x: Tensor, residual: Tensor | None) -> None:
    said = f"add_and_norm. {'residual is None: x begins the stream' if residual is None else 'A stream that exists'}."
    got = norm.add_and_norm(x.clone(), None if residual is None else residual.clone())
    expect(said, "number of results", 2, len(got), "what add_and_norm returns: two tensors")
    normed, stream = reference.Norm.add_and_norm(norm, x, residual)
    suspects = [
        (normed, "the second result: the stream as it is, not normalized. The residual is taken before the norm"),
        (x, "the second result: it lacks the residual"),
    ]
    expect_close(said, "the stream", stream, got[1], "the second result, x + residual", suspects)
    suspects = [
        (reference.Norm.forward(norm, x), "the first result: norm what is in the stream after adding x, not x alone"),
        (stream, "the first result: it is not normalized"),
    ]
    expect_close(said, "the normalized stream", normed, got[0], "the first result, the norm of the second", suspects)


@torch.no_grad()
def check_rotary(cls: type) -> None:
    """`RotaryEmbedding`: `angles`, and `forward` on positions in any order and on part of the channels."""
    for number, rng in enumerate(rounds("rotary", _ROUNDS)):
        head_dim, rotary_dim = rng.choice(((8, 8), (12, 8), (16, 4), (8, 4)))
        base, max_position = rng.choice((100.0, 10000.0)), (20, 600)[number % 2]
        made, expected = cls(rotary_dim, base, max_position), reference.angles(rotary_dim, base, max_position)
        said = f"rotary_dim {rotary_dim}, base {base:g}, max_position {max_position}."
        look = "the angle, position * base ** (-2 * i / rotary_dim) for pair i"
        expect_close(said, "angles", expected, made.angles(base, max_position), look, _angle_suspects(expected, rotary_dim, base))
        _check_bfloat16(cls, rotary_dim, base)
        positions = torch.tensor([rng.randrange(max_position) for _ in range(6)])
        x = make_tensor(rng, 6, 3, head_dim)
        said = f"head_dim {head_dim}, rotary_dim {rotary_dim}, positions {positions.tolist()}."
        expect_close(
            said, "rotated", reference.rotate(positions, x, expected), made(positions, x.clone()),
            "the pairs (i and i + rotary_dim / 2), the signs, and the channels after rotary_dim, which stay as they are",
            _rotary_suspects(positions, x, expected),
        )  # fmt: skip
        half = made(positions, x.to(torch.float16))
        expect(f"{said} x is in float16.", "dtype of rotated", "torch.float16", str(half.dtype), "the dtype: return what x has")


def _check_bfloat16(cls: type, rotary_dim: int, base: float) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = cls(rotary_dim, base, 600).angles(base, 600)
    finally:
        torch.set_default_dtype(before)
    said = f"rotary_dim {rotary_dim}, base {base:g}, max_position 600. The default dtype is bfloat16, as while a model in bfloat16 is built."
    look = "dtype=torch.float32 for torch.arange: 301 does not exist in bfloat16"
    expect_close(said, "cos(angles)", reference.angles(rotary_dim, base, 600).cos(), got.cos(), look, tolerance=1e-2)


def _angle_suspects(expected: Tensor, rotary_dim: int, base: float) -> list[Suspect]:
    positions, pairs = torch.arange(len(expected)).float(), torch.arange(rotary_dim // 2).float()
    return [
        (torch.outer(positions + 1, expected[1]), "the positions: they begin at 0"),
        (torch.outer(positions, base ** (-pairs / rotary_dim)), "the exponent: it falls by 2 / rotary_dim from pair to pair"),
        (torch.outer(positions, base ** (2 * pairs / rotary_dim)), "the sign of the exponent: the frequencies fall"),
        (torch.outer(positions, base ** (-pairs)), "the exponent: it is divided by rotary_dim"),
    ]


def _rotary_suspects(positions: Tensor, x: Tensor, table: Tensor) -> list[Suspect]:
    rotary_dim = 2 * table.shape[1]
    cos, sin = table[positions].cos()[:, None], table[positions].sin()[:, None]
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = part.chunk(2, dim=-1)
    even, odd = part[..., ::2], part[..., 1::2]
    turned_even, turned_odd = even * cos - odd * sin, odd * cos + even * sin
    turned_last = reference.rotate(positions, x[..., -rotary_dim:], table)
    off_by_one = [reference.rotate((positions + by) % len(table), x, table) for by in (1, -1)]

    def join(*parts: Tensor, rest: Tensor = rest) -> Tensor:
        return torch.cat((*parts, rest), dim=-1)

    pairs = "the pairs: channel i belongs with i + rotary_dim / 2, not with its neighbour"
    signs = "the signs: the first half is first * cos - second * sin. You turn backwards"
    in_order = "the positions: each row has its own, in `positions`; rows are not in order"
    return [
        (join(turned_even, turned_odd), pairs),
        (join(torch.stack((turned_even, turned_odd), dim=-1).flatten(-2)), pairs),
        (reference.rotate(torch.arange(len(positions)), x, table), in_order),
        *((wrong, "the positions: they are off by one") for wrong in off_by_one),
        (join(first * cos + second * sin, second * cos - first * sin), signs),
        (join(first * cos + second * sin, second * cos + first * sin), "the signs: one of the two sines is subtracted, the one of the first half"),
        (join(first * cos - second * sin, second * cos - first * sin), "the signs: only the sine of the first half is subtracted"),
        (join(x[..., :-rotary_dim], rest=turned_last), "which channels are rotated: the first rotary_dim"),
        (join(reference.rotate(positions, part, table), rest=0 * rest), "the channels after rotary_dim: they stay"),
    ]  # fmt: skip


@torch.no_grad()
def check_attend(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """`causal_attention`: several prompts in one flat batch, query heads that share keys and values."""
    for number, rng in enumerate(rounds("attend", _ROUNDS)):
        num_heads, num_kv_heads = rng.choice(((6, 2), (6, 3), (4, 1), (3, 3)))
        lengths, starts, _ = make_ragged(rng, min(number + 1, 3))
        q = make_tensor(rng, sum(lengths), num_heads, 8, scale=2.0)
        k, v = (make_tensor(rng, sum(lengths), num_kv_heads, 8, scale=scale) for scale in (2.0, 1.0))
        prompts = "A prompt of 1 token" if lengths == [1] else f"Prompts of {', '.join(map(str, lengths))} tokens"
        expect_close(
            f"{prompts}, {num_heads} query heads, {num_kv_heads} KV heads of 8.", "output",
            reference.causal_attention(q, k, v, starts), attend(q.clone(), k.clone(), v.clone(), starts.clone()),
            "the scores, the mask, the softmax over the keys, and which query head reads which KV head",
            _attend_suspects(q, k, v, starts),
        )  # fmt: skip


def _attend_suspects(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> list[Suspect]:
    group, num_heads, head_dim = q.shape[1] // k.shape[1], q.shape[1], q.shape[2]
    attend = reference.causal_attention
    tiled = attend(q, k.repeat(1, group, 1), v.repeat(1, group, 1), starts)
    unscaled = "the scale: scores are multiplied by head_dim ** -0.5"
    not_inverse = f"{unscaled}, not by 1 / head_dim (nor by a fixed 1 / 8, which is right for heads of 64 only)"
    return [
        (tiled, "which KV head a query head reads: neighbours share one (0, 0, 0, 1, 1, 1), they do not take turns (0, 1, 0, 1)"),
        (attend(q, k, v, torch.tensor([0, len(q)])), "query_start_loc: one prompt must not see the other"),
        (attend(q * head_dim**0.5, k, v, starts), f"{unscaled}, and yours are not"),
        (attend(q * num_heads**-0.5, k, v, starts), f"{unscaled}, the width of one head, not of all"),
        (attend(q * head_dim**-0.5, k, v, starts), not_inverse),
        (_masked(q, k, v, starts, len(q)), "the mask: a token must not see what comes after it"),
        (_masked(q, k, v, starts, 1), "the mask: it is off by one, and a token sees the next one"),
        (_masked(q, k, v, starts, -1), "the mask: it is off by one, and a token does not see itself"),
        (_masked(q, k, v, starts, 0, fill=0.0), "the mask: a score of 0 is not the same as not seen; -inf is"),
        (_masked(q, k, v, starts, 0, over=1), "the softmax: the weights of one query over all keys add up to 1"),
        (_masked(q, k, v, starts, 0, late=True), "the mask: it belongs before the softmax, so that the weights add up to 1"),
    ]


def _masked(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ahead: int, fill: float = -torch.inf, over: int = 2, late: bool = False
) -> Tensor:
    """Attention with a mask that may be wrong: a token sees `ahead` tokens after itself; and a softmax over a dimension of the scores."""
    group, parts = q.shape[1] // k.shape[1], []
    for start, end in pairwise(starts.tolist()):
        keys, values = (x[start:end].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * q.shape[2] ** -0.5
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril(ahead)
        weights = scores.softmax(over) * seen if late else scores.masked_fill(~seen, fill).softmax(over)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)
