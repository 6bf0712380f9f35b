"""AsyncLLMEngine: the tokens of `LLM.generate` as streams, given up at any time, with the engine in a thread or in a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from engine_health import is_healthy
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.config import CacheConfig, EngineArgs
from minivllm.core.scheduler import Scheduler
from minivllm.engine import core_messages
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    NewTokens,
    ReplicaChanged,
    SchedulerStats,
    SetTracing,
    Shutdown,
    StoppedSequence,
    StopSequences,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.input_processor import ProcessedRequest
from minivllm.engine.metrics import Metrics
from minivllm.engine.output_handler import RequestStream
from minivllm.engine.output_processor import RequestState
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from minivllm.outputs import Logprob, RequestMetrics
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import RequestOutputKind
from minivllm.scheduler_output import SchedulerOutput

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = "The capital of France is"
SMALL = EngineArgs("smollm2-135m", num_gpu_blocks_override=256, max_num_seqs=8)


@pytest.fixture
def engine(llm):
    """The shared model's engine, in a thread."""
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)
    yield engine
    engine.shutdown()
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def in_a_process():
    """An engine in a process of its own."""
    engine = AsyncLLMEngine.from_engine_args(replace(SMALL, enable_prefix_caching=True))
    yield engine
    engine.shutdown()


async def collect(engine, prompt, params, **options):
    return [output async for output in engine.generate(prompt, params, **options)]


def process_id_of(engine):
    return engine.replicas.statuses()[0].process_id


async def becomes(condition, seconds=10.0):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        await asyncio.sleep(0.01)


def joined(outputs):
    """The text and tokens of each continuation, put together from deltas."""
    texts, tokens = {}, {}
    for output in outputs:
        for completion in output.outputs:
            texts[completion.index] = texts.get(completion.index, "") + completion.text
            tokens[completion.index] = tokens.get(completion.index, []) + completion.token_ids
    return texts, tokens


# -- what a stream has ----------------------------------------------------------------------------------------------

VARIED = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=40, stop=["answer", "\n\nThe"]),
    SamplingParams(temperature=0.9, seed=7, max_tokens=9, n=3),
    SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, stop="e", n=2, logprobs=0),
]


@pytest.mark.slow
def test_all_kinds_of_output_say_what_generate_says(llm):
    expected = llm.generate([PROMPT] * len(VARIED), VARIED, use_tqdm=False)

    async def run(engine, kind):
        return await asyncio.gather(*[collect(engine, PROMPT, replace(params, output_kind=kind)) for params in VARIED])

    engine = AsyncLLMEngine.from_engine(llm.llm_engine)
    results = {kind: asyncio.run(run(engine, kind)) for kind in (CUMULATIVE, DELTA, FINAL_ONLY)}
    engine.shutdown()
    for i, final in enumerate(expected):
        for kind in (CUMULATIVE, FINAL_ONLY):
            last = results[kind][i][-1]
            assert last.finished
            assert last.outputs == final.outputs
            assert last.prompt_logprobs == final.prompt_logprobs
        assert len(results[FINAL_ONLY][i]) == 1
        texts, tokens = joined(results[DELTA][i])
        assert texts == {c.index: c.text for c in final.outputs}
        assert tokens == {c.index: c.token_ids for c in final.outputs}
        reasons = [c for output in results[DELTA][i] for c in output.outputs if c.finished]
        assert sorted((c.index, c.finish_reason, c.stop_reason) for c in reasons) == [
            (c.index, c.finish_reason, c.stop_reason) for c in final.outputs
        ]
        logprobs = [entry for output in results[DELTA][i] for c in output.outputs if c.index == 0 for entry in c.logprobs or []]
        assert logprobs == (final.outputs[0].logprobs or [])
        assert results[DELTA][i][0].prompt_logprobs == final.prompt_logprobs


@pytest.mark.slow
def test_the_engine_itself_gives_deltas_too(llm):
    engine, params = llm.llm_engine, replace(VARIED[2], output_kind=DELTA)
    engine.add_request("delta", PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    final = llm.generate(PROMPT, VARIED[2], use_tqdm=False)[0]
    assert joined(outputs)[0] == {c.index: c.text for c in final.outputs}
    assert all(c.text or c.token_ids or c.finished for output in outputs for c in output.outputs)


@pytest.mark.slow
def test_a_slow_reader_gets_several_tokens_at_once(engine):
    async def run():
        params = SamplingParams(temperature=0, max_tokens=12, output_kind=DELTA)
        outputs = []
        async for output in engine.generate(PROMPT, params):
            outputs.append(output)
            await asyncio.sleep(0 if len(outputs) > 1 else 3)
        return outputs

    outputs = asyncio.run(run())
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 12
    assert len(outputs) < 6


def make_state(params: SamplingParams, tokenizer=None, arrival_time=0.0) -> RequestState:
    return RequestState(
        ProcessedRequest(None, EngineCoreRequest("r", [1, 2, 3], params, 100, arrival_time=arrival_time)), tokenizer
    )


def make_core_output(*sequences: NewTokens, finished=False, metrics=None) -> EngineCoreOutput:
    return EngineCoreOutput("r", 0, list(sequences), finished, metrics or RequestMetrics(0.0))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(300, 400), max_size=3)), min_size=1, max_size=12), st.data())
def test_whenever_a_stream_is_read_its_pieces_join_to_the_whole(tokenizer, pieces, data):
    """For each kind of output, and in whichever pieces."""

    async def run(kind):
        state = make_state(SamplingParams(n=3, output_kind=kind), tokenizer)
        stream, texts, tokens = RequestStream(state), {}, {}
        for position, (index, token_ids) in enumerate(pieces):
            finished = position == len(pieces) - 1
            state.add(
                make_core_output(NewTokens(index, token_ids, finish_reason="length" if finished else None), finished=finished),
                1.0,
            )
            stream.notify()
            if (kind is not FINAL_ONLY and data.draw(st.booleans())) or finished:
                for output in (await stream.get()).outputs:
                    is_delta = kind is DELTA
                    texts[output.index] = texts.get(output.index, "") * is_delta + output.text
                    tokens[output.index] = tokens.get(output.index, []) * is_delta + output.token_ids
        return texts, tokens

    expected = {}
    for index, token_ids in pieces:
        expected[index] = expected.get(index, []) + token_ids
    for kind in (DELTA, CUMULATIVE, FINAL_ONLY):
        texts, tokens = asyncio.run(run(kind))
        assert {index: ids for index, ids in tokens.items() if ids} == {index: ids for index, ids in expected.items() if ids}
        ended = pieces[-1][0]  # the others may hold back the beginning of a character
        assert texts.get(ended, "") == tokenizer.decode(expected[ended])


# -- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_closing_a_stream_frees_its_blocks_within_a_step(engine):
    async def run():
        params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
        async with aclosing(engine.generate(PROMPT, params)) as stream:
            await anext(stream)
            await becomes(lambda: engine.stats.num_running == 2)
            assert engine.stats.num_used_blocks > 0
            steps = engine.stats.num_steps
        await becomes(lambda: engine.stats.num_used_blocks == 0)
        assert engine.stats.num_steps <= steps + 2  # the one that ran when it was looked at, and the one when it was closed
        assert engine.num_unfinished_requests() == 0

    asyncio.run(run())


@pytest.mark.slow
def test_cancelling_a_task_aborts_its_request_and_no_other(engine):
    async def run():
        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        alone = (await collect(engine, PROMPT, short))[-1].outputs[0].token_ids
        tasks = [asyncio.create_task(collect(engine, PROMPT, params)) for params in (long, short, long)]
        await becomes(lambda: engine.stats.num_running == 3)
        tasks[0].cancel()
        tasks[2].cancel()
        outputs = await tasks[1]
        assert outputs[-1].outputs[0].token_ids == alone
        await becomes(
            lambda: (
                engine.stats
                == SchedulerStats(
                    num_gpu_blocks=engine.num_gpu_blocks,
                    num_steps=engine.stats.num_steps,
                    num_generated_tokens=engine.stats.num_generated_tokens,
                )
            )
        )

    asyncio.run(run())


@pytest.mark.slow
def test_abort_ends_the_stream_with_a_reason(engine):
    async def run():
        params = SamplingParams(max_tokens=300, ignore_eos=True, output_kind=DELTA, n=2)
        outputs = []
        async for output in engine.generate(PROMPT, params, "mine"):
            outputs.append(output)
            await engine.abort("mine")
            await engine.abort("nobody's")
        assert outputs[-1].finished
        assert [c.finish_reason for c in outputs[-1].outputs] == ["abort", "abort"]

    asyncio.run(run())


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=12))
def test_whoever_leaves_whenever_everything_is_free_in_the_end(llm, workload):
    """Lengths of prompts and outputs, n, and after how many outputs each leaves (0: before the first)."""
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)

    async def one(number, num_prompt, num_output, n, leaves_after):
        params = SamplingParams(n=n, max_tokens=num_output, ignore_eos=True, seed=number)
        async with aclosing(engine.generate([number + 5] * num_prompt, params)) as stream:
            count = 0
            async for output in stream:
                count += 1
                if output.finished:
                    assert [len(c.token_ids) for c in output.outputs] == [num_output] * n
                if count > leaves_after:
                    return

    async def run():
        await asyncio.gather(*[one(number, *item) for number, item in enumerate(workload)])
        await becomes(lambda: engine.stats.num_running + engine.stats.num_waiting + engine.stats.num_used_blocks == 0)

    asyncio.run(run())
    engine.shutdown()
    assert llm.llm_engine.block_manager.get_num_free_gpu_blocks() == llm.llm_engine.block_manager.num_gpu_blocks
    assert not llm.llm_engine.output_processor.states


# -- bad requests, and what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "says"),
    [
        ("", SamplingParams(), None, "The prompt is empty"),
        ([10**6], SamplingParams(), None, "out of range"),
        (PROMPT, SamplingParams(n=100), None, "lower n"),
        ("word " * 9000, SamplingParams(), None, "shorten it"),
        (PROMPT, SamplingParams(), "line\nbreak", "printable"),
        (PROMPT, {"n": 1}, None, "must be a SamplingParams"),
        (PROMPT, SamplingParams(stop_token_ids=[10**6]), None, "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_at_the_door(engine, prompt, params, request_id, says):
    with pytest.raises(RequestError, match=says):
        asyncio.run(collect(engine, prompt, params, request_id=request_id))
    assert engine.num_unfinished_requests() == 0


@pytest.mark.slow
def test_two_requests_cannot_have_one_id(engine):
    async def run():
        async with aclosing(engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), "mine")) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="There is already a request 'mine'"):
                await collect(engine, PROMPT, SamplingParams(), request_id="mine")
            assert not (await anext(stream)).finished

    asyncio.run(run())


@pytest.mark.slow
def test_an_id_may_be_used_again_at_once(engine):
    """What the last step brings to the first owner of the id is not the second one's."""

    async def run():
        greedy = SamplingParams(temperature=0, max_tokens=4, output_kind=DELTA)
        expected = joined(await collect(engine, PROMPT, greedy))
        for number in range(20):
            async with aclosing(engine.generate([200 + number] * 9, replace(greedy, max_tokens=300), "mine")) as stream:
                await anext(stream)
            assert joined(await collect(engine, PROMPT, greedy, request_id="mine")) == expected

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"priority": 10**30}, {}),
        ({"arrival_time": True}, {}),
        ({}, {"seed": 2**64}),
        ({}, {"top_k": 10**30}),
        ({}, {"stop": "\ud800"}),
    ],
    ids=str,
)
def test_what_cannot_be_sent_to_the_core_is_refused_at_the_door(in_a_process, options, wanted):
    with pytest.raises(RequestError):
        asyncio.run(collect(in_a_process, PROMPT, SamplingParams(**wanted), **options))
    assert in_a_process.num_unfinished_requests() == 0


def test_an_engine_with_work_or_a_trace_of_its_own_is_not_taken_over(llm):
    llm.llm_engine.start_trace()
    with pytest.raises(ConfigError, match="records a trace"):
        AsyncLLMEngine.from_engine(llm.llm_engine)
    llm.llm_engine.stop_trace()
    llm.llm_engine.add_request("mine", PROMPT)
    with pytest.raises(ConfigError, match="unfinished requests"):
        AsyncLLMEngine.from_engine(llm.llm_engine)
    llm.llm_engine.abort_request("mine")


def test_a_model_that_fails_in_every_step_is_the_end_of_the_engine(llm, monkeypatch):
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)

    def fails(output):
        raise MemoryError("too much")

    monkeypatch.setattr(llm.llm_engine.executor, "execute_model", fails)

    async def run():
        for _ in range(3):
            assert "too much" in (await collect(engine, PROMPT, None))[-1].error
        assert "3 steps in a row failed" in str(await asyncio.wait_for(engine.wait_dead(), 10))

    asyncio.run(run())
    engine.shutdown()


class BrokenScheduler(Scheduler):
    def schedule(self):
        raise ZeroDivisionError("a scheduler in error")


@pytest.mark.slow
def test_an_engine_that_fails_ends_every_stream_with_the_cause():
    engine = AsyncLLMEngine.from_engine_args(replace(SMALL, scheduler_cls=BrokenScheduler), in_process=True)

    async def run():
        results = await asyncio.gather(*[collect(engine, PROMPT, None) for _ in range(3)], return_exceptions=True)
        assert [str(error) for error in results] == ["The engine has ended: ZeroDivisionError: a scheduler in error."] * 3
        assert str(await engine.wait_dead()) == str(results[0])
        for attempt in (collect(engine, PROMPT, None), anext(engine.steps())):
            with pytest.raises(EngineDeadError, match="a scheduler in error"):
                await attempt

    asyncio.run(run())
    engine.shutdown()


def test_a_model_that_fails_in_a_step_ends_the_requests_of_that_step(llm, monkeypatch):
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)

    def fails(output):
        monkeypatch.undo()
        raise MemoryError("too much")

    monkeypatch.setattr(llm.llm_engine.executor, "execute_model", fails)

    async def run():
        failed = (await collect(engine, PROMPT, None))[-1]
        assert failed.finished
        assert "too much" in failed.error
        engine.check_health()
        return (await collect(engine, PROMPT, SamplingParams(temperature=0, max_tokens=1)))[-1].outputs[0].text

    assert asyncio.run(run()) == " Paris"
    engine.shutdown()


def test_shutting_down_ends_the_streams(llm):
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)

    async def run():
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            async for _ in stream:
                pass

    asyncio.run(run())
    engine.shutdown()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.block_manager.get_num_free_gpu_blocks() == llm.llm_engine.block_manager.num_gpu_blocks


def test_an_engine_serves_one_event_loop_after_another(engine):
    params = SamplingParams(temperature=0, max_tokens=2)

    async def abandons():
        stream = engine.generate(PROMPT, replace(params, max_tokens=500))
        await anext(stream)
        return stream

    kept = asyncio.run(abandons())
    for _ in range(2):
        assert asyncio.run(collect(engine, PROMPT, params))[-1].outputs[0].text == " Paris."
    del kept
    assert engine.num_unfinished_requests() == 0


def test_a_loop_that_stands_still_does_not_hide_the_end_of_the_engine(llm):
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)
    params = SamplingParams(temperature=0, max_tokens=2)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    assert first.run_until_complete(collect(engine, PROMPT, params))[-1].outputs[0].text == " Paris."
    engine.shutdown()  # while the first loop is not closed, and will not run again
    assert isinstance(engine.dead_error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="it was shut down"):
        second.run_until_complete(collect(engine, PROMPT, params))
    first.close()
    second.close()


@pytest.mark.slow
def test_the_event_loop_is_free_while_the_model_computes(engine):
    async def run():
        task = asyncio.create_task(collect(engine, [100] * 2000, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0)
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(run()) >= 10


# -- watching -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_are_watched_from_the_middle_and_nothing_is_kept(engine, llm):
    async def run():
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        task = asyncio.create_task(collect(engine, PROMPT, params, request_id="watched"))
        await becomes(lambda: engine.stats.num_running == 1)
        async with aclosing(engine.steps()) as steps:
            records = [await anext(steps) for _ in range(5)]
            assert [record.phase for record in records] == ["decode"] * 5
            assert all({key.request_id for key in record.block_tables} == {"watched"} for record in records)
            lengths = [record.scheduled[0].context_len for record in records]
            assert lengths == list(range(lengths[0], lengths[0] + 5))
            assert not llm.llm_engine.trace.steps
            await task
            for number in range(3):
                await collect(engine, PROMPT, replace(params, max_tokens=2), request_id=f"more {number}")
            assert not llm.llm_engine.trace.requests
        await collect(engine, PROMPT, replace(params, max_tokens=1))
        assert llm.llm_engine.trace is None

    asyncio.run(run())


@pytest.mark.slow
def test_metrics_count_what_was_done(in_a_process):
    def read(name):
        values = [line.split()[-1] for line in in_a_process.metrics.render().decode().split("\n") if line.startswith(name)]
        assert values, name
        return sum(map(float, values))

    names = {
        "prompt": "minivllm:prompt_tokens_total{",
        "generated": "minivllm:generation_tokens_total{",
        "ttft": "minivllm:time_to_first_token_seconds_count{",
        "itl": "minivllm:inter_token_latency_seconds_count{",
        "e2e": "minivllm:e2e_request_latency_seconds_count{",
        "hits": "minivllm:prefix_cache_hits_total{",
        "prefill": "minivllm:request_prefill_time_seconds_count{",
        "decode": "minivllm:request_decode_time_seconds_count{",
        "n": "minivllm:request_params_n_sum{",
        "longest": "minivllm:request_max_num_generation_tokens_sum{",
        "limit": "minivllm:request_params_max_tokens_sum{",
        "in steps": "minivllm:iteration_tokens_total_sum{",
        "length": 'minivllm:request_success_total{engine="0",finished_reason="length"',
        "abort": 'minivllm:request_success_total{engine="0",finished_reason="abort"',
    }
    before = {key: read(name) for key, name in names.items()}

    async def run():
        prompt = list(range(500, 533))
        for _ in range(2):  # the second time, two whole blocks are in the prefix cache
            await collect(in_a_process, prompt, SamplingParams(max_tokens=5, ignore_eos=True))
        async with aclosing(in_a_process.generate([77] * 5, SamplingParams(max_tokens=300, ignore_eos=True))) as stream:
            await anext(stream)
        await becomes(lambda: in_a_process.stats.num_running == 0)

    asyncio.run(run())
    gained = {key: read(name) - before[key] for key, name in names.items()}
    assert gained["prompt"] == 33 + 33 + 5
    assert gained["hits"] == 32
    assert gained["generated"] >= 10 + 1
    assert gained["ttft"] == 3
    assert gained["itl"] >= 8
    assert (gained["e2e"], gained["length"], gained["abort"]) == (2, 2, 1)
    assert [gained[key] for key in ("prefill", "decode", "n")] == [2, 2, 2]
    assert (gained["longest"], gained["limit"]) == (10, 10)
    assert gained["in steps"] == gained["prompt"] - gained["hits"] + gained["generated"]
    assert read("minivllm:num_requests_running{") == read("minivllm:kv_cache_usage_perc{") == 0


DASHBOARD = {
    "E2E Request Latency": ["e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"],
    "Token Throughput": ["prompt_tokens_total", "generation_tokens_total"],
    "Inter Token Latency": ["inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count"],
    "Scheduler State": ["num_requests_running", "num_requests_waiting"],
    "Time To First Token Latency": ["time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"],
    "Cache Utilization": ["kv_cache_usage_perc"],
    "Request Prompt Length": ["request_prompt_tokens_bucket"],
    "Request Generation Length": ["request_generation_tokens_bucket"],
    "Finish Reason": ["request_success_total"],
    "Queue Time": ["request_queue_time_seconds_sum"],
    "Requests Prefill and Decode Time": ["request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"],
    "Max Generation Token in Sequence Group": ["request_max_num_generation_tokens_sum"],
}
"""The panels of vLLM's Grafana dashboard (examples/online_serving/prometheus_grafana/grafana.json), and the series that they show, by the names that these
have today."""


def test_vllms_dashboard_has_all_its_series_from_the_beginning():
    metrics = Metrics("a model", CacheConfig(), 2)
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    for panel, names in DASHBOARD.items():
        for name in names:
            found = [sample for sample in samples if sample.name == f"minivllm:{name}"]
            assert {sample.labels["engine"] for sample in found} == {"0", "1"}, (panel, name)
            assert all(sample.value == 0 and sample.labels["model_name"] == "a model" for sample in found), (panel, name)
    reasons = {sample.labels["finished_reason"] for sample in samples if sample.name == "minivllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    if sys.platform == "linux":
        assert metrics.registry.get_sample_value("process_resident_memory_bytes") > 2**20


def test_the_layout_of_a_cache_is_told_and_changes_with_it():
    metrics = Metrics("model", CacheConfig(block_size=16))
    for num_gpu_blocks in (100, 200):
        metrics.record_change(ReplicaChanged(0, is_ready=True, num_gpu_blocks=num_gpu_blocks))
    samples = {
        sample.labels["num_gpu_blocks"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "minivllm:cache_config_info"
    }
    assert samples == {"100": 0, "200": 1}


def test_each_of_n_answers_has_its_own_length_and_pace():
    metrics = Metrics("model", CacheConfig())
    state = make_state(SamplingParams(n=2), arrival_time=10.0)
    for moment, lengths in ((11.0, (1, 1)), (12.0, (1, 1)), (14.0, (0, 2))):
        new = [NewTokens(i, [5] * length) for i, length in enumerate(lengths) if length]
        if moment == 14.0:
            new = [NewTokens(i, tokens.token_ids, finish_reason="stop") for i, tokens in enumerate([NewTokens(0, []), *new])]
        state.add(make_core_output(*new, finished=moment == 14.0, metrics=RequestMetrics(10.0, 10.5)), moment)
        metrics.record_outputs(0, [state], moment, moment)
    sums = {
        name: (value("sum"), value("count"))
        for name in ("request_generation_tokens", "request_time_per_output_token_seconds", "e2e_request_latency_seconds")
        for value in [
            lambda what, name=name: metrics.registry.get_sample_value(
                f"minivllm:{name}_{what}", {"model_name": "model", "engine": "0"}
            )
        ]
    }
    assert sums["request_generation_tokens"] == (2 + 4, 2)
    assert sums["request_time_per_output_token_seconds"] == (1.0 + 3.0 / 3, 2)
    assert sums["e2e_request_latency_seconds"] == (4.0, 1)


def test_preemptions_are_counted_in_the_step_that_decides_them(llm):
    metrics = Metrics("model", CacheConfig())
    for total in (2, 2, 5, 0, 1):  # then another engine, which starts from zero
        metrics.set_stats(0, SchedulerStats(num_preemptions=total))
    assert metrics.registry.get_sample_value("minivllm:num_preemptions_total", {"model_name": "model", "engine": "0"}) == 5 + 1


# -- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_generates_what_llm_generates(in_a_process, llm):
    expected = llm.generate([PROMPT] * len(VARIED), VARIED, use_tqdm=False)

    async def run():
        return await asyncio.gather(*[collect(in_a_process, PROMPT, params) for params in VARIED])

    outputs = [outputs[-1] for outputs in asyncio.run(run())]
    for output, other in zip(outputs, expected, strict=True):
        for completion, theirs in zip(output.outputs, other.outputs, strict=True):
            without = {"logprobs": None, "cumulative_logprob": None}
            assert msgspec.structs.replace(completion, **without) == msgspec.structs.replace(theirs, **without)
            # The process may compute with another number of threads, so that sums differ in their last bits.
            assert completion.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
            assert [list(entry) for entry in completion.logprobs or ()] == [list(entry) for entry in theirs.logprobs or ()]
    assert process_id_of(in_a_process) != os.getpid()


@pytest.mark.slow
def test_a_killed_engine_ends_every_stream_within_two_seconds():
    engine = AsyncLLMEngine.from_engine_args(SMALL)

    async def run():
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        tasks = [asyncio.create_task(collect(engine, [100 + i] * 5, params)) for i in range(32)]
        await becomes(lambda: engine.stats.num_running == 8)
        os.kill(process_id_of(engine), signal.SIGKILL)
        done, pending = await asyncio.wait(tasks, timeout=2.0)
        assert not pending
        assert {str(task.exception()) for task in done} == {"The engine has ended: its process was killed by SIGKILL."}
        assert engine.num_unfinished_requests() == 0

    asyncio.run(run())
    engine.shutdown()


def test_a_process_that_is_stopped_is_reported_as_not_responding_until_it_goes_on(in_a_process, monkeypatch):
    monkeypatch.setattr("minivllm.engine.core_client.NOT_RESPONDING_SECONDS", 2.5)

    async def run():
        os.kill(process_id_of(in_a_process), signal.SIGSTOP)
        try:
            await becomes(lambda: not is_healthy(in_a_process))
            with pytest.raises(EngineDeadError, match="not responding: nothing heard from its process for"):
                await collect(in_a_process, PROMPT, None)
        finally:
            os.kill(process_id_of(in_a_process), signal.SIGCONT)
        await becomes(lambda: is_healthy(in_a_process))
        return (await collect(in_a_process, PROMPT, SamplingParams(temperature=0, max_tokens=1)))[-1].outputs[0].text

    assert asyncio.run(run()) == " Paris"


@pytest.mark.slow
def test_the_process_ends_with_its_frontend_and_leaves_no_socket(tmp_path):
    code = """
        import os, sys
        from minivllm.config import EngineArgs
        from minivllm.engine.async_llm_engine import AsyncLLMEngine
        engine = AsyncLLMEngine.from_engine_args(EngineArgs("smollm2-135m", num_gpu_blocks_override=64))
        print(engine.replicas.statuses()[0].process_id, flush=True)
        sys.stdin.read()
        """
    frontend = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    process_id = int(frontend.stdout.readline())
    assert not list(tmp_path.glob("minivllm-*")), "once both are connected, nobody needs the sockets' names"
    frontend.kill()
    frontend.communicate()

    async def ends():
        await becomes(lambda: not is_running(process_id))

    asyncio.run(ends())


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return "Z" not in open(f"/proc/{process_id}/stat").read().rpartition(")")[2].split()[0]  # noqa: PTH123


@pytest.mark.slow
def test_what_keeps_an_engine_from_starting_is_told_in_its_words(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError):
        AsyncLLMEngine.from_engine_args(EngineArgs(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"watch AsyncLLMEngine.steps\(\)"):
        AsyncLLMEngine.from_engine_args(replace(SMALL, trace=True))
    with pytest.raises(ConfigError, match="cache"):  # found in the process, when the model is loaded
        AsyncLLMEngine.from_engine_args(replace(SMALL, num_gpu_blocks_override=None, kv_cache_memory_bytes=1))


def test_a_class_goes_into_the_process_by_its_name():
    class Local(Scheduler):
        pass

    config = EngineConfig.from_engine_args(replace(SMALL, scheduler_cls=Scheduler, model="smollm2-135m"))
    assert pickle.loads(config.to_bytes()) == config
    with pytest.raises(ConfigError, match="put the class into a module, or run the engine in this process"):
        replace(config, scheduler_cls=Local).to_bytes()


@pytest.mark.slow
def test_an_engine_that_nobody_has_any_more_ends(llm, caplog):
    in_a_thread, in_a_process = AsyncLLMEngine.from_engine(llm.llm_engine), AsyncLLMEngine.from_engine_args(SMALL)
    asyncio.run(collect(in_a_process, PROMPT, SamplingParams(max_tokens=2)))
    process_id = process_id_of(in_a_process)
    del in_a_thread, in_a_process
    gc.collect()

    async def ends():
        await becomes(lambda: not is_running(process_id))
        await becomes(lambda: not any("minivllm engine" in thread.name for thread in threading.enumerate()))

    asyncio.run(ends())
    assert "has ended" not in caplog.text


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(engine, monkeypatch):
    def refuse(request):
        raise UnicodeEncodeError("utf-8", "", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(engine._client, "add_request", refuse)
    with pytest.raises(UnicodeEncodeError):
        asyncio.run(collect(engine, [5], None))
    assert engine.num_unfinished_requests() == 0 and not engine.output_processor.states


@pytest.mark.slow
def test_a_core_whose_words_cannot_be_sent_ends_instead_of_going_mute(monkeypatch, tmp_path):
    (tmp_path / "strange.py").write_text(
        "from minivllm.core.scheduler import Scheduler\n"
        "class Strange(Scheduler):\n"
        "    def update(self, output, results):\n"
        "        advanced = super().update(output, results)\n"
        "        for seq, _ in advanced:\n"
        "            seq.stop_reason = object()\n"
        "        return advanced\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from strange import Strange

    engine = AsyncLLMEngine.from_engine_args(replace(SMALL, scheduler_cls=Strange))
    with pytest.raises(EngineDeadError, match="its process ended with status 1"):
        asyncio.run(collect(engine, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.shutdown()


@pytest.mark.slow
def test_what_the_process_logs_is_in_the_log_of_its_frontend(caplog):
    engine = AsyncLLMEngine.from_engine_args(replace(SMALL, scheduler_cls=NoisyScheduler))
    asyncio.run(collect(engine, PROMPT, SamplingParams(max_tokens=1)))
    with pytest.raises(EngineDeadError, match="NoisyScheduler scheduled nothing"):
        asyncio.run(collect(engine, PROMPT, SamplingParams(max_tokens=3)))
    engine.shutdown()
    assert ("a.learner", logging.WARNING, "noise of 1") in caplog.record_tuples
    assert any("Traceback" in text and level == logging.ERROR for _, level, text in caplog.record_tuples)


class NoisyScheduler(Scheduler):
    """Logs what it schedules, and schedules nothing the third time."""

    count = 0

    def schedule(self):
        NoisyScheduler.count += 1
        output = super().schedule() if NoisyScheduler.count < 3 else SchedulerOutput()
        logging.getLogger("a.learner").warning("noise of %d", len(output.scheduled))
        return output


def test_no_thread_stays_behind(llm):
    before = set(threading.enumerate())
    engine = AsyncLLMEngine.from_engine(llm.llm_engine)
    asyncio.run(collect(engine, PROMPT, SamplingParams(max_tokens=1)))
    engine.shutdown()
    end = time.monotonic() + 5
    while {thread for thread in set(threading.enumerate()) - before if "minivllm" in thread.name} and time.monotonic() < end:
        time.sleep(0.01)
    assert not {thread.name for thread in set(threading.enumerate()) - before if "minivllm" in thread.name}


# -- messages -------------------------------------------------------------------------------------------------------

LOGPROBS = [{5: Logprob(-0.25, 1, "x"), 7: Logprob(-2.5, 3)}]
PARAMS = SamplingParams(stop="x", stop_token_ids=[3], logit_bias={5: 1.0}, seed=2**62, output_kind=DELTA)
MESSAGES = [
    AddRequest(EngineCoreRequest("r", [1, 2], PARAMS, 100, (2,), seed=2**64 - 1, arrival_time=1.5, priority=-1, number=7)),
    AbortRequests(["r"]),
    StopSequences([StoppedSequence("r", 7, 1, "né\U0001f600")]),
    SetTracing(True),
    Shutdown(),
]


def test_numpy_numbers_in_parameters_cross_the_line():
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), stop_token_ids=[np.int32(3)])
    message = AddRequest(EngineCoreRequest("r", [1], params, 100))
    received = core_messages.decode_to_core(core_messages.encode(message)).request.sampling_params
    assert (received.max_tokens, received.temperature, received.stop_token_ids) == (5, 0.5, (3,))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_to_the_core_come_back_whole(message):
    assert core_messages.decode_to_core(core_messages.encode(message)) == message


@pytest.mark.slow
def test_messages_from_the_core_come_back_whole(llm):
    engine = llm.llm_engine
    engine.start_trace()
    llm.generate([PROMPT] * 2, SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    record = engine.trace.steps[-1]
    engine.stop_trace()
    output = EngineCoreOutput(
        "r", 7, [NewTokens(1, [5], LOGPROBS, "stop", 2)], True, RequestMetrics(1.0, 2.0), {1: LOGPROBS[0]}, "an error"
    )
    message = EngineCoreOutputs([output], 5.0, SchedulerStats(1, 2, 3, 4, 5, 6, 7), record)
    assert core_messages.decode_from_core(core_messages.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "AbortRequests", "request_ids": 5}),
        msgspec.msgpack.encode({"type": "AbortRequests", "request_ids": ["r"], "more": 1}),
        msgspec.msgpack.encode({"type": "AddRequest", "request": {"request_id": "r", "prompt_token_ids": ["1"]}}),
    ],
)
def test_a_message_that_is_none_is_refused(data):
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        core_messages.decode_to_core(data)


def test_a_message_that_cannot_be_read_is_dropped_and_a_bad_request_answered(in_a_process):
    client = in_a_process._client
    with client._core._lock:
        client._core._input.send(b"nonsense")

    async def run():
        task = asyncio.create_task(collect(in_a_process, PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), request_id="r"))
        await becomes(lambda: in_a_process.stats.num_running == 1)
        client.add_request(in_a_process._outputs.streams["r"].state.request)  # the id is taken
        outputs = await task
        assert outputs[-1].error.startswith("There is already a request 'r'")
        client.abort_requests(["r"])
        return (await collect(in_a_process, PROMPT, SamplingParams(temperature=0, max_tokens=1)))[-1].outputs[0].text

    assert asyncio.run(run()) == " Paris"


def test_no_engine_is_ready_when_none_is_left():
    metrics = Metrics("m", CacheConfig(), num_engines=2)
    for rank in range(2):
        metrics.record_change(ReplicaChanged(rank, is_ready=True, num_gpu_blocks=9))
    assert metrics.render().count(b'minivllm:engine_ready{engine="0",model_name="m"} 1.0') == 1
    metrics.set_idle()
    text = metrics.render().decode()
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("minivllm:engine_ready{")] == ["0.0", "0.0"]
