"""The command line of the measurements: `minivllm bench offline`, `latency`, `sweep`, `quality` and `scheduler`."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import DISTRIBUTIONS, WorkloadRequest, load_workload, make_workload
from minivllm.config import QUANTIZATIONS, EngineArgs, ModelConfig
from minivllm.entrypoints.options import (
    add_command,
    add_engine_options,
    add_save_trace_option,
    check_writable,
    engine_args,
    picture,
)
from minivllm.errors import ConfigError

ONE_WORKLOAD = "This measurement takes one workload: give --workload FILE, or one --distribution."

if TYPE_CHECKING:
    from minivllm.bench.quality import Quality
    from minivllm.engine.llm_engine import LLMEngine


def add_benchmarks(benches) -> None:  # noqa: ANN001
    """All measurements and their options."""
    _add_offline(benches)
    _add_latency(benches)
    _add_sweep(benches)
    quality = add_command(
        benches, "quality", run_bench_quality, "what quantized weights do to the choice of tokens, on 2,000 positions of prose",
        "minivllm bench quality --quantization int8",
    )  # fmt: skip
    quality.add_argument("--model", default=EngineArgs.model, help="(default: %(default)s)")
    quality.add_argument(
        "--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS), help="(default: %(default)s)"
    )
    quality.add_argument("--positions", type=int, default=2000, help="tokens to compare (default: %(default)s)")
    quality.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    scheduler = add_command(
        benches, "scheduler", run_bench_scheduler, "what scheduling costs, with the model taken out", "minivllm bench scheduler"
    )
    scheduler.add_argument("--running", type=int, default=256, help="sequences in the batch (default: %(default)s)")
    scheduler.add_argument(
        "--waiting", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], help="queue lengths (default: %(default)s)"
    )


def _add_offline(benches) -> None:  # noqa: ANN001
    from minivllm.bench.peers import ENGINE_NAMES

    parser = add_command(
        benches, "offline", run_bench_offline, "static against continuous batching on one workload, or this engine against others",
        "minivllm bench offline --distribution longtail --plot timelines.png",
    )  # fmt: skip
    group = add_workload_options(parser)
    group.add_argument("--scheduler", nargs="+", choices=("static", "continuous"), help="policies to compare (default: both)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw the timelines of the last workload here")
    add_save_trace_option(group, "; of several runs, each has a file of its own, FILE with workload and policy in its name")
    group.add_argument("--profile", action="store_true", help="instead of comparing, say where the time of a step goes")
    group = parser.add_argument_group("other engines")
    group.add_argument(
        "--engine", nargs="+", choices=ENGINE_NAMES, metavar="ENGINE",
        help=f"compare these engines in turn, instead of policies: {', '.join(ENGINE_NAMES)}",
    )  # fmt: skip
    group.add_argument("--rounds", type=int, help="how often each engine runs the workload (default: 3)")
    group.add_argument("--vllm-python", metavar="PATH", help="the Python of the environment with vLLM (default: this one)")
    group.add_argument("--llama-python", metavar="PATH", help="of the one with llama-cpp-python (default: this one)")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=16)


def _add_latency(benches) -> None:  # noqa: ANN001
    parser = add_command(
        benches, "latency", run_bench_latency, "times to the first token and between tokens, by batch size",
        "minivllm bench latency --batch-sizes 1 8 64 --json latency.json",
    )  # fmt: skip
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N",
        help="requests that arrive at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--prompt-len", type=int, default=64, help="tokens (default: %(default)s)")
    group.add_argument("--output-len", type=int, default=32, help="tokens (default: %(default)s)")
    group.add_argument("--rounds", type=int, default=3, help="how often each batch is run (default: %(default)s)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=None)


def _add_sweep(benches) -> None:  # noqa: ANN001
    parser = add_command(
        benches, "sweep", run_bench_sweep, "throughput and latency against the number of running sequences",
        "minivllm bench sweep --workload benchmarks/workloads/offline_64.json --plot sweep.png",
    )  # fmt: skip
    group = add_workload_options(parser)
    group.add_argument(
        "--values", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N",
        help="values of max_num_seqs (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--rounds", type=int, default=1, help="how often each value is run (default: %(default)s)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw both curves here")
    add_engine_options(parser, leave_out={"max_num_seqs"})
    parser.set_defaults(distribution=["longtail"])


def add_workload_options(
    parser: argparse.ArgumentParser, num_requests: str = "generated requests (default: %(default)s)"
) -> argparse._ArgumentGroup:
    """The options that say which requests are run. What `num_requests` counts is said by the command."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", type=Path, metavar="FILE", help="a JSON list of {'ids': prompt tokens, 'out': tokens to generate}"
    )
    group.add_argument(
        "--distribution",
        nargs="+",
        choices=DISTRIBUTIONS,
        default=list(DISTRIBUTIONS),
        help="lengths of generated requests (default: %(default)s)",
    )
    group.add_argument("--num-requests", type=int, default=32, help=num_requests)
    group.add_argument("--mean-prompt-len", type=int, default=32, help="tokens (default: %(default)s)")
    group.add_argument("--mean-output-len", type=int, default=48, help="tokens (default: %(default)s)")
    group.add_argument("--workload-seed", type=int, default=0, help="of lengths and tokens (default: %(default)s)")
    return group


def _workloads(arguments: argparse.Namespace, config: ModelConfig) -> dict[str, list[WorkloadRequest]]:
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


def _one_workload(arguments: argparse.Namespace, config: ModelConfig) -> tuple[str, list[WorkloadRequest]]:
    workloads = _workloads(arguments, config)
    if len(workloads) > 1:
        raise ConfigError(ONE_WORKLOAD)
    return next(iter(workloads.items()))


def make_engine(arguments: argparse.Namespace, **overrides: Any) -> LLMEngine:
    """The engine that the options ask for."""
    from minivllm.entrypoints.llm import LLM

    return LLM(**engine_args(arguments) | overrides).llm_engine


def _model_config(arguments: argparse.Namespace) -> ModelConfig:
    """What is known of the model without loading it."""
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import load_model_config

    return load_model_config(arguments.model, resolve_model(arguments.model), arguments.max_model_len)


def report(
    arguments: argparse.Namespace, what: str, table: str, content: dict[str, Any], quantizations: Sequence[str] = ()
) -> None:
    """Print a result; as JSON, with --json, it has the same text and what it takes to repeat it: machine, time, command line.

    Speed is never shown without its quality: that of the quantizations is measured and stands below.
    """
    from minivllm.bench.machine import describe_machine
    from minivllm.bench.quality import format_table

    machine = describe_machine()
    text = f"{what}\n{machine}\n\n{table}"
    if quantizations:
        qualities = measure_qualities(arguments.model, quantizations)
        text += (
            f"\n\nQuantized, held against float32 on {qualities[0].num_positions} positions of prose\n\n{format_table(qualities)}"
        )
        content = content | {"quality": [vars(quality) for quality in qualities]}
    print(f"\n{text}")
    if arguments.json is not None:
        time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        origin = {"machine": machine, "time": time, "command": arguments.command, "model": arguments.model}
        arguments.json.write_text(to_text(origin | {"text": text.split("\n")} | content))


def to_text(content: dict[str, Any]) -> str:
    """A result as JSON for a file; a list of numbers takes one line."""
    text = json.dumps(content, indent=2)
    return re.sub(r"\[\n[\s\d.eE,+-]+\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text) + "\n"


def _quantizations(arguments: argparse.Namespace) -> list[str]:
    return [arguments.quantization] if arguments.quantization else []


def run_bench_offline(arguments: argparse.Namespace) -> int:
    """Compare policies on each workload, or engines on one, in turn, and print a table."""
    for path in (arguments.json, arguments.plot, arguments.save_trace):  # before the work, not after it
        check_writable(path)
    if arguments.save_trace and (arguments.profile or arguments.engine):
        raise ConfigError("--save-trace records runs of this engine's policies: leave it out, or --profile and --engine.")
    if arguments.profile:
        if arguments.engine or arguments.scheduler or arguments.plot or arguments.rounds:
            raise ConfigError("--profile compares nothing: leave out --engine, --scheduler, --plot and --rounds.")
        return _profile(arguments)
    if arguments.engine:
        if arguments.scheduler or arguments.plot:
            raise ConfigError("--scheduler and --plot compare policies of this engine: leave them out, or leave out --engine.")
        if arguments.quantization or arguments.dtype not in ("auto", "float32"):
            raise ConfigError("Engines are compared in float32: name minivllm-int8 or minivllm-int4 as an engine instead.")
        return _compare_engines(arguments)
    if arguments.rounds or arguments.vllm_python or arguments.llama_python:
        raise ConfigError("--rounds, --vllm-python and --llama-python are for a comparison of engines: name them with --engine.")
    return _compare_policies(arguments)


def _compare_policies(arguments: argparse.Namespace) -> int:
    from minivllm.bench.offline import SCHEDULERS, format_table, run_offline

    engine = make_engine(arguments)
    policies = arguments.scheduler or list(SCHEDULERS)
    workloads = _workloads(arguments, engine.model_config)
    runs = [(name, policy) for name in workloads for policy in policies]
    trace_files = _trace_files(arguments.save_trace, runs) if arguments.save_trace else []
    results = [run_offline(engine, policy, name, workloads[name]) for name, policy in runs]
    what, content = f"{arguments.model}, at most {arguments.max_num_seqs} running", [result.to_json() for result in results]
    report(arguments, what, format_table(results), {"results": content}, _quantizations(arguments))
    if arguments.plot:
        from minivllm.viz.timeline import draw_timelines

        last = results[-len(policies) :]
        draw_timelines({result.scheduler: result.trace for result in last}, last[0].workload).savefig(arguments.plot, dpi=150)
        print(f"\nTimelines of the {last[0].workload} workload: {arguments.plot}")
    for path, result in zip(trace_files, results, strict=False):
        result.trace.save(path)
        print(f"\nTrace of the {result.workload} workload, {result.scheduler}: {path}")
    return 0


def _trace_files(path: Path, runs: Sequence[tuple[str, str]]) -> list[Path]:
    """The file of each run: the one that was named, or, of several runs, one beside it with the run in its name."""
    return [path] if len(runs) == 1 else [path.with_name(f"{path.stem}.{name}.{policy}{path.suffix}") for name, policy in runs]


def _compare_engines(arguments: argparse.Namespace) -> int:
    from minivllm.bench.peers import compare, format_table, make_specs

    config = _model_config(arguments)
    name, requests = _one_workload(arguments, config)
    specs = make_specs(
        arguments.engine, config, engine_args(arguments), requests,
        gguf=_gguf_file(arguments.model), vllm_python=arguments.vllm_python, llama_python=arguments.llama_python,
    )  # fmt: skip
    comparison = compare(specs, name, requests, 3 if arguments.rounds is None else arguments.rounds)
    what = (
        f"{arguments.model}, {name}: {comparison.num_requests} requests, {comparison.prompt_tokens} prompt tokens, "
        f"{comparison.output_tokens} output tokens, at most {arguments.max_num_seqs} running"
    )
    content = {"max_num_seqs": arguments.max_num_seqs, "comparison": comparison.to_json()}
    quantizations = [engine.removeprefix("minivllm-") for engine in arguments.engine if engine.startswith("minivllm-")]
    report(arguments, what, format_table(comparison), content, quantizations)
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    from minivllm.bench.profile import format_profile, profile_offline

    engine = make_engine(arguments)
    name, requests = _one_workload(arguments, engine.model_config)
    profile = profile_offline(engine, name, requests)
    what = f"{arguments.model}, {name}, at most {arguments.max_num_seqs} running"
    report(arguments, what, format_profile(profile), {"profile": profile.to_json()}, _quantizations(arguments))
    return 0


def _gguf_file(model: str) -> str | None:
    """The GGUF file that a model's folder was made from, if it was."""
    from minivllm.models.hub import PACKAGED_MODELS, find_packaged_file

    if packaged := PACKAGED_MODELS.get(model.lower()):
        return str(find_packaged_file(packaged))
    return model if model.endswith(".gguf") else None


def run_bench_latency(arguments: argparse.Namespace) -> int:
    """Run a batch of each size and print what its users would wait."""
    from minivllm.bench.latency import format_table, measure_latency

    check_writable(arguments.json)
    largest = max(arguments.batch_sizes)
    if arguments.max_num_seqs is not None and arguments.max_num_seqs < largest:
        raise ConfigError(f"max_num_seqs is {arguments.max_num_seqs}, so a batch of {largest} would not run at once: raise it.")
    engine = make_engine(arguments, max_num_seqs=arguments.max_num_seqs or largest)
    lengths = {"prompt_len": arguments.prompt_len, "output_len": arguments.output_len}
    results = measure_latency(engine, arguments.batch_sizes, **lengths, rounds=arguments.rounds)
    what = (
        f"{arguments.model}, prompts of {arguments.prompt_len} and outputs of {arguments.output_len} tokens, all requests at once"
    )
    content = lengths | {"results": [vars(result) for result in results]}
    report(arguments, what, format_table(results), content, _quantizations(arguments))
    return 0


def run_bench_sweep(arguments: argparse.Namespace) -> int:
    """Run one workload with each value of max_num_seqs; print a table and draw the curves."""
    from minivllm.bench.sweep import format_table, sweep_max_num_seqs

    for path in (arguments.json, arguments.plot):
        check_writable(path)
    name, requests = _one_workload(arguments, _model_config(arguments))
    points = sweep_max_num_seqs(
        lambda value: make_engine(arguments, max_num_seqs=value), arguments.values, name, requests, arguments.rounds
    )
    what, content = f"{arguments.model}, {name}, {len(requests)} requests", [vars(point) for point in points]
    report(arguments, what, format_table(points), {"workload": name, "results": content}, _quantizations(arguments))
    if arguments.plot:
        from minivllm.viz.sweep import draw_sweep

        columns = zip(*((p.max_num_seqs, p.output_tokens_per_second, p.mean_latency) for p in points), strict=True)
        draw_sweep(*map(list, columns), f"{arguments.model}, {name}: {len(requests)} requests").savefig(arguments.plot, dpi=150)
        print(f"\nThe curves: {arguments.plot}")
    return 0


def measure_qualities(model: str, quantizations: Sequence[str], num_positions: int = 2000) -> list[Quality]:
    """Load the model in float32 and in each quantization, and compare."""
    from minivllm.bench.quality import measure_quality
    from minivllm.entrypoints.llm import LLM

    def load(**options: Any) -> LLMEngine:
        return LLM(model, device="cpu", dtype="float32", num_gpu_blocks_override=64, max_num_seqs=1, **options).llm_engine

    reference = load(low_memory=True)
    return measure_quality(reference, {name: load(quantization=name) for name in quantizations}, num_positions)


def run_bench_quality(arguments: argparse.Namespace) -> int:
    """Compare each quantization with float32 and print a table."""
    from minivllm.bench.quality import format_table

    check_writable(arguments.json)
    results = measure_qualities(arguments.model, arguments.quantization, arguments.positions)
    what = f"{arguments.model} against itself in float32, {arguments.positions} positions"
    report(arguments, what, format_table(results), {"results": [vars(result) for result in results]})
    return 0


def run_bench_scheduler(arguments: argparse.Namespace) -> int:
    """Measure `schedule()` and `update()` for each queue length."""
    from minivllm.bench.machine import describe_machine
    from minivllm.bench.scheduler import format_table, measure_scheduler

    costs = [measure_scheduler(arguments.running, num_waiting) for num_waiting in arguments.waiting]
    print(f"schedule() + update() per step; {describe_machine()}\n\n{format_table(costs)}")
    return 0
