"""Lesson 14's linear methods in the engine, as its solution has them: how fast one sequence decodes, beside float32, and how far the model moves.

    python benchmarks/lesson_int8.py --rounds 5 --json FILE

"loop" is the loop that a learner writes, called from Python in every layer; "packed" are the same integers in the compiled layers. "float32, not
compiled" calls torch's product from Python in every layer, as "loop" does with the learner's.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import nbformat
from quality import NUM_POSITIONS, measure_quality

from minivllm.bench.report import format_table, report
from minivllm.course.lessons.lesson_14.engine import OPTIONS, load, seconds_per_token
from minivllm.entrypoints.cli.options import check_writable
from minivllm.layers.linear_methods import UnquantizedLinearMethod

SOLUTION = Path(__file__).parents[1] / "solutions" / "14_making_it_fast.ipynb"


def read_solution() -> dict[str, Any]:
    """What the solution's cells define, its checks left out."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in nbformat.read(SOLUTION, as_version=4).cells:
        if cell.cell_type == "code" and not cell.metadata["nbgrader"]["grade"] and cell.id != "results":
            lines = [line for line in cell.source.split("\n") if not line.startswith("%")]
            exec(compile("\n".join(lines), f"<{cell.id}>", "exec"), namespace)
    return namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in turns (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each writes in a round (default: %(default)s)")
    parser.add_argument(
        "--positions", type=int, default=NUM_POSITIONS, help="positions of prose to compare (default: %(default)s)"
    )
    parser.add_argument("--note", default="", help="what a reader must know of this run, such as that the machine was busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    solution = read_solution()
    llms = {
        "float32": load(),
        "float32, not compiled": load(UnquantizedLinearMethod),
        "loop": load(solution["MyInt8"]),
        "packed": load(solution["MyPackedInt8"]),
    }
    for llm in llms.values():
        seconds_per_token(llm)  # what is compiled at the first call is compiled now
    times: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(arguments.rounds):
        for name, llm in llms.items():
            times[name].append(seconds_per_token(llm, arguments.tokens))
    engines = {name: llms[name].llm_engine for name in ("float32", "loop", "packed")}
    qualities = {
        quality.quantization: quality for quality in measure_quality(engines.pop("float32"), engines, arguments.positions)
    }
    base, rows = statistics.median(times["float32"]), []
    for name, seconds in times.items():
        median, quality = statistics.median(seconds), qualities.get(name)
        words = ("", "") if quality is None else (f"{quality.agreement:.1%}", f"{quality.mean_kl:.4f} nats")
        rows.append((name, f"{1 / median:.1f}", f"{base / median:.2f}", *words))
    note = f"; {arguments.note}" if arguments.note else ""
    title = f"Lesson 14's linear methods, one sequence, medians of {arguments.rounds} rounds in turns; {arguments.positions} positions of prose{note}"
    table = format_table(("weights", "tokens/s", "x float32", "same next token", "mean KL"), rows)
    results = {"seconds_per_token": times, "quality": {name: vars(quality) for name, quality in qualities.items()}}
    report(title, table, {"model": OPTIONS["model"], "note": arguments.note} | results, file=arguments.json)


if __name__ == "__main__":
    main()
