"""The load generator: `minivllm bench serve`, for any OpenAI-compatible server."""

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

from minivllm.bench.workloads import WorkloadRequest, generate_requests, load_workload, make_workload, warm_up_requests
from minivllm.entrypoints.cli import bench
from minivllm.entrypoints.cli.options import add_command, add_goal_options, add_option, picture
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.bench.serve import Load
    from minivllm.bench.summary import ServedRequest

API_KEY_VARIABLES = ("MINIVLLM_API_KEY", "OPENAI_API_KEY")
NUM_REQUESTS = 32
"""Generated requests if neither their number nor a duration is given."""
VOCAB_SIZE = 32_000
"""Generated token ids are below this: servers do not report their vocabulary size, and few have a smaller one."""
MAX_MODEL_LEN = 2048
"""Assumed if the server does not report one."""
WARM_UP_OFFSET = 1_000_000
"""Added to the warm-up's seed, so that no measured prompt is in the prefix cache."""


def add_bench_serve(benches) -> None:  # noqa: ANN001
    """`minivllm bench serve`."""
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

    bench.add_workload_options(
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
    load = Load(arguments.request_rate, arguments.concurrency, arguments.duration, arguments.grace, arguments.seed)
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
        requests, count = _make_requests(arguments, load, max_len)
        warm_up: list[WorkloadRequest] = []
        if arguments.warmup:
            seed = arguments.workload_seed + WARM_UP_OFFSET
            warm_up = make_workload("uniform", arguments.warmup, **_lengths(arguments, max_len), seed=seed)
            warm_up = warm_up_requests(warm_up, arguments.warmup)
        served, interrupted = await measure_serving(client, model.id, requests, load, num_requests=count, warm_up=warm_up)
    return model.id, served, interrupted


def _make_requests(arguments: argparse.Namespace, load: Load, max_len: int) -> tuple[Iterable[WorkloadRequest], int | None]:
    """Requests from the file, or generated ones, and their number; endless (None) with a duration and no --num-requests."""
    count = arguments.num_requests
    if count is not None and count < 1:
        raise ConfigError(f"--num-requests is {count}, but must be at least 1.")
    if len(arguments.distribution) > 1 and not arguments.workload:
        raise ConfigError(bench.ONE_WORKLOAD)
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
