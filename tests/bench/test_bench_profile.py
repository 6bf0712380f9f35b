"""The stopwatch, and profiles of a real run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import cpu_kernels
import decode_attention
import host_time
import linear_layers
import pytest
import torch
from linear_layers import Floor, measure_floor
from quality import measure_quality
from step_profile import PARTS, Stopwatch, format_profile, format_rank_profiles, profile_offline, profile_ranks

from minivllm import LLM
from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError
from minivllm.layers.linear import Linear

RESULTS = Path(cpu_kernels.__file__).parent / "results" / "kernels_2026-11-21.json"


def test_time_within_a_part_counts_for_the_inner_one():
    watch = Stopwatch()

    def work(seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    inner = watch.timed("inner", lambda: work(0.02))

    def outer():
        work(0.01)
        inner()
        work(0.01)

    watch.take()
    watch.timed("outer", outer)()
    seconds, switches = watch.take()
    assert seconds["inner"] >= 0.02 and seconds["outer"] >= 0.02
    assert seconds["inner"] + seconds["outer"] + seconds["other"] == pytest.approx(sum(seconds.values()))
    assert switches == {"other": 2, "outer": 2, "inner": 1}
    with pytest.raises(ZeroDivisionError):
        watch.timed("broken", lambda: 1 / 0)()
    work(0.005)
    seconds, _ = watch.take()
    assert seconds["other"] >= 0.005 > seconds["broken"], "an error ends a part"


@pytest.fixture(scope="module")
def engine():
    return LLM(max_num_seqs=4, max_model_len=256, num_gpu_blocks_override=80).llm_engine


@pytest.mark.slow
@pytest.mark.long
def test_a_profile_has_all_steps_and_leaves_the_engine_as_it_was(engine):
    requests = [WorkloadRequest(list(range(100, 120)), 6) for _ in range(6)]
    linear = next(module for module in engine.executor.worker.model_runner.model.modules() if isinstance(module, Linear))
    before = linear.forward, engine.step
    profile = profile_offline(engine, "six", requests)
    assert (linear.forward, engine.step) == before
    assert profile.num_tokens == {"prefill": 120, "decode": 30}
    assert profile.num_steps == {"prefill": 2, "decode": 10}
    assert profile.batch == 4
    assert profile.prefill_gigaflops > 0
    for parts in profile.milliseconds.values():
        assert parts.keys() == set(PARTS) and parts["linear"] > 0 and parts["attention"] > 0
    table = format_profile(profile)
    assert all(part in table for part in PARTS) and "of 4 sequences takes" in table
    assert profile.to_json()["floor"]["gigaflops"] == profile.floor.gigaflops
    assert "is more than the step" in format_profile(replace(profile, attention_alone=profile.decode_step))


@pytest.mark.slow
def test_the_profile_of_ranks_has_their_communication():
    engine = LLM(max_num_seqs=4, max_model_len=256, num_gpu_blocks_override=80, tensor_parallel_size=2).llm_engine
    profiles = profile_ranks(engine, "six", [WorkloadRequest(list(range(100, 120)), 6) for _ in range(6)])
    engine.engine_core.shutdown()
    assert {phase: (found.num_steps, found.num_tokens) for phase, found in profiles.items()} == {
        "prefill": (2, 120),
        "decode": (10, 30),
    }
    for profile in profiles.values():
        assert len(profile.computing) == len(profile.communication) == 2
        whole = [computing + waiting for computing, waiting in zip(profile.computing, profile.communication, strict=True)]
        assert max(whole) < profile.milliseconds and min(profile.computing + profile.communication) > 0
    # Two sums for each of 30 layers and one for the embedding, in float32; and of each sampled token, from each rank, its id and score.
    config = engine.model_config
    sums, choice = 61 * config.hf_config["hidden_size"] * 4, 16
    assert profiles["decode"].bytes_per_token == 2 * (sums + choice)
    table = format_rank_profiles(profiles)
    assert "decode, 10 steps" in table and table.count("rank 1") == 2


def test_the_floor_is_of_this_machine():
    floor = measure_floor(repeats=2)
    assert isinstance(floor, Floor)
    assert 0.1 < floor.read_gigabytes_per_second < 10_000 and 0.1 < floor.gigaflops < 1e6


@pytest.mark.slow
def test_quality_needs_a_text_that_is_long_enough(engine):
    for positions, text in ((10, "Too short."), (0, "Any.")):
        with pytest.raises(ConfigError, match=f"number of positions is {positions}, but must be from 1 to"):
            measure_quality(engine, {"itself": engine}, positions, text)
    (result,) = measure_quality(engine, {"itself": engine}, 20, use_tqdm=False)
    assert (result.agreement, result.mean_kl) == (1, 0)
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.slow
def test_all_ways_to_compute_linear_layers_are_measured(monkeypatch):
    monkeypatch.setattr(linear_layers, "SHAPES", [(96, 576), (64, 1536)])
    monkeypatch.setattr(linear_layers, "ROWS", (1, 32))
    times = linear_layers.measure_linear(repeats=1)
    assert {"F.linear", "minivllm", "minivllm bfloat16", "minivllm int8"} <= times.keys()
    assert all(set(by_rows) == {1, 32} for by_rows in times.values())
    table = linear_layers.format_layers(times, Floor(10.0, 100.0))
    assert "reading once" in table and "0.00 GB at 10.0 GB/s" in table


def test_the_kernels_benchmark_draws_the_roofline(capsys, monkeypatch, tmp_path):
    results = json.loads(RESULTS.read_text())
    by_rows = {way: {int(rows): ms for rows, ms in times.items()} for way, times in results["linear"].items()}
    monkeypatch.setattr(linear_layers, "measure_floor", lambda: Floor(**results["floor"]))
    monkeypatch.setattr(linear_layers, "measure_linear", lambda: by_rows)
    monkeypatch.setattr(decode_attention, "measure_attention", lambda: results["attention"])
    path, saved = tmp_path / "roofline.png", tmp_path / "kernels.json"
    cpu_kernels.main(["--plot", str(path), "--json", str(saved)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"The roofline: {path}" in capsys.readouterr().out
    assert cpu_kernels.peaks(json.loads(saved.read_text())) == cpu_kernels.peaks(results)


def test_the_hosts_part_of_a_step_is_measured_part_by_part():
    parts = host_time.measure(3, temperature=0.6, num_steps=8)
    assert list(parts) == ["a step", *host_time.PARTS, "text", "messages"] and min(parts.values()) > 0
    assert sum(parts[part] for part in host_time.PARTS) > 0.5 * parts["a step"]
