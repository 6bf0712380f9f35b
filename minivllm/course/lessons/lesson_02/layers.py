"""The checks of the three operations on their own: norm, rotary positions, causal attention of a ragged batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.situations import (
    Suspect,
    expect,
    expect_close,
    make_ragged,
    make_tensor,
    randomize,
)

_ROUNDS = 12

# -- norm ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_norm(cls: type) -> None:
    """`RMSNorm`: `forward` in any shape and dtype, and `add_and_norm`."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"norm {seed}")
        size, eps = rng.choice((6, 16)), rng.choice((1e-6, 1e-3))
        norm = cls(size, eps)
        randomize(norm, rng)
        weight = norm.weight.detach()
        leading = rng.choice(((4,), (3, 5)))
        x = make_tensor(rng, *leading, size, scale=rng.choice((0.03, 1.0, 4.0)))
        said = f"x is {list(x.shape)} in float32, eps {eps:g}."
        expect_close(
            said, "RMSNorm(x)", reference.Norm.forward(norm, x), norm(x.clone()),
            "the mean of the squares over the last dimension, eps, the root, the weight", _norm_suspects(x, weight, eps), 3e-5,
        )  # fmt: skip
        _check_half(norm, make_tensor(rng, *leading, size, scale=400.0).to(torch.float16))
        _check_add_and_norm(norm, make_tensor(rng, 4, size), make_tensor(rng, 4, size))


def _norm_suspects(x: Tensor, weight: Tensor, eps: float) -> list[Suspect]:
    squares = x.pow(2)
    return [
        (x / (squares.mean(-1, keepdim=True).sqrt() + eps) * weight, "where eps is added: to the mean, inside the root"),
        (x / squares.mean(-1, keepdim=True).sqrt() * weight, "eps: it is missing"),
        (x * torch.rsqrt(squares.sum(-1, keepdim=True) + eps) * weight, "the mean: you divide by the root of the sum"),
        (x * torch.rsqrt(squares.mean() + eps) * weight, "the mean: it is taken over the last dimension only, one for each row"),
        (x * torch.rsqrt(squares.mean(0, keepdim=True) + eps) * weight, "the mean: it is taken over the last dimension"),
        (x * torch.rsqrt(squares.mean(-1, keepdim=True) + eps), "the weight: it is not multiplied"),
        (x * torch.rsqrt(squares.mean(-1, keepdim=True) + eps) * (1 + weight), "the weight: you multiply by 1 + weight"),
        (F.layer_norm(x, x.shape[-1:], weight, eps=eps), "the mean of x, which an RMSNorm does not take off"),
        (x / (squares.mean(-1, keepdim=True) + eps) * weight, "the root: it is missing"),
        (x * (squares.mean(-1, keepdim=True) + eps).sqrt() * weight, "the division: you multiply by the root"),
    ]


def _check_half(norm: Any, x: Tensor) -> None:
    said = "x is in float16, and its numbers are around 400, so that their squares are larger than the largest number of float16."
    got = norm(x.clone())
    expected = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight).to(x.dtype)
    expect_close(said, "RMSNorm(x)", expected, got, "the precision of the norm: float32, whatever x is", tolerance=3e-3)


def _check_add_and_norm(norm: Any, x: Tensor, residual: Tensor) -> None:
    for stream, said in ((residual, "A stream that exists."), (None, "residual is None: x begins the stream.")):
        got = norm.add_and_norm(x.clone(), None if stream is None else stream.clone())
        expect(f"add_and_norm. {said}", "number of results", 2, len(got), "what add_and_norm returns: two tensors")
        total = x if stream is None else stream + x
        normed = reference.Norm.forward(norm, total)
        suspects = [
            (normed, "the second result: the stream as it is, not normalized. The residual is taken before the norm"),
            (x, "the second result: it lacks the residual"),
        ]
        expect_close(f"add_and_norm. {said}", "the stream", total, got[1], "the second result, x + residual", suspects)
        suspects = [
            (reference.Norm.forward(norm, x), "the first result: norm what is in the stream after adding x, not x alone"),
            (total, "the first result: it is not normalized"),
        ]
        look = "the first result, the norm of the second"
        expect_close(f"add_and_norm. {said}", "the normalized stream", normed, got[0], look, suspects)


# -- rotary positions ------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_rotary(cls: type) -> None:
    """`RotaryEmbedding`: `angles`, and `forward` on positions in any order and on part of the channels."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"rotary {seed}")
        head_dim, rotary_dim = rng.choice(((8, 8), (12, 8), (16, 4), (8, 4)))
        base, max_position = rng.choice((100.0, 10000.0)), 600
        made = cls(rotary_dim, base, max_position)
        expected = reference.angles(rotary_dim, base, max_position)
        said = f"rotary_dim {rotary_dim}, base {base:g}, max_position {max_position}."
        look = "the angle, position * base ** (-2 * i / rotary_dim) for pair i"
        expect_close(said, "angles", expected, made.angles(base, max_position), look, _angle_suspects(expected, rotary_dim, base))
        _check_bfloat16(cls, said, expected, rotary_dim, base, max_position)
        positions = torch.tensor([rng.randrange(max_position) for _ in range(6)])
        x = make_tensor(rng, 6, 3, head_dim)
        said = f"head_dim {head_dim}, rotary_dim {rotary_dim}, positions {positions.tolist()}."
        expect_close(
            said, "rotated", reference.rotate(positions, x, expected), made(positions, x.clone()),
            "the pairs (i and i + rotary_dim / 2), the signs, and the channels after rotary_dim, which stay as they are",
            _rotary_suspects(positions, x, expected),
        )  # fmt: skip
        half = made(positions, x.to(torch.float16))
        expect(f"{said} x is in float16.", "dtype of rotated", torch.float16, half.dtype, "the dtype: return what x has")


def _check_bfloat16(cls: type, said: str, expected: Tensor, rotary_dim: int, base: float, max_position: int) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        made = cls(rotary_dim, base, max_position).angles(base, max_position)
    finally:
        torch.set_default_dtype(before)
    said = f"{said} The default dtype is bfloat16, as while a model in bfloat16 is built."
    expect_close(said, "angles", expected, made, "dtype=torch.float32 for torch.arange: 301 does not exist in bfloat16")


def _angle_suspects(expected: Tensor, rotary_dim: int, base: float) -> list[Suspect]:
    positions, pairs = torch.arange(len(expected)).float(), torch.arange(rotary_dim // 2).float()
    return [
        (torch.outer(positions + 1, expected[1]), "the positions: they begin at 0"),
        (torch.outer(positions, base ** (-pairs / rotary_dim)), "the exponent: it falls by 2 / rotary_dim from pair to pair"),
        (torch.outer(positions, base ** (2 * pairs / rotary_dim)), "the sign of the exponent: the frequencies fall"),
        (torch.outer(positions, base ** (-pairs)), "the exponent: it is divided by rotary_dim"),
    ]


def _rotary_suspects(positions: Tensor, x: Tensor, table: Tensor) -> list[Suspect]:
    half = table.shape[1]
    rotary_dim, num_rows = 2 * half, len(positions)
    cos, sin = table[positions].cos()[:, None], table[positions].sin()[:, None]
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    even, odd = part[..., ::2], part[..., 1::2]
    interleaved = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    first, second = part[..., :half], part[..., half:]
    plus = torch.cat((first * cos + second * sin, second * cos + first * sin, rest), dim=-1)
    mixed = torch.cat((first * cos - second * sin, second * cos - first * sin, rest), dim=-1)
    back = torch.cat((first * cos + second * sin, second * cos - first * sin, rest), dim=-1)
    sorted_out = torch.cat((even * cos - odd * sin, odd * cos + even * sin, rest), dim=-1)
    in_order, last = torch.arange(num_rows), len(table) - 1
    last_part = torch.cat((x[..., :-rotary_dim], reference.rotate(positions, x[..., -rotary_dim:], table)), dim=-1)
    return [
        (sorted_out, "the pairs: channel i belongs with i + rotary_dim / 2, not with its neighbour"),
        (torch.cat((interleaved, rest), dim=-1), "the pairs: channel i belongs with i + rotary_dim / 2, not with its neighbour"),
        (reference.rotate(in_order, x, table), "the positions: each row has its own, in `positions`; rows are not in order"),
        (reference.rotate((positions + 1).clamp(max=last), x, table), "the positions: they are off by one"),
        (reference.rotate((positions - 1).clamp(min=0), x, table), "the positions: they are off by one"),
        (back, "the signs: the first half is first * cos - second * sin. You turn backwards"),
        (plus, "the signs: one of the two sines is subtracted, the one of the first half"),
        (mixed, "the signs: only the sine of the first half is subtracted"),
        (last_part, "which channels are rotated: the first rotary_dim"),
        (torch.cat((reference.rotate(positions, part, table), 0 * rest), dim=-1), "the channels after rotary_dim: they stay"),
    ]


# -- attention -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_attend(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """`causal_attention`: several prompts in one flat batch, query heads that share keys and values."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"attend {seed}")
        num_heads, num_kv_heads = rng.choice(((6, 2), (6, 3), (4, 1), (3, 3)))
        lengths, starts, _ = make_ragged(rng, 1 + seed % 3 if seed < 3 else 3)
        num_tokens = sum(lengths)
        q = make_tensor(rng, num_tokens, num_heads, 8, scale=2.0)
        k, v = make_tensor(rng, num_tokens, num_kv_heads, 8, scale=2.0), make_tensor(rng, num_tokens, num_kv_heads, 8)
        listed = ", ".join(map(str, lengths))
        said = f"{'A prompt of 1 token' if lengths == [1] else f'Prompts of {listed} tokens'}, {num_heads} query heads, {num_kv_heads} KV heads of 8."
        expect_close(
            said, "output", reference.causal_attention(q, k, v, starts), attend(q.clone(), k.clone(), v.clone(), starts.clone()),
            "the scores, the mask, the softmax over the keys, and which query head reads which KV head",
            _attend_suspects(q, k, v, starts),
        )  # fmt: skip


def _attend_suspects(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> list[Suspect]:
    group, num_heads, head_dim = q.shape[1] // k.shape[1], q.shape[1], q.shape[2]
    everything = torch.tensor([0, len(q)])
    tiled = reference.causal_attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), starts)
    unscaled = "the scale: scores are multiplied by head_dim ** -0.5"
    return [
        (tiled, "which KV head a query head reads: neighbours share one (0, 0, 0, 1, 1, 1), they do not take turns (0, 1, 0, 1)"),
        (reference.causal_attention(q, k, v, everything), "query_start_loc: one prompt must not see the other"),
        (reference.causal_attention(q * head_dim**0.5, k, v, starts), f"{unscaled}, and yours are not"),
        (reference.causal_attention(q * num_heads**-0.5, k, v, starts), f"{unscaled}, the width of one head, not of all"),
        (
            reference.causal_attention(q * head_dim**-0.5, k, v, starts),
            f"{unscaled}, not by 1 / head_dim (nor by a fixed 1 / 8, which is right for heads of 64 only)",
        ),
        (_masked(q, k, v, starts, len(q)), "the mask: a token must not see what comes after it"),
        (_masked(q, k, v, starts, 1), "the mask: it is off by one, and a token sees the next one"),
        (_masked(q, k, v, starts, -1), "the mask: it is off by one, and a token does not see itself"),
        (_masked(q, k, v, starts, 0, fill=0.0), "the mask: a score of 0 is not the same as not seen; -inf is"),
        (_masked(q, k, v, starts, 0, softmax_over=1), "the softmax: the weights of one query over all keys add up to 1"),
        (_masked(q, k, v, starts, 0, late=True), "the mask: it belongs before the softmax, so that the weights add up to 1"),
    ]


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    ahead: int,
    fill: float = -torch.inf,
    softmax_over: int = 2,
    late: bool = False,
) -> Tensor:
    """Attention with a mask that may be wrong: a token sees `ahead` tokens after itself."""
    group, parts = q.shape[1] // k.shape[1], []
    for start, end in pairwise(starts.tolist()):
        keys, values = (x[start:end].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * q.shape[2] ** -0.5
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril(ahead)
        weights = scores.softmax(softmax_over) * seen if late else scores.masked_fill(~seen, fill).softmax(softmax_over)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)
