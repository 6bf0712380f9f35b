"""How much time and memory the simulator takes for many requests.

    python benchmarks/simulation_scale.py --requests 10000 1000000 --json scale.json

All requests run through the real scheduler and block manager on one core: 64 sequences at a time, 128 requests in the engine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from minivllm.bench.report import format_table, report
from minivllm.bench.workloads import WorkloadRequest, generate_requests
from minivllm.simulation.engine import simulate

RUNNING = 64


def measure(num_requests: int) -> dict[str, float]:
    """Simulate: seconds of real time, and memory after a tenth of the requests and at the last one."""
    process, memory = psutil.Process(), {}

    def watched() -> Iterator[WorkloadRequest]:
        for number, request in enumerate(generate_requests(num_requests, arrivals="at-once")):
            if number in (num_requests // 10, num_requests - 1):
                memory[number] = process.memory_info().rss
            yield request

    start = time.perf_counter()
    result = simulate(
        watched(),
        max_concurrency=2 * RUNNING,
        progress_total=num_requests,
        max_num_seqs=RUNNING,
        num_gpu_blocks=2000,
        trace=False,
    )
    return {
        "requests": num_requests,
        "seconds": time.perf_counter() - start,
        "steps": result.num_steps,
        "output_tokens": result.output_tokens,
        "mean_running": result.mean_running,
        "simulated_hours": result.seconds / 3600,
        "memory_at_a_tenth": min(memory.values()),
        "memory_at_the_end": max(memory.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 1_000_000], help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = [measure(count) for count in arguments.requests]
    headers = ("requests", "steps", "output tokens", "running", "simulated", "took", "memory, first tenth", "end")
    rows = [
        (
            f"{result['requests']:,}",
            f"{result['steps']:,}",
            f"{result['output_tokens']:,}",
            f"{result['mean_running']:.1f}",
            f"{result['simulated_hours']:.2f} h",
            f"{result['seconds']:.1f} s",
            f"{result['memory_at_a_tenth'] / 1e6:.0f} MB",
            f"{result['memory_at_the_end'] / 1e6:.0f} MB",
        )
        for result in results
    ]
    title = f"Simulating requests on one core, {RUNNING} running"
    report(title, format_table(headers, rows, left=0), {"results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
