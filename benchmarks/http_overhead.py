"""What serving costs: the same requests through `LLM.generate`, and over HTTP with and without streaming, in turns.

    python benchmarks/http_overhead.py --json overhead.json

One engine computes at a time: the server is stopped while `LLM.generate` runs, and the engine of this process is idle while the server
runs. In one more round /health is polled, as a load balancer does: it must answer while the model computes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from server_process import HealthProbe, ServerProcess, start_server

from minivllm import LLM, SamplingParams
from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.report import format_table, report
from minivllm.bench.serve import Load, measure_serving, summarize
from minivllm.bench.summary import Goals, percentile
from minivllm.bench.workloads import WorkloadRequest, load_workload, warm_up_requests
from minivllm.entrypoints.cli.options import check_writable

WORKLOAD = Path(__file__).parent / "workloads" / "offline_64.json"
MODEL = "smollm2-135m"
LIMITS = {"max_num_seqs": 16, "max_model_len": 1024, "num_gpu_blocks_override": 512}
HEALTH_INTERVAL = 0.05
LEAST_RATIO, MOST_HEALTH_MS = 0.9, 50.0
"""The project's bars: throughput over HTTP relative to `LLM.generate`, and the 99th percentile of /health."""
WAYS = ("LLM.generate", "HTTP, streamed", "HTTP, whole")


def run_offline(llm: LLM, requests: list[WorkloadRequest]) -> float:
    """Output tokens per second of `LLM.generate`."""
    prompts = [request.prompt_token_ids for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True) for request in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


async def run_served(server: ServerProcess, requests: list[WorkloadRequest], stream: bool) -> float:
    """Output tokens per second over HTTP, all requests sent at once."""
    async with OpenAIClient(server.base_url, stream=stream) as client:
        served, interrupted = await measure_serving(client, MODEL, requests, Load(), use_tqdm=False)
    if interrupted:
        raise KeyboardInterrupt
    if failed := [request for request in served if request.error is not None]:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0].error}: {failed[0].detail}")
    return summarize(served, Load(), Goals()).output_tokens_per_second


def measure(requests: list[WorkloadRequest], rounds: int) -> tuple[dict[str, list[float]], HealthProbe]:
    """The throughput of each way's rounds, and how /health answered while the server computed."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    warm_up = warm_up_requests(requests, LIMITS["max_num_seqs"])
    llm = LLM(MODEL, **LIMITS)
    with start_server(MODEL, *options, "--no-enable-chunked-prefill") as server:  # as in LLM
        for number in range(1 + rounds):
            of_round = requests if number else warm_up
            with server.paused():
                results = [run_offline(llm, of_round)]
            results += [asyncio.run(run_served(server, of_round, stream)) for stream in (True, False)]
            if number:
                for way, speed in zip(WAYS, results, strict=True):
                    speeds[way].append(speed)
                print(f"round {number}: " + ", ".join(f"{way} {speeds[way][-1]:.1f} tokens/s" for way in WAYS), flush=True)
        with HealthProbe(server.port, HEALTH_INTERVAL) as probe:
            asyncio.run(run_served(server, requests, True))
    return speeds, probe


def format_overhead(speeds: dict[str, list[float]], health: dict[str, Any]) -> str:
    """The ways, and /health."""
    base = statistics.median(speeds[WAYS[0]])
    rows = []
    for way, of_way in speeds.items():
        median = statistics.median(of_way)
        rows.append((way, f"{median:.1f}", f"{min(of_way):.1f}", f"{max(of_way):.1f}", f"{median / base:.3f}"))
    return (
        f"{format_table(('way', 'tokens/s', 'min', 'max', 'x LLM.generate'), rows)}\n\n"
        f"/health while the engine computes, {health['count']} times, one every {HEALTH_INTERVAL * 1e3:.0f} ms: "
        f"p50 {health['p50_ms']:.1f} ms, p99 {health['p99_ms']:.1f} ms, longest {health['max_ms']:.1f} ms, {health['failures']} failed"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--num-requests", type=int, help="take only the first N requests of the workload (default: all)", metavar="N"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    requests = load_workload(WORKLOAD)[: arguments.num_requests]
    speeds, probe = measure(requests, arguments.rounds)
    milliseconds = [seconds * 1e3 for seconds in probe.seconds]
    health = {
        "count": len(milliseconds), "p50_ms": percentile(milliseconds, 50), "p99_ms": percentile(milliseconds, 99),
        "max_ms": max(milliseconds), "failures": probe.failures,
    }  # fmt: skip
    what = (
        f"{MODEL}, {WORKLOAD.stem}: {len(requests)} requests, {sum(request.output_len for request in requests)} output tokens, at most "
        f"{LIMITS['max_num_seqs']} running; medians of {arguments.rounds} rounds in turns"
    )
    results = {"model": MODEL, "tokens_per_second": speeds, "health": health}
    report(what, format_overhead(speeds, health), results, file=arguments.json)
    base = statistics.median(speeds[WAYS[0]])
    fast_enough = all(statistics.median(of_way) >= LEAST_RATIO * base for of_way in speeds.values())
    return 0 if fast_enough and health["p99_ms"] < MOST_HEALTH_MS and not health["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
