"""More and fewer replicas while requests run: each request gets the tokens that it would have got."""

from __future__ import annotations

import asyncio

import pytest
from test_data_parallel import alone, args_for, becomes, collect, metric, process_ids, tokens_of, workload  # noqa: F401

from minivllm.data_parallel.liveness import MAX_REPLICAS
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.errors import ConfigError, RequestError


@pytest.fixture(scope="module")
def engine(tiny_llama):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama), restart=True)
    yield engine
    engine.shutdown()


def states(engine):
    return [(status.rank, status.state) for status in engine.replicas.statuses()]


def all_ready(engine, count):
    return states(engine) == [(rank, "ready") for rank in range(count)]


async def scale(engine, size, seconds=60.0):
    engine.replicas.scale(size)
    await becomes(lambda: engine.num_engines == size and all_ready(engine, size), seconds)


def test_from_two_to_four_to_one_under_load(engine, alone, caplog):  # noqa: F811
    prompts, params = workload(40)
    expected = tokens_of(alone.generate(prompts, params, use_tqdm=False))
    answers = []

    async def run():
        is_over = False

        async def keep_asking(start):
            number = start
            while not is_over:
                place = number % len(prompts)
                answers.append(
                    (place, [each.token_ids for each in (await collect(engine, prompts[place], params[place])).outputs])
                )
                number += 7

        asking = [asyncio.create_task(keep_asking(start)) for start in range(6)]
        await scale(engine, 4)
        num_before = len(answers)
        await becomes(lambda: len(answers) > num_before + 10, 60.0)
        await scale(engine, 1)
        is_over = True
        await asyncio.gather(*asking)
        await becomes(lambda: len(process_ids(engine.replicas)) == 1)

    asyncio.run(run())
    assert [(place, tokens) for place, tokens in answers if tokens != expected[place]] == []
    assert min(metric(engine, "generation_tokens", rank) for rank in range(4)) > 0, "all of them worked"
    assert metric(engine, "num_lost_requests", 3) == metric(engine, "num_resumed_requests", 3) == 0
    assert "Replica 3 is draining" in caplog.text and "Replica 3 has left." in caplog.text


def test_a_coordinator_that_is_started_again_knows_how_many_there_are_to_be(engine):
    async def run():
        await scale(engine, 2)
        launcher = engine.replicas._launcher
        old = launcher.coordinator
        old.kill()
        await becomes(lambda: launcher.coordinator is not old and launcher.coordinator.poll() is None, 30.0)
        await asyncio.sleep(0.5)
        assert all_ready(engine, 2)
        await scale(engine, 1)

    asyncio.run(run())


def test_a_rank_that_was_left_out_is_used_again(engine):
    async def run():
        await scale(engine, 2)
        first = engine.replicas.statuses()[1].process_id
        engine.replicas.scale(1)
        await becomes(lambda: engine.num_engines == 1)
        engine.replicas.scale(2)
        await becomes(lambda: all_ready(engine, 2) and engine.replicas.statuses()[1].process_id != first, 60.0)
        prompts, params = workload(4)
        found = [await collect(engine, prompts[0], params[0]) for _ in range(3)]
        assert len({tuple(each.outputs[0].token_ids) for each in found}) == 1
        with pytest.raises(RequestError, match="must be from 0 to 1"):
            await collect(engine, prompts[0], params[0], data_parallel_rank=2)
        await collect(engine, prompts[0], params[0], data_parallel_rank=1)

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, -1, MAX_REPLICAS + 1])
def test_numbers_that_cannot_be(engine, size):
    with pytest.raises(ConfigError, match=f"size is {size}, but must be from 1 to {MAX_REPLICAS}"):
        engine.replicas.scale(size)


def test_one_engine_cannot_be_scaled(tiny_llama):
    engine = AsyncLLMEngine.from_engine_args(args_for(tiny_llama, data_parallel_size=1))
    with pytest.raises(ConfigError, match="start it with --data-parallel-size"):
        engine.replicas.scale(2)
    engine.shutdown()
