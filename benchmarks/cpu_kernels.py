"""The CPU kernels: linear layers and decode attention of SmolLM2-135M, against other ways and the machine's limits.

python benchmarks/cpu_kernels.py --json kernels.json --plot roofline.png
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import decode_attention
import linear_layers
from decode_attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from linear_layers import SHAPES

from minivllm.bench.report import describe_machine, report
from minivllm.entrypoints.cli.options import check_writable, picture
from minivllm.errors import ConfigError
from minivllm.viz.roofline import RooflinePoint, draw_roofline

FLOAT32_BYTES = 4


def kernel_points(
    results: dict[str, Any], ways: Sequence[str] = ("minivllm",), backends: Sequence[str] = ("cpu",)
) -> list[RooflinePoint]:
    """The float32 linear layers, by rows in the batch, and decode attention, by sequences and context, as points of a roofline.

    Bytes are those that a kernel cannot do without: weights, inputs and outputs once each, the keys and values of the contexts once.

    Args:
        results: The content of the file that `python benchmarks/cpu_kernels.py --json FILE` wrote.
        ways: Those of `linear_layers.WAYS` to show; "F.linear" if none of them was measured. No way with fewer bits: its arithmetic
            has another roof, which is not measured.
        backends: The attention backends to show: "cpu" or "torch".

    Returns:
        A point for each kernel.

    Raises:
        ConfigError: These are not results of this benchmark, or a way is not float32.
    """
    for way in ways:
        if "int" in way or "bfloat16" in way:
            raise ConfigError(f"{way!r} does not calculate in float32, and the roof of fewer bits is not measured: leave it out.")
    try:
        linear, attention = results["linear"], results["attention"]
        shown = [way for way in ways if way in linear] or ["F.linear"]
        points = [_linear_point(way, int(rows), milliseconds) for way in shown for rows, milliseconds in linear[way].items()]
        points += [_attention_point(row, backend) for backend in backends for row in attention]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"These are not results of `benchmarks/cpu_kernels.py` ({type(error).__name__}: {error}): write them with its --json."
        ) from None
    return points


def peaks(results: dict[str, Any]) -> tuple[float, float]:
    """The machine's measured float32 operations per second and bytes per second.

    Raises:
        ConfigError: These are not results of this benchmark.
    """
    try:
        return results["floor"]["gigaflops"] * 1e9, results["floor"]["read_gigabytes_per_second"] * 1e9
    except (KeyError, TypeError) as error:
        raise ConfigError(f"These are not results of `benchmarks/cpu_kernels.py` ({type(error).__name__}: {error}).") from None


def _linear_point(way: str, rows: int, milliseconds: float) -> RooflinePoint:
    weights = sum(outputs * inputs for outputs, inputs in SHAPES)
    activations = rows * sum(outputs + inputs for outputs, inputs in SHAPES)
    return RooflinePoint(
        f"{rows} row{'' if rows == 1 else 's'}",
        flops=2 * rows * weights,
        bytes=(weights + activations) * FLOAT32_BYTES,
        seconds=milliseconds / 1e3,
        series=f"linear layers ({way}), by rows in the batch",
    )


def _attention_point(row: dict[str, Any], backend: str) -> RooflinePoint:
    """Each query head is multiplied with each key, and its scores with each value."""
    tokens = NUM_LAYERS * row["sequences"] * row["context"]
    return RooflinePoint(
        f"{row['sequences']} × {row['context']:,}",
        flops=2 * 2 * tokens * NUM_HEADS * HEAD_DIM,
        bytes=2 * tokens * NUM_KV_HEADS * HEAD_DIM * FLOAT32_BYTES,
        seconds=row["milliseconds"][backend] / 1e3,
        series=f"decode attention ({backend}), sequences × tokens of context",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the roofline of the engine's float32 kernels here")
    arguments = parser.parse_args(argv)
    linear_layers.check_numba()
    for path in (arguments.json, arguments.plot):
        check_writable(path)
    print("This takes two minutes ...", file=sys.stderr)
    floor, layers, rows = linear_layers.measure_floor(), linear_layers.measure_linear(), decode_attention.measure_attention()
    table = (
        f"{linear_layers.format_layers(layers, floor)}\n\nAttention of a decode step, 30 layers\n\n"
        f"{decode_attention.format_attention(rows)}"
    )
    results = {"floor": vars(floor), "linear": layers, "attention": rows}
    report("All linear layers of a step of SmolLM2-135M, by rows in the batch", table, results, file=arguments.json)
    if arguments.plot:
        title = textwrap.fill(f"Linear layers and decode attention of SmolLM2-135M in float32; {describe_machine()}", 100)
        draw_roofline(kernel_points(results), *peaks(results), title).savefig(arguments.plot, dpi=150)
        print(f"\nThe roofline: {arguments.plot}")


if __name__ == "__main__":
    main()
