"""How much time and memory the simulator takes for many requests on many replicas.

    python benchmarks/simulation_scale.py 1x20000 1000x1000000 --json scale.json

A run of 1000x1000000 is that of `minivllm simulate --replicas 1000 --num-requests 1000000 --arrival-rate 3730 --routing least-loaded`, in a process of
its own that stays on one core. Requests arrive at the same rate for each replica.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from minivllm.bench.report import format_table, report
from minivllm.bench.workloads import generate_requests
from minivllm.data_parallel.routing import ROUTERS
from minivllm.entrypoints.cli.options import check_writable
from minivllm.simulation.engine import simulate_replicas

RATE = 3.73
"""Requests per second and replica."""
MAX_LEN = 2048
"""Of `minivllm simulate`."""


def measure(num_replicas: int, num_requests: int, routing: str) -> dict[str, Any]:
    """Simulate on one core. Seconds by the clock and of the processor, and the process's largest memory in bytes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    started, cpu_started = time.perf_counter(), time.process_time()
    requests = generate_requests(num_requests, arrival_rate=RATE * num_replicas, max_len=MAX_LEN)
    run = simulate_replicas(requests, num_replicas, routing=routing, max_model_len=MAX_LEN, progress_total=num_requests)
    return {
        "replicas": num_replicas,
        "requests": run.completed,
        "routing": routing,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "output_tokens": run.output_tokens,
        "mean_busy": sum(run.busy) / num_replicas,
        "simulated_seconds": run.seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", default=["1x20000", "1000x1000000"], metavar="REPLICASxREQUESTS", help="(default: %(default)s)"
    )
    parser.add_argument("--routing", default="least-loaded", choices=list(ROUTERS), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--note", help="what else the machine did, for the title")
    arguments = parser.parse_args()
    try:
        sizes = [tuple(map(int, run.split("x"))) for run in arguments.runs]
        assert all(len(size) == 2 and min(size) > 0 for size in sizes)
    except (ValueError, AssertionError):
        parser.error("a run is two numbers, of replicas and of requests, such as 1000x1000000")
    check_writable(arguments.json)
    results = []
    for num_replicas, num_requests in sizes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            results.append(fresh.submit(measure, num_replicas, num_requests, arguments.routing).result())
    headers = (
        "replicas", "requests", "output tokens", "busy", "simulated", "took", "processor", "for a request", "a token", "peak memory",
    )  # fmt: skip
    rows = [
        (
            f"{result['replicas']:,}",
            f"{result['requests']:,}",
            f"{result['output_tokens']:,}",
            f"{result['mean_busy']:.0%}",
            f"{result['simulated_seconds']:,.0f} s",
            f"{result['seconds']:.1f} s",
            f"{result['cpu_seconds']:.1f} s",
            f"{result['cpu_seconds'] / result['requests'] * 1e6:.0f} µs",
            f"{result['cpu_seconds'] / result['output_tokens'] * 1e6:.1f} µs",
            f"{result['peak_memory_bytes'] / 1e6:.0f} MB",
        )
        for result in results
    ]
    note = f" ({arguments.note})" if arguments.note else ""
    title = f"Simulating replicas on one core, routing {arguments.routing}{note}"
    report(title, format_table(headers, rows, left=0), {"results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
