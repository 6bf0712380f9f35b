"""The command line of the kernels: `minivllm bench kernels`, with the roofline of what was measured."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from minivllm.entrypoints import bench_cli
from minivllm.entrypoints.options import add_command, check_writable, picture


def add_kernels(benches) -> None:  # noqa: ANN001
    """`minivllm bench kernels`."""
    parser = add_command(
        benches, "kernels", run_bench_kernels, "linear layers and attention on the CPU, against other ways and the machine's limits",
        "minivllm bench kernels --json kernels.json --plot roofline.png",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the roofline of the engine's float32 kernels here")
    parser.set_defaults(model="smollm2-135m")


def run_bench_kernels(arguments: argparse.Namespace) -> int:
    """Measure linear layers and decode attention on the CPU, and what the machine could do at best."""
    from minivllm.bench import linear

    linear.check_numba()
    from minivllm.bench import attention  # which needs it

    for path in (arguments.json, arguments.plot):
        check_writable(path)
    print("This takes two minutes ...", file=sys.stderr)
    floor, layers, rows = linear.measure_floor(), linear.measure_linear(), attention.measure_attention()
    table = f"{linear.format_table(layers, floor)}\n\nAttention of a decode step, 30 layers\n\n{attention.format_table(rows)}"
    content = {"floor": vars(floor), "linear": layers, "attention": rows}
    bench_cli.report(arguments, "All linear layers of a step of SmolLM2-135M, by rows in the batch", table, content)
    if arguments.plot:
        _plot_roofline(content, arguments.plot)
        print(f"\nThe roofline: {arguments.plot}")
    return 0


def _plot_roofline(results: dict[str, Any], path: Path) -> None:
    """Draw the kernels that were measured under the machine's measured limits."""
    from minivllm.bench.machine import describe_machine
    from minivllm.bench.roofline import kernel_points, peaks
    from minivllm.viz.roofline import RooflinePoint, draw_roofline

    title = textwrap.fill(f"Linear layers and decode attention of SmolLM2-135M in float32; {describe_machine()}", 100)
    points = [RooflinePoint(**point) for point in kernel_points(results)]
    draw_roofline(points, *peaks(results), title).savefig(path, dpi=150)
