"""`minivllm simulate`: one engine under several schedulers, or replicas behind several routers."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.workloads import ARRIVALS, DISTRIBUTIONS, WorkloadRequest
from minivllm.config import PREEMPTION_MODES
from minivllm.data_parallel.routing import ROUTERS
from minivllm.entrypoints.cli.options import add_command, add_goal_options, add_option, picture
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.bench.summary import EngineRun
    from minivllm.simulation.engine import ReplicaRun

MOST_TRACED = 2_000
"""Most requests whose trace can still be drawn."""
PROGRESS_FROM = 2_000
"""From this many requests on, a run takes seconds and shows its progress."""
WORKLOAD_OPTIONS = (
    "arrivals", "arrival_rate", "burst_size", "distribution", "mean_prompt_len", "mean_output_len", "num_shared_prompt_tokens", "seed",
)  # fmt: skip
ENGINE_OPTIONS = (
    "max_num_seqs", "block_size", "num_gpu_blocks", "num_cpu_blocks", "max_model_len", "max_num_batched_tokens",
    "enable_chunked_prefill", "enable_prefix_caching", "preemption_mode",
)  # fmt: skip


def add_simulate(commands) -> None:  # noqa: ANN001
    """`minivllm simulate`."""
    parser = add_command(
        commands, "simulate", run_simulate, "run the real scheduler on a virtual clock, without a model: hours in seconds",
        "minivllm simulate --max-num-seqs 8 --arrival-rate 2 --save-trace trace.json",
    )  # fmt: skip
    group = parser.add_argument_group("requests")
    add_option(group, "--num-requests N", int, "number of requests (default: 200, or all of a trace)")
    add_option(group, "--arrivals", "poisson", "arrival process", choices=ARRIVALS)
    add_option(group, "--arrival-rate", 2.0, "requests per second")
    add_option(group, "--burst-size", 8, "requests per burst")
    add_option(group, "--max-concurrency N", int, "at most N requests in the engine at once (default: no limit)")
    add_option(group, "--distribution", "longtail", "length distribution", choices=DISTRIBUTIONS)
    add_option(group, "--mean-prompt-len", 48, "tokens")
    add_option(group, "--mean-output-len", 48, "tokens")
    add_option(group, "--num-shared-prompt-tokens", 0, "tokens in the shared prompt prefix")
    add_option(group, "--seed", 0, "seed of lengths and arrivals")
    group = parser.add_argument_group("requests of a production service, instead")
    traces = "a trace of requests, such as azure_2023_conversation.csv.gz or mooncake_conversation.jsonl.gz"
    add_option(group, "--trace FILE", str, traces)
    add_option(group, "--rate-factor", 1.0, "how many times as fast they arrive")
    add_option(group, "--length-factor", 1.0, "how many times as long prompts and outputs are")
    group = parser.add_argument_group("replicas")
    add_option(group, "--replicas N", int, "replicas of the model behind a router, each an engine as below")
    add_option(group, "--routing", list(ROUTERS), "each runs the same requests", choices=list(ROUTERS))
    add_goal_options(group)
    add_option(group, "--figure FILE", picture, "draw how the routers compare: .png, .pdf or .svg")
    group = parser.add_argument_group("engine")
    add_option(group, "--scheduler", list(SCHEDULERS), "each runs the same requests", choices=list(SCHEDULERS))
    add_option(group, "--max-num-seqs", 8, "most sequences per step")
    add_option(group, "--block-size", 16, "tokens per KV cache block")
    add_option(group, "--num-gpu-blocks", 512, "KV cache blocks on the device")
    add_option(group, "--num-cpu-blocks", 0, "KV cache blocks on the host, for swapping")
    add_option(group, "--max-model-len", 2048, "limit on prompt plus output tokens")
    add_option(group, "--max-num-batched-tokens", int, "most tokens per step (default: any prompt fits)")
    add_option(group, "--enable-chunked-prefill", False, "decodes and chunks of prompts share a step")
    add_option(group, "--enable-prefix-caching", False, "reuse the KV cache of earlier prompts with the same beginning")
    add_option(group, "--preemption-mode", "recompute", "what to do if blocks run out", choices=PREEMPTION_MODES)
    default = "SmolLM2-135M with up to 32 sequences, as measured for the README"
    add_option(group, "--cost-model FILE", Path, f"written by `minivllm bench calibrate --json` (default: {default})")
    group = parser.add_argument_group("results")
    add_option(group, "--save-trace FILE", Path, "write the trace of the last scheduler here")
    add_option(group, "--json FILE", Path, "write the results here")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate the requests under each scheduler, or with each router, and print a table."""
    from minivllm.bench.report import find_origin, to_json
    from minivllm.simulation.costs import DEFAULT_COSTS, load_costs

    costs = load_costs(arguments.cost_model) if arguments.cost_model else DEFAULT_COSTS
    num_requests, _ = _make_requests(arguments)
    options = {name: getattr(arguments, name) for name in ENGINE_OPTIONS} | {"cost_model": costs}
    options["progress_total"] = num_requests if num_requests >= PROGRESS_FROM else None
    started, cpu_started = time.perf_counter(), time.process_time()
    results = (_run_schedulers if arguments.replicas is None else _run_replicas)(arguments, num_requests, options)
    if arguments.json:
        took = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "peak_memory_bytes": _peak_memory(),
        }
        content = find_origin(arguments.command) | took | {"results": [result.to_json() for result in results]}
        arguments.json.write_text(to_json(content), encoding="utf-8")
    if arguments.save_trace:
        results[-1].trace.save(arguments.save_trace)
        print(f"\nTrace ({results[-1].scheduler}): {arguments.save_trace}")
        print(f"Draw it: minivllm trace show {shlex.quote(str(arguments.save_trace))}")
    if arguments.figure:
        from minivllm.viz.routing import draw_routing

        draw_routing(results).savefig(arguments.figure, dpi=150)
        print(f"\nFigure: {arguments.figure}")
    return 0


def _peak_memory() -> int:
    """The most memory that this process has held so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _run_schedulers(arguments: argparse.Namespace, num_requests: int, options: dict[str, Any]) -> list[EngineRun]:
    """One engine, with each scheduler."""
    from minivllm.simulation.engine import format_simulations, simulate

    for name in ("figure", "ttft_goal", "tpot_goal", "e2e_goal"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} compares routers: give --replicas too.")
    if arguments.routing != list(ROUTERS):
        raise ConfigError("--routing is for replicas: give --replicas too.")
    if arguments.save_trace and num_requests > MOST_TRACED:
        raise ConfigError(f"A trace of more than {MOST_TRACED} requests is too large to draw: lower --num-requests.")
    options |= {"trace": arguments.save_trace is not None, "max_concurrency": arguments.max_concurrency}
    schedulers = dict.fromkeys(arguments.scheduler)
    results = [simulate(_make_requests(arguments)[1], scheduler=scheduler, **options) for scheduler in schedulers]
    print(f"{num_requests} requests, {results[0].output_tokens} output tokens, simulated")
    print(f"\n{format_simulations(results)}")
    return results


def _run_replicas(arguments: argparse.Namespace, num_requests: int, options: dict[str, Any]) -> list[ReplicaRun]:
    """Replicas, with each router."""
    from minivllm.bench.summary import Goals
    from minivllm.simulation.engine import format_replicas, simulate_replicas

    if arguments.save_trace or arguments.max_concurrency is not None:
        raise ConfigError("--save-trace and --max-concurrency are for one engine: leave out --replicas.")
    goals = Goals(ttft=arguments.ttft_goal, tpot=arguments.tpot_goal, e2e=arguments.e2e_goal)
    if len(arguments.scheduler) > 1 and arguments.scheduler != list(SCHEDULERS):
        raise ConfigError("With --replicas, routers are compared under one --scheduler: name one.")
    scheduler = "continuous" if len(arguments.scheduler) > 1 else arguments.scheduler[0]
    if arguments.routing == ["prefix-aware"] and not arguments.enable_prefix_caching:
        print("Without --enable-prefix-caching, prefix-aware finds nothing in a cache.", file=sys.stderr)
    results = [
        simulate_replicas(
            _make_requests(arguments)[1], arguments.replicas, routing=router, goals=goals, scheduler=scheduler, **options
        )
        for router in dict.fromkeys(arguments.routing)
    ]
    replicas = "1 replica" if arguments.replicas == 1 else f"{arguments.replicas} replicas"
    print(f"{num_requests} requests, {results[0].output_tokens} output tokens, {replicas}, simulated")
    if goals.describe():
        print(f"goodput: requests per second with {goals.describe()}")
    print(f"\n{format_replicas(results)}")
    return results


def _make_requests(arguments: argparse.Namespace) -> tuple[int, Iterator[WorkloadRequest]]:
    """How many requests there are, and an iterator over them."""
    from minivllm.bench.production import load_trace, stream_trace
    from minivllm.bench.workloads import generate_requests

    given = vars(arguments)
    if arguments.trace is None:
        for name in ("rate_factor", "length_factor"):
            if given[name] != 1.0:
                raise ConfigError(f"--{name.replace('_', '-')} is for a --trace: use --arrival-rate and --mean-prompt-len.")
        num_requests = 200 if arguments.num_requests is None else arguments.num_requests
        workload = {name: given[name] for name in WORKLOAD_OPTIONS}
        return num_requests, generate_requests(num_requests, **workload, max_len=arguments.max_model_len)
    trace = load_trace(arguments.trace)
    requests = stream_trace(
        trace,
        arguments.num_requests,
        rate_factor=arguments.rate_factor,
        length=arguments.length_factor,
        max_len=arguments.max_model_len,
        seed=arguments.seed,
    )
    return arguments.num_requests or len(trace), requests
