"""Benchmarks of an engine in this process: `minivllm bench offline`, `latency`, `sweep` and `calibrate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import DISTRIBUTIONS, WorkloadRequest, load_workload, make_workload
from minivllm.config import ModelConfig
from minivllm.entrypoints.cli.options import (
    add_command,
    add_engine_options,
    add_option,
    add_save_trace_option,
    engine_args,
    picture,
)
from minivllm.errors import ConfigError

ONE_WORKLOAD = "This benchmark takes one workload: give --workload FILE, or one --distribution."

if TYPE_CHECKING:
    from minivllm.engine.llm_engine import LLMEngine


def add_offline(benches) -> None:  # noqa: ANN001
    """Register `minivllm bench offline`."""
    parser = add_command(
        benches, "offline", run_bench_offline, "compare static and continuous batching on the same workload",
        "minivllm bench offline --distribution longtail --plot timelines.png",
    )  # fmt: skip
    group = add_workload_options(parser)
    add_option(group, "--scheduler", ["static", "continuous"], "policies to compare", choices=("static", "continuous"))
    add_option(group, "--json FILE", Path, "write the results here")
    add_option(group, "--plot FILE", picture, "draw the timelines of the last workload here")
    add_save_trace_option(group, "; several runs get a file each, with workload and policy in its name")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=16)


def add_latency(benches) -> None:  # noqa: ANN001
    """Register `minivllm bench latency`."""
    example = "minivllm bench latency --batch-sizes 1 8 64 --json latency.json"
    parser = add_command(benches, "latency", run_bench_latency, "TTFT and ITL by batch size", example)
    group = parser.add_argument_group("requests")
    add_option(group, "--batch-sizes N", [1, 2, 4, 8, 16, 32, 64], "requests that arrive at once")
    add_option(group, "--prompt-len", 64, "tokens")
    add_option(group, "--output-len", 32, "tokens")
    add_option(group, "--rounds", 3, "runs per batch size")
    add_option(group, "--json FILE", Path, "write the results here")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=None)


def add_sweep(benches) -> None:  # noqa: ANN001
    """Register `minivllm bench sweep`."""
    parser = add_command(
        benches, "sweep", run_bench_sweep, "throughput and latency against max_num_seqs",
        "minivllm bench sweep --workload benchmarks/workloads/offline_64.json --plot sweep.png",
    )  # fmt: skip
    group = add_workload_options(parser)
    add_option(group, "--values N", [1, 2, 4, 8, 16, 32, 64], "values of max_num_seqs")
    add_option(group, "--rounds", 1, "runs per value")
    add_option(group, "--json FILE", Path, "write the results here")
    add_option(group, "--plot FILE", picture, "draw both curves here")
    add_engine_options(parser, leave_out="max_num_seqs")
    parser.set_defaults(distribution=["longtail"])


def add_calibrate(benches) -> None:  # noqa: ANN001
    """Register `minivllm bench calibrate`."""
    parser = add_command(
        benches, "calibrate", run_calibrate, "fit the simulator's cost model to this machine and check its predictions",
        "minivllm bench calibrate --max-num-seqs 32 --json costs.json",
    )  # fmt: skip
    add_option(parser, "--rounds", 3, "how often each run is repeated")
    add_option(parser, "--json FILE", Path, "write the cost model and the predictions here")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=32)


def add_workload_options(
    parser: argparse.ArgumentParser, num_requests: str = "generated requests (default: %(default)s)"
) -> argparse._ArgumentGroup:
    """The options that describe the workload; `num_requests` is the help of --num-requests."""
    group = parser.add_argument_group("workload")
    add_option(group, "--workload FILE", Path, "a JSON list of {'ids': prompt tokens, 'out': tokens to generate}")
    add_option(group, "--distribution", list(DISTRIBUTIONS), "lengths of generated requests", choices=DISTRIBUTIONS)
    group.add_argument("--num-requests", type=int, default=32, help=num_requests)
    add_option(group, "--mean-prompt-len", 32, "tokens")
    add_option(group, "--mean-output-len", 48, "tokens")
    add_option(group, "--workload-seed", 0, "seed of lengths and tokens")
    return group


def make_workloads(arguments: argparse.Namespace, config: ModelConfig) -> dict[str, list[WorkloadRequest]]:
    """The workload file, or a generated workload for each distribution."""
    if arguments.workload:
        return {arguments.workload.stem: load_workload(arguments.workload)}
    return {
        name: make_workload(
            name, arguments.num_requests, mean_prompt_len=arguments.mean_prompt_len, mean_output_len=arguments.mean_output_len,
            vocab_size=config.vocab_size, max_len=config.max_model_len, seed=arguments.workload_seed,
        )
        for name in arguments.distribution
    }  # fmt: skip


def one_workload(arguments: argparse.Namespace, config: ModelConfig) -> tuple[str, list[WorkloadRequest]]:
    """The name and the requests of the only workload.

    Raises:
        ConfigError: The options ask for several.
    """
    workloads = make_workloads(arguments, config)
    if len(workloads) > 1:
        raise ConfigError(ONE_WORKLOAD)
    return next(iter(workloads.items()))


def find_model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The model's configuration, without loading its weights."""
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import load_model_config

    return load_model_config(arguments.model, resolve_model(arguments.model), arguments.max_model_len)


def make_engine(arguments: argparse.Namespace, **overrides: Any) -> LLMEngine:
    """Build the engine from the options."""
    from minivllm.entrypoints.llm import LLM

    return LLM(**engine_args(arguments) | overrides).llm_engine


def report_engine(arguments: argparse.Namespace, what: str, table: str, results: dict[str, Any]) -> None:
    """Print and save results; with quantized weights, say how to measure their quality."""
    from minivllm.bench.report import report

    model = arguments.model
    if arguments.dtype not in ("auto", "float32"):
        model += f" in {arguments.dtype}"
    if arguments.quantization:
        model += f" with {arguments.quantization} weights"
        table += (
            "\n\nQuantized weights change some tokens: `python benchmarks/quality.py --weights "
            f"{arguments.quantization}` measures how many."
        )
    origin = {"model": arguments.model, "dtype": arguments.dtype, "quantization": arguments.quantization}
    report(f"{model}, {what}", table, origin | results, file=arguments.json, command=arguments.command)


def run_bench_offline(arguments: argparse.Namespace) -> int:
    """Run each workload under each policy and print a table."""
    from minivllm.bench.offline import format_runs, run_offline

    engine = make_engine(arguments)
    workloads = make_workloads(arguments, engine.model_config)
    names = [(name, policy) for name in workloads for policy in arguments.scheduler]
    runs = [run_offline(engine, policy, name, workloads[name]) for name, policy in names]
    results = {"results": [run.to_json() for run in runs]}
    report_engine(arguments, f"at most {arguments.max_num_seqs} running", format_runs(runs), results)
    if arguments.plot:
        from minivllm.viz.timeline import draw_timelines

        last = runs[-len(arguments.scheduler) :]
        draw_timelines({run.scheduler: run.trace for run in last}, last[0].workload).savefig(arguments.plot, dpi=150)
        print(f"\nTimelines of the {last[0].workload} workload: {arguments.plot}")
    for run in runs if arguments.save_trace else ():
        path: Path = arguments.save_trace
        if len(runs) > 1:
            path = path.with_name(f"{path.stem}.{run.workload}.{run.scheduler}{path.suffix}")
        run.trace.save(path)
        print(f"\nTrace of the {run.workload} workload, {run.scheduler}: {path}")
    return 0


def run_bench_latency(arguments: argparse.Namespace) -> int:
    """Measure TTFT and ITL at each batch size."""
    from minivllm.bench.offline import format_batches, measure_latency

    largest = max(arguments.batch_sizes)
    if arguments.max_num_seqs is not None and arguments.max_num_seqs < largest:
        raise ConfigError(f"max_num_seqs is {arguments.max_num_seqs}, so a batch of {largest} would not run at once: raise it.")
    engine = make_engine(arguments, max_num_seqs=arguments.max_num_seqs or largest)
    lengths = {"prompt_len": arguments.prompt_len, "output_len": arguments.output_len}
    batches = measure_latency(engine, arguments.batch_sizes, **lengths, rounds=arguments.rounds)
    what = f"prompts of {arguments.prompt_len} and outputs of {arguments.output_len} tokens, all requests at once"
    results = lengths | {"results": [batch.to_json() for batch in batches]}
    report_engine(arguments, what, format_batches(batches), results)
    return 0


def run_bench_sweep(arguments: argparse.Namespace) -> int:
    """Run one workload with each value of max_num_seqs; print a table and draw the curves."""
    from minivllm.bench.offline import format_points, sweep_max_num_seqs

    name, requests = one_workload(arguments, find_model_config(arguments))
    points = sweep_max_num_seqs(
        lambda value: make_engine(arguments, max_num_seqs=value), arguments.values, name, requests, arguments.rounds
    )
    results = {"workload": name, "results": [vars(point) for point in points]}
    report_engine(arguments, f"{name}, {len(requests)} requests", format_points(points), results)
    if arguments.plot:
        from minivllm.viz.sweep import draw_sweep

        columns = zip(*((p.max_num_seqs, p.output_tokens_per_second, p.mean_latency) for p in points), strict=True)
        draw_sweep(*map(list, columns), f"{arguments.model}, {name}: {len(requests)} requests").savefig(arguments.plot, dpi=150)
        print(f"\nCurves: {arguments.plot}")
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, fit, predict unseen runs, and print a table."""
    from minivllm.simulation.calibrate import calibrate, format_report

    print(f"This takes about {2 * arguments.rounds} minutes ...", file=sys.stderr)
    calibration = calibrate(make_engine(arguments), arguments.rounds)
    what = f"cost of a step with up to {arguments.max_num_seqs} sequences, {arguments.rounds} rounds"
    report_engine(arguments, what, format_report(calibration), {"calibration": calibration.to_json()})
    return 0
