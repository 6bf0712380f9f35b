"""Metrics for Prometheus.

Names (with `minivllm:` for `vllm:`) and meanings are vLLM's: `vllm/v1/metrics/loggers.py`, documented in vLLM's
`docs/design/metrics.md`. Latencies that a user sees (time to first token, between tokens, end to end) are taken in the frontend; queue, prefill,
decode and inference time in the engine core.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from minivllm.config import CacheConfig
from minivllm.engine.core_messages import ReplicaChanged, RequestsResumed, SchedulerStats
from minivllm.engine.output_processor import RequestState

SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Names a folder where several processes keep their metrics, to be added up. Must be set before prometheus_client is imported."""
_CACHE_LABELS = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization", "swap_space_bytes", "engine")
_FINISHED_REASONS = ("stop", "length", "abort", "error")
_COUNT_SECONDS = 1.0
_RATE_SECONDS = 2.0

_GAUGES = {
    "num_requests_running": "Sequences in the batch.",
    "num_requests_waiting": "Sequences that wait to be scheduled or swapped in.",
    "kv_cache_usage_perc": "Fraction of the KV-cache blocks in use; 1 is all.",
    "engine_ready": "1 if the engine takes requests, 0 if not.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "How often a sequence lost its cache blocks.",
    "prompt_tokens": "Prompt tokens that were computed or found in the cache.",
    "generation_tokens": "Generated tokens.",
    "engine_deaths": "How often the engine's process has died.",
    "num_resumed_requests": "How often a request went on at this engine after another, or an earlier one, was lost.",
    "num_lost_requests": "Requests that failed because their engine was lost.",
}
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (_TTFT_S, "From arrival to the first token."),
    "inter_token_latency_seconds": (_ITL_S, "Between two outputs of a request: of a token each, or of one for each of n."),
    "request_time_per_output_token_seconds": (_ITL_S, "Mean time per output token after the first, of an answer."),
    "e2e_request_latency_seconds": (_REQUEST_S, "From arrival to the last token."),
    "request_queue_time_seconds": (_REQUEST_S, "From when the engine core received it to its first step."),
    "request_prefill_time_seconds": (_REQUEST_S, "From the first step to the first token."),
    "request_decode_time_seconds": (_REQUEST_S, "From the first token to the last."),
    "request_inference_time_seconds": (_REQUEST_S, "From the first step to the last token."),
    "iteration_tokens_total": (
        _STEP_TOKENS,
        "Tokens generated in a step, and those of prompts that it completed, cached ones aside; each API server counts its own part.",
    ),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (_TOKENS, "Tokens of an answer; each of n has its own."),
    "request_max_num_generation_tokens": (_TOKENS, "Tokens of a request's longest output."),
    "request_params_n": ((1, 2, 5, 10, 20), "The parameter n."),
    "request_params_max_tokens": (_TOKENS, "The parameter max_tokens; without it, what the context has room for."),
    "request_num_preemptions": ((0, 1, 2, 5, 10, 20), "How often a request lost its cache blocks."),
}


@dataclass
class SequenceTimes:
    """How many tokens a sequence has, and when its first and its latest came, in seconds of `time.perf_counter`."""

    num_tokens: int
    first: float
    latest: float


@dataclass
class RequestTimes:
    """When the tokens of a request came, in seconds of `time.perf_counter`."""

    latest: float | None = None
    sequences: dict[int, SequenceTimes] = field(default_factory=dict)


class TokenRate:
    """Tokens per second of an engine, over the last two seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def update(self, num_tokens: int, now: float) -> None:
        """Record the running token count at time `now`, in seconds."""
        if self._counts and num_tokens < self._counts[-1][1]:
            self._counts.clear()  # another process
        self._counts.append((now, num_tokens))
        self._forget_old(now)

    def rate(self, now: float) -> float:
        """Tokens per second."""
        self._forget_old(now)
        return (self._counts[-1][1] - self._counts[0][1]) / _RATE_SECONDS if self._counts else 0.0

    def _forget_old(self, now: float) -> None:
        while self._counts and self._counts[0][0] < now - _RATE_SECONDS:
            self._counts.popleft()


class Metrics:
    """Counts requests and tokens, and measures latencies.

    Args:
        model_name: The label `model_name` of every metric. The label `engine` is the rank of a replica.
        cache_config: How the engines' caches are laid out.
        num_engines: How many replicas there are at the start.
        client_index, client_count: Which of the API servers this is, and how many there are. If there are several, metrics add up over all of
            them, which write to the folder that `SHARED_METRICS` names. Process metrics are left out then: they would be those of the server
            that happens to answer. Only the first reports the engines' gauges.

    Attributes:
        stats_by_engine: The state of each engine's scheduler after its latest step.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self, model_name: str, cache_config: CacheConfig, num_engines: int = 1, client_index: int = 0, client_count: int = 1
    ) -> None:
        self._layout, self._tells_of_engines = cache_config, client_index == 0
        self.stats_by_engine: dict[int, SchedulerStats] = {}
        self._token_rates: dict[int, TokenRate] = defaultdict(TokenRate)
        self.registry = self._rendered = CollectorRegistry()
        """Of its own, so that two engines in one process do not share metrics."""
        if client_count > 1:
            self._rendered = CollectorRegistry()
            MultiProcessCollector(self._rendered, os.environ[SHARED_METRICS])  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self.registry)

        labels: tuple[str, ...] = ("model_name", "engine")
        of_gauges: dict[str, Any] = {"registry": self.registry, "multiprocess_mode": "mostrecent"}
        self._gauges = {name: Gauge(f"minivllm:{name}", text, labels, **of_gauges) for name, text in _GAUGES.items()}
        self._counters = {
            name: Counter(f"minivllm:{name}", text, labels, registry=self.registry) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"minivllm:{name}", text, labels, registry=self.registry, buckets=buckets)
            for name, (buckets, text) in _HISTOGRAMS.items()
        }
        labels = (*labels, "finished_reason")
        self._finished = Counter("minivllm:request_success", "Finished requests, by reason.", labels, registry=self.registry)
        text = "Configuration of the KV cache, in the labels; the value is 1."
        self._cache_config = Gauge("minivllm:cache_config_info", text, _CACHE_LABELS, **of_gauges)
        self._model_name = model_name
        for engine in range(num_engines):
            self._begin(engine)
        self._of_engines: dict[tuple[str, int], Any] = {}
        """Metrics that have been used, by name and engine."""
        self._counts: dict[str, tuple[float, int]] = {}
        """What `count` has returned lately, and when."""
        self._layouts: dict[int, tuple[str, ...]] = {}
        """By engine, the labels of its KV cache."""
        self._times: dict[RequestState, RequestTimes] = {}
        """Of requests that have tokens and have not finished."""

    def _begin(self, engine: int) -> None:
        """Show all metrics of an engine, which are 0 from the beginning."""
        for metric in (*self._gauges.values(), *self._counters.values(), *self._histograms.values()):
            metric.labels(self._model_name, str(engine))
        for reason in _FINISHED_REASONS:
            self._finished.labels(self._model_name, str(engine), reason)

    def render(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._rendered)

    def _set(self, name: str, engine: int, value: float) -> None:
        self._of_engine(self._gauges, name, engine).set(value)

    def _count(self, name: str, engine: int, amount: float = 1) -> None:
        self._of_engine(self._counters, name, engine).inc(amount)

    def _observe(self, name: str, engine: int, value: float) -> None:
        self._of_engine(self._histograms, name, engine).observe(value)

    def _of_engine(self, metrics: dict[str, Any], name: str, engine: int) -> Any:
        """A metric with an engine's labels. prometheus_client would look it up by its labels for each token, which takes longer than to count."""
        if (name, engine) not in self._of_engines:
            self._of_engines[name, engine] = metrics[name].labels(self._model_name, str(engine))
        return self._of_engines[name, engine]

    def set_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """The state of an engine's scheduler has changed."""
        known = self.stats_by_engine.get(engine_index, SchedulerStats())
        self.stats_by_engine[engine_index] = stats
        self._token_rates[engine_index].update(stats.num_generated_tokens, time.monotonic())
        if self._tells_of_engines:
            self._set("num_requests_running", engine_index, stats.num_running)
            self._set("num_requests_waiting", engine_index, stats.num_waiting + stats.num_swapped)
            self._set("kv_cache_usage_perc", engine_index, stats.cache_usage)
            self._count("num_preemptions", engine_index, max(0, stats.num_preemptions - known.num_preemptions))

    def set_idle(self) -> None:
        """No engine is left: set the gauges to idle and keep the counts."""
        for engine_index, stats in self.stats_by_engine.items():
            self.set_stats(engine_index, stats.when_idle())
            if self._tells_of_engines:
                self._set("engine_ready", engine_index, 0)

    def tokens_per_second(self, engine_index: int) -> float:
        """How fast an engine has generated in the last two seconds."""
        return self._token_rates[engine_index].rate(time.monotonic())

    def record_change(self, change: ReplicaChanged) -> None:
        """An engine takes requests from now on, or is lost, and with it what it had."""
        rank = change.engine_index
        self._begin(rank)
        if not change.is_ready or rank not in self.stats_by_engine:  # shared gauges are shown once they are set
            known = self.stats_by_engine.get(rank, SchedulerStats(num_gpu_blocks=change.num_gpu_blocks))
            self.set_stats(rank, known.when_idle())
        if self._tells_of_engines:
            self._set("engine_ready", rank, change.is_ready)
            self._count("engine_deaths", rank, change.has_died)
            if change.is_ready:
                self._set_cache_config(rank, change.num_gpu_blocks)

    def _set_cache_config(self, engine_index: int, num_gpu_blocks: int) -> None:
        config = self._layout
        values = (config.block_size, num_gpu_blocks, config.enable_prefix_caching, config.gpu_memory_utilization)
        layout = tuple(map(str, (*values, config.swap_space_bytes, engine_index)))
        if engine_index in self._layouts:  # labels cannot be removed where several processes share metrics
            self._cache_config.labels(*self._layouts[engine_index]).set(0)
        self._cache_config.labels(*layout).set(1)
        self._layouts[engine_index] = layout

    def record_resumptions(self, resumed: RequestsResumed) -> None:
        """Requests whose engine was lost have been sent to another."""
        self._count("num_resumed_requests", resumed.engine_index, resumed.count)

    def record_lost_request(self, state: RequestState) -> None:
        """A request has failed because its engine was lost."""
        self._count("num_lost_requests", state.engine_index)

    def count(self, name: str) -> int:
        """The value of a counter, over all engines and API servers; if there are several of these, as it was at most a second ago."""
        full_name, now = f"minivllm:{name}_total", time.monotonic()
        if self._rendered is self.registry:
            return _sum_samples(self.registry.restricted_registry([full_name]).collect(), full_name)
        if name not in self._counts or now - self._counts[name][0] > _COUNT_SECONDS:
            self._counts[name] = now, _sum_samples(self._rendered.collect(), full_name)
        return self._counts[name][1]

    def record_outputs(self, engine_index: int, states: list[RequestState], now: float, step_end: float) -> None:
        """A step added something to these requests, at `now` on this process's clock (`time.perf_counter`); it ended at `step_end` on the core's."""
        if num_tokens := sum(self._record_output(state, now, step_end) for state in states):
            self._observe("iteration_tokens_total", engine_index, num_tokens)

    def _record_output(self, state: RequestState, now: float, step_end: float) -> int:
        """Returns the number of tokens added; with the first, the computed prompt tokens, too."""
        times, engine = self._times.setdefault(state, RequestTimes()), state.engine_index
        num_new = num_prompt = 0
        for index, text in state.texts.items():
            sequence = times.sequences.setdefault(index, SequenceTimes(0, now, now))
            if len(text.output.token_ids) > sequence.num_tokens:
                num_new += len(text.output.token_ids) - sequence.num_tokens
                sequence.num_tokens, sequence.latest = len(text.output.token_ids), now
        if num_new:
            if times.latest is None:
                num_prompt = len(state.request.prompt_token_ids) - state.metrics.num_cached_tokens
                self._record_first_token(state, now)
            else:
                self._observe("inter_token_latency_seconds", engine, now - times.latest)
            self._count("generation_tokens", engine, num_new)
            times.latest = now
        if state.finished:
            reasons = [text.output.finish_reason for text in state.texts.values()]
            if not state.error:
                self._record_phases(state, step_end)
            self.record_finish(state, "error" if state.error or not reasons else str(reasons[-1]), now)
        return num_prompt + num_new

    def _record_first_token(self, state: RequestState, now: float) -> None:
        engine, num_prompt_tokens = state.engine_index, len(state.request.prompt_token_ids)
        self._observe("time_to_first_token_seconds", engine, now - state.metrics.arrival_time)
        self._count("prompt_tokens", engine, num_prompt_tokens)
        if self._layout.enable_prefix_caching:
            self._count("prefix_cache_queries", engine, num_prompt_tokens)
            self._count("prefix_cache_hits", engine, state.metrics.num_cached_tokens)

    def record_finish(self, state: RequestState, reason: str, now: float) -> None:
        """A request has finished: "stop", "length", "abort" or "error"."""
        engine, num_prompt_tokens = state.engine_index, len(state.request.prompt_token_ids)
        self._finished.labels(self._model_name, str(engine), reason).inc()
        times = self._times.pop(state, RequestTimes())
        if reason not in ("stop", "length"):
            return
        max_tokens = state.params.max_tokens or state.request.max_num_tokens - num_prompt_tokens
        longest = max((sequence.num_tokens for sequence in times.sequences.values()), default=0)
        self._observe("e2e_request_latency_seconds", engine, now - state.metrics.arrival_time)
        self._observe("request_prompt_tokens", engine, num_prompt_tokens)
        self._observe("request_params_n", engine, state.params.n)
        self._observe("request_params_max_tokens", engine, max_tokens)
        self._observe("request_num_preemptions", engine, state.metrics.num_preemptions)
        self._observe("request_max_num_generation_tokens", engine, longest)
        for sequence in times.sequences.values():
            self._observe("request_generation_tokens", engine, sequence.num_tokens)
            if sequence.num_tokens > 1:
                seconds = (sequence.latest - sequence.first) / (sequence.num_tokens - 1)
                self._observe("request_time_per_output_token_seconds", engine, seconds)

    def _record_phases(self, state: RequestState, step_end: float) -> None:
        metrics, engine = state.metrics, state.engine_index
        queued, scheduled, first = metrics.queued_time, metrics.first_scheduled_time, metrics.first_token_time
        if queued is not None and scheduled is not None and first is not None:
            self._observe("request_queue_time_seconds", engine, scheduled - queued)
            self._observe("request_prefill_time_seconds", engine, first - scheduled)
            self._observe("request_decode_time_seconds", engine, step_end - first)
            self._observe("request_inference_time_seconds", engine, step_end - scheduled)


def _sum_samples(metrics: Iterable[Metric], name: str) -> int:
    return int(sum(sample.value for metric in metrics for sample in metric.samples if sample.name == name))
