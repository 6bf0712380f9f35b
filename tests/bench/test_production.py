"""A production trace is replayed as it was, or faster, slower, longer or shorter; and workers without batches answer it."""

from __future__ import annotations

import math
import os
import signal
import statistics

import pytest

from minivllm.bench.production import TracedRequest, load_conversation_trace, replay_trace
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import EngineArgs
from minivllm.course.lessons.lesson_09.workers import Workers
from minivllm.errors import ConfigError, MinivllmError

TRACE = [TracedRequest(10.0, 100, 8), TracedRequest(10.5, 300, 40), TracedRequest(14.0, 20, 400)]


def lengths(requests):
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


def test_the_trace_is_that_of_the_paper():
    trace = load_conversation_trace()
    assert len(trace) == 19_366 and trace[0] == (0.0, 374, 44)
    assert [request.arrival_time for request in trace] == sorted(request.arrival_time for request in trace)
    assert round(statistics.mean(request.prompt_len for request in trace)) == 1155
    assert round(statistics.mean(request.output_len for request in trace)) == 211
    assert len(trace) / trace[-1].arrival_time == pytest.approx(5.53, abs=0.01)


def test_it_is_replayed_as_it_was():
    requests = replay_trace(TRACE)
    assert [request.arrival_time for request in requests] == [0.0, 0.5, 4.0]
    assert lengths(requests) == [(100, 8), (300, 40), (20, 400)]
    assert requests == replay_trace(TRACE) != replay_trace(TRACE, seed=1)


def test_it_is_replayed_at_another_rate_with_its_own_proportions():
    assert [request.arrival_time for request in replay_trace(TRACE, request_rate=1.0)] == [0.0, 0.25, 2.0]
    assert [request.arrival_time for request in replay_trace(TRACE, request_rate=math.inf)] == [0.0, 0.0, 0.0]
    assert [request.arrival_time for request in replay_trace(TRACE, 1, request_rate=3.0)] == [0.0]


def test_lengths_are_scaled_and_cut():
    assert lengths(replay_trace(TRACE, length=0.1)) == [(10, 1), (30, 4), (2, 40)]
    assert lengths(replay_trace(TRACE, max_len=100)) == [(50, 8), (50, 40), (20, 80)]
    assert lengths(replay_trace(TRACE, length=0.001)) == [(1, 1)] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [({"length": 0}, "length"), ({"length": math.nan}, "length"), ({"request_rate": 0}, "request_rate"), ({"num_requests": 0}, "num_requests"), ({"max_len": 1}, "max_len"), ({"num_requests": 4}, "3 requests"), ({"vocab_size": 0}, "vocab_size"), ({"length": 1e308}, "length"), ({"request_rate": 1e-320}, "request_rate")],
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        replay_trace(TRACE, **options)


# -- workers ---------------------------------------------------------------------------------------------------------

ARGS = EngineArgs("smollm2-135m", max_model_len=64, num_gpu_blocks_override=8)


def test_a_trace_out_of_order_is_refused():
    with pytest.raises(ConfigError, match="order"):
        replay_trace(TRACE[::-1])


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_for_all():
    with Workers(ARGS, num_workers=2) as workers:
        os.kill(workers._engines[0].engine_core.client._core.process_id, signal.SIGKILL)
        with pytest.raises(MinivllmError):
            workers.run([WorkloadRequest([1] * 9, 50)] * 40)


@pytest.mark.slow
def test_workers_share_a_queue_and_answer_everybody():
    requests = [WorkloadRequest(list(range(50, 50 + n)), n) for n in (3, 1, 5, 2, 4)]
    with Workers(ARGS, num_workers=2) as workers:
        for _ in range(2):
            run = workers.run(requests)
            assert (run.completed, run.output_tokens, run.prompt_tokens) == (5, 15, 15)
            assert 0 < run.ttft.p50 <= run.latency.p50 <= run.seconds
        with pytest.raises(MinivllmError):
            workers.run([WorkloadRequest([1] * 99, 3), *requests])
        assert workers.run(requests).completed == 5


def test_at_least_one_worker():
    with pytest.raises(ConfigError, match="num_workers"):
        Workers(ARGS, num_workers=0)
