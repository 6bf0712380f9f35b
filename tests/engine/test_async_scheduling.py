"""When steps are scheduled while the device computes, what is said where that is impossible, and steps that fail in flight."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial

import pytest
from shadow import expected_tokens, shadow_engine

from minivllm import SamplingParams, Scheduler, StaticBatchScheduler
from minivllm.config import EngineArgs
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.data_parallel.messages import hash_config
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import AddRequest
from minivllm.engine.engine_config import EngineConfig, check_steps_in_flight
from minivllm.engine.engine_core_loop import MAX_FAILED_STEPS, EngineCoreLoop
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.simulation.engine import make_simulated_engine
from minivllm.worker.sampler import Sampler


class Mine(AsyncScheduler):
    """A scheduler of one's own that knows of steps in flight."""


def test_only_where_it_is_asked_for(tiny_llama):
    assert EngineConfig.from_engine_args(EngineArgs(tiny_llama, skip_tokenizer_init=True)).scheduler_cls is Scheduler
    for scheduler_cls in (None, Mine):
        args = EngineArgs(
            tiny_llama, skip_tokenizer_init=True, async_scheduling=True, scheduler_cls=scheduler_cls, sampler_cls=Sampler
        )
        assert EngineConfig.from_engine_args(args).scheduler_cls is (scheduler_cls or AsyncScheduler)


def test_replicas_with_and_without_it_belong_together(tiny_llama):
    args = [EngineArgs(tiny_llama, skip_tokenizer_init=True, async_scheduling=on) for on in (False, True)]
    assert len({hash_config(EngineConfig.from_engine_args(each)) for each in args}) == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_device_that_fails_in_every_step_is_given_up(async_scheduling):
    """A surplus step that fails behind a step that failed is no success between the two."""
    engine = make_simulated_engine(async_scheduling=async_scheduling, num_gpu_blocks=100)
    loop, params = EngineCoreLoop(engine.core), SamplingParams(max_tokens=10, ignore_eos=True)

    def fail(masks):
        raise RuntimeError("the device is gone")

    engine.executor.sample_tokens = lambda masks: partial(fail, masks)
    with pytest.raises(RuntimeError, match="steps in a row failed. The model failed in a step: RuntimeError: the device is gone"):
        for number in range(20):
            if not engine.core.scheduler.has_unfinished_requests():
                request = engine.input_processor.process_inputs(str(number), [1, 2, 3], params).core_request
                loop._handle(AddRequest(request))
            loop._step()
    assert int(request.request_id) <= MAX_FAILED_STEPS


def test_a_step_that_fails_while_it_is_launched_fails_in_its_turn():
    """It is recorded after the step before, keeps nothing of the step alive, and the others go on."""
    engine = make_simulated_engine(async_scheduling=True, num_gpu_blocks=100, trace=True)
    launch, kept = engine.executor.launch_model, []

    def launch_or_fail(request):
        if len(engine.trace.steps) == 2 and not kept:
            tensor = Tensor()
            kept.append(weakref.ref(tensor))
            raise RuntimeError("out of memory")
        return launch(request)

    engine.executor.launch_model = launch_or_fail
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        assert not kept or kept[0]() is None
    assert "out of memory" in outputs[-1].error and len(outputs[-1].outputs[0].token_ids) == 3
    assert [step.error is None for step in engine.trace][:4] == [True, True, True, False]  # then perhaps a surplus one
    EngineTrace.from_json(engine.trace.to_json())
    assert engine.block_manager.get_num_free_gpu_blocks() == 100


class Tensor:
    """Something that takes much memory."""


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"scheduler_cls": StaticBatchScheduler}, "scheduler_cls is StaticBatchScheduler, which is no AsyncScheduler"),
        ({"block_space_manager_cls": BlockSpaceManager}, "block_space_manager_cls is BlockSpaceManager, which may not know"),
    ],
)
def test_asked_for_where_it_is_impossible(args, cause):
    with pytest.raises(ConfigError, match=f"async_scheduling is on, but {cause}.*: leave it out."):
        check_steps_in_flight(EngineArgs(async_scheduling=True, **args))


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
