"""Scheduling, in small worked examples on a shadow model. Random workloads are in test_invariants.py."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from shadow import expected_tokens, shadow_engine

from minivllm import SamplingParams, Scheduler, StaticBatchScheduler
from minivllm.core.sequence_queue import SequenceQueue
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.errors import ConfigError, RequestError
from minivllm.scheduler_output import SchedulerOutput
from minivllm.simulation.engine import make_simulated_engine
from minivllm.simulation.replay import first_difference, replay

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def record_steps(engine, executor):
    """Phase and {request: tokens} of each step that runs from now on."""
    steps = []
    executor.observe = lambda output: steps.append(
        (output.phase, {item.seq.request.request_id: item.num_tokens for item in output.scheduled})
    )
    return steps


def run_all(engine):
    finished = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            if output.finished:
                finished.append(output.request_id)
    return finished


def test_by_default_a_step_is_either_prefill_or_decode():
    engine, executor = shadow_engine(100, max_num_seqs=4)
    steps = record_steps(engine, executor)
    engine.add_request("a", [1] * 5, SamplingParams(max_tokens=4, **GREEDY))
    engine.step()
    engine.step()
    engine.add_request("b", [2] * 7, SamplingParams(max_tokens=2, **GREEDY))
    run_all(engine)
    assert steps == [
        ("prefill", {"a": 5}),
        ("decode", {"a": 1}),
        ("prefill", {"b": 7}),
        ("decode", {"a": 1, "b": 1}),
        ("decode", {"a": 1}),
    ]


def test_chunked_prefill_fills_one_budget_with_decodes_first():
    engine, executor = shadow_engine(100, max_num_seqs=4, max_num_batched_tokens=6, enable_chunked_prefill=True)
    steps = record_steps(engine, executor)
    engine.add_request("a", [1] * 4, SamplingParams(max_tokens=4, **GREEDY))
    engine.step()
    engine.add_request("b", [2] * 12, SamplingParams(max_tokens=2, **GREEDY))
    run_all(engine)
    assert steps == [
        ("prefill", {"a": 4}),
        ("mixed", {"a": 1, "b": 5}),
        ("mixed", {"a": 1, "b": 5}),
        ("mixed", {"a": 1, "b": 2}),
        ("decode", {"b": 1}),
    ]


def test_the_token_budget_bounds_a_prefill_step():
    engine, executor = shadow_engine(100, max_num_seqs=8, max_num_batched_tokens=10, max_model_len=10)
    steps = record_steps(engine, executor)
    for name in "abcd":
        engine.add_request(name, [1] * 4, SamplingParams(max_tokens=1, **GREEDY))
    run_all(engine)
    assert steps == [("prefill", {"a": 4, "b": 4}), ("prefill", {"c": 4, "d": 4})]


def test_a_finished_sequence_makes_room_at_once():
    engine, executor = shadow_engine(100, max_num_seqs=2)
    steps = record_steps(engine, executor)
    for name, length in (("a", 2), ("b", 4), ("c", 2)):
        engine.add_request(name, [1], SamplingParams(max_tokens=length, **GREEDY))
    run_all(engine)
    assert steps[2] == ("prefill", {"c": 1})


def test_a_static_batch_waits_for_its_slowest():
    engine, executor = shadow_engine(100, max_num_seqs=2, scheduler_cls=StaticBatchScheduler)
    steps = record_steps(engine, executor)
    for name, length in (("a", 2), ("b", 4), ("c", 2)):
        engine.add_request(name, [1], SamplingParams(max_tokens=length, **GREEDY))
    run_all(engine)
    assert [sorted(tokens) for _, tokens in steps] == [["a", "b"], ["a", "b"], ["b"], ["b"], ["c"], ["c"]]


def test_a_preempted_member_of_a_static_batch_comes_before_newcomers_of_higher_priority():
    engine, executor = shadow_engine(
        5, block_size=4, max_num_seqs=2, watermark=0, policy="priority", scheduler_cls=StaticBatchScheduler
    )
    for name in "ab":
        engine.add_request(name, [1] * 7, SamplingParams(max_tokens=6, **GREEDY), priority=1)
    steps = record_steps(engine, executor)
    while not executor.num_preempted:
        engine.step()
    for name in "cd":
        engine.add_request(name, [1] * 3, SamplingParams(max_tokens=2, **GREEDY), priority=0)
    assert run_all(engine) == ["a", "b", "c", "d"]
    assert all(not ({"a", "b"} & tokens.keys() and {"c", "d"} & tokens.keys()) for _, tokens in steps)


def test_a_reused_name_does_not_join_a_static_batch():
    engine, executor = shadow_engine(100, max_num_seqs=2, scheduler_cls=StaticBatchScheduler)
    engine.add_request("short", [1], SamplingParams(max_tokens=1, **GREEDY))
    engine.add_request("long", [1], SamplingParams(max_tokens=5, **GREEDY))
    engine.step()
    steps = record_steps(engine, executor)
    engine.add_request("short", [1], SamplingParams(max_tokens=1, **GREEDY))
    assert run_all(engine) == ["long", "short"]
    assert steps[-1] == ("prefill", {"short": 1})


def test_priority_goes_before_arrival():
    engine, _ = shadow_engine(100, max_num_seqs=1, policy="priority")
    engine.add_request("late", [1], SamplingParams(max_tokens=1), priority=1)
    engine.add_request("soon", [1], SamplingParams(max_tokens=1), priority=0)
    engine.add_request("also soon", [1], SamplingParams(max_tokens=1), priority=0)
    assert run_all(engine) == ["soon", "also soon", "late"]


def prioritized(num_gpu_blocks=100, chunked=False, **options):
    """An engine under "priority", and what adds a request with a prompt of four tokens, or of another length."""
    engine, executor = shadow_engine(num_gpu_blocks, policy="priority", watermark=0, enable_chunked_prefill=chunked, **options)

    def add(name, priority, max_tokens=9, prompt_len=4, **params):
        engine.add_request(name, [1] * prompt_len, SamplingParams(max_tokens=max_tokens, **params, **GREEDY), priority=priority)

    return engine, add, record_steps(engine, executor)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("short_of", ["places", "blocks"])
def test_an_urgent_request_preempts_less_urgent_ones_for_a_place_or_for_blocks(short_of, mode, chunked):
    limits = {"places": {"max_num_seqs": 3}, "blocks": {"num_gpu_blocks": 6, "max_num_seqs": 8}}[short_of]
    engine, add, steps = prioritized(num_cpu_blocks=20, preemption_mode=mode, chunked=chunked, **limits)
    for name, priority in (("middle", 1), ("low", 2), ("lowest", 3)):
        add(name, priority)
    for _ in range(2):
        engine.step()
    del steps[:]
    add("urgent", 0, max_tokens=3)
    engine.step()
    assert steps[0][1]["urgent"] == 4 and "lowest" not in steps[0][1]
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["urgent", "middle", "low"]
    assert run_all(engine)[0] == "urgent"
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "priority,options", [(1, {}), (0, {"priority_preemption": False}), (0, {"scheduler_cls": StaticBatchScheduler})]
)
def test_nobody_is_preempted_for_an_equal_or_if_it_is_turned_off_or_for_a_place_in_a_static_batch(priority, options, chunked):
    engine, add, _ = prioritized(max_num_seqs=1, chunked=chunked, **options)
    add("first", 1)
    engine.step()
    add("second", priority)
    assert run_all(engine) == ["first", "second"]
    assert engine.num_preemptions == 0


def test_an_urgent_request_of_several_answers_takes_as_many_places_as_it_needs():
    engine, add, _ = prioritized(max_num_seqs=4)
    for name in "abcd":
        add(name, 1)
    engine.step()
    add("urgent", 0, n=2, seed=1)
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["urgent", "urgent", "a", "b"]


@pytest.mark.parametrize("chunked", [False, True])
def test_nobody_is_preempted_in_vain(chunked):
    """The first one holds so much that the urgent one would not fit even without the other."""
    engine, add, _ = prioritized(10, max_num_seqs=4, chunked=chunked)
    add("as urgent", 0, prompt_len=20, max_tokens=4)
    add("low", 1, max_tokens=12)
    engine.step()
    add("urgent", 0, prompt_len=34, max_tokens=1)
    assert run_all(engine) == ["as urgent", "urgent", "low"]
    assert engine.num_preemptions == 1
    assert engine.block_manager.get_num_free_gpu_blocks() == 10


def test_shared_blocks_are_counted_once_when_sequences_make_room():
    """Both answers share the prompt's blocks, so that both must give way, and what the prefix cache keeps of them is not counted as free."""
    engine, add, _ = prioritized(6, max_num_seqs=4, enable_prefix_caching=True)
    add("low", 1, prompt_len=16, n=2, seed=1)
    for _ in range(2):
        engine.step()
    add("urgent", 0, prompt_len=24, max_tokens=1)  # begins with the tokens of the other
    [done] = engine.step()
    assert (done.request_id, done.metrics.num_cached_tokens) == ("urgent", 16)
    assert engine.num_preemptions == 2 and not engine.scheduler.running
    assert run_all(engine) == ["low"]
    assert engine.block_manager.get_num_free_gpu_blocks() == 6


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_when_blocks_run_out_the_latest_arrival_is_preempted_and_comes_back(mode):
    engine, executor = shadow_engine(4, num_cpu_blocks=4, block_size=4, max_num_seqs=4, watermark=0, preemption_mode=mode)
    steps = record_steps(engine, executor)
    engine.add_request("a", [1] * 7, SamplingParams(max_tokens=6, **GREEDY))
    engine.add_request("b", [2] * 7, SamplingParams(max_tokens=6, **GREEDY))
    first, second = engine.scheduler.requests.values()
    assert run_all(engine) == ["a", "b"]
    assert (first.metrics.num_preemptions, second.metrics.num_preemptions) == (0, 1)
    recomputed = [tokens["b"] for phase, tokens in steps if phase == "prefill" and "b" in tokens]
    assert recomputed == ([7, 9] if mode == "recompute" else [7]), "recompute computes prompt and output again"


def test_swap_falls_back_to_recompute_when_the_host_is_full():
    engine, executor = shadow_engine(4, num_cpu_blocks=1, block_size=4, max_num_seqs=4, watermark=0, preemption_mode="swap")
    for name in "ab":
        engine.add_request(name, [1] * 7, SamplingParams(max_tokens=6, **GREEDY))
    assert run_all(engine) == ["a", "b"]
    assert executor.num_preempted == 1
    assert executor.num_swapped == 0


def test_siblings_share_the_prompt_and_copy_on_write():
    engine, executor = shadow_engine(100, block_size=4, max_num_seqs=3)
    engine.add_request("a", [1] * 6, SamplingParams(n=3, seed=0, max_tokens=3, ignore_eos=True))
    engine.step()
    request = engine.scheduler.requests["a"]
    tables = [engine.block_manager.get_block_table(seq) for seq in request.sequences]
    assert len(tables) == 3
    assert tables[0] == tables[1] == tables[2]
    engine.step()
    assert executor.num_copied == 2, "two of three get a copy, the last writes in place"
    run_all(engine)


def test_places_for_siblings_are_kept_from_the_start():
    engine, executor = shadow_engine(100, max_num_seqs=3)
    engine.add_request("a", [1], SamplingParams(n=2, max_tokens=2, **GREEDY))
    engine.add_request("b", [1], SamplingParams(n=2, max_tokens=2, **GREEDY))
    steps = record_steps(engine, executor)
    engine.step()
    assert steps == [("prefill", {"a": 1})]
    run_all(engine)


def test_an_aborted_request_gives_its_blocks_back_wherever_it_is():
    engine, _ = shadow_engine(4, num_cpu_blocks=4, block_size=4, max_num_seqs=2, watermark=0, preemption_mode="swap")
    for name in "abc":
        engine.add_request(name, [1] * 7, SamplingParams(max_tokens=6, **GREEDY))
    while not engine.scheduler.swapped:
        engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.swapped), len(engine.scheduler.waiting)) == (1, 1, 1)
    for name in ("b", "c", "a", "a", "nobody"):
        engine.abort_request(name)
    assert not engine.has_unfinished_requests()
    assert engine.block_manager.get_num_free_gpu_blocks() == 4
    assert engine.block_manager.get_num_free_cpu_blocks() == 4


def test_a_failing_step_gives_its_requests_the_cause_and_the_next_ones_go_on():
    engine, executor = shadow_engine(100, max_num_seqs=1)
    executor.fail_at = {2}
    for name in "ab":
        engine.add_request(name, [1], SamplingParams(max_tokens=3, **GREEDY))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert "planned failure" in outputs["a"].error
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert outputs["b"].error is None
    assert len(outputs["b"].outputs[0].token_ids) == 3


def test_a_later_prompt_reuses_the_blocks_of_an_earlier_one():
    engine, executor = shadow_engine(100, block_size=4, max_num_seqs=2, enable_prefix_caching=True)
    steps = record_steps(engine, executor)
    engine.add_request("a", list(range(1, 13)), SamplingParams(max_tokens=1))
    run_all(engine)
    engine.add_request("b", list(range(1, 13)), SamplingParams(max_tokens=1))
    request = engine.scheduler.requests["b"]
    run_all(engine)
    assert steps == [("prefill", {"a": 12}), ("prefill", {"b": 4})]
    assert request.metrics.num_cached_tokens == 8


def test_a_request_with_a_salt_reuses_only_blocks_of_its_salt_and_is_replayed_so():
    engine = make_simulated_engine(enable_prefix_caching=True, block_size=4)
    found = []
    for number, salt in enumerate((None, "a", "b", "a", None)):
        prompt = {"prompt_token_ids": list(range(1, 14)), **({"cache_salt": salt} if salt else {})}
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=1, **GREEDY))
        (output,) = engine.step()
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 12, 12]
    assert first_difference(engine.trace, replay(engine.trace)) is None


@pytest.mark.parametrize("salt", ["", 3, b"a", ["a"], "\ud800"])
def test_a_salt_is_a_string(salt):
    engine = make_simulated_engine()
    with pytest.raises(RequestError, match="cache_salt"):
        engine.add_request("a", {"prompt_token_ids": [1], "cache_salt": salt})
    assert not engine.has_unfinished_requests()


def test_times_of_a_request_are_kept():
    engine, _ = shadow_engine(100, max_num_seqs=1)
    engine.add_request("a", [1], SamplingParams(max_tokens=3, **GREEDY))
    engine.add_request("b", [1], SamplingParams(max_tokens=2, **GREEDY))
    first, second = engine.scheduler.requests.values()
    run_all(engine)
    times = first.metrics
    assert (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time) == (0, 0, 1, 3)
    times = second.metrics
    assert (times.first_scheduled_time, times.time_to_first_token, times.latency) == (3, 4, 5)


def test_a_queue_keeps_order_and_forgets_what_is_removed():
    engine, _ = shadow_engine(10, max_num_seqs=1)
    for i in range(4):
        engine.add_request(str(i), [1], SamplingParams())
    sequences = [request.sequences[0] for request in engine.scheduler.requests.values()]
    queue = SequenceQueue()
    for i in (2, 0, 3, 1):
        queue.add(sequences[i])
    queue.remove(sequences[0])
    assert [seq.request.request_id for seq in queue] == ["1", "2", "3"]
    assert queue.pop() is sequences[1]
    queue.add(sequences[0])
    assert queue.first() is sequences[0]
    assert len(queue) == 3
    assert sequences[1] not in list(queue)
    with pytest.raises(IndexError, match="empty"):
        SequenceQueue().pop()


@pytest.mark.parametrize(
    "args,sentence",
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "less than max_num_seqs"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"preemption_mode": "kill"}, "preemption_mode is 'kill'"),
    ],
)
def test_limits_that_cannot_work_are_refused(args, sentence):
    with pytest.raises(ConfigError, match=sentence):
        shadow_engine(10, **args)


def test_more_continuations_than_places_are_refused():
    engine, _ = shadow_engine(10, max_num_seqs=2)
    with pytest.raises(RequestError, match="n is 3, but at most max_num_seqs = 2"):
        engine.add_request("a", [1], SamplingParams(n=3))


def test_a_failing_step_ends_those_too_whose_blocks_it_should_have_brought_back():
    """With priorities, a sequence may be swapped in and yet not scheduled: the budget is spent on an earlier one."""
    found = 0
    for seed in range(300):
        rng = random.Random(seed)
        engine, executor = shadow_engine(
            30, num_cpu_blocks=100, block_size=2, max_num_seqs=4, max_num_batched_tokens=5, max_model_len=200, watermark=0,
            enable_chunked_prefill=True, preemption_mode="swap", policy="priority",
        )  # fmt: skip

        def observe(output, executor=executor):
            nonlocal found
            scheduled = {item.seq for item in output.scheduled}
            if any(seq not in scheduled for seq in output.swapped_in):
                found += 1
                executor.fail_at = {executor.num_steps + 1}

        executor.observe = observe

        def add(name, low, high, max_tokens, priority, engine=engine, rng=rng):
            prompt = [rng.randint(1, 49) for _ in range(rng.randint(low, high))]
            engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, **GREEDY), priority=priority)

        add("d", 4, 4, 40, -5)
        add("e", 20, 20, rng.randint(5, 15), -5)
        for _ in range(8):
            engine.step()
        add("b", 20, 30, 3, 0)
        for _ in range(rng.randint(1, 6)):
            engine.step()
        add("a", 10, 24, 3, -1)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None or "planned failure" in output.error
    assert found > 0


class IdleScheduler(Scheduler):
    """A learner's first try: it schedules nothing."""

    def schedule(self):
        return SchedulerOutput()


def test_a_scheduler_that_schedules_nothing_is_named_instead_of_running_for_ever():
    engine, _ = shadow_engine(10, scheduler_cls=IdleScheduler)
    engine.add_request("a", [1], SamplingParams())
    with pytest.raises(RuntimeError, match="IdleScheduler scheduled nothing, though 1 request is unfinished"):
        engine.step()


def test_an_executor_with_too_few_results_fails_the_step_and_not_the_engine():
    engine, executor = shadow_engine(10)
    executor.execute_model = lambda request: []
    engine.add_request("a", [1], SamplingParams())
    (output,) = engine.step()
    assert "0 results for 1 sequences" in output.error
    assert not engine.has_unfinished_requests()


def test_outputs_do_not_change_after_they_are_given_out():
    engine, _ = shadow_engine(10)
    engine.add_request("a", [1], SamplingParams(max_tokens=3, **GREEDY))
    (first,) = engine.step()
    run_all(engine)
    assert len(first.outputs[0].token_ids) == 1
    assert first.metrics.finished_time is None


@pytest.mark.parametrize(
    "kwargs", [{"priority": "high"}, {"priority": 1.5}, {"arrival_time": "now"}, {"arrival_time": float("nan")}]
)
def test_a_place_in_the_queue_that_cannot_be_compared_is_refused(kwargs):
    engine, _ = shadow_engine(10, policy="priority")
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="must be a"):
        engine.add_request("b", [1], SamplingParams(), **kwargs)
    assert run_all(engine) == ["a"]


def test_the_queue_lets_go_of_aborted_requests():
    engine, _ = shadow_engine(10, max_num_seqs=1)
    requests = []
    for i in range(1000):
        engine.add_request(str(i), [1], SamplingParams())
        requests.append(weakref.ref(engine.scheduler.requests[str(i)]))
        if i:
            engine.abort_request(str(i))
    gc.collect()
    assert sum(request() is not None for request in requests) < 40


def interrupt_a_step(engine, executor):
    """Add two requests, and press Ctrl-C in their first step."""
    execute = executor.execute_model

    def interrupt(request):
        executor.execute_model = execute
        raise KeyboardInterrupt

    executor.execute_model = interrupt
    for name in "ab":
        engine.add_request(name, [1], SamplingParams(max_tokens=2, **GREEDY))
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_after_ctrl_c_the_next_step_reports_the_requests_that_it_ended():
    engine, executor = shadow_engine(10)
    interrupt_a_step(engine, executor)
    assert engine.has_unfinished_requests()
    outputs = engine.step()
    assert [(output.request_id, "KeyboardInterrupt" in output.error) for output in outputs] == [("a", True), ("b", True)]
    assert not engine.has_unfinished_requests()


def test_after_ctrl_c_aborted_requests_are_not_reported_and_the_engine_is_free_for_others():
    engine, executor = shadow_engine(10)
    interrupt_a_step(engine, executor)
    engine.abort_request("a")
    engine.add_request("a", [2], SamplingParams(max_tokens=1, **GREEDY))
    assert [(output.request_id, output.error is None) for output in [*engine.step(), *engine.step()]] == [
        ("b", False),
        ("a", True),
    ]
    interrupt_a_step(engine, executor)
    for name in "ab":
        engine.abort_request(name)
    assert not engine.has_unfinished_requests()
    AsyncLLMEngine.from_engine(engine).shutdown()
    engine.core.use_scheduler(Scheduler)  # as run_offline does


# -- sliding windows -------------------------------------------------------------------------------------------------------

WINDOWED = {"window": 5, "max_num_batched_tokens": 8, "max_num_seqs": 4, "enable_chunked_prefill": True, "watermark": 0.0}


def test_a_prompt_and_its_answer_may_be_longer_than_the_cache():
    """24 tokens have room; 60 + 30 pass through, 8 at a time, and the shadow sees that each looks at the 5 before it."""
    engine, executor = shadow_engine(6, block_size=4, **WINDOWED)
    steps, params = record_steps(engine, executor), SamplingParams(max_tokens=30, seed=0, **GREEDY)
    engine.add_request("a", [1, 2, 3] * 20, params)
    finished = []
    while engine.has_unfinished_requests():
        finished += engine.step()
    assert finished[-1].outputs[0].token_ids == expected_tokens([1, 2, 3] * 20, params, 0, 0, 90)
    assert steps[:8] == [("prefill", {"a": 8})] * 7 + [("prefill", {"a": 4})]


def test_of_prompts_that_cannot_go_on_the_latest_gives_way():
    """Neither can go on while the other holds blocks, and nothing else runs that could give any back."""
    engine, _ = shadow_engine(6, block_size=4, **WINDOWED)
    scheduler, manager = engine.scheduler, engine.block_manager
    for name in "ab":
        engine.add_request(name, [1] * 60, SamplingParams(max_tokens=1, **GREEDY))
        seq = scheduler.waiting.pop()
        manager.allocate(seq)
        scheduler._join_running(seq)
        seq.num_computed_tokens = 8
        assert manager.append_chunk_slots(seq, 4) == 4
        seq.num_computed_tokens = 12
    first, second = scheduler.running
    output = scheduler.schedule()
    assert (output.scheduled, output.preempted) == ([], [second])
    for _ in range(2):
        manager.gpu_allocator.allocate()
    (item,) = scheduler.schedule().scheduled
    assert (item.seq, item.num_tokens) == (first, 4), "as much as one block has room for"
