"""The checks of lesson 05 for kernels that compute row by row, from an addition to RMSNorm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.course.lessons.lesson_05.launches import (
    check_reads,
    check_unchanged,
    compare,
    describe_call,
    find_stored,
    launch,
    make_input,
    make_output,
)
from minivllm.course.lessons.paged_kernels import power_of_2

_ROUNDS = 12
_DTYPES = (torch.float32, torch.float16)


class Case(NamedTuple):
    """A launch to check.

    Attributes:
        grid: Its programs.
        arguments: Everything but the constants, by name, in order.
        constants: BLOCK and the like.
        outputs: By name of an argument, its expected contents afterwards, in double precision.
        inputs: Names of the tensors that must not change.
        least: By name, the elements that must be read.
    """

    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, int]
    outputs: dict[str, Tensor]
    inputs: tuple[str, ...]
    least: dict[str, int]


def run_case(kernel: Any, case: Case, look: dict[str, str]) -> None:
    """Launch a case and compare. `look` says where to look if an output is wrong."""
    arguments = list(case.arguments.values())
    call = describe_call(kernel, case.grid, *arguments, **case.constants)
    before = [case.arguments[name].clone() for name in case.inputs]
    recorded = launch(kernel, case.grid, *arguments, **case.constants)
    tensors = [name for name, value in case.arguments.items() if isinstance(value, Tensor)]
    check_unchanged(call, case.inputs, [case.arguments[name] for name in case.inputs], before)
    for name, expected in case.outputs.items():
        compare(
            call,
            name,
            case.arguments[name],
            expected,
            look.get(name, look.get("", "")),
            find_stored(recorded, tensors.index(name)),
        )
    check_reads(call, recorded, {tensors.index(name): least for name, least in case.least.items()})


def ceil_div(a: int, b: int) -> int:
    """Programs that it takes for `a` elements, `b` each."""
    return -(-a // b)


def seeds(name: str, rounds: int = _ROUNDS) -> Iterator[tuple[int, random.Random, torch.Generator, torch.dtype]]:
    """Random situations, the same for everyone: number, numbers, tensors, and a dtype."""
    for number in range(rounds):
        rng = random.Random(f"{name} {number}")
        yield number, rng, torch.Generator().manual_seed(rng.getrandbits(32)), _DTYPES[number % 2]


# -- 1: add ----------------------------------------------------------------------------------------------------------


def make_add_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Vectors whose length is rarely a multiple of the block."""
    block = rng.choice((4, 8, 16, 32))
    size = rng.choice((1, block, 3 * block, rng.randint(2, 90)))
    x, y = (make_input((size,), dtype, generator) for _ in range(2))
    arguments = {"out_ptr": make_output((size,), dtype), "x_ptr": x, "y_ptr": y, "size": size}
    return Case(
        (ceil_div(size, block),), arguments, {"BLOCK": block}, {"out_ptr": x.double() + y.double()}, ("x_ptr", "y_ptr"),
        {"x_ptr": size, "y_ptr": size, "out_ptr": 0},
    )  # fmt: skip


def check_add(kernel: Any) -> None:
    """`out = x + y`, with a mask at the end."""
    for _, rng, generator, dtype in seeds("add"):
        run_case(
            kernel,
            make_add_case(rng, generator, dtype),
            {"": "which elements a program has: BLOCK of them, from program_id · BLOCK on"},
        )


# -- 2: scale_rows ---------------------------------------------------------------------------------------------------


def make_scale_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Matrices whose rows lie apart, by different distances."""
    rows, columns = rng.randint(1, 5), rng.choice((rng.randint(1, 40), 150))
    x = make_input((rows, columns), dtype, generator, gap=rng.choice((0, 3, 8)))
    out, factors = make_output((rows, columns), dtype, rng.choice((0, 1, 5))), make_input((rows,), dtype, generator)
    arguments = {
        "out_ptr": out, "x_ptr": x, "factors_ptr": factors, "num_columns": columns, "out_stride": out.stride(0), "x_stride": x.stride(0),
    }  # fmt: skip
    return Case(
        (rows,), arguments, {"BLOCK": power_of_2(columns) * rng.choice((1, 2))}, {"out_ptr": x.double() * factors.double()[:, None]},
        ("x_ptr", "factors_ptr"), {"x_ptr": rows * columns, "factors_ptr": rows, "out_ptr": 0},
    )  # fmt: skip


def check_scale_rows(kernel: Any) -> None:
    """Each row times a factor of its own, in tensors with different strides."""
    for _, rng, generator, dtype in seeds("scale"):
        look = "where a row begins (row · x_stride in x, row · out_stride in out), and which factor is its own"
        run_case(kernel, make_scale_case(rng, generator, dtype), {"": look})


# -- 3: max_and_sum --------------------------------------------------------------------------------------------------


def make_reduction_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Rows of numbers, sometimes all negative, sometimes so many of the same sign that float16 cannot hold their sum."""
    rows, columns = rng.randint(1, 4), rng.choice((1, rng.randint(2, 50), 700))
    x = make_input((rows, columns), dtype, generator, gap=rng.choice((0, 3)))
    sign = rng.choice((-1, 0, 1, -1))
    if sign:
        x.copy_(sign * (x.abs() + (100 if columns == 700 else 0.5)))
    if rng.random() < 0.3 and dtype == torch.float32:
        x.copy_(-1e30 * (x.abs() + 0.5))
    arguments = {
        "maxima_ptr": make_output((rows,), torch.float32), "sums_ptr": make_output((rows,), torch.float32), "x_ptr": x,
        "num_columns": columns, "x_stride": x.stride(0),
    }  # fmt: skip
    outputs = {"maxima_ptr": x.double().amax(dim=1), "sums_ptr": x.double().sum(dim=1)}
    least = {"x_ptr": rows * columns, "maxima_ptr": 0, "sums_ptr": 0}
    return Case((rows,), arguments, {"BLOCK": power_of_2(columns)}, outputs, ("x_ptr",), least)


def check_max_and_sum(kernel: Any) -> None:
    """A row's largest number and its sum, which is taken in float32."""
    look = {
        "maxima_ptr": "what masked elements count as: 0 is larger than every negative number",
        "sums_ptr": "what masked elements count as, and the dtype in which you add: in float16 a sum of thousands is coarse, and above 65504 infinite",
    }
    for _, rng, generator, dtype in seeds("reduction", 2 * _ROUNDS):
        run_case(kernel, make_reduction_case(rng, generator, dtype), look)


# -- 4: softmax ------------------------------------------------------------------------------------------------------


def make_softmax_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Rows of numbers that are small, large or very large."""
    rows, columns, scale = rng.randint(1, 4), rng.choice((1, rng.randint(2, 60), 200)), rng.choice((1.0, 30.0, 1e4))
    x = make_input((rows, columns), dtype, generator, scale=scale, gap=rng.choice((0, 2)))
    if rng.random() < 0.4 and scale < 1e4:
        x -= 5 * scale  # all of them far below 0
    elif rng.random() < 0.3 and dtype == torch.float32:
        x.copy_(-1e30 * (x.abs() + 0.5))
    out = make_output((rows, columns), dtype, rng.choice((0, 4)))
    arguments = {"out_ptr": out, "x_ptr": x, "num_columns": columns, "out_stride": out.stride(0), "x_stride": x.stride(0)}
    return Case(
        (rows,), arguments, {"BLOCK": power_of_2(columns) * rng.choice((1, 2))}, {"out_ptr": x.double().softmax(dim=1)}, ("x_ptr",),
        {"x_ptr": rows * columns, "out_ptr": 0},
    )  # fmt: skip


def check_softmax(kernel: Any) -> None:
    """The softmax of each row, of numbers as large as 10⁴, with one read."""
    look = "what masked elements count as in the maximum and in the sum, and whether the maximum is subtracted before exp"
    for _, rng, generator, dtype in seeds("softmax", 2 * _ROUNDS):
        run_case(kernel, make_softmax_case(rng, generator, dtype), {"": look})


# -- 5: silu_and_mul -------------------------------------------------------------------------------------------------


def make_silu_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """Rows of gate and up side by side, in several programs each."""
    block, rows = rng.choice((4, 8, 16)), rng.randint(1, 4)
    size = rng.choice((block, rng.randint(1, 50)))
    x = make_input((rows, 2 * size), dtype, generator, scale=rng.choice((1.0, 8.0)), gap=rng.choice((0, 3)))
    if dtype == torch.float16 and rng.random() < 0.5:
        x[:, :size] = -x[:, :size].abs() - 11.5  # exp(-gate) is above what float16 can hold
    out = make_output((rows, size), dtype, rng.choice((0, 2)))
    gate, up = x.double().chunk(2, dim=1)
    arguments = {"out_ptr": out, "x_ptr": x, "size": size, "out_stride": out.stride(0), "x_stride": x.stride(0)}
    return Case(
        (rows, ceil_div(size, block)), arguments, {"BLOCK": block}, {"out_ptr": F.silu(gate) * up}, ("x_ptr",),
        {"x_ptr": 2 * rows * size, "out_ptr": 0},
    )  # fmt: skip


def check_silu_and_mul(kernel: Any) -> None:
    """`silu(gate) · up`, a row in pieces."""
    look = (
        "where gate and up lie (up begins `size` numbers after gate), which piece axis 1 is, and the dtype in which you compute"
    )
    for _, rng, generator, dtype in seeds("silu", 2 * _ROUNDS):
        run_case(kernel, make_silu_case(rng, generator, dtype), {"": look})


# -- 6: add_rms_norm -------------------------------------------------------------------------------------------------


def make_norm_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> Case:
    """A residual stream, an addend, and a weight; large numbers whose squares float16 cannot hold."""
    rows, size, scale = rng.randint(1, 4), rng.choice((1, rng.randint(2, 60), 300)), rng.choice((1e-3, 1.0, 300.0))
    stride = size + rng.choice((0, 3))
    x, residual = (make_input((rows, size), dtype, generator, scale=scale, gap=stride - size) for _ in range(2))
    weight, eps = make_input((size,), dtype, generator), rng.choice((1e-5, 1e-2))
    total = (x.double() + residual.double()).to(dtype).double()
    normalized = total * (total.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    out = make_output((rows, size), dtype, stride - size)
    arguments = {
        "out_ptr": out, "residual_ptr": residual, "x_ptr": x, "weight_ptr": weight, "size": size, "stride": stride, "eps": eps,
    }  # fmt: skip
    outputs = {"residual_ptr": total, "out_ptr": normalized * weight.double()}
    least = {"x_ptr": rows * size, "residual_ptr": rows * size, "weight_ptr": rows * size, "out_ptr": 0}
    return Case((rows,), arguments, {"BLOCK": power_of_2(size) * rng.choice((1, 2))}, outputs, ("x_ptr", "weight_ptr"), least)


def check_add_rms_norm(kernel: Any) -> None:
    """Add to the residual stream, in place, and normalize the sum: everything read once."""
    look = {
        "residual_ptr": "what is stored to residual_ptr: residual + x",
        "out_ptr": "the mean (over `size` numbers, not BLOCK), eps inside the root, the weight, and the dtype of the squares: float32",
    }
    for _, rng, generator, dtype in seeds("norm", 2 * _ROUNDS):
        run_case(kernel, make_norm_case(rng, generator, dtype), look)


MAKERS: dict[str, Callable[[random.Random, torch.Generator, torch.dtype], Case]] = {
    "add": make_add_case,
    "scale_rows": make_scale_case,
    "max_and_sum": make_reduction_case,
    "softmax": make_softmax_case,
    "silu_and_mul": make_silu_case,
    "add_rms_norm": make_norm_case,
}
"""By kernel: the function that makes a case."""
