"""Routers compared on production traces, by simulation: 8 replicas at 80 % of what they can do.

    python benchmarks/routing.py --json routing.json --figures .

What a replica can do is measured first: requests per second when all are there from the beginning. Lengths are a quarter (conversation) and an
eighth (Mooncake) of the traces', for which the default cost model, a laptop's, is fast enough.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from minivllm.bench.production import load_trace, stream_trace
from minivllm.bench.report import report
from minivllm.bench.summary import Goals
from minivllm.core.routing import ROUTERS
from minivllm.simulation.replicas import ReplicaRun, format_replicas, simulate_replicas

NUM_REPLICAS, LOAD = 8, 0.8
ENGINE: dict[str, Any] = {
    "max_num_seqs": 32, "num_gpu_blocks": 4096, "max_model_len": 16_384, "enable_chunked_prefill": True, "max_num_batched_tokens": 512,
}  # fmt: skip
TRACES: dict[str, dict[str, Any]] = {
    "azure_2023_conversation.csv.gz": {"length": 0.25, "num_requests": 10_000, "engine": {}},
    "mooncake_conversation.jsonl.gz": {"length": 0.125, "num_requests": 12_000, "engine": {"enable_prefix_caching": True}},
}


def compare(name: str, length: float, num_requests: int, engine: dict[str, Any]) -> tuple[float, list[ReplicaRun]]:
    """Requests per second of one replica, and a run for each router."""
    trace, options = load_trace(name), ENGINE | engine

    def requests(count: int, rate: float) -> Any:
        return stream_trace(trace, count, request_rate=rate, length=length, max_len=options["max_model_len"])

    capacity = simulate_replicas(requests(num_requests // NUM_REPLICAS, math.inf), 1, **options).requests_per_second
    rate = LOAD * capacity * NUM_REPLICAS
    runs = [
        simulate_replicas(
            requests(num_requests, rate),
            NUM_REPLICAS,
            routing=routing,
            goals=Goals(ttft=2000),
            progress_total=num_requests,
            **options,
        )
        for routing in ROUTERS
    ]
    return capacity, runs


def main() -> None:
    """Simulate, print tables, write the results and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    results, tables = {}, []
    for name, options in TRACES.items():
        start = time.perf_counter()
        capacity, runs = compare(name, **options)
        seconds = time.perf_counter() - start
        results[name] = {
            "capacity_of_one": capacity, "load": LOAD, "seconds": seconds, "runs": [run.to_json() for run in runs],
        }  # fmt: skip
        tables.append(
            f"{name}: one replica serves {capacity:.2f} requests/s; goodput: first token within 2 s\n\n{format_replicas(runs)}"
        )
        if arguments.figures:
            from minivllm.viz.routing import draw_routing

            draw_routing(runs).savefig(arguments.figures / f"routing_{name.split('_')[0]}.png", dpi=150)
    title = f"{NUM_REPLICAS} replicas at {LOAD:.0%} load, simulated"
    report(title, "\n\n".join(tables), results, file=arguments.json)


if __name__ == "__main__":
    main()
