"""The figure of steps in flight: the device's bars touch when the host works beside it."""

from __future__ import annotations

import itertools

import pytest

from minivllm import SamplingParams
from minivllm.errors import ConfigError
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.chrome import to_chrome
from minivllm.viz.overlap import device_spans, draw_overlap, host_spans
from minivllm.viz.spans import find_spans, step_times


def record(async_scheduling: bool):
    """Ten steps of 6 seconds on the device, each after 2 seconds of scheduling."""
    engine = make_simulated_engine(cost_model=lambda work: 6.0, async_scheduling=async_scheduling)
    schedule = engine.scheduler.schedule

    def schedule_slowly():
        engine.clock.advance(2.0)
        return schedule()

    engine.scheduler.schedule = schedule_slowly
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=10, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


def test_the_device_waits_only_where_one_step_is_in_flight():
    one, two = record(async_scheduling=False), record(async_scheduling=True)
    assert device_spans(one) == [(8.0 * i + 2, 8.0 * i + 8) for i in range(10)]
    assert host_spans(one) == [(8.0 * i, 8.0 * i + 2) for i in range(10)]
    assert device_spans(two) == [(6.0 * i + 2, 6.0 * i + 8) for i in range(10)]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(host_spans(two)))
    titles = [axes.get_title(loc="left") for axes in draw_overlap({"one": one, "two": two}).axes]
    assert titles == ["one: 8,000.0 ms per step, device busy 75%", "two: 6,250.0 ms per step, device busy 96%"]


def test_there_must_be_enough_steps():
    with pytest.raises(ConfigError, match="run has 10 steps, fewer than first"):
        draw_overlap({"run": record(async_scheduling=True)}, first=5)


def test_bars_of_steps_in_flight_do_not_overlap_in_other_figures():
    trace = record(async_scheduling=True)
    assert any(after.start < before.end for before, after in itertools.pairwise(trace))
    spans = find_spans(trace, merge=False)
    assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in to_chrome(trace)["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows
    for bars in rows.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(bars)))


def test_the_engine_idles_after_a_surplus_step():
    """Its sequence ended in the step before, which was still in flight when it was scheduled."""
    engine = make_simulated_engine(cost_model=lambda work: 6.0, async_scheduling=True, eos_token_ids=())
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=10, stop_token_ids=list(range(50_000))))
        while engine.has_unfinished_requests():
            engine.step()
        engine.core.finish_surplus_steps()
        engine.clock.advance(100.0)
    trace = engine.trace
    assert len(trace) == 4 and not trace[1].finished
    assert [trace.is_idle_after(number) for number in range(4)] == [True] * 4
    assert step_times(trace)[1] == (0.0, 12.0)
