"""The checks of lesson 05 for kernels with addresses from memory, tiles, and loops over pieces."""

from __future__ import annotations

from typing import Any

import torch

from minivllm.course.lessons.lesson_05.launches import cases
from minivllm.course.lessons.lesson_05.rows import ceil_div
from minivllm.course.lessons.paged_kernels import power_of_2


def check_gather(kernel: Any) -> None:
    """`out[i] = table[rows[i]]`, and zeros where the row is -1; some rows are taken several times, and some never."""
    look = "the row's number: it is loaded from rows_ptr; and what is stored where it is -1: zeros, without a read of the table"
    for case in cases("gather", 24):
        num_rows, columns = case.rng.randint(1, 9), case.rng.choice((case.rng.randint(1, 30), 130))
        count = case.rng.randint(1, 8)
        table = case.input(num_rows, columns, gap=case.rng.choice((0, 3)))
        numbers = [case.rng.randrange(num_rows) if case.rng.random() < 0.8 else -1 for _ in range(count)]
        rows = torch.tensor(numbers, dtype=case.rng.choice((torch.int64, torch.int32)))
        out = case.output(count, columns, gap=case.rng.choice((0, 2)))
        exact = table.double()[rows.long()] * (rows >= 0)[:, None]
        args = out, table, rows, columns, out.stride(0), table.stride(0)
        least = {table: columns * sum(number >= 0 for number in numbers)}
        case.run(kernel, (count,), args, {out: (exact, look)}, least, BLOCK=power_of_2(columns))


def check_transpose(kernel: Any) -> None:
    """A transposed copy in square tiles, of matrices whose sizes are rarely multiples of the tile."""
    look = "which of the two numbers is multiplied by the stride: in x it is the row of x, in out the column of x"
    for case in cases("transpose", 12):
        rows, columns, block = case.rng.randint(1, 20), case.rng.randint(1, 20), case.rng.choice((4, 8))
        x = case.input(rows, columns, gap=case.rng.choice((0, 3)))
        out = case.output(columns, rows, gap=case.rng.choice((0, 2)))
        args, grid = (out, x, rows, columns, out.stride(0), x.stride(0)), (ceil_div(rows, block), ceil_div(columns, block))
        case.run(kernel, grid, args, {out: (x.double().t(), look)}, BLOCK=block)


def check_matmul(kernel: Any) -> None:
    """`a @ b` in tiles, of sizes that are not multiples of 16, with long sums in float32."""
    look = "the masks of the last tile in k (masked elements must count as 0), the tile's place in out, and the dtype of the sum: float32"
    for case in cases("matmul", 12):
        m, n = case.rng.randint(1, 40), case.rng.randint(1, 40)
        k = case.rng.choice((16, case.rng.randint(1, 30), 90))
        a, b = case.input(m, k, gap=case.rng.choice((0, 3))), case.input(k, n, gap=case.rng.choice((0, 2)))
        if case.rng.random() < 0.5:
            a, b = a.abs_(), b.abs_()
        out = case.output(m, n, dtype=torch.float32, gap=case.rng.choice((0, 1)))
        block = case.rng.choice((16, 32))
        grid = tiles_m, tiles_n = ceil_div(m, block), ceil_div(n, block)
        area = tiles_m * tiles_n * block * k  # a tile may wrap around: then it is read whole
        args = out, a, b, m, n, k, out.stride(0), a.stride(0), b.stride(0)
        case.run(kernel, grid, args, {out: (a.double() @ b.double(), look)}, {a: area, b: area}, BLOCK=block)


def check_running(kernel: Any) -> None:
    """Maximum and sum of a softmax in one pass over pieces: rows longer than a piece, with their largest number anywhere."""
    grown = "the maximum so far: it begins below all numbers, and grows from piece to piece"
    shrunk = "the sum so far: when a piece raises the maximum, it must shrink by exp(old maximum - new maximum)"
    for case in cases("running", 24):
        rows, block = case.rng.randint(1, 3), case.rng.choice((4, 8, 16))
        columns = case.rng.choice((1, block, 3 * block, case.rng.randint(2, 70), 250))
        x = case.input(rows, columns, scale=case.rng.choice((1.0, 30.0, 3e3)), gap=case.rng.choice((0, 3)))
        order = case.rng.choice(("any", "ascending", "descending"))
        if order != "any":
            x.copy_(x.sort(dim=1, descending=order == "descending").values)
        if case.rng.random() < 0.5:
            x -= 2 * x.abs().max()
        elif case.dtype == torch.float32:
            x.copy_(x / x.abs().max() - 1e30 if case.rng.random() < 0.5 else x)
        exact, maxima, sums = x.double(), case.output(rows, dtype=torch.float32), case.output(rows, dtype=torch.float32)
        right = exact.amax(dim=1)
        outputs = {maxima: (right, grown), sums: ((exact - right[:, None]).exp().sum(dim=1), shrunk)}
        case.run(kernel, (rows,), (maxima, sums, x, columns, x.stride(0)), outputs, BLOCK=block)
