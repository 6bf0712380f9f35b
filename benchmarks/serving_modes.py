"""The journey to continuous batching, as users see it over HTTP: servers under the same load.

    python benchmarks/serving_modes.py --json modes.json --plot modes.png

A process for each request (benchmarks/process_per_request.py), then static batching, then continuous batching (`minivllm serve --mode`):
one server after the other, with the same model, limits and long-tailed requests, which arrive over time whether the server keeps up or not.
`--modes whole-prompts chunks-of-2048 continuous` compares steps that are either prefill or decode with chunked prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from server_process import PROGRAM, start_server

from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.report import format_table, quantity, report
from minivllm.bench.serve import Load, ServingResult, format_serving, measure_serving, summarize
from minivllm.bench.summary import Distribution, Goals, ServedRequest
from minivllm.bench.workloads import WorkloadRequest, make_workload, warm_up_requests
from minivllm.entrypoints.cli.options import check_writable, picture

PROCESSES = (str(Path(__file__).with_name("process_per_request.py")),)
MODES = {
    "processes": (PROCESSES, ()),
    "static": (PROGRAM, ("--mode", "static")),
    "continuous": (PROGRAM, ("--mode", "continuous")),
    "whole-prompts": (PROGRAM, ("--mode", "continuous", "--no-enable-chunked-prefill")),
    "chunks-of-2048": (PROGRAM, ("--mode", "continuous", "--max-num-batched-tokens", "2048")),
}
"""What Python runs as `minivllm`, and the options of its `serve`."""
MODEL = "smollm2-135m"
MAX_NUM_SEQS = 16
OPTIONS = (MODEL, "--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "1024", "--num-gpu-blocks-override", "1024")
MOST_SECONDS = 1800.0
"""Longest time for a request: with a process for each, the last request waits long."""


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
    headers = (
        "mode", "completed", "seconds", "requests/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "end to end p50", "p99",
    )  # fmt: skip
    rows = []
    for mode, result in results.items():
        rates = (f"{result.seconds:.1f}", f"{result.requests_per_second:.2f}", f"{result.output_tokens_per_second:.1f}")
        rows.append((mode, result.completed, *rates, *_pair(result.ttft), *_pair(result.itl), *_pair(result.latency)))
    return format_table(headers, rows)


def _pair(times: Distribution) -> list[str]:
    return [quantity(time * 1e3, ",.0f", " ms") for time in (times.p50, times.p99)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["processes", "static", "continuous"], help="(default: %(default)s)"
    )
    parser.add_argument("--num-requests", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--request-rate", type=float, default=4.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--mean-prompt-len", type=int, default=48, help="tokens (default: %(default)s)")
    parser.add_argument("--mean-output-len", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, with each request's times")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw them here")
    arguments = parser.parse_args()
    for path in (arguments.json, arguments.plot):
        check_writable(path)
    lengths = {"mean_prompt_len": arguments.mean_prompt_len, "mean_output_len": arguments.mean_output_len}
    requests = make_workload("longtail", arguments.num_requests, **lengths, max_len=1024)
    load = Load(arguments.request_rate)
    served = {}
    for mode in arguments.modes:
        program, options = MODES[mode]
        with start_server(*OPTIONS, *options, program=program) as server:
            served[mode] = asyncio.run(measure(server.base_url, requests, load))
        print(f"\n{mode}\n\n{format_serving(summarize(served[mode], load, Goals()), Goals(), served[mode])}\n", flush=True)
    results = {mode: summarize(of_mode, load, Goals()) for mode, of_mode in served.items()}
    what = (
        f"{MODEL} behind one server after another, at most {MAX_NUM_SEQS} running; {len(requests)} long-tailed requests, "
        f"{sum(request.output_len for request in requests)} output tokens, {load.describe()}"
    )
    content = {
        mode: {"result": results[mode].to_json(), "requests": [request.to_json() for request in of_mode]}
        for mode, of_mode in served.items()
    }
    report(what, format_comparison(results), {"model": MODEL, "modes": content}, file=arguments.json)
    if arguments.plot:
        from minivllm.viz.serving import draw_serving

        draw_serving(served, f"{MODEL}: {len(requests)} long-tailed requests, {load.describe()}").savefig(arguments.plot, dpi=150)
        print(f"\nThe picture: {arguments.plot}")
    return 0 if all(result.completed == len(requests) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
