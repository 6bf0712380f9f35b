"""What the Hadamard transform does to the inputs of linear layers, the times of prefill attention, and what a busy neighbour costs, on small cases."""

from __future__ import annotations

import busy_neighbour
import outliers
import prefill_attention
import pytest
import torch

from minivllm import LLM


def test_a_row_of_equal_sizes_has_no_outlier_and_no_error_and_one_number_alone_is_the_largest_outlier():
    even, alone = torch.tensor([[1.0, -1.0, 1.0, -1.0] * 4]), torch.zeros(1, 16)
    alone[0, 3] = 5.0
    for rows, expected in ((even, 1.0), (alone, 4.0)):  # the root mean square of `alone` is 5 / 4
        largest, error = outliers.measure_rows(rows)
        assert largest.item() == pytest.approx(expected)
        assert error.item() == pytest.approx(0, abs=1e-6)


def test_the_error_of_rounding_grows_with_an_outlier():
    rows = torch.randn(2, 576, generator=torch.Generator().manual_seed(0))
    rows[1, 7] = 100.0
    (_, larger), (even, worse) = outliers.measure_rows(rows)
    assert larger > 20 and worse > 2 * even


@pytest.mark.slow
def test_the_transform_makes_the_default_models_inputs_easier_to_round():
    llm = LLM(device="cpu", dtype="float32", num_gpu_blocks_override=8, max_num_seqs=1, max_model_len=64)
    results = outliers.measure_inputs(llm, 24)
    assert {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} <= results.keys()
    for name in ("qkv_proj", "down_proj"):
        assert results[name]["error, after"] < results[name]["error, before"]
        assert results[name]["largest, after"] < results[name]["largest, before"]
    table = outliers.format_inputs(results, 24)
    assert "at 24 tokens of prose" in table and all(name in table for name in results)


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
