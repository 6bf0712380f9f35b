"""The innermost loop of the linear layers by itself: multiply-adds per second of one thread, with weights from a cache.

    python benchmarks/bfloat16_products.py

It tells which instruction to take for bfloat16 on a processor without AMX: VDPBF16PS, or multiply-adds of float32 with weights that become
float32 in registers. `kernels.cpu.features` has the choice.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np

from minivllm.bench.report import format_table, report
from minivllm.entrypoints.cli.options import check_writable
from minivllm.errors import ConfigError
from minivllm.kernels.ops import has_cpu_kernels

IN_FEATURES, NUM_PANELS = 576, 8
WARM_UP, REPEATS = 5, 60
KINDS: dict[str, tuple[Any, Any, int, str | None]] = {
    "float32": (np.float32, np.float32, 1, None),
    "bfloat16 in registers": (np.float32, np.uint32, 2, None),
    "bfloat16 VDPBF16PS": (np.uint32, np.uint32, 2, "avx512bf16"),
    "bfloat16 TDPBF16PS": (np.uint32, np.uint32, 2, "amx-bf16"),
    "int8 VPDPBUSD": (np.int32, np.int32, 4, "avx512vnni"),
    "int8 TDPBUSD": (np.int32, np.int32, 4, "amx-int8"),
}
"""What `x` and the panels are made of, how many input features a word has, and the feature of the processor that it takes."""
AMX = ("amx-bf16", "amx-int8")


def measure(name: str, rows: int, width: int) -> float:
    """Median seconds of one pass of the loop over all panels."""
    from minivllm.kernels.cpu.panels import PANEL, ROW_PADDING

    x_dtype, dtype, per_word, feature = KINDS[name]
    num_words = IN_FEATURES // per_word
    sums = np.int32 if name.startswith("int8") else np.float32
    columns = num_words * (2 if name.endswith("in registers") else 1)
    x, panels = np.zeros((columns, rows + ROW_PADDING), x_dtype), np.zeros((NUM_PANELS, num_words, PANEL), dtype)
    bias, out = np.zeros(NUM_PANELS * PANEL, sums), np.zeros((rows, NUM_PANELS * PANEL), sums)
    loop = compile_loop()
    if feature in AMX:
        loop, x = compile_tile_loop(), np.zeros((rows, num_words), x_dtype)
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        loop(x, panels, bias, out, rows, width)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


@functools.cache
def compile_loop() -> Any:
    """A compiled caller of `multiply_tile`, for all panels."""
    from numba import njit

    from minivllm.kernels.cpu.linear import multiply_tile, what_to_prefetch

    @njit(error_model="numpy")
    def loop(x: Any, panels: Any, bias: Any, out: Any, rows: int, width: int) -> None:
        place, pace = what_to_prefetch(panels, 0, len(panels), 0, 1)
        multiply_tile(x, panels, 0, len(panels), bias, out, 0, rows, width, place, pace)

    return loop


@functools.cache
def compile_tile_loop() -> Any:
    """The same by tiles, whose `x` is not transposed."""
    from numba import njit

    from minivllm.kernels.cpu.amx import tile_rows
    from minivllm.kernels.cpu.linear_bfloat16 import _multiply_amx_part

    @njit(error_model="numpy")
    def loop(x: Any, panels: Any, bias: Any, out: Any, rows: int, width: int) -> None:
        _multiply_amx_part(0, 1, x, panels, bias, out, tile_rows(rows, 2))

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    if not has_cpu_kernels():
        raise ConfigError("The loops are compiled by Numba, which is not installed.")
    from minivllm.kernels.cpu.features import request_amx
    from minivllm.kernels.cpu.panels import PANEL, WIDTHS

    features = llvmlite.binding.get_host_cpu_features()
    has_tiles = request_amx()
    names = [
        name
        for name, (*_, feature) in KINDS.items()
        if feature is None or (features.get(feature, False) and (has_tiles or feature not in AMX))
    ]
    products = IN_FEATURES * NUM_PANELS * PANEL
    results = {
        rows: {name: rows * products / measure(name, rows, width) / 1e9 for name in names} for rows, width in WIDTHS.items()
    }
    table = format_table(
        ("rows", *names), [(f"{rows}", *(f"{rates[name]:.0f}" for name in names)) for rows, rates in results.items()]
    )
    processor = llvmlite.binding.get_host_cpu_name()
    title = f"Billions of multiply-adds per second, one thread, {processor}"
    report(title, table, {"processor": processor, "results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
