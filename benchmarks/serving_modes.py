"""The journey to continuous batching, as users see it over HTTP: `minivllm serve` in each of its modes under the same load.

    python benchmarks/serving_modes.py --json modes.json --plot modes.png

A process for each request, then static batches, then continuous batching: one server after the other on this machine, with the same
model, the same limits and the same long-tailed requests, which come over time whether a server keeps up or not.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

from minivllm.bench.load_generator import Load
from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.serve import measure_serving
from minivllm.bench.served_request import Goals, ServedRequest, ServingResult, format_table, summarize
from minivllm.bench.server_process import start_server
from minivllm.bench.workloads import WorkloadRequest, make_workload, warm_up_requests
from minivllm.entrypoints.bench_cli import report
from minivllm.entrypoints.options import check_writable, picture

MODES = ("processes", "static", "continuous")
MODEL = "smollm2-135m"
MAX_NUM_SEQS = 16
OPTIONS = (MODEL, "--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "1024", "--num-gpu-blocks-override", "1024")
MOST_SECONDS = 1800.0
"""That a request may take: with a process for each, the last one waits long."""


async def measure(base_url: str, requests: list[WorkloadRequest], load: Load) -> list[ServedRequest]:
    """Warm a server up and load it."""
    async with OpenAIClient(base_url, timeout=MOST_SECONDS) as client:
        model = (await client.find_model()).id
        warm_up = warm_up_requests(make_workload("uniform", 2, mean_prompt_len=16, seed=-1), 2)
        served, interrupted = await measure_serving(client, model, requests, load, num_requests=len(requests), warm_up=warm_up)
    if interrupted:
        raise KeyboardInterrupt
    return served


def format_comparison(results: dict[str, ServingResult]) -> str:
    """A line for each mode."""
    header = (
        f"{'mode':<12}{'completed':>10}{'seconds':>9}{'requests/s':>12}{'tokens/s':>10}{'TTFT p50':>12}{'p99':>12}{'ITL p50':>11}"
        f"{'p99':>12}{'end to end p50':>16}{'p99':>12}"
    )
    lines = [header, "-" * len(header)]
    for mode, result in results.items():
        lines.append(
            f"{mode:<12}{result.completed:>10}{result.seconds:>9.1f}{result.requests_per_second:>12.2f}"
            f"{result.output_tokens_per_second:>10.1f}{_pair(result.ttft, 12)}{_pair(result.itl, 11)}{_pair(result.e2e, 16)}"
        )
    return "\n".join(lines)


def _pair(distribution, width: int) -> str:
    if distribution is None:
        return f"{'–':>{width}}{'–':>12}"
    return f"{distribution.p50:>{width - 3},.0f} ms{distribution.p99:>9,.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--request-rate", type=float, default=4.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--mean-output-len", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, with each request's times")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw them here")
    arguments = parser.parse_args()
    arguments.model, arguments.command = MODEL, shlex.join(["python", "benchmarks/serving_modes.py", *sys.argv[1:]])
    for path in (arguments.json, arguments.plot):
        check_writable(path)
    requests = make_workload("longtail", arguments.num_requests, mean_output_len=arguments.mean_output_len, max_len=1024)
    load = Load(arguments.request_rate)
    served = {}
    for mode in arguments.modes:
        with start_server(*OPTIONS, "--mode", mode) as server:
            served[mode] = asyncio.run(measure(server.base_url, requests, load))
        print(f"\n{mode}\n\n{format_table(summarize(served[mode], load, Goals()), Goals(), served[mode])}\n", flush=True)
    results = {mode: summarize(of_mode, load, Goals()) for mode, of_mode in served.items()}
    what = (
        f"{MODEL} behind `minivllm serve --mode ...`, at most {MAX_NUM_SEQS} running; {len(requests)} long-tailed requests, "
        f"{sum(request.output_len for request in requests)} output tokens, {load.describe()}"
    )
    content = {
        mode: {"result": results[mode].to_json(), "requests": [request.to_json() for request in of_mode]}
        for mode, of_mode in served.items()
    }
    report(arguments, what, format_comparison(results), {"modes": content})
    if arguments.plot:
        from minivllm.viz.serving import draw_serving

        draw_serving(served, f"{MODEL}: {len(requests)} long-tailed requests, {load.describe()}").savefig(arguments.plot, dpi=150)
        print(f"\nThe picture: {arguments.plot}")
    return 0 if all(result.completed == len(requests) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
