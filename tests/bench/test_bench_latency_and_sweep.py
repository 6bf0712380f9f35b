"""What a user waits for, by batch size, and the sweep of max_num_seqs."""

from __future__ import annotations

import json

import pytest

from minivllm.bench import offline
from minivllm.bench.summary import EngineRun, RequestLatency
from minivllm.bench.workloads import WorkloadRequest
from minivllm.entrypoints.cli import main as cli
from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.sweep import draw_sweep

SMALL = ["--num-gpu-blocks-override", "60", "--max-model-len", "256"]


def test_a_batch_is_summarized_by_the_times_of_its_tokens():
    """A step takes 10 ms, and each sequence that decodes in it 10 ms more."""
    engine = make_simulated_engine(cost_model=CostModel(0.01, per_decode_seq=0.01))
    for batch_size, gap in ((1, 20), (2, 30)):
        [result] = offline.measure_latency(engine, [batch_size], prompt_len=5, output_len=3, rounds=2, use_tqdm=False)
        assert (result.batch_size, result.completed, result.output_tokens) == (batch_size, 2 * batch_size, 6 * batch_size)
        assert result.ttft == pytest.approx([0.010] * 4) and result.itl == pytest.approx([gap / 1e3] * 4)
        assert result.rounds == pytest.approx([3 * batch_size / (0.010 + 2 * gap / 1e3)] * 2)
    assert offline.format_batches([result]).endswith("10.0 ms     30.0 ms  30.0 ms  30.0 ms      85.7")


def test_prompts_have_the_length_that_was_asked_for():
    engine = make_simulated_engine(num_gpu_blocks=1000)
    [result] = offline.measure_latency(engine, [2], prompt_len=5000, output_len=2, rounds=1, use_tqdm=False)
    assert result.prompt_tokens == 10_000


@pytest.mark.slow
def test_latency_is_measured_for_each_batch_size(llm):
    results = offline.measure_latency(llm.llm_engine, [1, 3], prompt_len=5, output_len=3, rounds=1, use_tqdm=False)
    assert [result.batch_size for result in results] == [1, 3]
    assert all(0 < result.itl.p50 <= result.itl.p95 <= result.itl.p99 for result in results)


@pytest.mark.parametrize(
    "numbers,sentence",
    [
        ({"batch_sizes": [0]}, "at least 1 request"),
        ({"rounds": 0}, "at least 1 round"),
        ({"output_len": 1}, "at least 2 output tokens"),
        ({"prompt_len": 8190}, "grows beyond the 8192 tokens that the model takes"),
    ],
)
def test_numbers_that_cannot_be_measured_are_refused(llm, numbers, sentence):
    with pytest.raises(ConfigError, match=sentence):
        offline.measure_latency(llm.llm_engine, **({"batch_sizes": [1], "use_tqdm": False} | numbers))


def test_a_workload_that_the_cache_would_cut_is_refused():
    engine = make_simulated_engine(num_gpu_blocks=4, block_size=4, max_model_len=64)
    sizes = {"prompt_len": 9, "use_tqdm": False, "rounds": 1}
    with pytest.raises(ConfigError, match="grows beyond the 17 tokens that the whole cache has room for"):
        offline.measure_latency(engine, [1], output_len=9, **sizes)
    assert offline.measure_latency(engine, [1], output_len=8, **sizes)[0].output_tokens == 8


@pytest.mark.slow
def test_bench_latency_writes_its_results(capsys, tmp_path):
    report = tmp_path / "latency.json"
    options = ["--batch-sizes", "1", "2", "--prompt-len", "4", "--output-len", "2", "--rounds", "1", "--json", str(report)]
    assert cli.main(["bench", "latency", *options, *SMALL]) == 0
    assert "TTFT median" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert [result["batch_size"] for result in content["results"]] == [1, 2]
    assert content["prompt_len"] == 4


def test_a_batch_that_would_not_run_at_once_is_refused(capsys):
    assert cli.main(["bench", "latency", "--batch-sizes", "8", "--max-num-seqs", "4"]) == 2
    assert "max_num_seqs is 4, so a batch of 8 would not run at once" in capsys.readouterr().err


def make_run(speed, wait):
    request = RequestLatency("r", wait, wait, (), num_tokens=round(speed), prompt_tokens=1, output_tokens=round(speed))
    return EngineRun.of([request], 1.0, scheduler="continuous", mean_running=2.0)


def test_a_value_is_summarized_by_the_medians_of_its_rounds():
    point = offline.SweepPoint.of(8, [make_run(10.0, 3.0), make_run(30.0, 1.0), make_run(20.0, 2.5)])
    assert (point.max_num_seqs, point.output_tokens_per_second, point.mean_latency) == (8, 20.0, 2.5)
    assert point.rounds == [10.0, 30.0, 20.0]


def test_the_sweeps_table_tells_the_gain_over_the_first_value():
    points = [offline.SweepPoint.of(n, [make_run(speed, 2.0)]) for n, speed in ((1, 10.0), (4, 25.0))]
    assert offline.format_points(points).split("\n")[-1].split() == ["4", "25.0", "2.0", "s", "2.0", "2.50"]


def test_a_sweep_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        offline.sweep_max_num_seqs(lambda value: None, [0], "w", [WorkloadRequest([1], 1)])


@pytest.mark.slow
def test_bench_sweep_runs_every_value_and_draws(capsys, tmp_path):
    report, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    options = ["--num-requests", "4", "--mean-prompt-len", "4", "--mean-output-len", "4", "--values", "1", "4"]
    assert cli.main(["bench", "sweep", *options, "--json", str(report), "--plot", str(plot), *SMALL]) == 0
    assert "speed-up" in capsys.readouterr().out
    assert [point["max_num_seqs"] for point in json.loads(report.read_text())["results"]] == [1, 4]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_sweeps_axes_have_names_and_units():
    axes = draw_sweep([1, 2, 8], [10.0, 19.0, 60.0], [9.0, 5.0, 4.0], "title").axes
    assert [axis.get_ylabel() for axis in axes] == ["throughput (output tokens/s)", "mean latency (s)"]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "2", "8"]
    assert all(axis.get_ylim()[0] == 0 for axis in axes), "so that heights can be compared"
