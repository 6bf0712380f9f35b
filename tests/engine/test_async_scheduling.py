"""When steps are scheduled while the device computes, and what is said where that is impossible."""

from __future__ import annotations

import asyncio

import pytest
from shadow import expected_tokens, shadow_engine

from minivllm import SamplingParams, Scheduler, StaticBatchScheduler
from minivllm.config import EngineArgs
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.engine_config import schedules_asynchronously
from minivllm.errors import ConfigError
from minivllm.worker.sampler import Sampler


class Mine(AsyncScheduler):
    """A scheduler of one's own that knows of steps in flight."""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_by_default_only_on_a_gpu_where_nothing_forbids_it(monkeypatch, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert schedules_asynchronously(EngineArgs()) == has_gpu
    assert schedules_asynchronously(EngineArgs(scheduler_cls=Mine)) == has_gpu
    for args in (
        {"device": "cpu"},
        {"tensor_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"scheduler_cls": Scheduler},
        {"scheduler_cls": StaticBatchScheduler},
        {"block_space_manager_cls": BlockSpaceManager},
        {"sampler_cls": Sampler},
        {"async_scheduling": False},
    ):
        assert not schedules_asynchronously(EngineArgs(**args))


def test_where_asked_for_on_a_cpu_too():
    assert schedules_asynchronously(EngineArgs(async_scheduling=True, device="cpu"))
    assert schedules_asynchronously(EngineArgs(async_scheduling=True, sampler_cls=Sampler))


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"tensor_parallel_size": 2}, "workers in processes of their own take one step at a time"),
        ({"scheduler_cls": StaticBatchScheduler}, "scheduler_cls is StaticBatchScheduler, which is no AsyncScheduler"),
        ({"block_space_manager_cls": BlockSpaceManager}, "block_space_manager_cls is BlockSpaceManager, which may not know"),
    ],
)
def test_asked_for_where_it_is_impossible(args, cause):
    with pytest.raises(ConfigError, match=f"async_scheduling is on, but {cause}.*: leave it out."):
        schedules_asynchronously(EngineArgs(async_scheduling=True, **args))


def test_streams_of_a_core_in_a_thread_that_hang_up_or_stop_while_a_step_is_in_flight():
    engine, executor = shadow_engine(60, scheduler_cls=AsyncScheduler, max_concurrent_batches=2, max_num_seqs=4)
    prompts = [[i + 1, 2, 3] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = [expected_tokens(prompt, params, 0, 0, 33) for prompt in prompts]

    async def read(asynchronous: AsyncLLMEngine, number: int) -> list[int]:
        tokens: list[int] = []
        async for output in asynchronous.generate({"prompt_token_ids": prompts[number]}, params, str(number)):
            tokens = output.outputs[0].token_ids
            if number % 3 == 0 and len(tokens) >= 4:
                break  # which aborts the request
        return tokens

    async def read_all() -> list[list[int]]:
        asynchronous = AsyncLLMEngine.from_engine(engine)
        try:
            return await asyncio.gather(*(read(asynchronous, number) for number in range(12)))
        finally:
            asynchronous.shutdown()

    for number, tokens in enumerate(asyncio.run(read_all())):
        assert tokens == (expected[number][: len(tokens)] if number % 3 == 0 else expected[number])
    assert executor.most_in_flight == 2
