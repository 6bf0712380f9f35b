"""Summarizes a traced run, and how long each of its requests waited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from minivllm.bench.summary import EngineRun, Goals, RequestLatency
from minivllm.engine.trace import EngineTrace, RequestRecord, SequenceKey, StepRecord


def request_latencies(trace: EngineTrace) -> list[RequestLatency]:
    """The latencies of all completed requests of a trace, in the order of arrival.

    Unfinished, aborted and failed requests are left out. A request older than the trace has only the ITLs that the trace recorded.
    """
    times = output_times(trace)
    result = []
    for request in trace.requests.values():
        if not is_complete(request):
            continue
        itls = tuple(
            later - earlier
            for index in range(len(request.output_token_ids))
            for earlier, later in itertools.pairwise(times.get(SequenceKey(request.request_id, index), []))
        )
        assert request.first_token_time is not None and request.finished_time is not None
        ttft, latency = request.first_token_time - request.arrival_time, request.finished_time - request.arrival_time
        lengths = [len(token_ids) for token_ids in request.output_token_ids]
        result.append(
            RequestLatency(request.request_id, ttft, latency, itls, max(lengths), request.num_prompt_tokens, sum(lengths))
        )
    return result


def is_complete(request: RequestRecord) -> bool:
    """Whether all sequences of a request finished by themselves ("stop" or "length")."""
    reasons = request.finish_reasons
    has_times = request.first_token_time is not None and request.finished_time is not None
    return has_times and bool(reasons) and all(reason in ("stop", "length") for reason in reasons)


def output_times(trace: EngineTrace) -> dict[SequenceKey, list[float]]:
    """When each sequence got tokens, in seconds of the engine's clock: one or, with speculative decoding, several at a time."""
    times: dict[SequenceKey, list[float]] = {}
    for step in trace:
        for key, _ in new_tokens(trace, step):
            times.setdefault(key, []).append(step.end)
    return times


def new_tokens(trace: EngineTrace, step: StepRecord) -> Iterator[tuple[SequenceKey, int]]:
    """Each sequence that got tokens in a step, and how many. The step that completes a prompt gives each sibling one, too."""
    for part in step.scheduled:
        if part.num_new_tokens == 0:
            continue
        yield part.key, part.num_new_tokens
        request = trace.requests.get(part.request_id)
        if request is not None and part.context_len == request.num_prompt_tokens:
            for index in range(1, request.params.get("n", 1)):
                yield SequenceKey(part.request_id, index), 1


def count_output_tokens(trace: EngineTrace) -> int:
    """All generated tokens: of finished requests, and of the others as far as the trace's steps show."""
    finished = {name for name, request in trace.requests.items() if request.finish_reasons}
    kept = sum(len(token_ids) for name in finished for token_ids in trace.requests[name].output_token_ids)
    return kept + sum(count for step in trace for key, count in new_tokens(trace, step) if key.request_id not in finished)


def time_origin(trace: EngineTrace) -> float:
    """When a trace begins, in seconds of the engine's clock: with the first arrival, or the first step if that is earlier."""
    times = [request.arrival_time for request in trace.requests.values()]
    return min(times + [step.start for step in trace.steps[:1]], default=0.0)


def summarize_trace(trace: EngineTrace, goals: Goals | None = None) -> EngineRun:
    """Summarize a traced run, from the first arrival to the end of the last step."""
    seconds = trace[-1].end - time_origin(trace) if len(trace) else 0.0
    run = EngineRun.of(
        request_latencies(trace),
        seconds,
        num_requests=len(trace.requests),
        goals=goals,
        scheduler=trace.config.scheduler,
        trace=trace,
    )
    run.prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests.values())
    run.output_tokens = count_output_tokens(trace)
    num_blocks = trace.config.num_gpu_blocks
    for step in trace:
        cache_use = 1 - step.num_free_blocks / num_blocks if num_blocks else 0.0
        run.add_step(step.end - step.start, step.num_running, cache_use, len(step.preempted))
    return run
