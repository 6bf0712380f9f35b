"""The checks of lesson 05 for kernels that compute row by row, from an addition to RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minivllm.course.lessons.lesson_05.launches import cases
from minivllm.course.lessons.paged_kernels import power_of_2


def ceil_div(a: int, b: int) -> int:
    """Programs that it takes for `a` elements, `b` each."""
    return -(-a // b)


def check_add(kernel: Any) -> None:
    """`out = x + y`, with a mask at the end: vectors whose length is rarely a multiple of the block."""
    look = "which elements a program has: BLOCK of them, from program_id · BLOCK on"
    for case in cases("add", 12):
        block = case.rng.choice((4, 8, 16, 32))
        size = case.rng.choice((1, block, 3 * block, case.rng.randint(2, 90)))
        x, y, out = case.input(size), case.input(size), case.output(size)
        exact = x.double() + y.double()
        case.run(kernel, (ceil_div(size, block),), (out, x, y, size), {out: (exact, look)}, BLOCK=block)


def check_scale_rows(kernel: Any) -> None:
    """Each row times a factor of its own, in tensors whose rows lie apart, by different distances."""
    look = "where a row begins (row · x_stride in x, row · out_stride in out), and which factor is its own"
    for case in cases("scale", 12):
        rows, columns = case.rng.randint(1, 5), case.rng.choice((case.rng.randint(1, 40), 150))
        x = case.input(rows, columns, gap=case.rng.choice((0, 3, 8)))
        out, factors = case.output(rows, columns, gap=case.rng.choice((0, 1, 5))), case.input(rows)
        exact = x.double() * factors.double()[:, None]
        args = out, x, factors, columns, out.stride(0), x.stride(0)
        case.run(kernel, (rows,), args, {out: (exact, look)}, BLOCK=power_of_2(columns) * case.rng.choice((1, 2)))


def check_max_and_sum(kernel: Any) -> None:
    """A row's largest number and its sum, in float32: sometimes all are negative, sometimes float16 cannot hold the sum of so many."""
    largest = "what masked elements count as: 0 is larger than every negative number"
    added = "what masked elements count as, and the dtype in which you add: in float16 a sum of thousands is coarse, and above 65504 infinite"
    for case in cases("reduction", 24):
        rows, columns = case.rng.randint(1, 4), case.rng.choice((1, case.rng.randint(2, 50), 700))
        x = case.input(rows, columns, gap=case.rng.choice((0, 3)))
        sign = case.rng.choice((-1, 0, 1, -1))
        if sign:
            x.copy_(sign * (x.abs() + (100 if columns == 700 else 0.5)))
        if case.rng.random() < 0.3 and case.dtype == torch.float32:
            x.copy_(-1e30 * (x.abs() + 0.5))
        maxima, sums = (case.output(rows, dtype=torch.float32) for _ in range(2))
        outputs = {maxima: (x.double().amax(dim=1), largest), sums: (x.double().sum(dim=1), added)}
        case.run(kernel, (rows,), (maxima, sums, x, columns, x.stride(0)), outputs, BLOCK=power_of_2(columns))


def check_softmax(kernel: Any) -> None:
    """The softmax of each row, of numbers that are small or as large as 10⁴, with one read."""
    look = "what masked elements count as in the maximum and in the sum, and whether the maximum is subtracted before exp"
    for case in cases("softmax", 24):
        rows, columns = case.rng.randint(1, 4), case.rng.choice((1, case.rng.randint(2, 60), 200))
        scale = case.rng.choice((1.0, 30.0, 1e4))
        x = case.input(rows, columns, scale=scale, gap=case.rng.choice((0, 2)))
        if case.rng.random() < 0.4 and scale < 1e4:
            x -= 5 * scale  # all of them far below 0
        elif case.rng.random() < 0.3 and case.dtype == torch.float32:
            x.copy_(-1e30 * (x.abs() + 0.5))
        out = case.output(rows, columns, gap=case.rng.choice((0, 4)))
        args, block = (out, x, columns, out.stride(0), x.stride(0)), power_of_2(columns) * case.rng.choice((1, 2))
        case.run(kernel, (rows,), args, {out: (x.double().softmax(dim=1), look)}, BLOCK=block)


def check_silu_and_mul(kernel: Any) -> None:
    """`silu(gate) · up`: gate and up side by side, a row in pieces."""
    look = (
        "where gate and up lie (up begins `size` numbers after gate), which piece axis 1 is, and the dtype in which you compute"
    )
    for case in cases("silu", 24):
        block, rows = case.rng.choice((4, 8, 16)), case.rng.randint(1, 4)
        size = case.rng.choice((block, case.rng.randint(1, 50)))
        x = case.input(rows, 2 * size, scale=case.rng.choice((1.0, 8.0)), gap=case.rng.choice((0, 3)))
        if case.dtype == torch.float16 and case.rng.random() < 0.5:
            x[:, :size] = -x[:, :size].abs() - 11.5  # exp(-gate) is above what float16 can hold
        out = case.output(rows, size, gap=case.rng.choice((0, 2)))
        gate, up = x.double().chunk(2, dim=1)
        args = out, x, size, out.stride(0), x.stride(0)
        case.run(kernel, (rows, ceil_div(size, block)), args, {out: (F.silu(gate) * up, look)}, BLOCK=block)


def check_add_rms_norm(kernel: Any) -> None:
    """Add to the residual stream, in place, and normalize the sum: everything read once, and numbers whose squares float16 cannot hold."""
    stored = "what is stored to residual_ptr: residual + x"
    mean = "the mean (over `size` numbers, not BLOCK), eps inside the root, the weight, and the dtype of the squares: float32"
    for case in cases("norm", 24):
        rows, size = case.rng.randint(1, 4), case.rng.choice((1, case.rng.randint(2, 60), 300))
        scale, gap = case.rng.choice((1e-3, 1.0, 300.0)), case.rng.choice((0, 3))
        x, residual = (case.input(rows, size, scale=scale, gap=gap) for _ in range(2))
        weight, eps, out = case.input(size), case.rng.choice((1e-5, 1e-2)), case.output(rows, size, gap=gap)
        total = (x.double() + residual.double()).to(case.dtype).double()
        normalized = total * (total.square().mean(dim=1, keepdim=True) + eps).rsqrt() * weight.double()
        outputs, least = {residual: (total, stored), out: (normalized, mean)}, {weight: rows * size, residual: rows * size}
        args, block = (out, residual, x, weight, size, size + gap, eps), power_of_2(size) * case.rng.choice((1, 2))
        case.run(kernel, (rows,), args, outputs, least, BLOCK=block)
