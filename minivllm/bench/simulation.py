"""The real engine without a model: a workload runs under a virtual clock, in moments, and the same each time.

Scheduler, block manager and engine are those that serve; `SimulatedExecutor` stands in for the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.costs import DEFAULT_COSTS
from minivllm.bench.offline import SCHEDULERS
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError, RequestError
from minivllm.executor.simulated import SimulatedExecutor, StepWork, VirtualClock
from minivllm.sampling_params import RequestOutputKind, SamplingParams


class Quantiles:
    """Percentiles of any number of values above 0, in memory that does not grow with them.

    Values are counted in buckets, each 1 % wider than the one before, so a percentile is right within half a percent.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Take in a value. Below a nanosecond all are the same."""
        self.count += 1
        self.sum += value
        self._buckets[math.floor(math.log(max(value, 1e-9), 1.01))] += 1

    @property
    def mean(self) -> float:
        """Of all values; not a number if there are none."""
        return self.sum / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """The value that so many percent do not exceed (nearest rank); not a number if there are none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(percent / 100 * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                break
        return 1.01 ** (bucket + 0.5)


@dataclass
class Simulation:
    """What a simulated workload came to. Times are in (virtual) seconds, of requests that ended.

    `ttft` is from arrival to the first token, `latency` to the last one, `tpot` per output token after the first. `mean_running` and
    the cache's use are averages over the time in which the engine was busy.
    """

    scheduler: str
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    mean_running: float = 0.0
    mean_cache_use: float = 0.0
    peak_cache_use: float = 0.0
    ttft: Quantiles = field(default_factory=Quantiles)
    latency: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    trace: EngineTrace | None = field(default=None, repr=False)

    @property
    def output_tokens_per_second(self) -> float:
        """From the first arrival to the last token."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """From the first arrival to the last token."""
        return self.num_requests / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """All but the trace, with means and percentiles for the distributions."""
        content = {name: value for name, value in vars(self).items() if name not in ("trace", "ttft", "latency", "tpot")}
        for name in ("ttft", "latency", "tpot"):
            values = getattr(self, name)
            numbers = {"mean": values.mean} | {f"p{percent}": values.percentile(percent) for percent in (50, 95, 99)}
            content[name] = {key: value if values.count else None for key, value in numbers.items()}
        return content | {"output_tokens_per_second": self.output_tokens_per_second}


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
        clock: Time; a new clock if None. It is the engine's `clock`.
        cost_model: Seconds of a step from its `StepWork`.
        scheduler: "continuous", "static", or a class.
        block_space_manager_cls: The class to make.
        block_size, num_gpu_blocks, num_cpu_blocks, watermark, enable_prefix_caching: The cache.
        max_model_len: The longest prompt and output together.
        vocab_size, eos_token_ids: Of the model; the simulated one never says that it has come to an end.
        max_num_seqs, max_num_batched_tokens: The most in a step; by default a prompt of any length fits.
        trace: Record what is done.
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
) -> Simulation:
    """Run requests, in the order of their arrival, to their end.

    Without a trace, memory does not grow with the requests that have ended: a million can be drawn one by one.

    Args:
        requests: As `generate_requests` draws them; or any list, with arrival times that do not go back.
        max_concurrency: At most so many requests are in the engine at a time; who would be one more arrives when another has
            ended.
        progress_total: Show progress towards so many requests.
        **engine_options: See `make_simulated_engine`. Time begins with the first arrival.

    Raises:
        ConfigError: There are no requests, they are not in order, one does not fit, or an option is out of range.
    """
    if max_concurrency is not None and (not isinstance(max_concurrency, int) or max_concurrency < 1):
        raise ConfigError(f"max_concurrency is {max_concurrency!r}, but must be a whole number of at least 1.")
    if "clock" in engine_options:
        raise ConfigError("A simulation has a clock of its own, which begins with the first arrival: leave out clock.")
    queue = _in_order(requests)
    upcoming = next(queue, None)
    if upcoming is None:
        raise ConfigError("There are no requests to simulate.")
    start = upcoming.arrival_time
    clock = VirtualClock(start)
    engine = make_simulated_engine(clock=clock, **engine_options)
    name = engine_options.get("scheduler", "continuous")
    result = Simulation(scheduler=name if isinstance(name, str) else name.__name__, trace=engine.trace)
    _watch(engine, result)
    num_added = 0
    room = math.inf if max_concurrency is None else max_concurrency
    with tqdm(total=progress_total, unit="request", disable=progress_total is None, dynamic_ncols=True) as bar:
        while True:
            while upcoming is not None and upcoming.arrival_time <= clock.now and result.num_requests + room > num_added:
                _add(engine, num_added, upcoming, upcoming.arrival_time if max_concurrency is None else clock.now)
                num_added += 1
                upcoming = next(queue, None)
            if engine.has_unfinished_requests():
                for output in engine.step():
                    _take_in(result, output)
                    bar.update()
            elif upcoming is None:
                break
            else:
                clock.advance_to(upcoming.arrival_time)
    result.seconds, result.num_preemptions = clock.now - start, engine.num_preemptions
    if result.busy_seconds:
        result.mean_running /= result.busy_seconds
        result.mean_cache_use /= result.busy_seconds
    return result


def _in_order(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """The same requests; one whose arrival is no moment, or goes back, is an error."""
    last = -math.inf
    for number, request in enumerate(requests):
        if not math.isfinite(request.arrival_time):
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s: arrival times must be finite.")
        if request.arrival_time < last:
            raise ConfigError(f"Request {number} arrives at {request.arrival_time} s, before the one before it: sort them.")
        last = request.arrival_time
        yield request


def _add(engine: LLMEngine, number: int, request: WorkloadRequest, arrival_time: float) -> None:
    num_tokens = len(request.prompt_token_ids) + request.output_len
    if num_tokens > engine.cache_tokens + 1:  # the last token needs no place
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


def _watch(engine: LLMEngine, result: Simulation) -> None:
    """Sum up the steps while they happen."""
    scheduler, manager = engine.scheduler, engine.block_manager

    def watch(seconds: float) -> None:
        use = 1 - manager.get_num_free_gpu_blocks() / manager.num_gpu_blocks
        result.num_steps += 1
        result.busy_seconds += seconds
        result.mean_running += len(scheduler.running) * seconds
        result.mean_cache_use += use * seconds
        result.peak_cache_use = max(result.peak_cache_use, use)

    assert isinstance(engine.executor, SimulatedExecutor)
    engine.executor.watch = watch


def _take_in(result: Simulation, output: Any) -> None:
    if output.error is not None:
        raise ConfigError(f"Request {output.request_id} failed. {output.error}")
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    result.num_requests += 1
    result.prompt_tokens += len(output.prompt_token_ids)
    result.output_tokens += num_tokens
    result.ttft.add(metrics.time_to_first_token)
    result.latency.add(metrics.latency)
    if num_tokens > 1:
        result.tpot.add((metrics.finished_time - metrics.first_token_time) / (num_tokens - 1))


def format_table(results: list[Simulation]) -> str:
    """The simulations as a table of text."""
    header = (
        f"{'scheduler':<22}{'requests/s':>11}{'tokens/s':>10}{'TTFT':>9}{'p95':>9}{'latency':>9}{'p95':>9}"
        f"{'TPOT':>9}{'running':>9}{'cache use':>11}{'peak':>6}{'preempted':>11}"
    )
    lines = [header, "-" * len(header)]
    lines += [
        f"{result.scheduler:<22}{result.requests_per_second:>11.2f}{result.output_tokens_per_second:>10.1f}"
        f"{result.ttft.mean:>8.2f}s{result.ttft.percentile(95):>8.2f}s{result.latency.mean:>8.2f}s"
        f"{result.latency.percentile(95):>8.2f}s{result.tpot.mean * 1e3:>7.1f}ms{result.mean_running:>9.1f}"
        f"{result.mean_cache_use:>11.0%}{result.peak_cache_use:>6.0%}{result.num_preemptions:>11}"
        for result in results
    ]
    return "\n".join(lines)
