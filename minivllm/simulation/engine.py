"""The real engine on a virtual clock, with `SimulatedExecutor` in place of the model: fast, and the same every time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import Distribution, EngineRun, time_per_output_token
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, check_at_least, check_choice
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError, RequestError
from minivllm.executor.simulated import SimulatedExecutor, StepWork, VirtualClock
from minivllm.outputs import RequestOutput
from minivllm.simulation.costs import DEFAULT_COSTS


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
    if isinstance(scheduler, str):
        check_choice("scheduler", scheduler, tuple(SCHEDULERS))
    check_at_least("max_model_len", max_model_len, 1)
    check_at_least("max_num_seqs", max_num_seqs, 1)
    clock = clock or VirtualClock()
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(8192, max_model_len, max_num_seqs)
    try:
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduler_options
        )
    except TypeError as error:
        raise ConfigError(f"The scheduler has no such option: {error}.") from None
    scheduler_config.check_prompts_fit(max_model_len)
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

    Without a trace, a finished request takes 24 bytes: simulate a million.

    Args:
        requests: From `generate_requests`, or any list sorted by arrival time.
        max_concurrency: Most requests in the engine at once; further ones arrive as others finish.
        progress_total: Show progress towards this many requests.
        **engine_options: See `make_simulated_engine`. Time starts with the first arrival.

    Raises:
        ConfigError: There are no requests, they are not in order, one does not fit, or an option is out of range.
    """
    if max_concurrency is not None:
        check_at_least("max_concurrency", max_concurrency, 1)
    if "clock" in engine_options:
        raise ConfigError("A simulation has its own clock, which starts with the first arrival: leave out clock.")
    queue = in_order(requests)
    upcoming = next(queue, None)
    if upcoming is None:
        raise ConfigError("There are no requests to simulate.")
    start = upcoming.arrival_time
    clock = VirtualClock(start)
    engine = make_simulated_engine(clock=clock, **engine_options)
    tally = _Tally(engine)
    num_added = 0
    room = math.inf if max_concurrency is None else max_concurrency
    with tqdm(total=progress_total, unit="request", disable=progress_total is None, dynamic_ncols=True) as bar:
        while True:
            while upcoming is not None and upcoming.arrival_time <= clock.now and tally.run.num_requests + room > num_added:
                _add(engine, num_added, upcoming, upcoming.arrival_time if max_concurrency is None else clock.now)
                num_added += 1
                upcoming = next(queue, None)
            if engine.has_unfinished_requests():
                for output in engine.step():
                    tally.add_request(output)
                    bar.update()
            elif upcoming is None:
                break
            else:
                clock.advance_to(upcoming.arrival_time)
    scheduler = engine_options.get("scheduler", "continuous")
    run = tally.finish(clock.now - start)
    run.scheduler = scheduler if isinstance(scheduler, str) else scheduler.__name__
    run.trace = engine.trace
    return run


def in_order(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
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
        params = request.sampling_params()
        engine.add_request(str(number), request.prompt_token_ids, params, arrival_time=arrival_time)
    except RequestError as error:
        raise ConfigError(f"Request {number} cannot be served. {error}") from None


class _Tally:
    """Counts a simulation in its `EngineRun`, without ITLs. A finished request takes 24 bytes."""

    def __init__(self, engine: LLMEngine) -> None:
        self.run = EngineRun()
        self._ttft, self._latency, self._tpot = array("d"), array("d"), array("d")
        scheduler, manager = engine.scheduler, engine.block_manager

        def watch(seconds: float) -> None:
            cache_use = 1 - manager.get_num_free_gpu_blocks() / manager.num_gpu_blocks
            self.run.add_step(seconds, len(scheduler.running), cache_use, engine.num_preemptions - self.run.num_preemptions)

        assert isinstance(engine.executor, SimulatedExecutor)
        engine.executor.watch = watch

    def add_request(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if output.error is not None:
            raise ConfigError(f"Request {output.request_id} failed. {output.error}")
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        assert metrics is not None and metrics.time_to_first_token is not None and metrics.latency is not None
        self.run.num_requests += 1
        self.run.prompt_tokens += len(output.prompt_token_ids)
        self.run.output_tokens += num_tokens
        self._ttft.append(metrics.time_to_first_token)
        self._latency.append(metrics.latency)
        tpot = time_per_output_token(metrics.time_to_first_token, metrics.latency, num_tokens)
        if tpot is not None:
            self._tpot.append(tpot)

    def finish(self, seconds: float) -> EngineRun:
        """The run, which took this long."""
        self.run.completed, self.run.seconds = self.run.num_requests, seconds
        self.run.ttft, self.run.latency, self.run.tpot = map(Distribution.of, (self._ttft, self._latency, self._tpot))
        return self.run


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
