"""The invariants of the design, over random workloads, on the real engine with a shadow model (tests/support/shadow.py).

`HYPOTHESIS_PROFILE=nightly` runs 1,000 examples of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from shadow import VOCAB_SIZE, check_blocks, expected_tokens, shadow_engine

from minivllm import SamplingParams, Scheduler, StaticBatchScheduler
from minivllm.errors import RequestError
from minivllm.scheduler_output import FREED_BLOCK


@dataclass
class Job:
    """One request of a workload: what it asks for, when it comes, and when it is given up, in steps."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: int
    abort_after: int | None


@dataclass
class Result:
    """What became of a job: its tokens by sequence, or its error."""

    finished: bool = False
    error: str | None = None
    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)


@st.composite
def jobs(draw, max_prompt: int, max_n: int) -> Job:
    # Few different beginnings, so that prompts often share a prefix.
    prefix = draw(st.sampled_from([[], [1] * 8, [1] * 8 + [2] * 8, [3, 4] * 10]))
    tail = draw(st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=12))
    prompt = (prefix + tail)[:max_prompt]
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 30)))
    params = SamplingParams(
        n=draw(st.integers(1, max_n)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 5)),
        ignore_eos=draw(st.booleans()) if max_tokens else False,
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
    )
    abort_after = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)))
    return Job(prompt, params, draw(st.integers(0, 15)), draw(st.integers(0, 2)), abort_after)


@st.composite
def engine_arguments(draw, *, scheduler_cls=None, policy=None):
    """Random limits of a shadow engine."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_num_seqs = draw(st.integers(1, 8))
    chunked = draw(st.booleans())
    max_model_len = draw(st.integers(20, 60))
    low = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    return {
        "num_gpu_blocks": draw(st.integers(3, 60)),
        "num_cpu_blocks": draw(st.sampled_from([0, 5, 50])),
        "block_size": block_size,
        "enable_prefix_caching": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.2])),
        "max_model_len": max_model_len,
        "scheduler_cls": scheduler_cls or draw(st.sampled_from([Scheduler, Scheduler, StaticBatchScheduler])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(low, low + 40)),
        "policy": policy or draw(st.sampled_from(["fcfs", "priority"])),
        "enable_chunked_prefill": chunked,
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_speculative_tokens": draw(st.sampled_from([0, 0, 1, 3, 8])),
        "prompt_lookup_min": draw(st.sampled_from([1, 2])),
        "window": draw(st.sampled_from([0, 0, 0, 1, 2, 5, 16])),
    }


@st.composite
def workloads(draw, *, scheduler_cls=None, policy=None, with_failures=False):
    """An engine with random limits, and random requests for it."""
    arguments = draw(engine_arguments(scheduler_cls=scheduler_cls, policy=policy))
    engine, executor = shadow_engine(**arguments)
    if with_failures:
        executor.fail_at = draw(st.sets(st.integers(1, 40), max_size=3))
    return engine, executor, draw(st.lists(jobs(40, arguments["max_num_seqs"]), min_size=1, max_size=12))


def run(engine, workload: list[Job], after_step=lambda outputs: None) -> dict[str, Result]:
    """Feed a workload to the engine, each job at its step, and collect the results."""
    results = {str(i): Result() for i in range(len(workload))}
    added: dict[str, int] = {}
    step = 0
    while len(added) < len(workload) or engine.has_unfinished_requests():
        for i, job in enumerate(workload):
            name = str(i)
            if job.arrival == step:
                added[name] = step
                try:
                    engine.add_request(name, job.prompt, job.params, priority=job.priority)
                except RequestError as error:
                    results[name].error = str(error)
            if name in added and job.abort_after is not None and step == added[name] + job.abort_after:
                if not results[name].finished:
                    results[name].error = "aborted"
                engine.abort_request(name)
        outputs = engine.step()
        for output in outputs:
            if output.finished:
                assert not results[output.request_id].finished, "finished twice"
                results[output.request_id].finished = True
                results[output.request_id].error = output.error
                results[output.request_id].tokens = [c.token_ids for c in output.outputs]
                results[output.request_id].reasons = [c.finish_reason for c in output.outputs]
                results[output.request_id].logprobs = [c.logprobs for c in output.outputs]
        check_blocks(engine.scheduler)
        for seq in engine.scheduler.running:
            table = engine.block_manager.get_block_table(seq)
            has_spare_blocks = len(table) > engine.block_manager.num_blocks_for(seq.num_tokens)
            assert not has_spare_blocks or seq.num_tokens_in_flight, "blocks of wrong drafts are kept"
            window, num_freed = engine.scheduler.config.window, table.count(FREED_BLOCK)
            num_behind = max(0, seq.num_computed_tokens - window + 1) // engine.block_manager.block_size if window else 0
            assert num_freed == num_behind or seq.num_tokens_in_flight, "a block behind the window is kept"
        after_step(outputs)
        step += 1
        assert step < 5000, f"the engine makes no progress: {vars(engine.scheduler)} {vars(engine.block_manager)}"
    return results


def expected_of(engine, job: Job) -> list[list[int]]:
    """The tokens that a job must give in this engine, one list for each of its sequences."""
    max_num_tokens = len(job.prompt) + (job.params.max_tokens or 10**6)
    config, cache_tokens = engine.scheduler_config, engine.cache_tokens
    # A window, a step's tokens and two blocks that are partly another's: so much of the cache suffices for any length.
    goes_on = config.window and config.enable_chunked_prefill
    goes_on = goes_on and config.window + config.max_num_batched_tokens + 2 * engine.block_manager.block_size <= cache_tokens
    limit = engine.core.model_config.max_model_len
    max_num_tokens = min(max_num_tokens, limit if goes_on else min(limit, cache_tokens + 1))
    return [expected_tokens(job.prompt, job.params, job.params.seed, index, max_num_tokens) for index in range(job.params.n)]


def describe(executor) -> None:
    """Let hypothesis' statistics show that the rare paths are reached."""
    event(f"windows: {executor.config.window > 0}")
    for name in ("num_swapped", "num_copied", "num_preempted", "num_mixed", "num_accepted"):
        event(f"{name} > 0: {getattr(executor, name) > 0}")


@pytest.mark.slow
@given(workloads())
def test_a_request_depends_on_itself_alone(workload):
    """Invariants 1, 2, 3 and 5: right tokens whatever the batch, preemption, chunking and cache; no block is lost."""
    engine, executor, jobs_ = workload
    results = run(engine, jobs_)
    describe(executor)
    for name, job in zip(results, jobs_, strict=True):
        result = results[name]
        if result.error is not None:
            assert not result.finished
            continue
        assert result.finished
        assert result.tokens == expected_of(engine, job)
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks
    assert engine.block_manager.get_num_free_cpu_blocks() == engine.block_manager.num_cpu_blocks
    assert not engine.output_processor.states
    assert engine.scheduler.num_running == 0


@pytest.mark.slow
@given(workloads(with_failures=True))
def test_a_failing_step_ends_its_own_requests_only(workload):
    """Invariants 1 and 6: a failure is an error of the requests in the step, and of no other; all blocks come back."""
    engine, executor, jobs_ = workload
    in_failed_steps: set[str] = set()

    def observe(output):
        if executor.num_steps + 1 in executor.fail_at:
            sequences = [*(item.seq for item in output.scheduled), *output.preempted, *output.swapped_in]
            in_failed_steps.update(seq.request.request_id for seq in sequences)

    executor.observe = observe
    results = run(engine, jobs_)
    failed = {name for name, result in results.items() if result.error and "planned failure" in result.error}
    assert failed == in_failed_steps
    event(f"failed: {bool(failed)}")
    for name, job in zip(results, jobs_, strict=True):
        result = results[name]
        if result.error is None:
            assert set(result.reasons) <= {"stop", "length"}
            assert result.tokens == expected_of(engine, job)
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks
    assert engine.block_manager.get_num_free_cpu_blocks() == engine.block_manager.num_cpu_blocks


@pytest.mark.slow
@given(workloads(), st.integers(1, 30))
def test_an_interrupted_step_ends_its_own_requests_only(workload, interrupted_step):
    """Ctrl-C in the middle of a step: its requests end, the next step says so, the others are right."""
    engine, executor, jobs_ = workload
    step, calls = engine.step, 0

    def observe(output):
        if executor.num_steps + 1 == interrupted_step:
            executor.num_steps += 1
            raise KeyboardInterrupt

    def step_and_go_on():
        nonlocal calls
        try:
            return step()
        except KeyboardInterrupt:
            calls += 1
            return []

    executor.observe, engine.step = observe, step_and_go_on
    results = run(engine, jobs_)
    event(f"interrupted: {calls == 1}")
    for name, job in zip(results, jobs_, strict=True):
        if results[name].error is None:
            assert results[name].tokens == expected_of(engine, job)
        else:
            assert calls == 1 or "KeyboardInterrupt" not in results[name].error
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks


@given(workloads(policy="fcfs"))
def test_nobody_is_overtaken_for_admission(workload):
    """Invariant 4: with FCFS, requests are first scheduled in the order of their arrival."""
    engine, executor, jobs_ = workload
    arrived: list[str] = []
    admitted: list[str] = []
    add = engine.scheduler.add_request

    def add_and_note(request):
        arrived.append(request.request_id)
        add(request)

    def observe(output):
        for item in output.scheduled:
            if item.seq.request.request_id not in admitted:
                admitted.append(item.seq.request.request_id)

    engine.scheduler.add_request, executor.observe = add_and_note, observe
    run(engine, jobs_)
    assert admitted == [name for name in arrived if name in admitted]


@pytest.mark.slow
@given(workloads(scheduler_cls=Scheduler))
def test_the_latest_arrival_is_preempted(workload):
    """When blocks run out, nobody who came earlier than a running sequence loses its blocks."""
    engine, executor, jobs_ = workload

    def observe(output):
        for victim in output.preempted:
            assert all(seq.order < victim.order for seq in engine.scheduler.running)

    executor.observe = observe
    run(engine, jobs_)


@pytest.mark.slow
@given(workloads(scheduler_cls=StaticBatchScheduler))
def test_nobody_joins_a_static_batch(workload):
    """Until all that have begun are done, only requests begin that had come before the first of them, and in all no
    more of them than there are places: nobody joins, and no place is used twice.
    """
    engine, executor, jobs_ = workload
    batch: set[str] = set()
    waiting_at_start: set[str] = set()

    def observe(output):
        nonlocal batch, waiting_at_start
        names = {item.seq.request.request_id for item in output.scheduled}
        if not any(name in engine.scheduler.requests for name in batch):
            batch = set()
            waiting_at_start = set(engine.scheduler.requests)
        batch |= names
        assert batch <= waiting_at_start
        assert sum(jobs_[int(name)].params.n for name in batch) <= engine.scheduler.config.max_num_seqs

    executor.observe = observe
    run(engine, jobs_)


@pytest.mark.slow
@given(workloads(), st.integers(0, 10**6))
def test_a_refused_request_costs_nobody_a_block(workload, bad_token):
    """Invariant 6: what is refused at the door leaves queues, blocks and the other requests as they were."""
    engine, _, jobs_ = workload

    def add_a_bad_one(outputs):
        free = engine.block_manager.get_num_free_gpu_blocks()
        unfinished = engine.get_num_unfinished_requests()
        for prompt in ([], [VOCAB_SIZE + bad_token], [1] * 1001):
            try:
                engine.add_request("bad", prompt, SamplingParams())
                raise AssertionError("a bad request was let in")
            except RequestError as error:
                assert str(error).endswith(".")
        assert engine.block_manager.get_num_free_gpu_blocks() == free
        assert engine.get_num_unfinished_requests() == unfinished

    results = run(engine, jobs_, after_step=add_a_bad_one)
    assert all(result.finished or result.error for result in results.values())
