"""The checks of lesson 05 for kernels with addresses from memory, tiles, and loops over pieces."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from minivllm.course.lessons.lesson_05.launches import make_input, make_output
from minivllm.course.lessons.lesson_05.rows import Case, ceil_div, power_of_2, run_case, seeds

_ROUNDS = 12


# -- 7: gather -------------------------------------------------------------------------------------------------------


def make_gather_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """A table some of whose rows are taken, some several times, and some never."""
    num_rows, columns, count = rng.randint(1, 9), rng.choice((rng.randint(1, 30), 130)), rng.randint(1, 8)
    table = make_input((num_rows, columns), dtype, generator, gap=rng.choice((0, 3)))
    numbers = [rng.randrange(num_rows) if rng.random() < 0.8 else -1 for _ in range(count)]
    rows = torch.tensor(numbers, dtype=rng.choice((torch.int64, torch.int32)))
    out = make_output((count, columns), dtype, rng.choice((0, 2)))
    expected = torch.stack(
        [table[number].double() if number >= 0 else torch.zeros(columns, dtype=torch.float64) for number in numbers]
    )
    arguments = {
        "out_ptr": out, "table_ptr": table, "rows_ptr": rows, "num_columns": columns, "out_stride": out.stride(0),
        "table_stride": table.stride(0),
    }  # fmt: skip
    least = {"table_ptr": columns * sum(number >= 0 for number in numbers), "rows_ptr": count, "out_ptr": 0}
    return Case((count,), arguments, {"BLOCK": power_of_2(columns)}, {"out_ptr": expected}, ("table_ptr", "rows_ptr"), least)


def check_gather(kernel: Any) -> None:
    """`out[i] = table[rows[i]]`, and zeros where the row is -1."""
    look = "the row's number: it is loaded from rows_ptr; and what is stored where it is -1: zeros, without a read of the table"
    for _, rng, generator, dtype in seeds("gather", 2 * _ROUNDS):
        run_case(kernel, make_gather_case(rng, generator, dtype), {"": look})


# -- 8: transpose ----------------------------------------------------------------------------------------------------


def make_transpose_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Matrices whose sizes are rarely multiples of the tile."""
    rows, columns, block = rng.randint(1, 20), rng.randint(1, 20), rng.choice((4, 8))
    x, out = (
        make_input((rows, columns), dtype, generator, gap=rng.choice((0, 3))),
        make_output((columns, rows), dtype, rng.choice((0, 2))),
    )
    arguments = {
        "out_ptr": out, "x_ptr": x, "num_rows": rows, "num_columns": columns, "out_stride": out.stride(0), "x_stride": x.stride(0),
    }  # fmt: skip
    return Case(
        (ceil_div(rows, block), ceil_div(columns, block)), arguments, {"BLOCK": block}, {"out_ptr": x.double().t()}, ("x_ptr",),
        {"x_ptr": rows * columns, "out_ptr": 0},
    )  # fmt: skip


def check_transpose(kernel: Any) -> None:
    """A transposed copy in square tiles."""
    look = "which of the two numbers is multiplied by the stride: in x it is the row of x, in out the column of x"
    for _, rng, generator, dtype in seeds("transpose"):
        run_case(kernel, make_transpose_case(rng, generator, dtype), {"": look})


# -- 9: matmul -------------------------------------------------------------------------------------------------------


def make_matmul_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Matrices whose sizes are not multiples of 16; long sums, in float16 too."""
    m, n, k = rng.randint(1, 40), rng.randint(1, 40), rng.choice((16, rng.randint(1, 30), 90))
    a, b = (
        make_input((m, k), dtype, generator, gap=rng.choice((0, 3))),
        make_input((k, n), dtype, generator, gap=rng.choice((0, 2))),
    )
    if rng.random() < 0.5:
        a, b = a.abs_(), b.abs_()
    out = make_output((m, n), torch.float32, rng.choice((0, 1)))
    arguments = {
        "out_ptr": out, "a_ptr": a, "b_ptr": b, "m": m, "n": n, "k": k, "out_stride": out.stride(0), "a_stride": a.stride(0), "b_stride": b.stride(0),
    }  # fmt: skip
    block = rng.choice((16, 32))
    tiles_m, tiles_n = ceil_div(m, block), ceil_div(n, block)  # a tile may wrap around: then it is read whole
    least = {"a_ptr": tiles_m * block * k * tiles_n, "b_ptr": k * tiles_n * block * tiles_m, "out_ptr": 0}
    return Case(
        (tiles_m, tiles_n),
        arguments,
        {"BLOCK": block},
        {"out_ptr": a.double() @ b.double()},
        ("a_ptr", "b_ptr"),
        least,
    )


def check_matmul(kernel: Any) -> None:
    """`a @ b` in tiles, with sums in float32."""
    look = "the masks of the last tile in k (masked elements must count as 0), the tile's place in out, and the dtype of the sum: float32"
    for _, rng, generator, dtype in seeds("matmul"):
        run_case(kernel, make_matmul_case(rng, generator, dtype), {"": look})


# -- 10: running_max_and_sum -----------------------------------------------------------------------------------------


def make_running_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Rows that are longer than a piece, with their largest number anywhere."""
    rows, block = rng.randint(1, 3), rng.choice((4, 8, 16))
    columns = rng.choice((1, block, 3 * block, rng.randint(2, 70), 500))
    x = make_input((rows, columns), dtype, generator, scale=rng.choice((1.0, 30.0, 3e3)), gap=rng.choice((0, 3)))
    order = rng.choice(("any", "ascending", "descending"))
    if order != "any":
        x.copy_(x.sort(dim=1, descending=order == "descending").values)
    if rng.random() < 0.5:
        x -= 2 * x.abs().max()
    elif dtype == torch.float32:
        x.copy_(x / x.abs().max() - 1e30 if rng.random() < 0.5 else x)
    exact = x.double()
    maxima = exact.amax(dim=1)
    arguments = {
        "maxima_ptr": make_output((rows,), torch.float32), "sums_ptr": make_output((rows,), torch.float32), "x_ptr": x,
        "num_columns": columns, "x_stride": x.stride(0),
    }  # fmt: skip
    outputs = {"maxima_ptr": maxima, "sums_ptr": (exact - maxima[:, None]).exp().sum(dim=1)}
    least = {"x_ptr": rows * columns, "maxima_ptr": 0, "sums_ptr": 0}
    return Case((rows,), arguments, {"BLOCK": block}, outputs, ("x_ptr",), least)


def check_running(kernel: Any) -> None:
    """Maximum and sum of a softmax in one pass over pieces."""
    look = {
        "maxima_ptr": "the maximum so far: it begins below all numbers, and grows from piece to piece",
        "sums_ptr": "the sum so far: when a piece raises the maximum, it must shrink by exp(old maximum - new maximum)",
    }
    for _, rng, generator, dtype in seeds("running", 2 * _ROUNDS):
        run_case(kernel, make_running_case(rng, generator, dtype), look)


MAKERS: dict[str, Callable[[random.Random, torch.Generator, torch.dtype], Case]] = {
    "gather": make_gather_case,
    "transpose": make_transpose_case,
    "matmul": make_matmul_case,
    "running_max_and_sum": make_running_case,
}
"""By kernel: the function that makes a case."""
