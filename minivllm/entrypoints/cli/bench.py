"""`minivllm bench offline`, `latency`, `sweep` and `calibrate` measure an engine in this process, `serve` any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import (
    DISTRIBUTIONS,
    WorkloadRequest,
    generate_requests,
    load_workload,
    make_workload,
    warm_up_requests,
)
from minivllm.config import EngineArgs, ModelConfig
from minivllm.entrypoints.cli.options import (
    add_command,
    add_engine_options,
    add_goal_options,
    add_option,
    add_save_trace_option,
    options_for,
    picture,
)
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.bench.serve import Load
    from minivllm.bench.summary import ServedRequest
    from minivllm.engine.llm_engine import LLMEngine

ONE_WORKLOAD = "This benchmark takes one workload: give --workload FILE, or one --distribution."
API_KEY_VARIABLES = ("MINIVLLM_API_KEY", "OPENAI_API_KEY")
NUM_REQUESTS = 32
"""Generated requests if neither their number nor a duration is given."""
VOCAB_SIZE = 32_000
"""Generated token ids are below this: servers do not report their vocabulary size, and few have a smaller one."""
MAX_MODEL_LEN = 2048
"""Assumed if the server does not report one."""
WARM_UP_OFFSET = 1_000_000
"""Added to the warm-up's seed, so that no measured prompt is in the prefix cache."""


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
    """The name and the requests of the only workload. Raises ConfigError if the options ask for several."""
    workloads = make_workloads(arguments, config)
    if len(workloads) > 1:
        raise ConfigError(ONE_WORKLOAD)
    return next(iter(workloads.items()))


def find_model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The model's configuration, without loading its weights."""
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import load_model_config

    folder = resolve_model(arguments.model, with_weights=arguments.load_format != "dummy")
    return load_model_config(arguments.model, folder, arguments.max_model_len)


def make_engine(arguments: argparse.Namespace, **overrides: Any) -> LLMEngine:
    """Build the engine from the options."""
    from minivllm.entrypoints.llm import LLM

    return LLM(**options_for(EngineArgs, arguments) | overrides).llm_engine


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


# -- a server ----------------------------------------------------------------------------------------------------------


def add_serve(benches) -> None:  # noqa: ANN001
    """Register `minivllm bench serve`."""
    parser = add_command(
        benches, "serve", run_bench_serve, "load-test a server: latency and throughput as clients see them",
        "minivllm bench serve --request-rate 2 --duration 60 --ttft-goal 500 --plot serving.png",
    )  # fmt: skip
    group = parser.add_argument_group("server")
    add_option(group, "--base-url URL", "http://127.0.0.1:8000", "an OpenAI-compatible server")
    add_option(group, "--model NAME", str, "the model to ask for (default: the first that the server lists)")
    add_option(group, "--api-key KEY", str, f"(default: the environment variable {' or '.join(API_KEY_VARIABLES)}, if set)")
    endpoints = "completions take prompts of an exact length; a chat prompt's tokens are counted by the server"
    add_option(group, "--endpoint", "completions", endpoints, choices=("completions", "chat"))
    add_option(group, "--stream", True, "stream the answers; without it, only end-to-end latency is measured")
    eos = "always generate the requested number of tokens; give --no-ignore-eos unless the server is vLLM's or minivllm's"
    add_option(group, "--ignore-eos", True, eos)
    add_option(group, "--timeout SECONDS", 300.0, "time limit per request")

    group = parser.add_argument_group("load")
    add_option(group, "--request-rate R", math.inf, "requests per second, with Poisson arrivals; inf sends all at once")
    add_option(group, "--concurrency C", int, "instead: C requests at a time, the next as soon as one has finished")
    add_option(group, "--duration SECONDS", float, "stop sending after this")
    add_option(group, "--grace SECONDS", 30.0, "how long requests may run on after --duration before they are cancelled")
    add_option(group, "--seed", 0, "seed of the arrivals")
    add_option(group, "--warmup N", 0, "send N short requests first, unmeasured")

    add_workload_options(
        parser, f"requests to send (default: all of the file, or {NUM_REQUESTS}; with --duration, as many as it takes)"
    )
    group = parser.add_argument_group("results")
    add_goal_options(group)
    add_option(group, "--json FILE", Path, "write the results here, with each request's times")
    add_option(group, "--plot FILE", picture, "draw the distributions and the requests over time here")
    parser.set_defaults(num_requests=None, distribution=["longtail"])


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """Load the server; print, save and draw what was measured. The status is 1 if no request completed."""
    from minivllm.bench.report import report
    from minivllm.bench.serve import Load, format_serving, summarize
    from minivllm.bench.summary import Goals

    goals = Goals(arguments.ttft_goal, arguments.tpot_goal, arguments.e2e_goal)
    if not arguments.stream and (goals.ttft is not None or goals.tpot is not None):
        raise ConfigError("Without streaming, TTFT and TPOT are not known: leave out --ttft-goal and --tpot-goal.")
    if arguments.warmup < 0:
        raise ConfigError(f"--warmup is {arguments.warmup}, but must be at least 0 requests.")
    load = Load(**options_for(Load, arguments))
    model, served, interrupted = asyncio.run(_measure(arguments, load))
    if not served:
        print("minivllm: stopped before a request was sent", file=sys.stderr)
        return 130 if interrupted else 1
    result = summarize(served, load, goals)
    workload = arguments.workload.stem if arguments.workload else arguments.distribution[0]
    what = (
        f"{model} at {arguments.base_url}, {arguments.endpoint}{', streamed' if arguments.stream else ''}; "
        f"{workload}: {len(served)} requests, {load.describe()}{', interrupted' if interrupted else ''}"
    )
    content = {"model": model, "workload": workload, "result": result.to_json()}
    content["requests"] = [request.to_json() for request in served]
    command = _without_key(arguments.command, arguments.api_key)
    report(what, format_serving(result, goals, served), content, file=arguments.json, command=command)
    if arguments.plot:
        from minivllm.viz.serving import draw_serving

        draw_serving({load.describe(): served}, f"{model}, {workload}").savefig(arguments.plot, dpi=150)
        print(f"\nPlot: {arguments.plot}")
    if interrupted:
        return 130
    return 0 if result.completed else 1


async def _measure(arguments: argparse.Namespace, load: Load) -> tuple[str, list[ServedRequest], bool]:
    """Returns the model's name, the requests as served, and whether Ctrl-C interrupted them."""
    from minivllm.bench.openai_client import OpenAIClient
    from minivllm.bench.serve import measure_serving

    key = arguments.api_key or next(filter(None, map(os.environ.get, API_KEY_VARIABLES)), None)
    options = {name: getattr(arguments, name) for name in ("endpoint", "stream", "ignore_eos", "timeout")}
    async with OpenAIClient(arguments.base_url, key, **options) as client:
        model = await client.find_model(arguments.model)
        max_len = model.max_model_len or MAX_MODEL_LEN
        requests, count = _requests_to_serve(arguments, load, max_len)
        warm_up: list[WorkloadRequest] = []
        if arguments.warmup:
            seed = arguments.workload_seed + WARM_UP_OFFSET
            warm_up = make_workload("uniform", arguments.warmup, **_lengths(arguments, max_len), seed=seed)
            warm_up = warm_up_requests(warm_up, arguments.warmup)
        served, interrupted = await measure_serving(client, model.id, requests, load, num_requests=count, warm_up=warm_up)
    return model.id, served, interrupted


def _requests_to_serve(arguments: argparse.Namespace, load: Load, max_len: int) -> tuple[Iterable[WorkloadRequest], int | None]:
    """Requests from the file, or generated ones, and their number; endless (None) with a duration and no --num-requests."""
    count = arguments.num_requests
    if count is not None and count < 1:
        raise ConfigError(f"--num-requests is {count}, but must be at least 1.")
    if len(arguments.distribution) > 1 and not arguments.workload:
        raise ConfigError(ONE_WORKLOAD)
    endless = count is None and load.duration is not None
    if endless and not load.is_open and load.concurrency is None:
        raise ConfigError("An endless workload cannot be sent all at once: give --num-requests, --request-rate or --concurrency.")
    if arguments.workload:
        requests = load_workload(arguments.workload)
        count = None if endless else count or len(requests)
        return itertools.islice(itertools.cycle(requests), count), count
    [distribution] = arguments.distribution
    options = _lengths(arguments, max_len) | {"distribution": distribution, "seed": arguments.workload_seed}
    if endless:
        return generate_requests(None, arrivals="at-once", **options), None
    count = count or NUM_REQUESTS
    return make_workload(num_requests=count, **options), count


def _lengths(arguments: argparse.Namespace, max_len: int) -> dict[str, Any]:
    means = {"mean_prompt_len": arguments.mean_prompt_len, "mean_output_len": arguments.mean_output_len}
    return means | {"max_len": max_len, "vocab_size": VOCAB_SIZE}


def _without_key(command: str, key: str | None) -> str:
    """The command line with the API key replaced by a placeholder."""
    if not key:
        return command
    return shlex.join("KEY" if word == key else word.replace(f"={key}", "=KEY") for word in shlex.split(command))
