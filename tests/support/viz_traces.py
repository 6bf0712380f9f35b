"""Traces to draw: of the real engine on the shadow model, with a clock that steps advance as a machine would."""

from __future__ import annotations

import random

from shadow import VOCAB_SIZE, shadow_engine

from minivllm import SamplingParams, StaticBatchScheduler
from minivllm.engine.trace import EngineTrace


def record(requests, *, failures=(), aborts=None, **engine_args) -> EngineTrace:
    """Run requests and record them.

    Args:
        requests: (id, arrival in seconds, prompt, sampling parameters) of each, in the order of arrival.
        failures: Numbers of the steps in which the model fails.
        aborts: Ids of requests to give up, each with the second in which it is.
        engine_args: Of the engine.
    """
    engine, executor = shadow_engine(**engine_args)
    executor.fail_at = set(failures)
    now = 0.0

    def observe(output) -> None:
        nonlocal now
        now += 0.01 + 0.0005 * output.num_batched_tokens + 0.001 * len(output.scheduled)

    executor.observe = observe
    engine.clock = lambda: now
    trace = engine.start_trace()
    pending, aborts = list(requests), dict(aborts or {})
    while pending or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            now = max(now, pending[0][1])
        while pending and pending[0][1] <= now:
            request_id, arrival, prompt, params = pending.pop(0)
            engine.add_request(request_id, prompt, params, arrival_time=arrival)
        for request_id in [name for name, time in aborts.items() if time <= now]:
            del aborts[request_id]
            engine.abort_request(request_id)
        engine.step()
    return trace


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0, ignore_eos=True, seed=1)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def tiny() -> EngineTrace:
    """Three requests and twelve blocks."""
    requests = [("A", 0.0, prompt(6, 1), params(9)), ("B", 0.0, prompt(3, 2), params(12)), ("C", 0.04, prompt(9, 3), params(5))]
    return record(requests, num_gpu_blocks=12, max_num_seqs=4)


def fifty(**changes) -> EngineTrace:
    """Fifty requests that come one after another."""
    rng = random.Random(0)
    requests, time = [], 0.0
    for i in range(50):
        time += rng.expovariate(12.0)
        requests.append((str(i), time, prompt(rng.randint(4, 60), i), params(int(4 + rng.expovariate(1 / 50)))))
    args = {"num_gpu_blocks": 100, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 250}
    return record(requests, **(args | changes))


def preempting(mode: str) -> EngineTrace:
    """Six requests that outgrow the cache: some lose their blocks, to be recomputed or swapped."""
    requests = [(name, 0.02 * i, prompt(5 + 2 * i, i), params(24)) for i, name in enumerate("ABCDEF")]
    return record(requests, num_gpu_blocks=24, num_cpu_blocks=16, max_num_seqs=8, preemption_mode=mode)


def forking() -> EngineTrace:
    """A request with three continuations and one with two: they share the prompt's blocks, and copy the last."""
    requests = [
        ("poem", 0.0, prompt(10, 1), params(8, n=3)),
        ("chat", 0.0, prompt(5, 2), params(10)),
        ("song", 0.03, prompt(6, 3), params(6, n=2)),
    ]
    return record(requests, num_gpu_blocks=20, max_num_seqs=8)


def prefix_sharing() -> EngineTrace:
    """Questions about one document, some at the same time: its blocks are shared, and cached when nobody uses them."""
    document = prompt(16, 1)
    requests = [(f"q{i}", 0.06 * i, document + prompt(3 + i, 10 + i), params(5 + 2 * i)) for i in range(6)]
    requests.append(("other", 0.4, prompt(7, 99), params(4)))
    return record(requests, num_gpu_blocks=32, max_num_seqs=4, enable_prefix_caching=True)


def static() -> EngineTrace:
    """Static batching: places stand empty until the slowest has finished."""
    lengths = (4, 18, 7, 11, 3, 9, 14, 5)
    requests = [(str(i), 0.0, prompt(6, i), params(length)) for i, length in enumerate(lengths)]
    return record(requests, num_gpu_blocks=40, max_num_seqs=4, scheduler_cls=StaticBatchScheduler)


def troubled() -> EngineTrace:
    """Chunked prefill and drafts, with a step that fails and requests given up: one waits, one runs."""
    requests = [(f"r{i}", 0.03 * i, prompt(4 + 7 * i, i), params(12 + i)) for i in range(6)]
    return record(
        requests,
        num_gpu_blocks=40,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        enable_chunked_prefill=True,
        num_speculative_tokens=3,
        prompt_lookup_min=1,
        failures=[20],
        aborts={"r1": 0.2, "r5": 0.18},
    )


TRACES = {
    "tiny": tiny,
    "fifty": fifty,
    "recompute": lambda: preempting("recompute"),
    "swap": lambda: preempting("swap"),
    "forks": forking,
    "prefixes": prefix_sharing,
    "static": static,
    "troubled": troubled,
}
"""Functions that make the traces, by name."""
