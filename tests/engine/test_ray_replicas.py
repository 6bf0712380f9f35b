"""Replicas on a Ray cluster of three nodes: the tokens of one engine, whatever happens to an actor or a whole node, and more or fewer of them."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from ray_nodes import WHY_NOT, RayNodes
from test_data_parallel import alone, args_for, becomes, collect, metric, tokens_of, workload  # noqa: F401

pytest.importorskip("ray", reason=WHY_NOT)

from minivllm import LLM, SamplingParams
from minivllm.engine.async_llm_engine import AsyncLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.long]

STREAMS = [[5, 6 + i] for i in range(8)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes():
    made = RayNodes(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(nodes, tiny_llama):
    args = args_for(tiny_llama, data_parallel_size=3, data_parallel_backend="ray", ray_address=nodes.address)
    engine = AsyncLLMEngine.from_engine_args(args, restart=True)
    yield engine
    left = [process for node in nodes.ids for process in nodes.processes(node, "minivllm")]
    engine.shutdown()
    assert psutil.wait_procs(left, timeout=10)[1] == []


@pytest.fixture(scope="module")
def expected(alone):  # noqa: F811
    return tokens_of(alone.generate(STREAMS, PARAMS, use_tqdm=False))


def states(engine):
    return [status.state for status in engine.replicas.statuses()]


async def all_ready(engine, count=3):
    await becomes(lambda: engine.num_engines == count and states(engine) == ["ready"] * count, 90.0)


def check_streams(engine, expected, disturb):
    """Streams are what they should be though something happens to the replicas under them."""

    async def run():
        await all_ready(engine)
        before = [status.process_id for status in engine.replicas.statuses()]
        begun = set()

        async def read(number):
            outputs = []
            async for output in engine.generate(STREAMS[number], PARAMS):
                begun.add(number)
                outputs.append(output)
            return outputs[-1]

        streams = [asyncio.create_task(read(number)) for number in range(len(STREAMS))]
        await becomes(lambda: len(begun) == len(STREAMS))
        await asyncio.to_thread(disturb)
        found = tokens_of(await asyncio.gather(*streams))
        assert found == expected
        return before

    return asyncio.run(run())


def actor_of(process):
    """The actor that has started a replica's process."""
    return psutil.Process(process).parent()


def test_they_are_spread_over_the_nodes_and_give_the_tokens_of_one_engine(nodes, engine, alone):  # noqa: F811
    assert [len(nodes.processes(node, "data_parallel.engine_core_proc")) for node in nodes.ids] == [1, 1, 1]
    prompts, params = workload(30)

    async def run():
        await all_ready(engine)
        return await asyncio.gather(*[collect(engine, *item) for item in zip(prompts, params, strict=True)])

    assert tokens_of(asyncio.run(run())) == tokens_of(alone.generate(prompts, params, use_tqdm=False))
    assert all(metric(engine, "generation_tokens", rank) for rank in range(3))
    assert all("tcp://" in address for address in engine.replicas._launcher._setup.known.input_addresses)


def test_a_replica_that_is_killed_is_started_again(engine, expected):
    victim = engine.replicas.statuses()[1].process_id
    check_streams(engine, expected, lambda: os.kill(victim, signal.SIGKILL))
    asyncio.run(all_ready(engine))
    assert engine.replicas.statuses()[1].process_id != victim


def test_an_actor_that_is_killed_takes_its_replica_along_and_both_are_started_again(engine, expected, caplog):
    victim = psutil.Process(engine.replicas.statuses()[2].process_id)
    check_streams(engine, expected, actor_of(victim.pid).kill)
    asyncio.run(all_ready(engine))
    assert not victim.is_running()
    assert "Replica 2 has ended: its process was lost with its Ray actor on " in caplog.text


def test_a_node_that_is_gone_loses_no_stream_and_the_next_one_gets_the_replica(nodes, engine, expected, caplog):
    before = check_streams(engine, expected, lambda: nodes.kill(nodes.ids[0]))

    async def wait_for_notice():
        await becomes(lambda: "waits for a node with 1 free CPU." in caplog.text, 90.0)
        assert sorted(states(engine)) == ["ready", "ready", "starting"]
        await asyncio.to_thread(nodes.add)
        await all_ready(engine)

    asyncio.run(wait_for_notice())
    assert "was lost with its node on " in caplog.text
    assert len(set(before) & {status.process_id for status in engine.replicas.statuses()}) == 2
    check_streams(engine, expected, lambda: None)


def test_when_a_node_only_loses_its_ray_the_replica_on_it_ends(nodes, engine, expected):
    node = nodes.ids[0]
    [replica] = nodes.processes(node, "data_parallel.engine_core_proc")
    check_streams(engine, expected, lambda: nodes.kill_raylet(node))
    assert psutil.wait_procs([replica], timeout=20)[1] == []
    nodes.add()
    asyncio.run(all_ready(engine))


def test_from_three_to_one_and_with_a_fourth_node_to_four(nodes, engine, expected):
    def scale(size):
        engine.replicas.scale(size)

    check_streams(engine, expected, lambda: scale(1))
    asyncio.run(all_ready(engine, 1))
    nodes.add()
    scale(4)
    asyncio.run(all_ready(engine, 4))
    assert sorted(len(nodes.processes(node, "data_parallel.engine_core_proc")) for node in nodes.ids) == [1, 1, 1, 1]
    scale(3)
    asyncio.run(all_ready(engine))
    assert metric(engine, "num_lost_requests", 0) == 0


def test_offline_prompts_are_spread_over_the_cluster(nodes, engine, tiny_llama, alone):  # noqa: F811
    engine.replicas.scale(1)
    asyncio.run(all_ready(engine, 1))
    prompts, params = workload(10)
    llm = LLM(
        tiny_llama, skip_tokenizer_init=True, num_gpu_blocks_override=300, data_parallel_size=2, data_parallel_backend="ray",
        ray_address=nodes.address,
    )  # fmt: skip
    assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == tokens_of(alone.generate(prompts, params, use_tqdm=False))
