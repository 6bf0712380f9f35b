"""Calibration finds the costs of an engine whose costs are known, and predicts its other runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.report import to_json
from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel, StepWork
from minivllm.simulation import calibrate as calibration
from minivllm.simulation.calibrate import (
    Calibration,
    batch_sizes,
    calibrate,
    calibration_settings,
    fit_costs,
    format_report,
    run_setting,
    step_costs,
    unseen_settings,
)
from minivllm.simulation.costs import load_costs
from minivllm.simulation.engine import make_simulated_engine, simulate

TRUE_COSTS = CostModel(
    fixed=0.02, per_prefill_step=0.006, per_prefill_token=7e-4, per_prefill_pair=4e-7, per_decode_seq=8e-4, per_context_token=3e-6
)


def engine_with(cost_model):
    return make_simulated_engine(cost_model=cost_model, max_num_seqs=12, max_model_len=512, num_gpu_blocks=2000)


def traces_of(engine):
    return [run_setting(engine, setting).trace for setting in calibration_settings(12, 1000, 512)]


def test_it_finds_the_costs_again():
    costs = fit_costs(traces_of(engine_with(TRUE_COSTS)))
    for work in (StepWork(0, 0, 1, 50), StepWork(0, 0, 12, 900), StepWork(256, 256 * 257 // 2, 0, 0), StepWork(16, 800, 5, 400)):
        assert costs(work) == pytest.approx(TRUE_COSTS(work), rel=1e-3)


def test_noise_and_interruptions_do_little_to_it():
    rng = random.Random(0)

    def noisy(work):
        interrupted = 0.3 if rng.random() < 0.01 else 0.0
        return TRUE_COSTS(work) * rng.uniform(0.9, 1.1) + interrupted

    costs = fit_costs(traces_of(engine_with(noisy)))
    for work in (StepWork(0, 0, 1, 50), StepWork(0, 0, 12, 900), StepWork(256, 256 * 257 // 2, 0, 0)):
        assert costs(work) == pytest.approx(TRUE_COSTS(work), rel=0.05)


@given(st.lists(st.floats(1e-4, 1e-1), min_size=6, max_size=6))
@settings(max_examples=20)
def test_no_coefficient_is_below_zero(values):
    rng = random.Random(1)
    costs = fit_costs(traces_of(engine_with(lambda work: rng.choice(values))))
    assert min(value for name, value in vars(costs).items() if name != "decode_curve") >= 0
    assert all(seconds >= 0 for _, seconds in costs.decode_curve)


def test_a_jump_between_two_batch_sizes_is_found():
    costs = fit_costs(traces_of(engine_with(lambda work: 0.02 + 0.05 * (work.decode_seqs > 8))))
    assert costs(StepWork(0, 0, 8, 100)) == pytest.approx(0.02, rel=0.05)
    assert costs(StepWork(0, 0, 12, 100)) == pytest.approx(0.07, rel=0.05)


def test_time_without_work_is_no_cost():
    requests = [WorkloadRequest([1, 2], 3, arrival) for arrival in (0.0, 100.0)]
    trace = simulate(requests, cost_model=lambda work: 1.0).trace
    assert [seconds for _, seconds in step_costs(trace)] == [1.0] * 6


def test_time_between_two_steps_is_a_cost_of_the_first():
    trace = simulate([WorkloadRequest([1, 2], 3)], cost_model=lambda work: 1.0).trace
    for step in trace:
        step.end -= 0.25
    assert [seconds for _, seconds in step_costs(trace)] == [1.0, 1.0, 0.75]


def test_runs_that_were_not_seen_are_predicted():
    """Here the real engine is a simulated one: nothing but the fit and the settings can be wrong."""
    engine = engine_with(TRUE_COSTS)
    report = calibrate(engine, rounds=1)
    assert engine.core.scheduler_config.max_num_seqs == 12
    assert report.r_squared > 0.9999
    assert {(p.scheduler, p.workload) for p in report.predictions} == {
        (scheduler, workload) for scheduler in ("static", "continuous") for workload in ("uniform", "longtail")
    }
    for prediction in report.predictions:
        assert abs(prediction.throughput_error) < 1e-3
        assert abs(prediction.ttft_error) < 1e-3
    assert "largest error: throughput 0.0%, mean TTFT 0.0%" in format_report(report)


def test_what_is_predicted_was_not_fitted_to():
    seen = {(tuple(r.prompt_token_ids), r.output_len) for s in calibration_settings(32, 1000, 512) for r in s.requests}
    unseen = {(tuple(r.prompt_token_ids), r.output_len) for s in unseen_settings(32, 1000, 512) for r in s.requests}
    assert seen and unseen and not seen & unseen


def test_a_calibration_is_read_as_a_cost_model(tmp_path):
    file = tmp_path / "costs.json"
    costs = CostModel(0.5, per_decode_seq=0.25, decode_curve=((1, 0.125), (2, 0.25)))
    file.write_text(to_json({"calibration": Calibration(costs, 10, 0.9, 0.1, []).to_json()}))
    assert load_costs(file) == costs


def test_batch_sizes_grow_by_half():
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert batch_sizes(0) == []


def test_too_few_steps_are_told():
    trace = simulate([WorkloadRequest([1, 2], 3)]).trace
    with pytest.raises(ConfigError, match="3 steps are too few"):
        fit_costs([trace])
    with pytest.raises(ConfigError, match="rounds is 0"):
        calibrate(engine_with(TRUE_COSTS), rounds=0)


def test_a_cache_too_small_for_the_runs_is_told_before_them():
    engine = make_simulated_engine(max_num_seqs=12, max_model_len=512, num_gpu_blocks=4)
    with pytest.raises(ConfigError, match="requests of up to .* tokens, but the cache holds 64"):
        calibrate(engine, rounds=1)
    assert not engine.trace.steps


def test_a_model_of_short_texts_is_calibrated_with_short_ones():
    engine = make_simulated_engine(max_num_seqs=4, max_model_len=24, num_gpu_blocks=100)
    assert calibrate(engine, rounds=1).num_steps > 50


def test_the_calibrated_engine_keeps_its_config_when_a_run_fails(monkeypatch):
    engine = engine_with(TRUE_COSTS)
    run, calls = calibration.run_offline, []

    def fail_at_the_third(*args):
        calls.append(engine.core.scheduler_config.max_num_seqs)
        return 1 / 0 if len(calls) == 3 else run(*args)

    monkeypatch.setattr(calibration, "run_offline", fail_at_the_third)
    with pytest.raises(ZeroDivisionError):
        calibrate(engine, rounds=1)
    assert calls == [12, 1, 2]
    assert engine.core.scheduler_config.max_num_seqs == 12
