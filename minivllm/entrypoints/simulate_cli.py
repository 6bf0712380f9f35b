"""The simulator: `minivllm simulate`, and `minivllm bench calibrate`, which fits its cost model."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.workloads import ARRIVALS, DISTRIBUTIONS
from minivllm.config import PREEMPTION_MODES
from minivllm.entrypoints import bench_cli
from minivllm.entrypoints.options import add_command, add_engine_options, check_writable
from minivllm.errors import ConfigError

MOST_TRACED = 2_000
"""Most requests whose trace can still be drawn."""
PROGRESS_FROM = 2_000
"""From this many requests on, a run takes seconds and shows its progress."""


def add_simulate(commands) -> None:  # noqa: ANN001
    """`minivllm simulate`."""
    parser = add_command(
        commands, "simulate", run_simulate, "run the real scheduler on a virtual clock, without a model: hours in seconds",
        "minivllm simulate --max-num-seqs 8 --arrival-rate 2 --save-trace trace.json",
    )  # fmt: skip
    group = parser.add_argument_group("requests")
    group.add_argument("--num-requests", type=int, default=200, help="number of requests (default: %(default)s)")
    group.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="arrival process (default: %(default)s)")
    group.add_argument("--arrival-rate", type=float, default=2.0, help="requests per second (default: %(default)s)")
    group.add_argument("--burst-size", type=int, default=8, help="requests per burst (default: %(default)s)")
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="at most N requests in the engine at once (default: no limit)",
    )
    group.add_argument(
        "--distribution", choices=DISTRIBUTIONS, default="longtail", help="length distribution (default: %(default)s)"
    )
    group.add_argument("--mean-prompt-len", type=int, default=48, help="tokens (default: %(default)s)")
    group.add_argument("--mean-output-len", type=int, default=48, help="tokens (default: %(default)s)")
    group.add_argument(
        "--num-shared-prompt-tokens", type=int, default=0, help="tokens in the shared prompt prefix (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of lengths and arrivals (default: %(default)s)")
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--scheduler", nargs="+", choices=list(SCHEDULERS), default=list(SCHEDULERS),
        help="each runs the same requests (default: both)",
    )  # fmt: skip
    for name, default, text in (
        ("max-num-seqs", 8, "most sequences per step"),
        ("block-size", 16, "tokens per KV cache block"),
        ("num-gpu-blocks", 512, "KV cache blocks on the device"),
        ("num-cpu-blocks", 0, "KV cache blocks on the host, for swapping"),
        ("max-model-len", 2048, "limit on prompt plus output tokens"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    group.add_argument("--max-num-batched-tokens", type=int, help="most tokens per step (default: any prompt fits)")
    group.add_argument("--enable-chunked-prefill", action="store_true", help="decodes and chunks of prompts share a step")
    group.add_argument(
        "--enable-prefix-caching", action="store_true", help="reuse the KV cache of earlier prompts with the same beginning"
    )
    group.add_argument("--preemption-mode", choices=PREEMPTION_MODES, default="recompute", help="(default: %(default)s)")
    group.add_argument(
        "--cost-model", type=Path, metavar="FILE",
        help="cost model written by `minivllm bench calibrate --json` (default: SmolLM2-135M with up to 32 sequences, as measured for the README)",
    )  # fmt: skip
    group = parser.add_argument_group("results")
    group.add_argument("--save-trace", type=Path, metavar="FILE", help="write the trace of the last scheduler here")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate the requests under each scheduler and print a table."""
    from minivllm.bench.costs import DEFAULT_COSTS, load_costs
    from minivllm.bench.report import to_json
    from minivllm.bench.simulation import format_simulations, simulate
    from minivllm.bench.workloads import generate_requests

    for path in (arguments.save_trace, arguments.json):
        check_writable(path)
    if arguments.save_trace and arguments.num_requests > MOST_TRACED:
        raise ConfigError(f"A trace of more than {MOST_TRACED} requests is too large to draw: lower --num-requests.")
    costs = load_costs(arguments.cost_model) if arguments.cost_model else DEFAULT_COSTS
    workload = {
        name: getattr(arguments, name)
        for name in (
            "arrivals", "arrival_rate", "burst_size", "distribution", "mean_prompt_len", "mean_output_len",
            "num_shared_prompt_tokens", "seed",
        )
    } | {"max_len": arguments.max_model_len}  # fmt: skip
    options = {
        name: getattr(arguments, name)
        for name in (
            "max_num_seqs", "block_size", "num_gpu_blocks", "num_cpu_blocks", "max_model_len", "max_num_batched_tokens",
            "enable_chunked_prefill", "enable_prefix_caching", "preemption_mode",
        )
    }  # fmt: skip
    results = []
    for scheduler in dict.fromkeys(arguments.scheduler):
        result = simulate(
            generate_requests(arguments.num_requests, **workload),
            max_concurrency=arguments.max_concurrency,
            progress_total=arguments.num_requests if arguments.num_requests >= PROGRESS_FROM else None,
            scheduler=scheduler,
            cost_model=costs,
            trace=arguments.save_trace is not None,
            **options,
        )
        results.append(result)
    print(
        f"{arguments.num_requests} requests, {results[0].output_tokens} output tokens, simulated\n\n{format_simulations(results)}"
    )
    if arguments.json:
        content = {"command": arguments.command, "results": [result.to_json() for result in results]}
        arguments.json.write_text(to_json(content))
    if arguments.save_trace:
        results[-1].trace.save(arguments.save_trace)
        print(f"\nTrace ({results[-1].scheduler}): {arguments.save_trace}")
        print(f"Draw it: minivllm trace show {shlex.quote(str(arguments.save_trace))}")
    return 0


def add_calibrate(benches) -> None:  # noqa: ANN001
    """`minivllm bench calibrate`."""
    parser = add_command(
        benches, "calibrate", run_calibrate, "fit the simulator's cost model to this machine and check its predictions",
        "minivllm bench calibrate --max-num-seqs 32 --json costs.json",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="how often each run is repeated (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cost model and the predictions here")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=32)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, fit, predict held-out runs, and print a table."""
    from minivllm.bench.calibrate import calibrate, format_report

    check_writable(arguments.json)
    print(f"This takes about {2 * arguments.rounds} minutes ...", file=sys.stderr)
    calibration = calibrate(bench_cli.make_engine(arguments), arguments.rounds)
    what = f"cost of a step with up to {arguments.max_num_seqs} sequences, {arguments.rounds} rounds"
    bench_cli.report_engine(arguments, what, format_report(calibration), {"calibration": calibration.to_json()})
    return 0
