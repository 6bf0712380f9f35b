"""How long the simulator takes for many requests, and how much memory.

    python benchmarks/simulation_scale.py --requests 10000 1000000 --json scale.json

All requests run through the real scheduler and block manager, 64 at a time, on one core; 128 are in the engine at any time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from pathlib import Path

import psutil

from minivllm.bench.arrivals import generate_requests
from minivllm.bench.machine import describe_machine
from minivllm.bench.simulation import simulate

RUNNING = 64


def measure(num_requests: int) -> dict[str, float]:
    """Simulate so many; seconds of real time, and memory at the tenth and at the last request."""
    process, memory = psutil.Process(), {}

    def watched():
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
    text = [
        f"Simulating requests on one core, {RUNNING} running; {describe_machine()}",
        "",
        f"{'requests':>10}{'steps':>12}{'output tokens':>15}{'running':>9}{'simulated':>12}{'took':>10}{'memory, first tenth':>21}{'end':>9}",
    ]
    for result in results:
        text.append(
            f"{result['requests']:>10,}{result['steps']:>12,}{result['output_tokens']:>15,}{result['mean_running']:>9.1f}"
            f"{result['simulated_hours']:>10.2f} h{result['seconds']:>8.1f} s{result['memory_at_a_tenth'] / 1e6:>18.0f} MB"
            f"{result['memory_at_the_end'] / 1e6:>6.0f} MB"
        )
    print("\n".join(text))
    if arguments.json:
        command = (
            f"python benchmarks/simulation_scale.py --requests {' '.join(map(str, arguments.requests))} --json {arguments.json}"
        )
        report = {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "command": command}
        arguments.json.write_text(json.dumps(report | {"text": text, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
