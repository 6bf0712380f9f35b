"""Replicas in processes: the tokens of one engine, whichever of them a request goes to, and what happens to replicas that end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_health import is_healthy
from failing_parts import FailingSampler

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.data_parallel.blame import MAX_DEATHS_IN_COMPANY, NUM_TRIALS
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import AddRequest, EngineCoreOutputs, Heartbeat, SchedulerStats
from minivllm.entrypoints.openai.errors import as_api_error
from minivllm.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError, RequestGivenUpError

LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def args_for(tiny_llama, **options):
    defaults = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 300, "max_num_seqs": 8, "data_parallel_size": 2}
    return EngineArgs(tiny_llama, **defaults | options)


@pytest.fixture(scope="module")
def engine(tiny_llama):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama))
    yield engine
    replicas = engine.replicas
    processes = [psutil.Process(number) for number in (*process_ids(replicas), replicas._launcher.coordinator.process_id)]
    engine.shutdown()
    assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.fixture(scope="module")
def alone(tiny_llama):
    return LLM(tiny_llama, skip_tokenizer_init=True, num_gpu_blocks_override=300)


@pytest.mark.long
def test_replicas_of_pipeline_stages_give_the_tokens_of_one_worker(tiny_llama, alone):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama, pipeline_parallel_size=2))
    try:
        prompts, params = workload(12)

        async def run():
            return await asyncio.gather(*[collect(engine, *request) for request in zip(prompts, params, strict=True)])

        for found, expected in zip(asyncio.run(run()), alone.generate(prompts, params, use_tqdm=False), strict=True):
            assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]
    finally:
        engine.shutdown()


def workload(size, seed=0):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 60))] for _ in range(size)]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 20))
        if i % 2
        else SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(1, 20), n=1 + i % 3, top_p=0.9)
        for i in range(size)
    ]
    return prompts, params


async def collect(engine, prompt, params, **options):
    return [output async for output in engine.generate(prompt, params, **options)][-1]


def process_ids(replicas):
    """Those that run, by rank."""
    return [place.process.process_id for place in replicas._launcher.local._places.values() if place.process is not None]


async def becomes(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        await asyncio.sleep(0.01)


def tokens_of(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def metric(engine, name, rank):
    labels = {"model_name": engine.model_config.name, "engine": str(rank)}
    return engine.metrics.registry.get_sample_value(f"minivllm:{name}_total", labels)


def states(engine):
    return [status.state for status in engine.replicas.statuses()]


def in_flight(engine):
    return engine.replicas.group.table._router.num_in_flight


def test_two_replicas_generate_what_one_engine_does_and_both_work(engine, alone):
    prompts, params = workload(60)
    expected = alone.generate(prompts, params, use_tqdm=False)

    async def run():
        return await asyncio.gather(*[collect(engine, *item) for item in zip(prompts, params, strict=True)])

    outputs = asyncio.run(run())
    assert tokens_of(outputs) == tokens_of(expected)
    assert in_flight(engine) == [0, 0]
    finished = [metric(engine, "generation_tokens", rank) for rank in range(2)]
    assert sum(finished) == sum(len(tokens) for output in tokens_of(outputs) for tokens in output)
    assert min(finished) > 0.3 * max(finished)


def test_offline_prompts_are_spread_over_replicas(tiny_llama, alone):
    prompts, params = workload(40, seed=1)
    llm = LLM(
        tiny_llama,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=300,
        data_parallel_size=2,
        data_parallel_routing="round-robin",
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(alone.generate(prompts, params, use_tqdm=False))
    with pytest.raises(ConfigError, match="in another process, out of reach"):
        llm.llm_engine.start_trace()
    first, second = process_ids(llm.llm_engine.engine_core.client)
    threading.Timer(1.0, os.kill, (second, signal.SIGKILL)).start()
    expected = alone.generate([[5, 6 + i] for i in range(4)], LONG, use_tqdm=False)
    outputs = llm.generate([[5, 6 + i] for i in range(4)], LONG, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(expected), "those of the one that died went on at the other"
    os.kill(first, signal.SIGKILL)
    with pytest.raises(
        EngineDeadError, match=r"no replica is left; the last, replica 0, was lost: its process was killed by SIGKILL\."
    ):
        llm.generate([[5, 6]] * 4, LONG, use_tqdm=False)


def test_who_gives_up_frees_the_replica_that_computes_for_them(engine):
    async def run():
        async with aclosing(engine.generate([5] * 4, LONG)) as first, aclosing(engine.generate([6] * 4, LONG)) as second:
            await anext(first), await anext(second)
            assert in_flight(engine) == [1, 1]
        await becomes(lambda: engine.stats.num_running == 0)
        assert in_flight(engine) == [0, 0]
        assert [stats.num_used_blocks for _, stats in sorted(engine.stats_by_engine.items())] == [0, 0]

    asyncio.run(run())


def test_a_replica_whose_messages_were_lost_begins_anew_though_it_is_never_idle(engine, alone, caplog):
    """Its stream goes on at the other one; and when it is back, it has no request left."""
    replicas = engine.replicas
    params = replace(LONG, max_tokens=4000)
    expected = tokens_of(alone.generate([[5] * 4, [6] * 4], params, use_tqdm=False))

    async def run():
        streams = [asyncio.create_task(collect(engine, [5 + i] * 4, params)) for i in range(2)]
        await becomes(lambda: [stats.num_running for stats in engine.stats_by_engine.values()] == [1, 1])
        with replicas.lock:
            replicas.group.liveness.peers[0].next_number += 1  # as if one were missing
        await becomes(lambda: in_flight(engine)[1] == 2)
        await becomes(lambda: set(states(engine)) == {"ready"}, 3)
        assert in_flight(engine) == [0, 2]
        assert tokens_of(await asyncio.gather(*streams)) == expected
        await becomes(lambda: engine.stats.num_running == 0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "Replica 0 is lost: messages from it were lost." in caplog.text
    assert metric(engine, "num_resumed_requests", 1) == 1


def test_a_request_that_cannot_be_sent_goes_elsewhere_and_the_replica_is_used_again_when_it_is_connected(engine, monkeypatch):
    replicas, failed = engine.replicas, []
    group, send = replicas.group, replicas.group._send_to

    def fail_once(rank, incarnation, message):
        if isinstance(message, AddRequest) and not failed:
            failed.append((rank, incarnation))
            return False
        return send(rank, incarnation, message)

    monkeypatch.setattr(group, "_send_to", fail_once)

    async def run():
        for _ in range(4):
            assert len((await collect(engine, [5], SHORT)).outputs[0].token_ids) == 5
        assert group.table.open == [1 - failed[0][0]]
        with replicas.lock:
            group.connect(failed)
        await becomes(lambda: len(group.table.open) == 2, 3)
        assert states(engine) == ["ready", "ready"]

    asyncio.run(run())


def test_a_request_may_ask_for_its_replica(engine):
    async def run():
        for rank in (1, 1, 0, 1):
            stream = engine.generate([5], LONG, data_parallel_rank=rank)
            async with aclosing(stream):
                await anext(stream)
                assert in_flight(engine)[rank] == 1
        for rank in (-1, 2):
            with pytest.raises(RequestError, match="must be from 0 to 1"):
                await anext(engine.generate([5], SHORT, data_parallel_rank=rank))

    asyncio.run(run())


def test_nobody_was_silent_while_this_process_was_stopped(engine, caplog, monkeypatch):
    replicas = engine.replicas
    next_messages, is_done = replicas._next_messages, threading.Event()

    def after_a_pause():
        if not is_done.is_set():  # between two rounds of the thread of messages
            for peer in replicas.group.liveness.peers:
                peer.last_heard = time.monotonic() - 60
            replicas._latest_check = time.monotonic() - 60
        is_done.set()
        return next_messages()

    monkeypatch.setattr(replicas, "_next_messages", after_a_pause)
    assert is_done.wait(5)
    time.sleep(0.5)
    assert states(engine) == ["ready", "ready"]
    engine.check_health()
    assert "othing was heard" not in caplog.text


@pytest.mark.slow
def test_one_that_leaves_finishes_what_it_has_and_one_that_dies_takes_nothing_with_it(tiny_llama, alone, caplog):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama, data_parallel_size=3))
    first, second, third = process_ids(engine.replicas)
    longer = replace(LONG, max_tokens=2500)  # still running when the replicas are told to leave, however busy the machine is
    expected = tokens_of(alone.generate([[5 + i] * 4 for i in range(3)], longer, use_tqdm=False))

    async def run():
        streams = [asyncio.create_task(collect(engine, [5 + i] * 4, longer)) for i in range(3)]
        await becomes(
            lambda: all(stats.num_running for stats in engine.stats_by_engine.values()) and len(engine.stats_by_engine) == 3
        )
        os.kill(third, signal.SIGSTOP)  # its stream does not end before it dies, however busy the machine is
        os.kill(first, signal.SIGTERM)
        await becomes(lambda: "Replica 0 is draining" in caplog.text)
        busy = asyncio.create_task(collect(engine, [9] * 4, replace(LONG, max_tokens=4000)))  # its replica has no quiet moment
        await becomes(lambda: in_flight(engine)[1] + in_flight(engine)[2] >= 2)
        os.kill(third, signal.SIGKILL)
        await becomes(lambda: states(engine)[2] == "gone" and engine.stats_by_engine[2].num_running == 0)  # known to both threads
        replicas = engine.replicas
        late = EngineCoreOutputs([], 0.0, SchedulerStats(num_running=3), engine_index=2)
        for message in (late, Heartbeat(2, 300, third)):  # what it had sent, and was not read yet
            peer = replicas.group.liveness.peers[2]
            assert replicas._take_message(peer.incarnation, peer.next_number, message) == []
        await asyncio.gather(*[collect(engine, [5], SHORT) for _ in range(6)])
        assert states(engine)[2] == "gone" and engine.stats_by_engine[2].num_running == 0
        assert tokens_of(await asyncio.gather(*streams)) == expected
        num_resumed = engine.metrics.count("num_resumed_requests")  # "busy" may have been one of them
        assert metric(engine, "num_resumed_requests", 1) == num_resumed and num_resumed in (1, 2)
        await becomes(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
        await becomes(lambda: "Replica 0 has left." in caplog.text)
        engine.check_health()
        assert len((await collect(engine, [5], SHORT)).outputs[0].token_ids) == 5
        busy.cancel()
        await asyncio.wait([busy])
        os.kill(second, signal.SIGTERM)
        assert "no replica is left" in str(await asyncio.wait_for(engine.wait_dead(), 10))
        with pytest.raises(EngineDeadError):
            await collect(engine, [5], SHORT)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    engine.shutdown()


def start_later(local, seconds):
    """Give a busy machine time to ask before the next process is ready."""
    plan_restart = local._plan_restart

    def plan_later(rank, place, *args, **options):
        outlook = plan_restart(rank, place, *args, **options)
        place.due += seconds
        return outlook

    local._plan_restart = plan_later


@pytest.mark.long
@pytest.mark.slow
def test_another_is_started_for_one_that_dies_and_none_for_one_that_leaves(tiny_llama, alone, caplog):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama), restart=True)
    replicas = engine.replicas

    async def run():
        before = process_ids(replicas)
        os.kill(before[0], signal.SIGKILL)
        await becomes(lambda: len(process_ids(replicas)) == 2 and process_ids(replicas)[0] != before[0], 30)
        await becomes(lambda: sorted(replicas.group.table.open) == [0, 1], 30)
        assert process_ids(replicas)[1] == before[1]
        outputs = await asyncio.gather(*[collect(engine, [5], SHORT) for _ in range(4)])
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        os.kill(process_ids(replicas)[1], signal.SIGTERM)
        await becomes(lambda: "Replica 1 has left." in caplog.text, 30)
        assert replicas.group.table.open == [0]
        # and now the only one that is left: until it is back, requests wait
        running = asyncio.create_task(collect(engine, [5] * 4, LONG))
        await becomes(lambda: engine.stats.num_running)
        os.kill(process_ids(replicas)[0], signal.SIGKILL)
        await becomes(lambda: not is_healthy(engine))
        with pytest.raises(EngineDeadError, match="Another engine is being started"):
            engine.check_health()
        assert tokens_of([await collect(engine, [5], SHORT)]) == tokens_of(outputs[:1])
        engine.check_health()
        assert tokens_of([await running]) == tokens_of(alone.generate([[5] * 4], LONG, use_tqdm=False))
        # and for how long is limited
        replicas.group.failover.timeout = 0.5
        start_later(replicas._launcher.local, 5.0)
        running = [asyncio.create_task(collect(engine, [5] * 4, LONG)) for _ in range(2)]
        await becomes(lambda: engine.stats.num_running)
        os.kill(process_ids(replicas)[0], signal.SIGKILL)
        await asyncio.wait(running)
        [reason] = {str(task.exception()) for task in running}
        with pytest.raises(EngineDeadError, match="Another engine is being started") as refusal:
            await collect(engine, [5], SHORT)
        assert str(refusal.value) == reason
        await becomes(lambda: is_healthy(engine), 30)
        await collect(engine, [5], SHORT)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    engine.shutdown()


@pytest.mark.slow
def test_a_request_that_kills_is_given_up_and_harms_nobody_else(tiny_llama, alone, caplog):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama, data_parallel_size=3, sampler_cls=FailingSampler), restart=True)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=1500, ignore_eos=True) for seed in range(6)]
    expected = tokens_of(alone.generate([[5 + i] * 4 for i in range(6)], params, use_tqdm=False))

    async def run():
        streams = [asyncio.create_task(collect(engine, [5 + i] * 4, params[i])) for i in range(6)]
        await becomes(lambda: engine.stats.num_running > 1)  # not 6: who began first may have finished
        with pytest.raises(RequestGivenUpError, match="at least 3 processes"):
            await collect(engine, [9], SamplingParams(temperature=1.0, seed=14))
        assert tokens_of(await asyncio.gather(*streams)) == expected
        await becomes(lambda: states(engine) == ["ready"] * 3, 30)

    asyncio.run(run())
    assert sum(status.num_deaths for status in engine.replicas.statuses()) == MAX_DEATHS_IN_COMPANY + NUM_TRIALS, (
        "SIGKILL may come from outside"
    )
    assert engine.metrics.count("num_lost_requests") == 1
    engine.shutdown()
    refusal = as_api_error(RequestGivenUpError("It kills."))
    assert (refusal.status_code, refusal.headers["x-should-retry"]) == (500, "false"), "or clients would send it again"


def test_what_keeps_replicas_from_starting_is_told_in_its_words(tiny_llama, tmp_path):
    with pytest.raises(ModelLoadError, match="There is no model"):
        AsyncLLMEngine.from_engine_args(args_for(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="data_parallel_size is 0"):
        args_for(tiny_llama, data_parallel_size=0)
    with pytest.raises(ConfigError, match="data_parallel_routing is 'best'"):
        args_for(tiny_llama, data_parallel_routing="best")
    with pytest.raises(ConfigError, match="leave out in_process"):
        AsyncLLMEngine.from_engine_args(args_for(tiny_llama), in_process=True)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        AsyncLLMEngine.from_engine_args(args_for(tiny_llama, num_gpu_blocks_override=None, kv_cache_memory_bytes=10))


@pytest.mark.slow
def test_replicas_end_with_their_frontend_and_leave_no_socket(tiny_llama):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        check_that_nothing_is_left(tiny_llama, Path(folder))


def check_that_nothing_is_left(tiny_llama, tmp_path):
    program = f"""
        import time
        from minivllm.config import EngineArgs
        from minivllm.engine.async_llm_engine import AsyncLLMEngine
        args = EngineArgs({tiny_llama!r}, skip_tokenizer_init=True, num_gpu_blocks_override=300, data_parallel_size=2)
        engine = AsyncLLMEngine.from_engine_args(args)
        processes = [status.process_id for status in engine.replicas.statuses()]
        print(*processes, engine.replicas._launcher.coordinator.process_id, flush=True)
        time.sleep(100)
    """
    frontend = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    processes = [psutil.Process(int(number)) for number in frontend.stdout.readline().split()]
    assert len(processes) == 3
    assert any(path.name.startswith("minivllm-") for path in tmp_path.iterdir())
    frontend.kill()
    frontend.wait()
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert not any(path.name.startswith("minivllm-") for path in tmp_path.iterdir())


@pytest.mark.slow
def test_an_engine_that_nobody_has_any_more_ends(tiny_llama):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama))
    processes = [psutil.Process(number) for number in process_ids(engine.replicas)]
    del engine
    gc.collect()
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_replicas_of_several_workers_each(tiny_llama, alone):
    """Two replicas of two ranks."""
    prompts, params = workload(12, seed=2)
    llm = LLM(**replace(args_for(tiny_llama), tensor_parallel_size=2).__dict__)
    assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == tokens_of(alone.generate(prompts, params, use_tqdm=False))
    llm.llm_engine.shutdown()
