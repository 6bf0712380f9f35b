"""How much is gained by running more requests at once, and what each of them pays: a sweep of `max_num_seqs`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.bench.offline import OfflineResult, run_offline
from minivllm.bench.workloads import WorkloadRequest, warm_up_requests
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class SweepPoint:
    """One value of `max_num_seqs`: medians of its rounds. Latency is in seconds, from the arrival of all to the last token."""

    max_num_seqs: int
    output_tokens_per_second: float
    mean_latency: float
    mean_running: float
    rounds: list[float]
    """Output tokens per second of each round."""


def sweep_max_num_seqs(
    make_engine: Callable[[int], LLMEngine], values: Sequence[int], name: str, requests: list[WorkloadRequest], rounds: int = 1
) -> list[SweepPoint]:
    """Run one workload with each value. An engine is made for each, since it prepares itself for the batches that will come.

    Args:
        make_engine: Makes an engine from a value of `max_num_seqs`.
        values: The values, in the order in which they are run.
        name: Of the workload, for the progress bar.
        requests: The workload; all of it is there from the start.
        rounds: How often each value is run, after one short run that warms up.

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


def summarize(value: int, results: list[OfflineResult]) -> SweepPoint:
    """The medians of a value's rounds."""
    speeds = [result.output_tokens_per_second for result in results]
    return SweepPoint(
        max_num_seqs=value,
        output_tokens_per_second=statistics.median(speeds),
        mean_latency=statistics.median(result.mean_latency for result in results),
        mean_running=statistics.median(result.mean_running for result in results),
        rounds=speeds,
    )


def format_table(points: list[SweepPoint]) -> str:
    """The values as a table of text; the last column is the speed relative to the first value."""
    header = f"{'max_num_seqs':>12}{'tokens/s':>10}{'mean latency':>14}{'running':>9}{'speed-up':>10}"
    lines = [header, "-" * len(header)]
    lines += [
        f"{point.max_num_seqs:>12}{point.output_tokens_per_second:>10.1f}{point.mean_latency:>12.1f} s{point.mean_running:>9.1f}"
        f"{point.output_tokens_per_second / points[0].output_tokens_per_second:>10.2f}"
        for point in points
    ]
    return "\n".join(lines)
