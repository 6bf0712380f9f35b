"""Offline throughput: a workload through the real engine, under static or continuous batching."""

from __future__ import annotations

from tqdm.auto import tqdm

from minivllm.bench.report import format_table
from minivllm.bench.summary import EngineRun
from minivllm.bench.trace_summary import summarize_trace
from minivllm.bench.workloads import WorkloadRequest
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
    if engine.has_unfinished_requests():
        raise ConfigError("run_offline needs an idle engine: finish or abort its requests first.")
    if not requests:
        raise ConfigError("The workload has no requests.")
    limit = engine.model_config.max_model_len
    for i, request in enumerate(requests):
        if len(request.prompt_token_ids) + request.output_len > limit:
            raise ConfigError(
                f"Request {i} of the workload grows beyond the {limit} tokens that the model takes: make it shorter."
            )
    engine.core.use_scheduler(SCHEDULERS[scheduler])
    engine.block_manager.reset_prefix_cache()
    was_traced = engine.trace is not None
    trace = engine.start_trace()
    arrival = engine.clock()
    try:
        for i, request in enumerate(requests):
            params = request.sampling_params()
            engine.add_request(f"{i}", request.prompt_token_ids, params, arrival_time=arrival)
        with tqdm(
            total=len(requests), desc=f"{name}, {scheduler}", unit="request", disable=not use_tqdm, dynamic_ncols=True
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
