"""A trace as a Chrome trace: what Perfetto will show is what happened."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import set_clock, shadow_engine

from minivllm.engine.trace import EngineTrace
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import FREED_BLOCK
from minivllm.viz.chrome import to_chrome
from minivllm.viz.spans import STATES, find_spans, time_origin


def record(
    requests: list[tuple[int, int, int]],
    num_blocks: int = 24,
    *,
    seconds: float = 0.1,
    pause: float = 0.001,
    abort: bool = False,
    **options: object,
) -> EngineTrace:
    """The trace of requests (prompt length, max_tokens, n), one of which comes with every other step.

    A step takes `seconds`, and each look at the clock takes `pause`.
    """
    engine, executor = shadow_engine(num_blocks, 30, max_num_seqs=5, max_num_batched_tokens=64, **options)
    executor.execute_model, execute = lambda output: (clock(seconds), execute(output))[1], executor.execute_model
    now = [5.0]

    def clock(passing: float = pause) -> float:
        now[0] += passing
        return now[0]

    set_clock(engine, clock)
    trace = engine.start_trace()
    todo = list(enumerate(requests))
    for number in itertools.count():
        if todo and number % 2 == 0:
            i, (prompt_len, max_tokens, n) = todo.pop(0)
            params = SamplingParams(temperature=i % 2, max_tokens=max_tokens, n=n, seed=i)
            engine.add_request(f"r{i}", [1 + (i + j) % 7 for j in range(prompt_len)], params)
        engine.step()
        if abort and number == 4:
            engine.abort_request("r1")
        if not todo and not engine.has_unfinished_requests():
            return trace
    raise AssertionError


def by_kind(content: dict) -> dict[str, list[dict]]:
    events = sorted(content["traceEvents"], key=lambda event: event["ph"])
    return {kind: list(group) for kind, group in itertools.groupby(events, key=lambda event: event["ph"])}


def rows_of(content: dict) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def test_a_small_example_by_hand():
    trace = record([(5, 3, 1)], enable_prefix_caching=True)
    content = to_chrome(trace)
    kinds = by_kind(content)
    processes = {event["args"]["name"]: event["pid"] for event in kinds["M"] if event["name"] == "process_name"}
    assert list(processes) == ["engine", "requests"]
    assert sorted(rows_of(content).values()) == ["r0", "steps"]
    of_request = [event for event in kinds["X"] if event["pid"] == processes["requests"]]
    assert [event["name"] for event in of_request] == ["waiting", "prefill", "decode", "decode"]
    assert [event["args"] for event in of_request] == [
        {"prompt_tokens": 5},
        {"step": 0, "context_len": 5, "tokens": 5, "new_tokens": 1},
        {"step": 1, "context_len": 6, "tokens": 1, "new_tokens": 1},
        {"step": 2, "context_len": 7, "tokens": 1, "new_tokens": 1},
    ]
    assert (of_request[0]["ts"], of_request[0]["dur"]) == (0, 2000), "the core asks for the time when it gets a request"
    assert of_request[1]["dur"] == 103_000
    steps = [event for event in kinds["X"] if event["pid"] == processes["engine"]]
    assert [(event["name"], event["args"]["tokens"]) for event in steps] == [("prefill", 5), ("decode", 1), ("decode", 1)]
    assert {"queues", "cache blocks", "prefix cache"} == {event["name"] for event in kinds["C"]}


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=2, max_size=7)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    REQUESTS, st.integers(24, 40), st.booleans(), st.sampled_from(["recompute", "swap"]), st.integers(0, 3), st.booleans(),
    st.sampled_from([0.1, 1e-6, 0.1234567, 1e4 / 3]), st.sampled_from([0.0, 0.001]),
)  # fmt: skip
def test_slices_do_not_overlap_and_last_as_long_as_the_spans(requests, num_blocks, chunked, mode, drafts, abort, seconds, pause):
    trace = record(
        requests, num_blocks, seconds=seconds, pause=pause, abort=abort, enable_chunked_prefill=chunked, preemption_mode=mode,
        num_speculative_tokens=drafts, enable_prefix_caching=True,
    )  # fmt: skip
    content = json.loads(json.dumps(to_chrome(trace), allow_nan=False))
    rows, kinds = rows_of(content), by_kind(content)
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in kinds["X"]:
        assert isinstance(event["ts"], int) and event["ts"] >= 0 and event["dur"] >= 0
        slices.setdefault((event["pid"], event["tid"]), []).append(event)
    assert slices.keys() == rows.keys(), "no row without a name, and no name without a row"
    assert len(set(rows.values())) == len(rows)
    for row in slices.values():
        row.sort(key=lambda event: (event["ts"], event["dur"]))
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in itertools.pairwise(row))

    names = {rows[key]: events for key, events in slices.items() if key[0] == 2}
    spans = find_spans(trace)
    for key in {span.key for span in spans}:
        several = trace.requests[key.request_id].params.get("n", 1) > 1 and (key.request_id, 1) in {
            (s.request_id, s.index) for s in spans
        }
        events = names.pop(f"{key.request_id}/{key.index}" if several else key.request_id)
        for state in STATES:
            own = [span for span in find_spans(trace, merge=False) if span.key == key and span.state == state]
            drawn = [event for event in events if event["name"] == state]
            assert len(drawn) == len(own)
            total = sum(span.end - span.start for span in own) * 1e6
            assert sum(event["dur"] for event in drawn) == pytest.approx(total, abs=len(own) + 1e-3)
    assert names == {}


@settings(max_examples=settings().max_examples * 2 // 5)
@given(REQUESTS, st.integers(24, 40), st.sampled_from(["recompute", "swap"]))
def test_counters_and_preemptions_are_those_of_the_steps(requests, num_blocks, mode):
    trace = record(requests, num_blocks, preemption_mode=mode, enable_prefix_caching=True)
    content = to_chrome(trace)
    kinds, rows = by_kind(content), rows_of(content)
    counters = {
        name: [event for event in kinds["C"] if event["name"] == name] for name in ("queues", "cache blocks", "prefix cache")
    }
    for number, step in enumerate(trace):
        at = round((step.start - time_origin(trace)) * 1e6)
        assert all(events[number]["ts"] == at for events in counters.values())
        values = {name: events[number]["args"] for name, events in counters.items()}
        assert values["queues"] == {"running": step.num_running, "waiting": step.num_waiting, "swapped": step.num_swapped}
        held = {block for table in step.block_tables.values() for block in table if block != FREED_BLOCK}
        assert values["cache blocks"] == {"used": len(held), "free": num_blocks - len(held)}
        assert values["prefix cache"] == {"blocks": len(step.cached_blocks)}
    preempted = [item for step in trace for item in step.preempted]
    instants = kinds.get("i", [])
    assert [event["args"]["mode"] for event in instants] == [item.mode for item in preempted]
    assert [rows[event["pid"], event["tid"]].split("/")[0] for event in instants] == [item.request_id for item in preempted]


names = st.text(min_size=1).filter(str.isprintable)


@given(names, names.filter(lambda text: "/" not in text))
def test_any_name_comes_through(first, second):
    engine, _ = shadow_engine(20)
    trace = engine.start_trace()
    for name in dict.fromkeys((first, second)):
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    content = json.loads(json.dumps(to_chrome(trace), allow_nan=False))
    names = [name for (process, _), name in rows_of(content).items() if process == 2]
    assert names == list(dict.fromkeys((first, second)))


def test_no_row_has_the_number_of_a_process():
    content = to_chrome(record([(3, 2, 2)] * 6))
    processes = {event["pid"] for event in content["traceEvents"]}
    rows = [event["tid"] for event in content["traceEvents"] if event["name"] == "thread_name"]
    assert len(set(rows)) == len(rows) == 13
    assert not processes & set(rows)


def test_it_tells_no_tokens():
    trace = record([(9, 4, 1)])
    trace.requests["r0"].prompt_token_ids = [987654321] * 9
    assert "987654321" not in json.dumps(to_chrome(trace))


def test_a_failed_step_says_why():
    engine, executor = shadow_engine(20)
    executor.fail_at = {2}
    trace = engine.start_trace()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    events = to_chrome(trace)["traceEvents"]
    assert [event["args"]["error"] for event in events if "error" in event["args"]] == ["RuntimeError: planned failure"]
    assert [event["args"]["new_tokens"] for event in events if "new_tokens" in event["args"]] == [1, 0]


def test_an_empty_trace_is_one_without_slices():
    content = to_chrome(shadow_engine(20)[0].start_trace())
    assert set(by_kind(content)) == {"M"}
