"""The real engine on a virtual clock, with `SimulatedExecutor` in place of the model: fast, and the same every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.costs import DEFAULT_COSTS
from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import EngineRun, Quantiles, StepTotals, time_per_output_token
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError, RequestError
from minivllm.executor.simulated import SimulatedExecutor, StepWork, VirtualClock
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams


def make_simulated_engine(
    *,
    clock: VirtualClock | None = None,
    cost_model: Callable[[StepWork], float] = DEFAULT_COSTS,
    scheduler: str | type[Scheduler] = "continuous",
    block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager,
    block_size: int = 16,
    num_gpu_blocks: int = 512,
    num_cpu_blocks: int = 0,
    watermark: float = 0.01,
    enable_prefix_caching: bool = False,
    max_model_len: int = 8192,
    vocab_size: int = 50_000,
    eos_token_ids: tuple[int, ...] = (),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int | None = None,
    trace: bool = True,
    **scheduler_options: Any,
) -> LLMEngine:
    """The real engine on a simulated device.

    Args:
        clock: The engine's clock; a new one if None.
        cost_model: Seconds of a step from its `StepWork`.
        scheduler: "continuous", "static", or a class.
        block_space_manager_cls: The block manager's class.
        block_size, num_gpu_blocks, num_cpu_blocks, watermark, enable_prefix_caching: The cache.
        max_model_len: Limit on prompt and output together.
        vocab_size, eos_token_ids: Of the model; simulated tokens never end a sequence.
        max_num_seqs, max_num_batched_tokens: Limits per step; by default a prompt of any length fits.
        trace: Record a trace.
        **scheduler_options: Other fields of `SchedulerConfig`.

    Raises:
        ConfigError: An argument is out of range.
    """
    if isinstance(scheduler, str) and scheduler not in SCHEDULERS:
        raise ConfigError(f"scheduler is {scheduler!r}, but must be one of {', '.join(map(repr, SCHEDULERS))}, or a class.")
    for name, value in (("block_size", block_size), ("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, but must be a whole number of at least 1.")
    if not isinstance(watermark, (int, float)) or not 0 <= watermark < 1:
        raise ConfigError(f"watermark is {watermark!r}, but is a fraction of the blocks: use a value in [0, 1).")
    clock = clock or VirtualClock()
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(8192, max_model_len, max_num_seqs)
    try:
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduler_options
        )
    except TypeError as error:
        raise ConfigError(f"The scheduler has no such option: {error}.") from None
    if not scheduler_config.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, but a prompt may have up to max_model_len = {max_model_len} tokens "
            f"and must fit in one step: raise it, lower max_model_len, or set enable_chunked_prefill=True."
        )
    engine = LLMEngine.from_executor(
        ModelConfig(
            name="simulated", path=Path(), architecture="", hf_config={}, num_layers=0, num_heads=0, num_kv_heads=0, head_dim=0,
            vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=eos_token_ids,
        ),
        CacheConfig(block_size=block_size, watermark=watermark, enable_prefix_caching=enable_prefix_caching),
        scheduler_config,
        SimulatedExecutor(clock, cost_model, num_gpu_blocks, num_cpu_blocks, vocab_size),
        None,
        scheduler_cls=SCHEDULERS[scheduler] if isinstance(scheduler, str) else scheduler,
        block_space_manager_cls=block_space_manager_cls,
        clock=clock,
    )  # fmt: skip
    if trace:
        engine.start_trace()
    return engine


def simulate(
    requests: Iterable[WorkloadRequest],
    *,
    max_concurrency: int | None = None,
    progress_total: int | None = None,
    **engine_options: Any,
) -> EngineRun:
    """Run requests to completion, in order of arrival.

    Without a trace, memory does not grow with finished requests: a million can be drawn one by one.

    Args:
        requests: From `generate_requests`, or any list sorted by arrival time.
        max_concurrency: Most requests in the engine at once; further ones arrive as others finish.
        progress_total: Show progress towards this many requests.
        **engine_options: See `make_simulated_engine`. Time starts with the first arrival.

    Raises:
        ConfigError: There are no requests, they are not in order, one does not fit, or an option is out of range.
    """
    if max_concurrency is not None and (not isinstance(max_concurrency, int) or max_concurrency < 1):
        raise ConfigError(f"max_concurrency is {max_concurrency!r}, but must be a whole number of at least 1.")
    if "clock" in engine_options:
        raise ConfigError("A simulation has its own clock, which starts with the first arrival: leave out clock.")
    queue = _in_order(requests)
    upcoming = next(queue, None)
    if upcoming is None:
        raise ConfigError("There are no requests to simulate.")
    start = upcoming.arrival_time
    clock = VirtualClock(start)
    engine = make_simulated_engine(clock=clock, **engine_options)
    totals = _Totals(engine)
    num_added = 0
    room = math.inf if max_concurrency is None else max_concurrency
    with tqdm(total=progress_total, unit="request", disable=progress_total is None, dynamic_ncols=True) as bar:
        while True:
            while upcoming is not None and upcoming.arrival_time <= clock.now and totals.num_requests + room > num_added:
                _add(engine, num_added, upcoming, upcoming.arrival_time if max_concurrency is None else clock.now)
                num_added += 1
                upcoming = next(queue, None)
            if engine.has_unfinished_requests():
                for output in engine.step():
                    totals.add_request(output)
                    bar.update()
            elif upcoming is None:
                break
            else:
                clock.advance_to(upcoming.arrival_time)
    scheduler = engine_options.get("scheduler", "continuous")
    run = totals.summarize(clock.now - start, scheduler if isinstance(scheduler, str) else scheduler.__name__)
    run.trace = engine.trace
    return run


def _in_order(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """The same requests, checked to have finite, ascending arrival times."""
    last = -math.inf
    for number, request in enumerate(requests):
        if not math.isfinite(request.arrival_time):
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s: arrival times must be finite.")
        if request.arrival_time < last:
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s, before its predecessor: sort them.")
        last = request.arrival_time
        yield request


def _add(engine: LLMEngine, number: int, request: WorkloadRequest, arrival_time: float) -> None:
    num_tokens = len(request.prompt_token_ids) + request.output_len
    if num_tokens > engine.cache_tokens + 1:  # the last token is not cached
        raise ConfigError(
            f"Request {number} grows to {num_tokens} tokens, but the whole cache holds only {engine.cache_tokens}: raise "
            f"num_gpu_blocks, or make requests shorter."
        )
    try:
        params = SamplingParams(
            temperature=0, max_tokens=request.output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        engine.add_request(str(number), request.prompt_token_ids, params, arrival_time=arrival_time)
    except RequestError as error:
        raise ConfigError(f"Request {number} cannot be served. {error}") from None


class _Totals:
    """Running totals of a simulation, in constant memory."""

    def __init__(self, engine: LLMEngine) -> None:
        self.num_requests = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._ttft, self._latency, self._tpot = Quantiles(), Quantiles(), Quantiles()
        self._steps = StepTotals()
        scheduler, manager = engine.scheduler, engine.block_manager

        def watch(seconds: float) -> None:
            cache_use = 1 - manager.get_num_free_gpu_blocks() / manager.num_gpu_blocks
            num_preempted = engine.num_preemptions - self._steps.num_preemptions
            self._steps.add(seconds, len(scheduler.running), cache_use, num_preempted)

        assert isinstance(engine.executor, SimulatedExecutor)
        engine.executor.watch = watch

    def add_request(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if output.error is not None:
            raise ConfigError(f"Request {output.request_id} failed. {output.error}")
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        assert metrics is not None and metrics.time_to_first_token is not None and metrics.latency is not None
        self.num_requests += 1
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += num_tokens
        self._ttft.add(metrics.time_to_first_token)
        self._latency.add(metrics.latency)
        tpot = time_per_output_token(metrics.time_to_first_token, metrics.latency, num_tokens)
        if tpot is not None:
            self._tpot.add(tpot)

    def summarize(self, seconds: float, scheduler: str) -> EngineRun:
        """The run so far; inter-token latencies are not counted."""
        return EngineRun(
            num_requests=self.num_requests,
            completed=self.num_requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            seconds=seconds,
            ttft=self._ttft.distribution(),
            itl=Quantiles().distribution(),
            tpot=self._tpot.distribution(),
            latency=self._latency.distribution(),
            scheduler=scheduler,
            **self._steps.to_fields(),
        )


def format_simulations(results: list[EngineRun]) -> str:
    """A text table of simulations."""
    headers = (
        "scheduler", "requests/s", "tokens/s", "TTFT", "p95", "latency", "p95", "TPOT", "running", "cache use", "peak", "preempted",
    )  # fmt: skip
    rows = [
        (
            result.scheduler,
            f"{result.requests_per_second:.2f}",
            f"{result.output_tokens_per_second:.1f}",
            f"{result.ttft.mean:.2f}s",
            f"{result.ttft.p95:.2f}s",
            f"{result.latency.mean:.2f}s",
            f"{result.latency.p95:.2f}s",
            quantity(result.tpot.mean * 1e3, ".1f", "ms"),
            f"{result.mean_running:.1f}",
            f"{result.mean_cache_use:.0%}",
            f"{result.peak_cache_use:.0%}",
            result.num_preemptions,
        )
        for result in results
    ]
    return format_table(headers, rows)
