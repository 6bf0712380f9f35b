"""The times of prefill attention, and what a busy neighbour costs, on small cases."""

from __future__ import annotations

import busy_neighbour
import prefill_attention
import pytest


def test_prefill_attention_is_timed_in_three_ways():
    results = {length: prefill_attention.measure(length) for length in (1, 20)}
    assert all(set(times) == {"torch", "float32", "bfloat16"} and min(times.values()) > 0 for times in results.values())
    assert prefill_attention.format_times(results).count(" ms") == 6


@pytest.mark.parametrize(("beside", "together", "good"), [(70, 80, True), (69, 80, False), (70, 79, False)])
def test_an_engine_beside_a_busy_process_is_held_to_its_bars(beside, together, good):
    speeds = {
        "now": {f"{n} {what}": [1.0, speed, 1000.0] for n in (1, 16) for what, speed in
                (("alone", 100.0), ("beside", float(beside)), ("two engines", float(together)))},
        "vllm": {f"{n} {what}": [speed] for n in (1, 16) for what, speed in (("alone", 200.0), ("beside", 2.0))},
    }  # fmt: skip
    rows, missed = busy_neighbour.compare(speeds)
    assert (not missed) == good
    assert rows[1] == ("now", 16, "100.0", f"{beside}.0", f"0.{beside}", "1.000", f"{together}.0", f"0.{together}")
    assert rows[3] == ("vllm", 16, "200.0", "2.0", "0.01", "2.000", "", "")


def test_an_engine_that_is_slower_than_before_misses_its_bar():
    now = {f"{n} {what}": [100.0] for n in (1, 16) for what in ("alone", "beside", "two engines")}
    assert busy_neighbour.compare({"before": {name: [104.0] for name in now}, "now": now})[1] == [
        f"now, {n}: x first, alone 0.96 of 0.97" for n in (1, 16)
    ]
    assert busy_neighbour.compare({"before": {name: [103.0] for name in now}, "now": now})[1] == []
