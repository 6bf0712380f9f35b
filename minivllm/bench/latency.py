"""Time to first token (TTFT) and inter-token latency (ITL) when a batch of requests arrives at once, by batch size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from minivllm.bench.offline import run_offline
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import EngineRun, RunSummary
from minivllm.bench.trace_summary import request_latencies
from minivllm.bench.workloads import make_workload
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError


@dataclass(kw_only=True)
class BatchLatency(RunSummary):
    """What the users of a batch wait, over all rounds.

    Attributes:
        batch_size: Requests that arrive at once.
        rounds: Output tokens per second of each round, prompts included in the time.
    """

    batch_size: int
    rounds: list[float]


def measure_latency(
    engine: LLMEngine,
    batch_sizes: Sequence[int],
    *,
    prompt_len: int = 64,
    output_len: int = 32,
    rounds: int = 3,
    use_tqdm: bool = True,
) -> list[BatchLatency]:
    """Run batches of requests of equal lengths: each batch size once to warm up, then `rounds` times.

    Args:
        engine: An idle engine with room for the largest batch (`max_num_seqs`).
        batch_sizes: Requests that arrive at once.
        prompt_len, output_len: Tokens of each request; at least 2 to generate, or there would be no ITL.

    Raises:
        ConfigError: A number is too small, or a request does not fit the model.
    """
    if min(batch_sizes) < 1 or rounds < 1 or output_len < 2:
        raise ConfigError(
            "Latency is measured with batches of at least 1 request, at least 1 round, and at least 2 output tokens."
        )
    results = []
    with tqdm(total=len(batch_sizes) * (1 + rounds), unit="batch", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for batch_size in batch_sizes:
            bar.set_description(f"batch of {batch_size}")
            requests = make_workload(
                "uniform", batch_size, mean_prompt_len=prompt_len, mean_output_len=output_len,
                vocab_size=engine.model_config.vocab_size, max_len=2 * (prompt_len + output_len),
            )  # fmt: skip
            runs = []
            for _ in range(1 + rounds):
                runs.append(run_offline(engine, "continuous", f"batch of {batch_size}", requests, use_tqdm=False))
                bar.update()
            results.append(summarize(batch_size, runs[1:]))  # the first is the warm-up
    return results


def summarize(batch_size: int, runs: list[EngineRun]) -> BatchLatency:
    """The requests of all rounds together."""
    requests = [request for run in runs if run.trace is not None for request in request_latencies(run.trace)]
    speeds = [run.output_tokens_per_second for run in runs]
    return BatchLatency.of(requests, sum(run.seconds for run in runs), batch_size=batch_size, rounds=speeds)


def format_batches(results: list[BatchLatency]) -> str:
    """The batch sizes as a table of text."""
    headers = ("batch", "TTFT median", "ITL median", "ITL p95", "ITL p99", "tokens/s")
    rows = []
    for result in results:
        times = (result.ttft.p50, result.itl.p50, result.itl.p95, result.itl.p99)
        cells = (quantity(time * 1e3, ".1f", " ms") for time in times)
        rows.append((result.batch_size, *cells, f"{statistics.median(result.rounds):.1f}"))
    return format_table(headers, rows, left=0)
