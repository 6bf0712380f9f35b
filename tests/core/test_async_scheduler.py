"""Steps in flight by small examples, on the shadow model."""

from __future__ import annotations

import pytest
from shadow import check_blocks, expected_tokens, shadow_engine

from minivllm import SamplingParams, Scheduler
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.static_batching import StaticBatchScheduler
from minivllm.errors import ConfigError

PROMPT = [5, 6, 7, 8, 9]


def make_engine(num_gpu_blocks=40, max_concurrent_batches=2, scheduler_cls=AsyncScheduler, **options):
    engine, executor = shadow_engine(
        num_gpu_blocks, scheduler_cls=scheduler_cls, max_concurrent_batches=max_concurrent_batches, **options
    )
    executor.batches = []
    executor.observe = lambda output: executor.batches.append([item.seq.request.request_id for item in output.scheduled])
    return engine, executor


def params(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def finish(engine):
    """Run to the end. The tokens of each request, or its error."""
    results = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                results[output.request_id] = output.error or [completion.token_ids for completion in output.outputs]
    return results


def tokens(prompt, sampling_params):
    return [expected_tokens(prompt, sampling_params, 0, 0, len(prompt) + sampling_params.max_tokens)]


@pytest.mark.parametrize(("max_concurrent_batches", "first"), [(1, 0), (2, 1), (3, 2)])
def test_the_next_steps_are_launched_before_the_results_of_the_oldest_come(max_concurrent_batches, first):
    engine, executor = make_engine(max_concurrent_batches=max_concurrent_batches)
    engine.add_request("a", PROMPT, params())
    engine.step()
    assert executor.num_steps == max_concurrent_batches and executor.num_in_flight == first
    (seq,) = engine.scheduler.running
    assert (len(seq.output_token_ids), seq.num_placeholders, seq.num_tokens_in_flight) == (1, first, first)
    assert seq.num_tokens == seq.num_computed_tokens + 1 == len(PROMPT) + 1 + first


def test_no_step_is_launched_for_a_sequence_that_ends_by_its_length():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(max_tokens=4))
    assert finish(engine) == {"a": tokens(PROMPT, params(max_tokens=4))}
    assert executor.num_steps == 4


def test_a_stop_token_is_noticed_a_step_late_and_the_surplus_step_is_dropped():
    whole = tokens(PROMPT, params())[0]
    stop = next(token for token in whole[1:] if token != whole[0])
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(stop_token_ids=[stop]))
    assert finish(engine) == {"a": [whole[: whole.index(stop) + 1]]}
    assert executor.num_steps == whole.index(stop) + 2
    assert engine.block_manager.get_num_free_gpu_blocks() == 40 and executor.num_in_flight == 0


def test_blocks_of_a_surplus_step_are_free_for_others_at_once():
    """The device runs steps in order: the surplus step has written before the new owner does. The shadow model would notice."""
    whole = tokens(PROMPT, params())[0]
    engine, executor = make_engine(num_gpu_blocks=3, block_size=4, watermark=0.0)
    engine.add_request("a", PROMPT, params(stop_token_ids=[whole[1]]))
    engine.add_request("b", PROMPT[::-1], params(max_tokens=7))
    while "a" in engine.scheduler.requests:
        engine.step()
    assert executor.num_in_flight == 1
    engine.step()
    assert executor.batches[-2:] == [["a"], ["b"]]
    assert finish(engine) == {"b": tokens(PROMPT[::-1], params(max_tokens=7))}


def test_sequences_with_penalties_wait_and_stay_in_one_batch():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(max_tokens=10, presence_penalty=0.5))
    engine.step()
    assert executor.num_in_flight == 0
    engine.add_request("b", PROMPT, params(max_tokens=10, presence_penalty=0.5))
    finish(engine)
    assert executor.batches == [["a"], ["b"], *[["a", "b"]] * 9]


def test_others_go_on_while_sequences_with_penalties_wait():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(presence_penalty=0.5))
    engine.add_request("b", PROMPT, params())
    finish(engine)
    assert executor.batches[:4] == [["a", "b"], ["b"], ["a", "b"], ["b"]]


def test_siblings_are_forked_before_the_next_step():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(n=3))
    assert finish(engine) == {"a": tokens(PROMPT, params()) * 3}
    assert [len(batch) for batch in executor.batches] == [1, *[3] * 5]


@pytest.mark.parametrize(("mode", "queue"), [("recompute", "waiting"), ("swap", "swapped")])
def test_the_token_of_a_preempted_sequence_arrives_and_may_finish_it(mode, queue):
    engine, executor = make_engine(num_gpu_blocks=4, num_cpu_blocks=4, block_size=4, watermark=0.0, preemption_mode=mode)
    long, short = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]
    engine.add_request("a", long, params(max_tokens=9))
    engine.add_request("b", short, params(max_tokens=2))
    finished_from, finish_sequence = [], engine.scheduler._finish

    def note_and_finish(seq, *args):
        finished_from.append(seq.status.value)
        finish_sequence(seq, *args)

    engine.scheduler._finish = note_and_finish
    assert finish(engine) == {"a": tokens(long, params(max_tokens=9)), "b": tokens(short, params(max_tokens=2))}
    assert finished_from == [queue, "running"] and executor.num_preempted == 1
    assert len(engine.scheduler.waiting) == len(engine.scheduler.swapped) == 0
    check_blocks(engine.scheduler)


def test_a_prompt_that_is_preempted_before_its_siblings_are_forked_is_computed_again():
    options = {"watermark": 0.0, "preemption_mode": "swap", "num_cpu_blocks": 4}
    engine, executor = make_engine(num_gpu_blocks=3, block_size=4, **options)
    engine.add_request("a", [1, 2, 3, 4, 5, 6, 7, 8], params(max_tokens=3))
    drawn = SamplingParams(temperature=1, seed=1, n=2, max_tokens=3, ignore_eos=True)  # siblings begin differently
    engine.add_request("b", [1, 2, 3, 4], drawn)
    assert finish(engine) == {
        "a": tokens([1, 2, 3, 4, 5, 6, 7, 8], params(max_tokens=3)),
        "b": [expected_tokens([1, 2, 3, 4], drawn, 1, index, 7) for index in range(2)],
    }
    assert executor.num_preempted == 1 and executor.num_swapped == 0


def test_the_prefix_cache_offers_nothing_of_a_step_that_failed():
    engine, executor = make_engine(block_size=2, enable_prefix_caching=True)
    executor.fail_at = {1}
    engine.add_request("a", PROMPT, params())
    assert "planned failure" in finish(engine)["a"]
    assert executor.num_steps == 2, "another step was in flight"
    assert engine.block_manager.get_cached_blocks() == frozenset()
    engine.add_request("b", PROMPT, params())
    assert finish(engine) == {"b": tokens(PROMPT, params())}


def test_an_id_may_be_used_again_while_a_surplus_step_is_in_flight():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params(max_tokens=20))
    engine.add_request("b", PROMPT, params(max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.abort_request("a")
    assert executor.num_in_flight == 1
    engine.add_request("a", PROMPT[:3], params())
    assert finish(engine)["a"] == tokens(PROMPT[:3], params())


@pytest.mark.parametrize("scheduler_cls", [Scheduler, StaticBatchScheduler])
def test_other_schedulers_run_with_one_step_in_flight(scheduler_cls):
    engine, executor = make_engine(scheduler_cls=scheduler_cls)
    engine.add_request("a", PROMPT, params())
    finish(engine)
    assert executor.most_in_flight == 1


def test_the_scheduler_can_be_replaced_when_only_surplus_steps_are_left():
    engine, executor = make_engine()
    engine.add_request("a", PROMPT, params())
    engine.step()
    with pytest.raises(ConfigError, match="unfinished requests"):
        engine.core.use_scheduler(Scheduler)
    engine.core.abort_requests(["a"])
    assert executor.num_in_flight == 1 and engine.core.has_unfinished_requests()
    engine.core.use_scheduler(Scheduler)
    assert executor.num_in_flight == 0


def test_a_surplus_step_that_fails_is_nobodys_failure():
    whole = tokens(PROMPT, params())[0]
    engine, executor = make_engine()
    executor.fail_at = {3}
    engine.add_request("a", PROMPT, params(stop_token_ids=[whole[1]]))
    messages = []
    while engine.core.has_unfinished_requests():
        messages += engine.core.step().outputs
        assert not engine.core.has_failed
    assert executor.num_steps == 3
    assert [message.finished for message in messages] == [False, True]
    assert [message.error for message in messages] == [None, None]
