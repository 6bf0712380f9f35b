"""The real engine on a virtual clock, with `SimulatedExecutor` in place of the model: fast, and the same every time. One of them
(`simulate`), or several behind the router of the server (`simulate_replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import EngineRun, Goals, LatencyHistogram, RunSummary
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, check_at_least, check_choice
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.pipeline_scheduler import choose_scheduler
from minivllm.core.scheduler import Scheduler
from minivllm.data_parallel.routing import make_router
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.executor.simulated import SimulatedExecutor, StepWork, VirtualClock
from minivllm.simulation.costs import DEFAULT_COSTS
from minivllm.simulation.events import ExactTimes, SimulatedReplica, Tally, run_requests, start_of


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
    scheduler_cls = SCHEDULERS[scheduler] if isinstance(scheduler, str) else scheduler
    if scheduler_cls is Scheduler:
        scheduler_cls = choose_scheduler(scheduler_config)
    num_stages = scheduler_config.pipeline_parallel_size
    num_in_flight = 2 if issubclass(scheduler_cls, AsyncScheduler) and num_stages == 1 else 1
    engine = LLMEngine.from_executor(
        ModelConfig(
            name="simulated", path=Path(), architecture="", hf_config={}, num_layers=0, num_heads=0, num_kv_heads=0, head_dim=0,
            vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=eos_token_ids,
        ),
        CacheConfig(block_size=block_size, watermark=watermark, enable_prefix_caching=enable_prefix_caching),
        scheduler_config,
        SimulatedExecutor(clock, cost_model, num_gpu_blocks, num_cpu_blocks, vocab_size, num_in_flight, num_stages),
        None,
        scheduler_cls=scheduler_cls,
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
    """Run requests to completion on one engine, in order of arrival.

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
    start, queue = start_of(requests)
    engine = make_simulated_engine(clock=VirtualClock(start), **engine_options)
    scheduler = engine_options.get("scheduler", "continuous")
    run = EngineRun(scheduler=scheduler if isinstance(scheduler, str) else scheduler.__name__, trace=engine.trace)

    def watch(seconds: float) -> None:
        cache_use = 1 - engine.block_manager.get_num_free_gpu_blocks() / engine.block_manager.num_gpu_blocks
        run.add_step(seconds, len(engine.scheduler.running), cache_use, engine.num_preemptions - run.num_preemptions)

    engine.executor.watch = watch
    tally = Tally(run, ExactTimes)
    run_requests(queue, [SimulatedReplica(engine)], make_router("round-robin"), tally, max_concurrency, progress_total)
    return run


@dataclass(kw_only=True)
class ReplicaRun(RunSummary):
    """The results of a run of several replicas. Percentiles are exact to 1 percent.

    Attributes:
        routing: The name of the router.
        num_replicas: How many there were.
        prefix_hit_rate: The fraction of prompt tokens found in a prefix cache.
        requests: Each replica's number of requests.
        mean_in_flight: Each replica's unfinished requests, averaged over the run.
        busy: The fraction of the run in which each replica computed.
        num_preemptions: How often a sequence lost its blocks.
    """

    routing: str = ""
    num_replicas: int = 0
    prefix_hit_rate: float = 0.0
    requests: list[int] = field(default_factory=list)
    mean_in_flight: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def imbalance(self) -> float:
        """The load of the busiest replica, in requests in flight, over the mean load; 1 is even."""
        mean = sum(self.mean_in_flight) / len(self.mean_in_flight)
        return max(self.mean_in_flight) / mean if mean else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_json() | {"imbalance": self.imbalance}


def simulate_replicas(
    requests: Iterable[WorkloadRequest],
    num_replicas: int,
    *,
    routing: str = "least-loaded",
    goals: Goals | None = None,
    progress_total: int | None = None,
    **engine_options: Any,
) -> ReplicaRun:
    """Route requests to replicas and run them to completion. A finished request takes no memory.

    Args:
        requests: In the order of arrival.
        num_replicas: How many replicas.
        routing: One of `minivllm.data_parallel.routing.ROUTERS`.
        goals: What a request must meet to count for goodput.
        progress_total: Show progress towards this many requests.
        **engine_options: Of each replica, see `make_simulated_engine`.

    Raises:
        ConfigError: There are no requests, they are not in order, one does not fit, or an option is out of range.
    """
    check_at_least("num_replicas", num_replicas, 1)
    start, queue = start_of(requests)
    engines = [make_simulated_engine(clock=VirtualClock(start), trace=False, **engine_options) for _ in range(num_replicas)]
    replicas = [SimulatedReplica(engine) for engine in engines]
    run = ReplicaRun(routing=routing, num_replicas=num_replicas)
    tally = Tally(run, LatencyHistogram, goals, num_replicas)
    router = make_router(routing, max_num_seqs=engines[0].scheduler_config.max_num_seqs)
    run_requests(queue, replicas, router, tally, progress_total=progress_total)
    run.itl = tally.itl.distribution()
    run.requests = tally.requests
    run.prefix_hit_rate = tally.num_cached_tokens / run.prompt_tokens
    run.mean_in_flight = [run.per_second(seconds) for seconds in tally.request_seconds]
    run.busy = [run.per_second(replica.busy_seconds) for replica in replicas]
    run.num_preemptions = sum(replica.core.num_preemptions for replica in replicas)
    return run


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


def format_replicas(results: list[ReplicaRun]) -> str:
    """A text table of runs."""
    headers = (
        "routing", "requests/s", "goodput", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "prefix hits", "imbalance", "preempted",
    )  # fmt: skip
    rows = [
        (
            run.routing,
            f"{run.requests_per_second:.2f}",
            "-" if run.goodput is None else f"{run.goodput:.2f}",
            *(f"{seconds:.2f}s" for seconds in run.ttft[1:]),
            *(quantity(seconds * 1e3, ".0f", "ms") for seconds in run.itl[1:]),
            f"{run.prefix_hit_rate:.0%}",
            f"{run.imbalance:.2f}",
            run.num_preemptions,
        )
        for run in results
    ]
    return format_table(headers, rows)
