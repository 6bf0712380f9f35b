"""A trace tells what the engine did, survives being saved, and is enough to take the same decisions again."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from shadow import shadow_engine
from test_invariants import run, workloads

from minivllm import LLM, SamplingParams, Scheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.engine.trace import EngineTrace, RequestRecord, SequenceKey, SequenceStep, StepRecord
from minivllm.errors import ConfigError
from minivllm.scheduler_output import FREED_BLOCK
from minivllm.simulation.engine import make_simulated_engine
from minivllm.simulation.replay import first_difference, replay


def traced(workload):
    """Run a random workload; its trace, and its results."""
    engine, _, jobs = workload
    trace = engine.start_trace()
    return trace, run(engine, jobs)


@given(workloads(with_failures=True))
def test_it_tells_the_tables_counts_and_queues_of_each_step(workload):
    engine, executor, jobs = workload
    manager, scheduler = engine.block_manager, engine.scheduler
    seen = []

    def observe(output):
        tables = {(seq.request.request_id, seq.index): tuple(manager.get_block_table(seq)) for seq in scheduler.running}
        swapped = {(seq.request.request_id, seq.index): tuple(manager.swapped_tables[seq.seq_id]) for seq in scheduler.swapped}
        counts = Counter(block for table in tables.values() for block in table if block != FREED_BLOCK)
        work = [(item.seq.request.request_id, item.seq.index, item.num_tokens) for item in output.scheduled]
        queues = (len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped), manager.get_num_free_gpu_blocks())
        seen.append((tables, swapped, {block: count for block, count in counts.items() if count > 1}, work, queues))

    executor.observe = observe
    trace = engine.start_trace()
    run(engine, jobs)
    assert [
        (
            step.block_tables,
            step.swapped_tables,
            step.ref_counts,
            [(part.request_id, part.index, part.num_tokens) for part in step.scheduled],
            (step.num_running, step.num_waiting, step.num_swapped, step.num_free_blocks),
        )
        for step in trace
    ] == seen


@given(workloads(with_failures=True))
def test_it_tells_what_became_of_each_request(workload):
    trace, results = traced(workload)
    for name, request in trace.requests.items():
        parts = [part for step in trace for part in step.scheduled if part.request_id == name]
        ends = [finish for step in trace for finish in step.finished if finish.request_id == name]
        assert sum(name in step.arrived for step in trace) <= 1
        assert request.num_preemptions == sum(p.request_id == name for step in trace for p in step.preempted)
        if results[name].finished:
            assert request.output_token_ids == results[name].tokens
            assert request.finish_reasons == results[name].reasons
            assert sorted(end.index for end in ends) == list(range(len(request.finish_reasons)))
            won = Counter(part.index for part in parts for _ in range(part.num_new_tokens))
            forked = len(request.output_token_ids) - 1  # siblings win their first token in their parent's step
            dropped = won.total() + forked - sum(map(len, request.output_token_ids))
            assert dropped == 0 if not any(part.num_drafts for part in parts) else dropped >= 0
        for before, part in itertools.pairwise(parts):
            assert part.action in ("prefill", "decode")
            assert before.index != part.index or part.context_len > before.context_len or request.num_preemptions


@given(workloads(with_failures=True))
def test_saved_and_loaded_it_is_the_same(workload):
    trace, _ = traced(workload)
    loaded = EngineTrace.from_json(json.loads(json.dumps(trace.to_json())))
    assert loaded == trace


@pytest.mark.slow
@given(workloads(with_failures=True))
def test_a_replay_takes_the_same_decisions(workload):
    """Without the model: same batches, block tables, preemptions, copies and cache hits, step by step."""
    trace, results = traced(workload)
    event(f"preempted: {any(step.preempted for step in trace)}")
    event(f"drafts: {any(part.num_drafts for step in trace for part in step.scheduled)}")
    event(f"aborted: {any(step.aborted for step in trace)}")
    replayed = replay(EngineTrace.from_json(json.loads(json.dumps(trace.to_json()))))
    assert first_difference(trace, replayed) is None
    for name, request in trace.requests.items():
        if results[name].finished and results[name].error is None:
            assert list(map(len, replayed.requests[name].output_token_ids)) == list(map(len, request.output_token_ids))


class Lifo(Scheduler):
    """Admits the latest arrival first."""

    def add_request(self, request):
        super().add_request(request)
        seq = request.sequences[0]
        self.waiting.remove(seq)
        seq.order = (-seq.order[0], 0)
        self.waiting.add(seq)


@pytest.fixture
def crowded_trace():
    engine, _ = shadow_engine(12, block_size=4, max_num_seqs=4)
    trace = engine.start_trace()
    for i in range(6):
        engine.add_request(str(i), [1 + i] * 6, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return trace


def test_a_replay_with_another_scheduler_shows_where_it_differs(crowded_trace):
    assert any(step.preempted for step in crowded_trace)
    difference = first_difference(crowded_trace, replay(crowded_trace, scheduler_cls=Lifo))
    assert difference.startswith("step 0, scheduled: ")


def test_a_run_on_an_engine_that_has_run_before_is_replayed():
    """Its free blocks are in another order than in a new one."""
    engine, _ = shadow_engine(20, 10, block_size=2, max_num_seqs=3, preemption_mode="swap")
    for i in range(2):
        trace = engine.start_trace()
        for j in range(4):
            engine.add_request(f"{i}{j}", [1 + j] * (3 + j), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    assert trace.config.free_gpu_blocks is not None
    assert first_difference(trace, replay(EngineTrace.from_json(json.loads(json.dumps(trace.to_json()))))) is None


def test_what_came_before_the_trace_cannot_be_replayed():
    engine, _ = shadow_engine(20, block_size=2, max_num_seqs=3, enable_prefix_caching=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    trace = engine.start_trace()
    with pytest.raises(ConfigError, match="1 requests in the engine"):
        replay(trace)
    while engine.has_unfinished_requests():
        engine.step()
    trace = engine.start_trace()
    with pytest.raises(ConfigError, match="blocks in its prefix cache"):
        replay(trace)
    engine.block_manager.reset_prefix_cache()
    assert len(replay(engine.start_trace())) == 0


class OwnManager:
    """Has what a scheduler calls, and none of the package's pools, as one that was written in a lesson may."""

    POOLS = ("gpu_allocator", "cpu_allocator", "get_free_blocks", "get_cached_blocks")

    def __init__(self, *args, **kwargs):
        self._own = BlockSpaceManager(*args, **kwargs)

    def __getattr__(self, name):
        if name in self.POOLS:
            raise AttributeError(name)
        return getattr(self._own, name)


def test_references_are_counted_in_the_tables_where_the_manager_has_no_counts():
    traces = []
    for manager in (BlockSpaceManager, OwnManager):
        engine = make_simulated_engine(block_space_manager_cls=manager, block_size=4)
        engine.add_request("a", [1] * 9, SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=0))
        while engine.has_unfinished_requests():
            engine.step()
        traces.append(engine.trace)
    assert any(step.ref_counts for step in traces[0])
    assert [step.ref_counts for step in traces[1]] == [step.ref_counts for step in traces[0]]


def test_requests_that_are_not_done_are_replayed_as_far_as_they_came():
    engine, _ = shadow_engine(12, block_size=2, max_num_seqs=3)
    trace = engine.start_trace()
    for i in range(5):
        engine.add_request(f"{i}", [1 + i] * 4, SamplingParams(n=1 + i % 2, max_tokens=9, ignore_eos=True, seed=i))
    for num_steps in range(1, 15):
        engine.step()
        assert len(replay(trace)) == num_steps
        assert first_difference(trace, replay(trace)) is None
    assert {bool(request.finish_reasons) for request in trace.requests.values()} == {True, False}


def test_after_a_step_whose_update_failed_each_record_is_of_its_own_step(monkeypatch):
    engine, _ = shadow_engine(12)
    trace = engine.start_trace()
    update, failures = engine.core.scheduler.update, [RuntimeError("no")]

    def fail_once(output, results):
        if failures:
            raise failures.pop()
        return update(output, results)

    monkeypatch.setattr(engine.core.scheduler, "update", fail_once)
    engine.add_request("a", [1] * 4, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    engine.add_request("b", [2] * 4, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    engine.step()
    engine.step()
    assert [step.arrived for step in trace.steps] == [["b"], []]


def test_params_of_numpy_are_saved_as_plain_numbers(tmp_path):
    engine, _ = shadow_engine(12)
    trace = engine.start_trace()
    given = SamplingParams(
        seed=np.int64(3), max_tokens=np.int32(2), stop_token_ids=list(np.arange(2)), logit_bias={np.int64(4): 1.0}
    )
    engine.add_request("a", [1, 2], given)
    while engine.has_unfinished_requests():
        engine.step()
    trace.save(tmp_path / "trace.json")
    params = EngineTrace.load(tmp_path / "trace.json").requests["a"].params
    assert params == {"seed": 3, "max_tokens": 2, "stop_token_ids": [0, 1], "logit_bias": {"4": 1.0}}


def test_an_unknown_scheduler_must_be_given(crowded_trace):
    crowded_trace.config.scheduler = "Mine"
    with pytest.raises(ConfigError, match=r"recorded with Mine: give that class"):
        replay(crowded_trace)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {},
    pytest.param({"enable_chunked_prefill": True, "max_num_batched_tokens": 32}, marks=pytest.mark.long),
    pytest.param({"enable_prefix_caching": True, "num_speculative_tokens": 3}, marks=pytest.mark.long),
    pytest.param({"preemption_mode": "swap", "swap_space": 0.1}, marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_of_the_real_model_is_replayed(smollm2_path, options):
    """Stop strings, stop tokens, ends of text, siblings, preemptions; then from the trace alone the same decisions."""
    llm = LLM(str(smollm2_path), num_gpu_blocks_override=14, max_num_seqs=6, max_model_len=200, trace=True, **options)
    prompts = ["The capital of France is", "1 2 3 4 5 6 7 8 9 10 11 12 1 2 3 4 5 6 7", "Once upon a time there was"] * 3
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, n=1 + i % 2, stop=[".", "\n"][: i % 3]) for i in range(9)]
    llm.generate(prompts, params, use_tqdm=False)
    trace = llm.llm_engine.trace
    assert {reason for request in trace.requests.values() for reason in request.finish_reasons} == {"stop", "length"}
    assert any(step.preempted for step in trace)
    assert first_difference(trace, replay(trace)) is None


def test_ids_that_come_again_are_told_apart():
    engine, _ = shadow_engine(12, max_num_seqs=4)
    trace = engine.start_trace()
    for _ in range(2):
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    assert list(trace.requests) == ["a", "a#2"]
    assert [part.request_id for step in trace for part in step.scheduled] == ["a"] * 3 + ["a#2"] * 3
    assert first_difference(trace, replay(trace)) is None


def test_one_that_begins_late_knows_the_requests_that_are_there():
    engine, _ = shadow_engine(12, max_num_seqs=4)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.trace is None
    trace = engine.start_trace()
    engine.step()
    engine.stop_trace()
    engine.step()
    assert engine.trace is None
    assert (len(trace), trace[0].arrived) == (1, ["a"])


def test_it_keeps_equal_tables_once(crowded_trace):
    tables = [step.block_tables.get(SequenceKey("0")) for step in crowded_trace[1:4]]
    assert tables[0] is tables[1]


@pytest.mark.parametrize("content, message", [
    ("", "not valid JSON"),
    ("[]", "not a trace"),
    ('{"steps": []}', "not a trace"),
    ('{"minivllm_trace": 99}', "version 99, and this minivllm reads version 1"),
    ('{"minivllm_trace": 1}', "damaged trace"),
    ('{"minivllm_trace": 1, "config": {}, "requests": [], "steps": []}', "damaged trace"),
])  # fmt: skip
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(tmp_path, content, message):
    file = tmp_path / "trace.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        EngineTrace.load(file)
    assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineTrace.load(tmp_path / "missing.json")


def test_a_file_that_was_cut_or_changed_is_refused(tmp_path, crowded_trace):
    file = tmp_path / "trace.json"
    crowded_trace.save(file)
    assert EngineTrace.load(file) == crowded_trace
    content = json.loads(file.read_text())
    for change in (
        lambda c: c["steps"][0].pop("start"),
        lambda c: c["steps"][0].update(scheduled=[["0"]]),
        lambda c: c["steps"][0].update(start=float("nan")),
        lambda c: c["steps"][0].update(num_running=-1),
        lambda c: c["steps"][0].update(arrived=["nobody"]),
        lambda c: c["steps"][1].update(end=c["steps"][1]["start"] - 1e-3),
        lambda c: c["steps"][2].update(start=c["steps"][1]["start"] - 1e-3),
        lambda c: c["steps"][1].update(block_tables=[["0", 0, [c["config"]["num_gpu_blocks"]]]]),
        lambda c: c["steps"][1].update(block_tables=[["0", 0]]),
        lambda c: c["steps"][1].update(swapped_tables=[["0", 0, [c["config"]["num_cpu_blocks"]]]]),
        lambda c: c["steps"].__setitem__(0, 5),
        lambda c: c["config"].pop("block_size"),
        lambda c: c["config"].update(block_size=0),
        lambda c: c["config"]["scheduler_config"].update(max_num_seqs="many"),
        lambda c: c["requests"][0]["params"].update(n=None),
        lambda c: c["requests"][0].update(arrival_time="today"),
        lambda c: c["requests"][0]["output_token_ids"].pop(),
        lambda c: c.update(requests=5),
    ):
        damaged = json.loads(json.dumps(content))
        change(damaged)
        with pytest.raises(ConfigError, match="damaged trace"):
            EngineTrace.from_json(damaged)


@given(st.integers(0, 5), st.booleans())
def test_json_leaves_out_what_is_empty(index, swapped):
    step = StepRecord(1.0, 2.0, "decode", [SequenceStep("a", index, "decode", 1, 5)], 1, 0, 0, 3)
    if swapped:
        step.swapped_tables = {SequenceKey("b", index): (1, 2)}
    content = EngineTrace.to_json(EngineTrace(trace_config(), [step], {"a": RequestRecord("a", 0.0, [1], 5)}))["steps"][0]
    assert ("swapped_tables" in content) == swapped
    assert "preempted" not in content


def trace_config():
    """Of no engine in particular."""
    engine, _ = shadow_engine(3, max_num_seqs=1)
    return engine.start_trace().config
