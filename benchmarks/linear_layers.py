"""The linear layers of a step of SmolLM2-135M, by rows in the batch and way to compute them, against the machine's limits.

All layers run one after another, as in a decode step, so that no weight is still in a cache when its turn comes again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.bench.report import format_table
from minivllm.errors import ConfigError
from minivllm.kernels.ops import has_cpu_kernels
from minivllm.layers.linear import Linear
from minivllm.layers.platform import Platform

SHAPES = [*[(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30, (49152, 576)]
"""[out_features, in_features] of SmolLM2-135M: qkv, o, gate and up, down of 30 layers, and the head."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

Product = Callable[[Tensor], Tensor]
"""`[rows, in_features]` to `[rows, out_features]`, with a weight of its own inside."""


def make_linear(weight: Tensor, quantization: str | None) -> Linear:
    """A linear layer as a model has it on a CPU, with this weight."""
    platform = Platform(weight.device, weight.dtype, quantization=quantization)
    layer = Linear(weight.shape[1], weight.shape[0], False, platform)
    layer.get_parameter("weight").data.copy_(weight)
    layer.process_weights_after_loading()
    return layer


def _mkl(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


def _onednn(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


WAYS: dict[str, Callable[[Tensor, int], Product]] = {
    "F.linear": lambda weight, rows: lambda x: F.linear(x, weight),
    "(W @ x.T).T": lambda weight, rows: lambda x: (weight @ x.t()).t().contiguous(),
    "oneDNN packed": _onednn,
    "MKL packed": _mkl,
    "minivllm": lambda weight, rows: make_linear(weight, None),
    "minivllm bfloat16": lambda weight, rows: make_linear(weight.bfloat16(), None),
    "minivllm int8": lambda weight, rows: make_linear(weight, "int8"),
}
"""Name to what prepares a weight for a number of rows. oneDNN's and MKL's packed products are those that torch.compile uses."""


@dataclass(frozen=True)
class Floor:
    """What a machine can do at best.

    Attributes:
        read_gigabytes_per_second: When summing a large float32 array.
        gigaflops: In a product of two large float32 matrices.
    """

    read_gigabytes_per_second: float
    gigaflops: float


def check_numba() -> None:
    """Raise ConfigError if the kernels cannot run here."""
    if not has_cpu_kernels():
        raise ConfigError("The CPU kernels need Numba: `pip install numba`.")


def measure_floor(repeats: int = 7) -> Floor:
    """The best of some runs; nothing else may run meanwhile."""
    numbers = torch.ones(sum(rows * columns for rows, columns in SHAPES))
    seconds = min(_seconds(numbers.sum) for _ in range(repeats))
    size = 2048
    a, b = torch.randn(2, size, size)
    product_seconds = min(_seconds(lambda: a @ b) for _ in range(repeats))
    return Floor(numbers.numel() * 4 / seconds / 1e9, 2 * size**3 / product_seconds / 1e9)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _can_measure(name: str, weight: Tensor) -> bool:
    """Whether torch has the operators of a way on this machine."""
    if name in ("minivllm", "minivllm bfloat16"):
        return has_cpu_kernels()
    if name == "MKL packed":
        return torch.backends.mkl.is_available()
    return torch.backends.mkldnn.is_available() or not ("oneDNN" in name or "int" in name)


@torch.inference_mode()
def measure_linear(repeats: int = 5, names: Sequence[str] = tuple(WAYS)) -> dict[str, dict[int, float]]:
    """Way to rows to median milliseconds of a pass over all layers, for some of `WAYS`."""
    weights = [torch.randn(shape) for shape in SHAPES]
    result: dict[str, dict[int, float]] = {}
    for name in names:
        make = WAYS[name]
        if not _can_measure(name, weights[0]):
            continue
        products: list[Product] = []
        result[name] = {}
        for rows in ROWS:
            inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
            if not products or name == "MKL packed":  # whose weights serve one number of rows
                del products
                products = [make(weight, rows) for weight in weights]
            times = []
            for repeat in range(repeats + 1):
                start = time.perf_counter()
                for product, weight in zip(products, weights, strict=True):
                    product(inputs[weight.shape[1]])
                if repeat > 0:  # the first pass warms up
                    times.append((time.perf_counter() - start) * 1e3)
            result[name][rows] = statistics.median(times)
    return result


def format_layers(milliseconds: dict[str, dict[int, float]], floor: Floor) -> str:
    """The measurements as a table of text, with how long reading the weights and the arithmetic alone take."""
    gigabytes = sum(rows * columns for rows, columns in SHAPES) * 4 / 1e9
    reading, flops = gigabytes / floor.read_gigabytes_per_second * 1e3, gigabytes / 2 * 1e9
    table = [(name, *(f"{times[rows]:.1f}" if rows in times else "" for rows in ROWS)) for name, times in milliseconds.items()]
    table.append(("reading once", *[f"{reading:.1f}"] * len(ROWS)))
    table.append(("arithmetic", *(f"{rows * flops / floor.gigaflops / 1e6:.1f}" for rows in ROWS)))
    return (
        f"{format_table(('ms, by rows', *map(str, ROWS)), table)}\n\n"
        f"reading once: the float32 weights, {gigabytes:.2f} GB at {floor.read_gigabytes_per_second:.1f} GB/s. arithmetic: at "
        f"{floor.gigaflops:.0f} GFLOP/s, the rate of a large product. Both were measured."
    )
