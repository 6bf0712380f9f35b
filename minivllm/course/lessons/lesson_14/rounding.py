"""The checks of lesson 14 for 8-bit numbers: scales, rounding, products of integers, and a rotation that spreads outliers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.ranks import situation
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds

SMALLEST = 1e-12
"""The scale of a row of zeros."""


def find_scales(x: Tensor, bits: int = 8) -> Tensor:
    """`[rows, 1]`: what one step of the integers is worth in each row."""
    return (x.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=SMALLEST)


def to_int8(x: Tensor, scales: Tensor, bits: int = 8) -> Tensor:
    """`x` in steps of its scales, rounded, within the symmetric range."""
    most = 2 ** (bits - 1) - 1
    return (x / scales).round().clamp(-most, most).to(torch.int8)


def hadamard(order: int) -> Tensor:
    """`[order, order]`: Sylvester's matrix, divided so that it keeps lengths."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / order**0.5


def _scale_suspects(x: Tensor, bits: int) -> Iterator[Suspect]:
    most, largest = 2 ** (bits - 1) - 1, x.abs().amax(dim=1, keepdim=True)
    small = {"min": SMALLEST}
    whole = (largest.amax() / most).expand(len(x), 1)
    yield whole, "which numbers the maximum is taken over: each row has its own scale"
    yield (x.amax(dim=1, keepdim=True) / most).clamp(**small), "the largest magnitude: the number may be negative"
    yield (largest / (most + 1)).clamp(**small), f"the range: with {bits} bits, the integers go from {-most} to {most}"
    yield (largest / (2 * most + 1)).clamp(**small), "the range: there are as many integers below zero as above"
    yield largest.clamp(**small) / most, "a row of zeros: no scale is smaller than SMALLEST, so clamp after the division"
    if bits != 8:
        yield (largest / 127).clamp(**small), f"bits: with {bits}, the largest integer is {most}"
    yield largest.clamp(**small), "what a scale is: the largest magnitude divided by the largest integer"
    yield most / largest.clamp(**small), "what a scale is: what one integer step is worth, not its inverse"
    yield (largest[:, 0] / most).clamp(**small), "the shape: [rows, 1], so that it divides rows"


def _int8_suspects(x: Tensor, scales: Tensor, bits: int) -> Iterator[Suspect]:
    most, steps = 2 ** (bits - 1) - 1, x / scales
    yield (
        steps.clamp(-most, most).to(torch.int8),
        "the rounding: .to(torch.int8) drops what is after the decimal point; round before it",
    )
    yield steps.clamp(-most, most).floor().to(torch.int8), "the rounding: to the nearest, not down"
    if bits != 8:
        yield steps.round().clamp(-127, 127).to(torch.int8), f"bits: with {bits}, the largest integer is {most}"
    wrapped = ((steps.round().long() + 128) % 256 - 128).to(torch.int8)
    yield wrapped, "numbers beyond the range: 130 as int8 is -126. Clamp before the conversion"
    yield wrapped.clamp(-most, most), "the order: clamp before .to(torch.int8), afterwards it is too late"
    yield steps.round().clamp(-most - 1, most).to(torch.int8), f"the range: symmetric, from {-most} to {most}"
    yield (x.round() / scales).clamp(-most, most).to(torch.int8), "the order: first divide, then round"
    yield steps.round().clamp(0, most).to(torch.int8), "the range: half of the numbers are negative"
    yield (x * scales).round().clamp(-most, most).to(torch.int8), "the division: by the scales"


def check_rounding(find: Callable[..., Any], to: Callable[..., Any]) -> None:
    """Each row has its own scale; the largest magnitude becomes the largest integer, and nothing wraps around."""
    for rng in rounds("rounding", 40):
        bits, rows, columns = rng.choice((8, 8, 4, 3)), rng.randint(2, 4), rng.randint(3, 7)
        x = make_tensor(rng, rows, columns) * torch.tensor([[10.0 ** rng.randint(-1, 2)] for _ in range(rows)])
        x[rng.randrange(rows), rng.randrange(columns)] *= -20
        if rng.random() < 0.3:
            x[0] = 0
        said = f"find_scales(x, bits={bits}), x being\n{_show(x)}"
        right = find_scales(x, bits)
        with situation(said):
            scales = find(x.clone(), bits)
        look = f"the largest magnitude of each row, which becomes {2 ** (bits - 1) - 1}; of a row of zeros, SMALLEST"
        _expect_ratio(said, right, scales, look, list(_scale_suspects(x, bits)))
        used = right * rng.choice((1.0, 1.0, 0.37))
        said = f"to_int8(x, scales, bits={bits}), x being\n{_show(x)}\nand the scales {[round(float(s), 5) for s in used.flatten()]}."
        with situation(said):
            rounded = to(x.clone(), used.clone(), bits)
        _expect_integers(said, to_int8(x, used, bits), rounded, _int8_suspects(x, used, bits))


def _show(x: Tensor) -> str:
    return "\n".join(" ".join(f"{float(number):9.3f}" for number in row) for row in x)


def _expect_ratio(said: str, right: Tensor, got: Any, look: str, suspects: list[Suspect]) -> None:
    """Scales differ by orders of magnitude: compared by ratio."""
    if isinstance(got, Tensor) and got.shape == right.shape and got.dtype == right.dtype:
        ones = torch.ones_like(right)
        seen = [(wrong / right, hint) for wrong, hint in suspects if wrong.shape == right.shape]
        expect_close(said, "scales, relative to the right ones,", ones, got / right, look, seen, tolerance=1e-4)
    else:
        expect_close(said, "scales", right, got, look, suspects)


def _expect_integers(said: str, right: Tensor, got: Any, suspects: Iterator[Suspect]) -> None:
    expect(said, "dtype", "torch.int8", str(getattr(got, "dtype", type(got).__name__)), "the last step: .to(torch.int8)")
    hint = next((hint for wrong, hint in suspects if torch.equal(wrong, got) and not torch.equal(wrong, right)), None)
    expect(said, "integers", right.tolist(), got.tolist(), hint or "divide, round, clamp, convert: in this order")


def check_multiply(multiply: Callable[..., Any]) -> None:
    """Sums of products of 8-bit integers, exactly, for some of the outputs."""
    for rng in rounds("multiply", 12):
        tokens, outputs, inputs = rng.randint(1, 3), rng.randint(3, 6), rng.choice((3, 40, 1536))
        most = rng.choice((5, 127))
        numpy_rng = np.random.default_rng(rng.randrange(2**32))
        x = numpy_rng.integers(-most, most + 1, (tokens, inputs)).astype(np.int8)
        weight = numpy_rng.integers(-most, most + 1, (outputs, inputs)).astype(np.int8)
        if rng.random() < 0.5:
            x[:], weight[:] = np.abs(x) // 2 + most // 2, np.abs(weight) // 2 + most // 2  # sums that need many bits
        if inputs == 1536 and rng.random() < 0.5:
            x[:], weight[:] = 127, 127  # a sum that float32 cannot hold exactly
            x[:, rng.randrange(inputs)] = 126
        first = rng.randrange(outputs - 1)
        last = rng.randint(first + 1, outputs)
        exact = x.astype(np.int64) @ weight.astype(np.int64).T
        out = np.full((tokens, outputs), -7, np.int32)
        said = f"multiply_some(x, weight, {first}, {last}, out) with x {x.shape}, weight {weight.shape}, numbers up to {most}."
        with situation(said):
            multiply(x, weight, first, last, out)
        right = np.full_like(out, -7)
        right[:, first:last] = exact[:, first:last]
        expect(said, "out", right.tolist(), out.tolist(), lambda: _find_mistake(exact, x, weight, first, last, out))  # noqa: B023


def _find_mistake(exact: np.ndarray, x: np.ndarray, weight: np.ndarray, first: int, last: int, out: np.ndarray) -> str:
    def put(part: np.ndarray) -> np.ndarray:
        whole = np.full_like(out, -7)
        whole[:, first:last] = part[:, first:last]
        return whole

    mask = np.arange(len(weight))
    for bits, kind in ((8, np.int8), (16, np.int16)):
        if np.array_equal(put(exact.astype(kind)), out):
            return f"the sum: it has {bits} bits, and wraps around. Begin with np.int32(0), and make the numbers int32 before you multiply"
    if np.array_equal(np.where((mask >= first) & (mask <= last), exact, -7), out):
        return "the outputs: from first on, but without last"
    if (out[:, :first] != -7).any() or (out[:, last:] != -7).any():
        return "where a result belongs: output o is row o of the weight and column o of out; others are left alone"
    if (out[1:, first:last] == -7).all() and len(out) > 1:
        return "the tokens: every row of x"
    if (out[:, last - 1] == -7).all():
        return "the last output: it is number last - 1"
    return "the loops: for each output and each token, the sum over all inputs, from zero on, in np.int32"


def check_rotate(hadamard_of: Callable[..., Any], rotate: Callable[..., Any]) -> None:
    """A matrix that is its own inverse, applied to blocks of a row."""
    for rng in rounds("rotate", 20):
        order = 2 ** rng.randint(1, 6)
        said = f"hadamard({order})."
        right = hadamard(order)
        with situation(said):
            got = hadamard_of(order)
        look = "how it doubles: [[H, H], [H, -H]]; and divided by the square root of the order, it keeps lengths"
        expect_close(said, "matrix", right, got, look, _matrix_suspects(order))
        rows, blocks = rng.randint(1, 3), rng.randint(1, 3)
        x = make_tensor(rng, rows, blocks * order)
        said = f"rotate(x, block={order}), x of shape {list(x.shape)}."
        right = _rotate(x, order)
        with situation(said):
            got = rotate(x.clone(), order)
        expect_close(said, "result", right, got, "each block of a row, times the matrix", _rotate_suspects(x, order))


def _rotate(x: Tensor, order: int) -> Tensor:
    return torch.cat([part @ hadamard(order) for part in x.split(order, dim=1)], dim=1)


def _matrix_suspects(order: int) -> Iterator[Suspect]:
    matrix, half, other = hadamard(order), hadamard(order // 2), torch.ones(1, 1)
    while len(other) < order:
        other = torch.cat([torch.cat([other, other], 1), torch.cat([-other, other], 1)])
    yield matrix * order**0.5, "the lengths: divide by the square root of the order, so that H @ H is 1"
    yield matrix / order**0.5, "the lengths: divided by the order it shrinks what it rotates; the square root keeps lengths"
    yield torch.ones(order, order) / order**0.5, "the sign: the last quarter is -H"
    yield other / order**0.5, "which quarter has the minus: the last"
    for twice in (hadamard(2 * order), hadamard(2 * order) * 2**0.5):
        yield twice, "when the doubling ends: the matrix has `order` rows"
    yield half, "when the doubling ends: the matrix has `order` rows"


def _rotate_suspects(x: Tensor, order: int) -> Iterator[Suspect]:
    matrix, rows = hadamard(order), len(x)
    yield (
        (x.view(rows, order, -1).transpose(1, 2) @ matrix).transpose(1, 2).reshape(x.shape),
        "what a block is: neighbours in a row",
    )
    yield torch.cat([x[:, :order] @ matrix, x[:, order:]], dim=1), "the other blocks: each is rotated"
    yield x, "the product: nothing is rotated"
    yield _rotate(x, order).view(-1, order), "the shape: that of x"
    yield _rotate(x, order) / order**0.5, "the lengths: hadamard has divided already"
    yield _rotate(x, order) * order**0.5, "the lengths: they must stay"


def some_outliers(rng: random.Random, rows: int, columns: int) -> Tensor:
    """Inputs as models have them: in a few columns, numbers are much larger."""
    x = make_tensor(rng, rows, columns)
    x[:, rng.sample(range(columns), 2)] *= 40
    return x
