"""Lesson 15's fit, as its solution has it: four coefficients from traced runs of this machine, and how well they predict runs that they have not seen.

    python benchmarks/lesson_fit.py --rounds 5 --json FILE

All runs are measured in turns, on a quiet machine if the errors are to mean anything. A prediction is compared with the medians of an unseen run.
The last runs are beyond the fit: with more sequences than it has seen, kernels for the CPU compute a step in more passes, and a straight line
knows nothing of that.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import nbformat
import numpy as np

from minivllm import LLM
from minivllm.bench.report import format_table, report
from minivllm.bench.summary import EngineRun
from minivllm.bench.workloads import make_workload
from minivllm.entrypoints.cli.options import check_writable
from minivllm.executor.simulated import CostModel
from minivllm.simulation.calibrate import Setting, calibration_settings, run_setting, step_costs
from minivllm.simulation.engine import simulate

SOLUTION = Path(__file__).parents[1] / "solutions" / "15_planning_for_a_million_users.ipynb"
OPTIONS = {"model": "smollm2-135m", "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 256}
"""As in the lesson."""
FITTED, BEYOND = 6, 7
"""The largest batch of the runs that are fitted, and the one of the runs beyond."""


def read_fit() -> Any:
    """`fit_costs` of the solution."""
    namespace: dict[str, Any] = {"np": np, "math": math, "CostModel": CostModel}
    for cell in nbformat.read(SOLUTION, as_version=4).cells:
        if cell.id in ("fit", "interrupted"):
            exec(compile(cell.source, f"<{cell.id}>", "exec"), namespace)
    return namespace["fit_costs"]


def unseen_settings() -> list[Setting]:
    """Other lengths and batch sizes than those of the fit, all of continuous batching; those beyond it last."""
    settings = []
    for name, count, prompt_len, output_len in (("longtail", 24, 40, 32), ("uniform", 24, 32, 48)):
        requests = make_workload(
            name, count, mean_prompt_len=prompt_len, mean_output_len=output_len, vocab_size=10_000, max_len=512, seed=1
        )
        settings += [Setting(name, requests, "continuous", size) for size in (3, 5, BEYOND)]
    return sorted(settings, key=lambda setting: setting.max_num_seqs)


def predict(costs: CostModel, setting: Setting, runs: list[EngineRun]) -> dict[str, Any]:
    """A run as simulated, beside the medians of its measurements."""
    run = simulate(
        setting.requests, cost_model=costs, max_num_seqs=setting.max_num_seqs, num_gpu_blocks=256, max_model_len=512, trace=False
    )
    speed = statistics.median(other.output_tokens_per_second for other in runs)
    ttft = statistics.median(other.ttft.p50 for other in runs)
    return {
        "workload": setting.workload,
        "max_num_seqs": setting.max_num_seqs,
        "predicted_throughput": run.output_tokens_per_second,
        "measured_throughput": speed,
        "throughput_error": run.output_tokens_per_second / speed - 1,
        "predicted_ttft_p50": run.ttft.p50,
        "measured_ttft_p50": ttft,
        "ttft_p50_error": run.ttft.p50 / ttft - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each run is repeated (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    engine = LLM(**OPTIONS).llm_engine
    seen = calibration_settings(FITTED, engine.model_config.vocab_size, 512)
    unseen, steps = unseen_settings(), []
    measured: list[list[EngineRun]] = [[] for _ in unseen]
    run_setting(engine, seen[-1])  # to warm up
    for _ in range(arguments.rounds):
        steps += [step for setting in seen for step in step_costs(run_setting(engine, setting).trace)]
        for runs, setting in zip(measured, unseen, strict=True):
            runs.append(run_setting(engine, setting))
    costs = read_fit()(steps)
    predictions = [predict(costs, setting, runs) for setting, runs in zip(unseen, measured, strict=True)]
    rows = [
        (
            p["workload"], p["max_num_seqs"], f"{p['predicted_throughput']:.1f}", f"{p['measured_throughput']:.1f}", f"{p['throughput_error']:+.1%}",
            f"{p['predicted_ttft_p50']:.2f} s", f"{p['measured_ttft_p50']:.2f} s", f"{p['ttft_p50_error']:+.1%}",
        )
        for p in predictions
    ]  # fmt: skip
    headers = ("unseen run", "max_num_seqs", "tokens/s predicted", "measured", "error", "TTFT p50 predicted", "measured", "error")
    title = (
        f"Lesson 15's fit to {len(steps)} steps of up to {FITTED} sequences, {arguments.rounds} rounds: fixed {1e3 * costs.fixed:.1f} ms, a prompt token "
        f"{1e6 * costs.per_prefill_token:.0f} µs, a sequence {1e6 * costs.per_decode_seq:.0f} µs, a context token {1e6 * costs.per_context_token:.2f} µs"
    )
    results: dict[str, Any] = {"model": OPTIONS["model"], "costs": vars(costs), "num_steps": len(steps)}
    for name, beyond in (("predictions", False), ("beyond", True)):
        results[name] = [p for p in predictions if (p["max_num_seqs"] > FITTED) == beyond]
    report(title, format_table(headers, rows), results, file=arguments.json)


if __name__ == "__main__":
    main()
