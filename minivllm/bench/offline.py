"""Measurements of an engine in this process: throughput under static or continuous batching, TTFT and ITL by batch size, and a sweep of
`max_num_seqs`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import EngineRun, RunSummary
from minivllm.bench.trace_summary import request_latencies, summarize_trace
from minivllm.bench.workloads import WorkloadRequest, make_workload, warm_up_requests
from minivllm.core.pipeline_scheduler import choose_scheduler
from minivllm.core.scheduler import Scheduler
from minivllm.core.static_batching import StaticBatchScheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError

SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticBatchScheduler, "continuous": Scheduler}


def run_offline(
    engine: LLMEngine, scheduler: str, name: str, requests: list[WorkloadRequest], use_tqdm: bool = True
) -> EngineRun:
    """Run a workload whose requests all arrive at the start, greedily, past end-of-sequence tokens.

    Args:
        engine: An idle engine. The run is recorded in a trace of its own.
        scheduler: "static" or "continuous": the policy that the engine gets for this run.
        name: Name of the workload, for the report.
        requests: The workload.
        use_tqdm: Show progress.

    Raises:
        ConfigError: The engine has other requests, or a request does not fit the model.
    """
    from tqdm.auto import tqdm  # not at the top: the playground's first step need not wait for it

    if engine.has_unfinished_requests():
        raise ConfigError("run_offline needs an idle engine: finish or abort its requests first.")
    if not requests:
        raise ConfigError("The workload has no requests.")
    limit = engine.input_processor.max_request_tokens
    what = "the model takes" if limit == engine.model_config.max_model_len else "the whole cache has room for"
    for i, request in enumerate(requests):
        if len(request.prompt_token_ids) + request.output_len > limit:
            raise ConfigError(f"Request {i} of the workload grows beyond the {limit} tokens that {what}: make it shorter.")
    scheduler_cls = SCHEDULERS[scheduler]
    engine.core.use_scheduler(choose_scheduler(engine.core.scheduler_config) if scheduler_cls is Scheduler else scheduler_cls)
    engine.block_manager.reset_prefix_cache()
    was_traced = engine.trace is not None
    trace = engine.start_trace()
    arrival = engine.clock()
    try:
        for i, request in enumerate(requests):
            engine.add_request(f"{i}", request.prompt_token_ids, request.sampling_params(), arrival_time=arrival)
        title = f"{name}, {scheduler}"
        with tqdm(
            total=len(requests), desc=title, unit="request", disable=not use_tqdm or sys.stderr is None, dynamic_ncols=True
        ) as bar:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise ConfigError(f"Request {output.request_id} of the workload failed. {output.error}")
                    if output.finished:
                        bar.update()
    except BaseException:  # Ctrl-C too: leave nothing behind
        for i in range(len(requests)):
            engine.abort_request(f"{i}")
        raise
    finally:
        if not was_traced:
            engine.stop_trace()
    run = summarize_trace(trace)
    run.scheduler, run.workload = scheduler, name
    return run


def format_runs(runs: list[EngineRun]) -> str:
    """Runs as a table of text, with a line for each workload that was run with both policies."""
    headers = ("workload", "batching", "requests/s", "tokens/s", "latency", "p95", "TTFT", "running", "cache use", "peak")
    rows = [
        (
            run.workload,
            run.scheduler,
            f"{run.requests_per_second:.2f}",
            f"{run.output_tokens_per_second:.1f}",
            f"{run.latency.mean:.1f}s",
            f"{run.latency.p95:.1f}s",
            f"{run.ttft.mean:.1f}s",
            f"{run.mean_running:.1f}",
            f"{run.mean_cache_use:.0%}",
            f"{run.peak_cache_use:.0%}",
        )
        for run in runs
    ]
    lines = [format_table(headers, rows, left=2)]
    for workload in dict.fromkeys(run.workload for run in runs):
        speeds = {run.scheduler: run.output_tokens_per_second for run in runs if run.workload == workload}
        if speeds.keys() >= SCHEDULERS.keys():
            ratio = speeds["continuous"] / speeds["static"]
            lines.append(f"{workload}: continuous batching gives {ratio:.2f} times the tokens/s of static batching.")
    return "\n".join(lines)


# -- latency by batch size -------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class BatchLatency(RunSummary):
    """What the users of a batch of `batch_size` requests wait, over all rounds. `rounds` are the output tokens per second of each."""

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
    """Run batches of requests of equal lengths, all arriving at once: each batch size once to warm up, then `rounds` times.

    Args:
        engine: An idle engine with room for the largest batch (`max_num_seqs`).
        batch_sizes: Requests per batch.
        prompt_len, output_len: Tokens of each request; at least 2 to generate, or there would be no ITL.

    Raises:
        ConfigError: A number is too small, or a request does not fit the model.
    """
    from tqdm.auto import tqdm

    if min(batch_sizes) < 1 or rounds < 1 or output_len < 2:
        raise ConfigError(
            "Latency is measured with batches of at least 1 request, at least 1 round, and at least 2 output tokens."
        )
    results = []
    with tqdm(
        total=len(batch_sizes) * (1 + rounds), unit="batch", disable=not use_tqdm or sys.stderr is None, dynamic_ncols=True
    ) as bar:
        for batch_size in batch_sizes:
            name = f"batch of {batch_size}"
            bar.set_description(name)
            requests = make_workload(
                "uniform", batch_size, mean_prompt_len=prompt_len, mean_output_len=output_len,
                vocab_size=engine.model_config.vocab_size, max_len=2 * (prompt_len + output_len),
            )  # fmt: skip
            runs = []
            for _ in range(1 + rounds):
                runs.append(run_offline(engine, "continuous", name, requests, use_tqdm=False))
                bar.update()
            del runs[0]  # the warm-up
            latencies = [request for run in runs if run.trace is not None for request in request_latencies(run.trace)]
            speeds = [run.output_tokens_per_second for run in runs]
            results.append(BatchLatency.of(latencies, sum(run.seconds for run in runs), batch_size=batch_size, rounds=speeds))
    return results


def format_batches(results: list[BatchLatency]) -> str:
    """The batch sizes as a table of text."""
    headers = ("batch", "TTFT median", "ITL median", "ITL p95", "ITL p99", "tokens/s")
    rows = []
    for result in results:
        times = (result.ttft.p50, result.itl.p50, result.itl.p95, result.itl.p99)
        cells = (quantity(time * 1e3, ".1f", " ms") for time in times)
        rows.append((result.batch_size, *cells, f"{statistics.median(result.rounds):.1f}"))
    return format_table(headers, rows, left=0)


# -- throughput against latency --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """One value of `max_num_seqs`: medians over its rounds, latency in seconds. `rounds` are the output tokens per second of each."""

    max_num_seqs: int
    output_tokens_per_second: float
    mean_latency: float
    mean_running: float
    rounds: list[float]

    @classmethod
    def of(cls, max_num_seqs: int, runs: list[EngineRun]) -> SweepPoint:
        """The medians of a value's runs."""
        speeds = [run.output_tokens_per_second for run in runs]
        latencies, running = [run.latency.mean for run in runs], [run.mean_running for run in runs]
        return cls(max_num_seqs, *map(statistics.median, (speeds, latencies, running)), speeds)


def sweep_max_num_seqs(
    make_engine: Callable[[int], LLMEngine], values: Sequence[int], name: str, requests: list[WorkloadRequest], rounds: int = 1
) -> list[SweepPoint]:
    """Run a workload, whose requests all arrive at the start, `rounds` times with each value of `max_num_seqs`.

    `make_engine` makes an engine for each value, which a short run warms up.

    Raises:
        ConfigError: A number is less than 1, or a request does not fit the model.
    """
    if min(values) < 1 or rounds < 1:
        raise ConfigError("A sweep needs values of max_num_seqs of at least 1, and at least 1 round.")
    points = []
    for value in values:
        engine = make_engine(value)
        run_offline(engine, "continuous", name, warm_up_requests(requests, value), use_tqdm=False)
        runs = [run_offline(engine, "continuous", f"{name}, {value} running", requests) for _ in range(rounds)]
        points.append(SweepPoint.of(value, runs))
        del engine  # before the next one is loaded
    return points


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
