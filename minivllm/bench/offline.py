"""Run a workload through the real engine under static and continuous batching, and tell what each user would see."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.workloads import WorkloadRequest
from minivllm.core.scheduler import Scheduler
from minivllm.core.static_batching import StaticBatchScheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticBatchScheduler, "continuous": Scheduler}


@dataclass
class OfflineResult:
    """One run of a workload.

    Times are in seconds. `latency` is from arrival to the last token, `ttft` from arrival to the first; all requests
    arrive at the start. `mean_running` and the cache's use are averages over time, weighted by the length of the steps.
    """

    workload: str
    scheduler: str
    num_requests: int
    output_tokens: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    mean_latency: float
    p95_latency: float
    mean_ttft: float
    mean_running: float
    mean_cache_use: float
    peak_cache_use: float
    num_preemptions: int
    trace: EngineTrace = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the trace."""
        return {name: value for name, value in vars(self).items() if name != "trace"}


def run_offline(
    engine: LLMEngine, scheduler: str, name: str, requests: list[WorkloadRequest], use_tqdm: bool = True
) -> OfflineResult:
    """Run all requests of a workload, all there from the start, greedy and without regard to the end-of-sequence token.

    Args:
        engine: With nothing to do. The run is recorded in a trace of its own.
        scheduler: "static" or "continuous": the policy that the engine gets for this run.
        name: Name of the workload, for the report.
        requests: The workload.
        use_tqdm: Show progress.

    Raises:
        ConfigError: The engine has other requests, or a request does not fit the model.
    """
    if engine.has_unfinished_requests():
        raise ConfigError("run_offline needs an engine with nothing else to do: finish or abort its requests first.")
    if not requests:
        raise ConfigError("The workload has no requests.")
    limit = engine.model_config.max_model_len
    for i, request in enumerate(requests):
        if len(request.prompt_token_ids) + request.output_len > limit:
            raise ConfigError(f"Request {i} of the workload grows beyond the {limit} tokens that the model takes: leave it out.")
    engine.core.use_scheduler(SCHEDULERS[scheduler])
    engine.block_manager.reset_prefix_cache()
    was_traced = engine.trace is not None
    trace = engine.start_trace()
    arrival = engine.clock()
    finished: list[RequestOutput] = []
    try:
        for i, request in enumerate(requests):
            params = SamplingParams(
                temperature=0, max_tokens=request.output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
            )
            engine.add_request(f"{i}", request.prompt_token_ids, params, arrival_time=arrival)
        with tqdm(
            total=len(requests), desc=f"{name}, {scheduler}", unit="request", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise ConfigError(f"Request {output.request_id} of the workload failed. {output.error}")
                    if output.finished:
                        finished.append(output)
                        bar.update()
    except BaseException:  # Ctrl-C too: leave nothing behind
        for i in range(len(requests)):
            engine.abort_request(f"{i}")
        raise
    finally:
        if not was_traced:
            engine.stop_trace()
    return _summarize(name, scheduler, finished, trace)


def _summarize(name: str, scheduler: str, outputs: list[RequestOutput], trace: EngineTrace) -> OfflineResult:
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    latencies = [times.latency or 0.0 for times in metrics]
    seconds = max(latencies)  # all arrived at the same moment
    busy = sum(step.end - step.start for step in trace)

    def over_time(values: Iterable[float]) -> float:
        return sum(value * (step.end - step.start) for value, step in zip(values, trace, strict=True)) / busy

    cache_use = [1 - step.num_free_blocks / trace.config.num_gpu_blocks for step in trace]
    return OfflineResult(
        workload=name,
        scheduler=scheduler,
        num_requests=len(outputs),
        output_tokens=output_tokens,
        seconds=seconds,
        requests_per_second=len(outputs) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        mean_latency=statistics.mean(latencies),
        p95_latency=percentile(latencies, 95),
        mean_ttft=statistics.mean(times.time_to_first_token or 0.0 for times in metrics),
        mean_running=over_time(step.num_running for step in trace),
        mean_cache_use=over_time(cache_use),
        peak_cache_use=max(cache_use),
        num_preemptions=sum(times.num_preemptions for times in metrics),
        trace=trace,
    )


def percentile(values: list[float], percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def format_table(results: list[OfflineResult]) -> str:
    """The results as a table of text, with a line under each pair that compares them."""
    width = max(10, *(len(result.workload) + 1 for result in results))
    header = (
        f"{'workload':<{width}}{'batching':<12}{'requests/s':>11}{'tokens/s':>10}{'latency':>9}{'p95':>7}{'TTFT':>7}"
        f"{'running':>9}{'cache use':>11}{'peak':>6}"
    )
    lines = [header, "-" * len(header)]
    for result in results:
        lines.append(
            f"{result.workload:<{width}}{result.scheduler:<12}{result.requests_per_second:>11.2f}"
            f"{result.output_tokens_per_second:>10.1f}{result.mean_latency:>8.1f}s{result.p95_latency:>6.1f}s"
            f"{result.mean_ttft:>6.1f}s{result.mean_running:>9.1f}{result.mean_cache_use:>11.0%}{result.peak_cache_use:>6.0%}"
        )
    for workload in dict.fromkeys(result.workload for result in results):
        by_scheduler = {result.scheduler: result for result in results if result.workload == workload}
        if by_scheduler.keys() >= SCHEDULERS.keys():
            ratio = by_scheduler["continuous"].output_tokens_per_second / by_scheduler["static"].output_tokens_per_second
            lines.append(f"{workload}: continuous batching gives {ratio:.2f} times the tokens/s of static batching.")
    return "\n".join(lines)
