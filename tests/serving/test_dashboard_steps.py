"""What the live page is told of the engine's steps: small worked examples, and then an engine with everything at once."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections import Counter

import pytest
from watched_engine import WaitingExecutor, model_config

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import Finish, Preemption, RequestSnapshot, SequenceKey, SequenceStep, StepRecord
from minivllm.entrypoints.dashboard.step_view import MOST_STEPS, MOST_WAITING, StepView
from minivllm.sampling_params import SamplingParams

A, B, C = SequenceKey("a"), SequenceKey("b"), SequenceKey("c")


def make_step(number, scheduled=(), tables=None, **fields):
    """A step that began at second `number` and took half a second; its parts are (key, action, tokens, context, new tokens)."""
    items = [SequenceStep(*key, action, *counts) for key, action, *counts in scheduled]
    defaults = {"num_running": len(tables or {}), "num_waiting": 0, "num_swapped": 0, "num_free_blocks": 10}
    defaults["request_snapshots"] = [know(name, number) for name in fields.get("arrived", [])]
    return StepRecord(number, number + 0.5, "decode", items, block_tables=tables or {}, **{**defaults, **fields})


def know(name, queued_time, first_token_time=None, num_prompt_tokens=20, num_cached_tokens=0, **progress):
    """A request, of the number that its name has in the alphabet; its progress is that of sequence 0."""
    counts = (progress.get("computed", 0), progress.get("generated", 0))
    return RequestSnapshot(
        name, ord(name[0]) - ord("a"), queued_time, first_token_time, num_prompt_tokens, num_cached_tokens, {0: counts}
    )


def report_of(*steps):
    view = StepView()
    for step in steps:
        view.take(step)
    return view.report()


def only(sequences):
    (sequence,) = sequences
    return sequence


def test_nothing_is_told_before_the_first_step_and_after_the_last():
    view = StepView()
    assert view.report() is None
    view.take(make_step(0))
    assert view.report() is not None
    assert view.report() is None


def test_a_sequence_has_its_prompt_its_answer_and_its_blocks():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(A, "decode", 1, 21)], {A: (3, 4)}),
        make_step(2, [(A, "decode", 1, 22)], {A: (3, 4)}),
    )
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"], sequence["context_len"]) == (20, 3, 22)
    assert (sequence["action"], sequence["num_tokens"], sequence["keep"], sequence["blocks"]) == ("decode", 1, 0, (3, 4))


def test_a_prompt_in_chunks_is_as_long_as_its_last_chunk_says():
    first = make_step(0, [(A, "prefill", 16, 16, 0)], {A: (0, 1)}, arrived=["a"])
    assert only(report_of(first)["sequences"])["num_prompt_tokens"] is None
    second = make_step(1, [(A, "prefill", 9, 25, 1)], {A: (0, 1)})
    assert only(report_of(first, second)["sequences"])["num_prompt_tokens"] == 25


def test_what_the_prefix_cache_spared_is_told():
    report = report_of(make_step(0, [(A, "prefill", 4, 36)], {A: (0, 1, 2)}, arrived=["a"]))
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_cached_tokens"]) == (36, 32)


def test_a_page_that_is_opened_in_the_middle_knows_the_requests_that_are_there():
    told = [know("c", 3.0, first_token_time=4.0, num_prompt_tokens=48, num_cached_tokens=32, computed=49, generated=2)]
    report = report_of(make_step(10, [(C, "decode", 1, 50)], {C: (1, 2, 3, 4)}, request_snapshots=told))
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"], sequence["context_len"]) == (48, 3, 50)
    assert (sequence["num_cached_tokens"], sequence["number"]) == (32, 2)
    assert report["first_tokens"] == [(4.0, 1.0)]


def test_requests_that_nobody_has_described_are_left_out_until_somebody_does():
    view = StepView()
    view.take(make_step(0, [(A, "decode", 1, 50), (B, "prefill", 5, 5)], {A: (1,), B: (2,)}, arrived=["b"], preempted=[Preemption("c", 0, "recompute")]))  # fmt: skip
    assert [item["request_id"] for item in view.report()["sequences"]] == ["b"]
    described = [know("a", 0.0, 0.1, computed=50, generated=31)]
    view.take(make_step(1, [(A, "decode", 1, 51), (B, "decode", 1, 6)], {A: (1,), B: (2,)}, request_snapshots=described))
    told = [(item["request_id"], item["keep"], item["blocks"], item["num_generated"]) for item in view.report()["sequences"]]
    assert told == [("a", 0, (1,), 32), ("b", 1, (), 2)]


def test_requests_that_go_on_at_another_engine_core_get_its_numbers_and_none_is_lost():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 20, 20), (B, "prefill", 20, 20)], {A: (3, 4), B: (5, 6)}, arrived=["a", "b"]))
    moved = [know(name, 0.0, 0.5, generated=1)._replace(ordinal=7 + i) for i, name in enumerate("ba")]
    view.take(make_step(10, [(B, "prefill", 21, 21)], {B: (1, 2)}, request_snapshots=moved, num_waiting=1))
    report = view.report()
    assert [(item["request_id"], item["number"], item["num_generated"]) for item in report["sequences"]] == [("b", 7, 2)]
    assert [(item["request_id"], item["number"], item["was_preempted"]) for item in report["waiting"]] == [("a", 8, True)]
    assert report["first_tokens"] == [(0.5, 0.5)] * 2, "they have had their first tokens"
    view.take(make_step(11, [(B, "decode", 1, 22), (A, "prefill", 21, 21)], {B: (1, 2), A: (3, 4)}))
    assert [item["request_id"] for item in view.report()["sequences"]] == ["b", "a"]


def test_a_sequence_that_is_not_computed_is_stalled():
    report = report_of(
        make_step(0, [(A, "decode", 1, 50)], {A: (1,)}, arrived=["a"]),
        make_step(1, [(B, "prefill", 5, 5)], {A: (1,), B: (2,)}, arrived=["b"]),
    )
    assert [(sequence["request_id"], sequence["action"]) for sequence in report["sequences"]] == [
        ("a", "stalled"),
        ("b", "prefill"),
    ]


def test_times_come_from_the_steps():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(B, "prefill", 20, 20)], {A: (3, 4), B: (5, 6)}, arrived=["b"]),
        make_step(4, [(A, "decode", 1, 21), (B, "decode", 1, 21)], {A: (3, 4), B: (5, 6)}, finished=[Finish("a", 0, "length")]),
    )
    assert report["first_tokens"] == [(0.5, 0.5), (1.5, 0.5)]
    assert report["curve"]["mean_gap"] == [None, None, 3.5]
    assert report["curve"]["max_gap"] == [None, None, 4.0]
    ended = only(report["happenings"])
    assert (ended["request_id"], ended["what"], ended["why"]) == ("a", "ended", "length")
    assert (ended["num_generated"], ended["seconds"]) == (2, 4.5)


def test_several_tokens_won_at_once_share_the_time_between_them():
    speculative = SequenceStep("a", 0, "decode", 4, 24, num_new_tokens=4, num_drafts=3, num_accepted=3)
    step = make_step(2, [], {A: (3, 4)})
    step.scheduled.append(speculative)
    report = report_of(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]), step)
    assert report["curve"]["mean_gap"] == [None, 0.5]
    assert only(report["sequences"])["num_accepted"] == 3


def test_the_preempted_wait_again_and_keep_their_answer():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]))
    view.take(make_step(1, [], {}, preempted=[Preemption("a", 0, "recompute")], num_waiting=1))
    report = view.report()
    waiting = only(report["waiting"])
    assert (waiting["request_id"], waiting["was_preempted"]) == ("a", True)
    assert only(report["happenings"])["what"] == "preempted"
    view.take(make_step(2, [(A, "prefill", 21, 21)], {A: (5, 6)}))
    report = view.report()
    assert report["waiting"] == []
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"]) == (20, 2)
    assert report["first_tokens"] == [], "it has had its first token"


def test_those_that_wait_are_told_in_the_order_in_which_they_came():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a", "b"], num_waiting=1))
    view.take(make_step(1, [], {}, preempted=[Preemption("a", 0, "recompute")], num_waiting=2))
    assert [item["request_id"] for item in view.report()["waiting"]] == ["a", "b"]


def test_what_is_swapped_out_is_told_with_its_blocks_on_the_host():
    swapped = make_step(1, [(B, "decode", 1, 9)], {B: (1,)}, swapped_tables={A: (7, 8)}, num_swapped=1)
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20), (B, "prefill", 8, 8)], {A: (3, 4), B: (1,)}, arrived=["a", "b"]), swapped
    )
    assert [(s["request_id"], s["place"], s["blocks"]) for s in report["sequences"]] == [
        ("b", "running", (1,)),
        ("a", "swapped", (7, 8)),
    ]


def test_siblings_share_a_prompt_and_each_has_a_token():
    tables = {A: (3, 4), SequenceKey("a", 1): (3, 5)}
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(key, "decode", 1, 21) for key in tables], tables, ref_counts={3: 2}),
    )
    assert [(s["index"], s["num_prompt_tokens"], s["num_generated"]) for s in report["sequences"]] == [(0, 20, 2), (1, 20, 2)]
    assert report["shared"] == {3: 2}


def test_the_aborted_are_gone():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a", "b"], num_waiting=1), make_step(1, aborted=["a", "b"])
    )
    assert (report["sequences"], report["waiting"]) == ([], [])
    assert [(item["request_id"], item["why"]) for item in report["happenings"]] == [("a", "abort"), ("b", "abort")]


def test_no_ghosts_wait_after_a_step_that_was_missed():
    report = report_of(make_step(0, arrived=["a", "b", "c"], num_waiting=3), make_step(5, num_waiting=1))
    assert [item["request_id"] for item in report["waiting"]] == ["c"]


def test_a_view_keeps_nothing_of_finished_requests():
    view, sizes = StepView(), []
    for number in range(50):
        name = f"{number:02}"
        tables = {SequenceKey(name): (1,)}
        finished = [Finish(name, 0, "stop")]
        view.take(make_step(number, [(SequenceKey(name), "prefill", 3, 3)], tables, arrived=[name], finished=finished))
        view.take(make_step(number + 0.5, aborted=["never seen"]))
        view.report()
        sizes.append(len(pickle.dumps(view)))
    assert max(sizes[5:]) <= max(sizes[:5])


def test_a_page_that_does_not_read_costs_no_memory():
    view = StepView()
    for number in range(3 * MOST_STEPS):
        finished = [Finish("a", 0, "stop")]
        view.take(make_step(number, [(A, "prefill", 3, 3)], {A: (1,)}, arrived=["a"], finished=finished))
    view.take(make_step(number + 1, arrived=[f"{i}" for i in range(500)], num_waiting=500))
    report = view.report()
    assert len(report["curve"]["end"]) == MOST_STEPS
    assert len(report["waiting"]) == MOST_WAITING
    assert report["num_waiting"] == 500
    assert len(json.dumps(report)) < 1_000_000


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_what_a_page_puts_together_is_what_the_last_step_says(enable_prefix_caching):
    rng = random.Random(3)
    engine = traced_engine(num_blocks=24, enable_prefix_caching=enable_prefix_caching)
    names = itertools.count()
    view, tables, cached, num_reports = StepView(), {}, set(), 0
    for _ in range(400):
        if rng.random() < 0.15:
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, n=rng.choice([1, 1, 2]))
            engine.add_request(f"{next(names)}", [rng.randint(1, 3)] * rng.randint(1, 90), params)
        if rng.random() < 0.02 and engine.scheduler.requests:
            engine.abort_request(rng.choice(list(engine.scheduler.requests)))
        engine.step()
        if not engine.trace.steps:
            continue
        step = engine.trace.steps.pop()
        view.take(step)
        if rng.random() < 0.6:
            continue
        report = view.report()
        num_reports += 1
        tables = {
            (s["request_id"], s["index"]): (*tables.get((s["request_id"], s["index"]), ())[: s["keep"]], *s["blocks"])
            for s in report["sequences"]
        }
        cached = (cached - set(report["uncached"])) | set(report["cached"])
        assert tables == {tuple(key): table for key, table in step.block_tables.items()}
        assert cached == step.cached_blocks
        assert len(report["waiting"]) == step.num_waiting
        held = Counter(block for table in tables.values() for block in table)
        assert report["shared"] == {block: count for block, count in held.items() if count > 1}
    assert num_reports > 50
    assert engine.block_manager.num_gpu_blocks == 24


def traced_engine(num_blocks, enable_prefix_caching):
    """An engine that records its steps, and takes no time for them."""
    cache = CacheConfig(enable_prefix_caching=enable_prefix_caching)
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=2048)
    engine = LLMEngine.from_executor(model_config(), cache, scheduler, WaitingExecutor(num_blocks, 0.0))
    engine.start_trace()
    engine.core.snapshot_requests()
    return engine


def test_requests_that_waited_before_the_page_have_a_time_to_first_token():
    view = StepView()
    known = [know("a", 1.0, 1.5, num_prompt_tokens=38, computed=39, generated=2), know("b", 8.0, num_prompt_tokens=5)]
    view.take(make_step(10, [(A, "decode", 1, 40, 1)], {A: (0, 1, 2)}, request_snapshots=known, num_waiting=1))
    view.take(make_step(11, [(B, "prefill", 5, 5, 1)], {B: (3,)}, finished=[Finish("a", 0, "length")]))
    view.take(make_step(12, [(C, "prefill", 5, 5, 1)], {B: (3,), C: (4,)}, arrived=["c"]))
    report = view.report()
    [ended] = report["happenings"]
    assert (ended["num_generated"], ended["seconds"], ended["number"]) == (3, 10.5, 0)
    assert report["first_tokens"] == [(1.5, 0.5), (11.5, 3.5), (12.5, 0.5)]
    b, c = report["sequences"]
    assert (b["num_prompt_tokens"], b["num_generated"]) == (5, 1) == (c["num_prompt_tokens"], c["num_generated"])


def test_a_prompt_that_is_found_half_computed_is_not_said_to_be_cached():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 8, 24, 1)], {A: (0, 1)}, request_snapshots=[know("a", 0.0, computed=16)]))
    assert only(view.report()["sequences"])["num_cached_tokens"] == 0


def without_blocks(sequence):
    """What does not depend on what a page has been told before."""
    return {name: value for name, value in sequence.items() if name not in ("keep", "blocks")}


def test_all_pages_have_the_same_numbers_whenever_they_were_opened():
    """Pages that come and go; some have followed from the beginning, some begin in the middle, where all is told again."""
    rng, names = random.Random(5), itertools.count()
    engine, views = traced_engine(num_blocks=24, enable_prefix_caching=True), []
    order, num_compared = {}, 0
    for _ in range(500):
        if rng.random() < 0.2:
            name = f"{next(names)}"
            order[name] = len(order)
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, n=rng.choice([1, 1, 2]))
            engine.add_request(name, [rng.randint(1, 3)] * rng.randint(1, 90), params)
        if rng.random() < 0.02 and engine.scheduler.requests:
            engine.abort_request(rng.choice(list(engine.scheduler.requests)))
        if rng.random() < 0.1 and len(views) < 4:
            views.append(StepView())
            engine.core.snapshot_requests()
        engine.step()
        if not engine.trace.steps:
            continue
        step = engine.trace.steps.pop()
        if rng.random() < 0.03:  # a record is lost; then all requests are described again
            engine.core.snapshot_requests()
            continue
        for view in views:
            view.take(step)
        reports = [view.report() for view in views]
        for report in reports:
            for item in (*report["sequences"], *report["waiting"]):
                assert item["number"] == order[item["request_id"]]
            assert [without_blocks(item) for item in report["sequences"]] == [
                without_blocks(item) for item in reports[0]["sequences"]
            ]
            assert report["waiting"] == reports[0]["waiting"]
            num_compared += 1
        if rng.random() < 0.05 and views:
            views.pop(rng.randrange(len(views)))
    assert num_compared > 500
