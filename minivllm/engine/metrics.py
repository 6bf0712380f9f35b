"""What a server's owner wants to know, in the form that Prometheus reads.

The metrics are vLLM's, in name (with `minivllm:` for `vllm:`) and meaning: `vllm/v1/metrics/loggers.py`, documented in vLLM's
`docs/design/metrics.md`. Times are those of the frontend, which sees a token when its user could.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minivllm.engine.core_messages import EngineStats, RequestDelta
from minivllm.engine.request_stream import GeneratedTokens, RequestStream

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


class Metrics:
    """Counts requests and tokens, and measures waiting.

    Args:
        model_name: The label `model_name` of every metric.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        """These metrics alone: two engines in one process do not meet."""

        def label(metric: type, name: str, text: str, **options: object):  # noqa: ANN202 - Gauge, Counter or Histogram
            return metric(f"minivllm:{name}", text, ["model_name"], registry=self.registry, **options).labels(model_name)

        self._running = label(Gauge, "num_requests_running", "Sequences in the batch.")
        self._waiting = label(Gauge, "num_requests_waiting", "Sequences that wait, for a first place or to come back.")
        self._cache_usage = label(Gauge, "kv_cache_usage_perc", "Fraction of the KV-cache blocks in use; 1 is all.")
        self._prefix_queries = label(Counter, "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._prefix_hits = label(Counter, "prefix_cache_hits", "Prompt tokens that the prefix cache spared.")
        self._preemptions = label(Counter, "num_preemptions", "How often a sequence lost its cache blocks.")
        self._prompt_tokens = label(Counter, "prompt_tokens", "Prompt tokens that were computed or found in the cache.")
        self._generation_tokens = label(Counter, "generation_tokens", "Tokens that were generated.")
        self._ttft = label(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=_TTFT_S)
        self._itl = label(Histogram, "inter_token_latency_seconds", "Between two tokens of a request.", buckets=_ITL_S)
        self._tpot = label(
            Histogram,
            "request_time_per_output_token_seconds",
            "Of an answer: from its first token to its last, by token.",
            buckets=_ITL_S,
        )
        self._e2e = label(Histogram, "e2e_request_latency_seconds", "From arrival to the last token.", buckets=_REQUEST_S)
        self._queue = label(Histogram, "request_queue_time_seconds", "From arrival to the first step.", buckets=_REQUEST_S)
        self._request_prompt = label(Histogram, "request_prompt_tokens", "Prompt tokens of a request.", buckets=_TOKENS)
        self._request_output = label(
            Histogram, "request_generation_tokens", "Tokens of an answer; each of n has its own.", buckets=_TOKENS
        )
        self._finished = Counter(
            "minivllm:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name
        self._num_preemptions = 0
        """That the engine told of last."""

    def render(self) -> bytes:
        """All of it, as Prometheus scrapes it."""
        return generate_latest(self.registry)

    def set_stats(self, stats: EngineStats) -> None:
        """What the engine does now."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting + stats.num_swapped)
        self._cache_usage.set(stats.cache_usage)
        self._preemptions.inc(max(0, stats.num_preemptions - self._num_preemptions))
        self._num_preemptions = stats.num_preemptions

    def take_delta(self, stream: RequestStream, delta: RequestDelta, now: float, has_prefix_cache: bool) -> None:
        """Something has come of a request; called before the stream takes it.

        Args:
            stream: The request, with what was known of it.
            delta: What is new.
            now: Seconds of `time.perf_counter`.
            has_prefix_cache: Whether prompts are looked up.
        """
        num_new = sum(len(output.token_ids) for output in delta.outputs)
        if num_new:
            if stream.last_token_time is None:
                self._take_first_token(stream, delta, now, has_prefix_cache)
            else:
                self._itl.observe(now - stream.last_token_time)
            self._generation_tokens.inc(num_new)
            stream.last_token_time = now
            for output in delta.outputs:
                if output.token_ids:
                    generated = stream.generated.setdefault(output.index, GeneratedTokens(0, now, now))
                    generated.count += len(output.token_ids)
                    generated.last_time = now
        if delta.finished:
            reasons = [output.finish_reason for output in delta.outputs if output.finish_reason]
            self.take_end(stream, "error" if delta.error else reasons[-1] if reasons else "error", now)

    def _take_first_token(self, stream: RequestStream, delta: RequestDelta, now: float, has_prefix_cache: bool) -> None:
        stream.first_token_time = now
        self._ttft.observe(now - stream.arrival_time)
        self._prompt_tokens.inc(stream.num_prompt_tokens)
        if delta.metrics is not None:
            if delta.metrics.first_scheduled_time is not None:
                self._queue.observe(max(0.0, delta.metrics.first_scheduled_time - stream.arrival_time))
            if has_prefix_cache:
                self._prefix_queries.inc(stream.num_prompt_tokens)
                self._prefix_hits.inc(delta.metrics.num_cached_tokens)

    def take_end(self, stream: RequestStream, reason: str, now: float) -> None:
        """A request has ended: "stop", "length", "abort" or "error"."""
        self._finished.labels(self._model_name, reason).inc()
        if reason not in ("stop", "length"):
            return
        self._e2e.observe(now - stream.arrival_time)
        self._request_prompt.observe(stream.num_prompt_tokens)
        for generated in stream.generated.values():
            self._request_output.observe(generated.count)
            if generated.count > 1:
                self._tpot.observe((generated.last_time - generated.first_time) / (generated.count - 1))
