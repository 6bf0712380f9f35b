"""Throughput against latency: a sweep of `max_num_seqs`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.bench.offline import run_offline
from minivllm.bench.report import format_table
from minivllm.bench.summary import EngineRun
from minivllm.bench.workloads import WorkloadRequest, warm_up_requests
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class SweepPoint:
    """One value of `max_num_seqs`: medians over its rounds, latency in seconds."""

    max_num_seqs: int
    output_tokens_per_second: float
    mean_latency: float
    mean_running: float
    rounds: list[float]
    """Output tokens per second of each round."""


def sweep_max_num_seqs(
    make_engine: Callable[[int], LLMEngine], values: Sequence[int], name: str, requests: list[WorkloadRequest], rounds: int = 1
) -> list[SweepPoint]:
    """Run a workload with each value of `max_num_seqs`, each on an engine of its own, prepared for batches of that size.

    All requests arrive at the start. Each value is run `rounds` times, after a short warm-up.

    Raises:
        ConfigError: A number is less than 1, or a request does not fit the model.
    """
    if min(values) < 1 or rounds < 1:
        raise ConfigError("A sweep needs values of max_num_seqs of at least 1, and at least 1 round.")
    points = []
    for value in values:
        engine = make_engine(value)
        run_offline(engine, "continuous", name, warm_up_requests(requests, value), use_tqdm=False)
        results = [run_offline(engine, "continuous", f"{name}, {value} running", requests) for _ in range(rounds)]
        points.append(summarize(value, results))
        del engine  # before the next one is loaded
    return points


def summarize(value: int, runs: list[EngineRun]) -> SweepPoint:
    """The medians over a value's rounds."""
    speeds = [run.output_tokens_per_second for run in runs]
    return SweepPoint(
        max_num_seqs=value,
        output_tokens_per_second=statistics.median(speeds),
        mean_latency=statistics.median(run.latency.mean for run in runs),
        mean_running=statistics.median(run.mean_running for run in runs),
        rounds=speeds,
    )


def format_points(points: list[SweepPoint]) -> str:
    """The values as a table of text, with the speed-up over the first."""
    headers = ("max_num_seqs", "tokens/s", "mean latency", "running", "speed-up")
    rows = [
        (
            point.max_num_seqs,
            f"{point.output_tokens_per_second:.1f}",
            f"{point.mean_latency:.1f} s",
            f"{point.mean_running:.1f}",
            f"{point.output_tokens_per_second / points[0].output_tokens_per_second:.2f}",
        )
        for point in points
    ]
    return format_table(headers, rows, left=0)
