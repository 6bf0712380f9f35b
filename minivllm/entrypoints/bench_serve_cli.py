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
from typing import TYPE_CHECKING, NamedTuple

from minivllm.bench.workloads import WorkloadRequest, generate_requests, load_workload, make_workload, warm_up_requests
from minivllm.entrypoints import bench_cli
from minivllm.entrypoints.options import add_command, check_writable, picture
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.bench.load_generator import Load
    from minivllm.bench.openai_client import ServedModel
    from minivllm.bench.served_request import ServedRequest

API_KEY_VARIABLES = ("MINIVLLM_API_KEY", "OPENAI_API_KEY")
NUM_REQUESTS = 32
"""Generated requests if neither their number nor a duration is given."""
VOCAB_SIZE = 32_000
"""Generated token ids are below this: servers do not report their vocabulary size, and few have a smaller one."""
MAX_MODEL_LEN = 2048
"""Assumed if the server does not report one."""
WARM_UP_OFFSET = 1_000_000
"""Added to the warm-up's seed, so that no measured prompt is in the prefix cache."""


class _Workload(NamedTuple):
    """Requests and their number, None if endless."""

    name: str
    requests: Iterable[WorkloadRequest]
    num_requests: int | None


def add_bench_serve(benches) -> None:  # noqa: ANN001
    """`minivllm bench serve`."""
    parser = add_command(
        benches, "serve", run_bench_serve, "load-test a server: latency and throughput as clients see them",
        "minivllm bench serve --request-rate 2 --duration 60 --ttft-goal 500 --plot serving.png",
    )  # fmt: skip
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="an OpenAI-compatible server (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="the model to ask for (default: the first that the server lists)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"(default: the environment variable {' or '.join(API_KEY_VARIABLES)}, if set)"
    )
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions",
        help="completions take prompts of an exact length; a chat prompt's tokens are counted by the server (default: %(default)s)",
    )  # fmt: skip
    _add_flag(group, "--stream", "stream the answers; without it, only end-to-end latency is measured")
    _add_flag(
        group, "--ignore-eos", "always generate the requested number of tokens; give --no-ignore-eos unless the server is vLLM's or minivllm's"
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="time limit per request (default: %(default)s)"
    )

    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="requests per second, with Poisson arrivals; inf sends all at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=int, metavar="C", help="instead: C requests at a time, the next as soon as one has finished"
    )
    group.add_argument("--duration", type=float, metavar="SECONDS", help="stop sending after this")
    group.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="how long requests may run on after --duration before they are cancelled (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: %(default)s)")
    group.add_argument(
        "--warmup",
        type=int,
        default=0,
        metavar="N",
        help="send N short requests first, unmeasured (default: %(default)s)",
    )

    bench_cli.add_workload_options(
        parser, f"requests to send (default: all of the file, or {NUM_REQUESTS}; with --duration, as many as it takes)"
    )
    group = parser.add_argument_group("results")
    for name, words in (
        ("ttft", "its first token"),
        ("tpot", "each further token on average"),
        ("e2e", "its last token"),
    ):
        group.add_argument(
            f"--{name}-goal",
            type=float,
            metavar="MS",
            help=f"a request counts for goodput if {words} took at most MS milliseconds",
        )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here, with each request's times")
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw the distributions and the requests over time here")
    parser.set_defaults(num_requests=None, distribution=["longtail"])


def _add_flag(group: argparse._ArgumentGroup, name: str, words: str) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=f"{words} (default: %(default)s)")


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """Load the server; print, save and draw what was measured. The status is 1 if no request completed."""
    from minivllm.bench.load_generator import Load
    from minivllm.bench.report import report
    from minivllm.bench.served_request import format_serving, summarize
    from minivllm.bench.summary import Goals

    for path in (arguments.json, arguments.plot):  # fail before the work
        check_writable(path)
    goals = Goals(arguments.ttft_goal, arguments.tpot_goal, arguments.e2e_goal)
    if not arguments.stream and (goals.ttft is not None or goals.tpot is not None):
        raise ConfigError("Without streaming, TTFT and TPOT are not known: leave out --ttft-goal and --tpot-goal.")
    if arguments.warmup < 0:
        raise ConfigError(f"--warmup is {arguments.warmup}, but must be at least 0 requests.")
    load = Load(arguments.request_rate, arguments.concurrency, arguments.duration, arguments.grace, arguments.seed)
    model, workload, served, interrupted = asyncio.run(_measure(arguments, load))
    if not served:
        print("minivllm: stopped before a request was sent", file=sys.stderr)
        return 130 if interrupted else 1
    result = summarize(served, load, goals)
    what = (
        f"{model.id} at {arguments.base_url}, {arguments.endpoint}{', streamed' if arguments.stream else ''}; "
        f"{workload.name}: {len(served)} requests, {load.describe()}{', interrupted' if interrupted else ''}"
    )
    content = {
        "model": model.id,
        "workload": workload.name,
        "result": result.to_json(),
        "requests": [request.to_json() for request in served],
    }
    command = _without_key(arguments.command)
    report(what, format_serving(result, goals, served), content, file=arguments.json, command=command)
    if arguments.plot:
        from minivllm.viz.serving import draw_serving

        draw_serving({load.describe(): served}, f"{model.id}, {workload.name}").savefig(arguments.plot, dpi=150)
        print(f"\nPlot: {arguments.plot}")
    if interrupted:
        return 130
    return 0 if result.completed else 1


async def _measure(arguments: argparse.Namespace, load: Load) -> tuple[ServedModel, _Workload, list[ServedRequest], bool]:
    from minivllm.bench.openai_client import OpenAIClient
    from minivllm.bench.serve import measure_serving

    key = arguments.api_key or next(filter(None, map(os.environ.get, API_KEY_VARIABLES)), None)
    client = OpenAIClient(
        arguments.base_url, key, endpoint=arguments.endpoint, stream=arguments.stream, ignore_eos=arguments.ignore_eos,
        timeout=arguments.timeout,
    )  # fmt: skip
    async with client:
        model = await client.find_model(arguments.model)
        max_len = model.max_model_len or MAX_MODEL_LEN
        workload = _make_workload(arguments, load, max_len)
        warm_up: list[WorkloadRequest] = []
        if arguments.warmup:
            warm_up = warm_up_requests(
                list(_generate(arguments, "uniform", arguments.warmup, max_len, warm_up=True)), arguments.warmup
            )
        served, interrupted = await measure_serving(
            client, model.id, workload.requests, load, num_requests=workload.num_requests, warm_up=warm_up
        )
    return model, workload, served, interrupted


def _make_workload(arguments: argparse.Namespace, load: Load, max_len: int) -> _Workload:
    """Requests from the file, or generated ones; endless with a duration and no --num-requests."""
    count = arguments.num_requests
    if count is not None and count < 1:
        raise ConfigError(f"--num-requests is {count}, but must be at least 1.")
    if len(arguments.distribution) > 1 and not arguments.workload:
        raise ConfigError(bench_cli.ONE_WORKLOAD)
    endless = count is None and load.duration is not None
    if endless and not load.is_open and load.concurrency is None:
        raise ConfigError("An endless workload cannot be sent all at once: give --num-requests, --request-rate or --concurrency.")
    if arguments.workload:
        requests = load_workload(arguments.workload)
        count = None if endless else count or len(requests)
        return _Workload(arguments.workload.stem, itertools.islice(itertools.cycle(requests), count), count)
    [distribution] = arguments.distribution
    count = None if endless else count or NUM_REQUESTS
    return _Workload(distribution, _generate(arguments, distribution, count, max_len), count)


def _generate(
    arguments: argparse.Namespace, distribution: str, count: int | None, max_len: int, *, warm_up: bool = False
) -> Iterable[WorkloadRequest]:
    """Generated requests, endless if `count` is None; else their mean lengths are exact."""
    options = {
        "mean_prompt_len": arguments.mean_prompt_len, "mean_output_len": arguments.mean_output_len, "vocab_size": VOCAB_SIZE,
        "max_len": max_len, "seed": arguments.workload_seed + (WARM_UP_OFFSET if warm_up else 0),
    }  # fmt: skip
    if count is None:
        return generate_requests(None, arrivals="at-once", distribution=distribution, **options)
    return make_workload(distribution, count, **options)


def _without_key(command: str) -> str:
    """The command line with the API key replaced by a placeholder."""
    parts = shlex.split(command)
    for i, part in enumerate(parts):
        name, equals, _ = part.partition("=")
        if name.startswith("--a") and "--api-key".startswith(name):  # argparse accepts abbreviations
            if equals:
                parts[i] = f"{name}=KEY"
            elif i + 1 < len(parts):
                parts[i + 1] = "KEY"
    return shlex.join(parts)
