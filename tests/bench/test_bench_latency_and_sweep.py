"""What a user waits for, by batch size, and the sweep of max_num_seqs."""

from __future__ import annotations

import itertools
import json

import pytest

from minivllm.bench import latency, sweep
from minivllm.bench.offline import OfflineResult
from minivllm.bench.workloads import WorkloadRequest
from minivllm.entrypoints import cli
from minivllm.errors import ConfigError
from minivllm.viz.sweep import draw_sweep

SMALL = ["--num-gpu-blocks-override", "60", "--max-model-len", "256"]


def test_the_times_of_tokens_become_ttft_and_itl():
    result = latency.summarize(2, [[0.010, 0.030, 0.040], [0.020, 0.050, 0.090]], 12.5)
    assert result.batch_size == 2
    assert result.ttft_median == pytest.approx(15)
    assert result.itl_median == pytest.approx(25)  # of 20, 10, 30 and 40
    assert result.itl_p95 == result.itl_p99 == pytest.approx(40)
    assert "15.0 ms" in latency.format_table([result])


def test_every_token_of_every_request_gets_a_time(llm):
    times = latency.run_batch(llm.llm_engine, [WorkloadRequest([5, 6, 7], 4), WorkloadRequest([8], 2)])
    assert [len(request) for request in times] == [4, 2]
    assert all(0 < a < b for request in times for a, b in itertools.pairwise(request))


def test_latency_is_measured_for_each_batch_size(llm):
    results = latency.measure_latency(llm.llm_engine, [1, 3], prompt_len=5, output_len=3, rounds=1, use_tqdm=False)
    assert [result.batch_size for result in results] == [1, 3]
    assert all(0 < result.itl_median <= result.itl_p95 <= result.itl_p99 for result in results)


@pytest.mark.parametrize(
    "numbers,sentence",
    [
        ({"batch_sizes": [0]}, "at least 1 request"),
        ({"rounds": 0}, "at least 1 round"),
        ({"output_len": 1}, "at least 2 output tokens"),
        ({"prompt_len": 8190}, "do not fit the 8192 tokens of the model"),
    ],
)
def test_numbers_that_cannot_be_measured_are_refused(llm, numbers, sentence):
    with pytest.raises(ConfigError, match=sentence):
        latency.measure_latency(llm.llm_engine, **({"batch_sizes": [1], "use_tqdm": False} | numbers))


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


def make_result(speed, wait):
    zeros = dict.fromkeys(("requests_per_second", "p95_latency", "mean_ttft", "mean_cache_use", "peak_cache_use"), 0.0)
    return OfflineResult(
        "w", "continuous", 4, 40, seconds=1.0, output_tokens_per_second=speed, mean_latency=wait, mean_running=2.0,
        num_preemptions=0, trace=None, **zeros,
    )  # fmt: skip


def test_a_value_is_summarized_by_the_medians_of_its_rounds():
    point = sweep.summarize(8, [make_result(10.0, 3.0), make_result(30.0, 1.0), make_result(20.0, 2.5)])
    assert (point.max_num_seqs, point.output_tokens_per_second, point.mean_latency) == (8, 20.0, 2.5)
    assert point.rounds == [10.0, 30.0, 20.0]


def test_the_sweeps_table_tells_the_gain_over_the_first_value():
    points = [sweep.summarize(n, [make_result(speed, 2.0)]) for n, speed in ((1, 10.0), (4, 25.0))]
    assert sweep.format_table(points).split("\n")[-1].split() == ["4", "25.0", "2.0", "s", "2.0", "2.50"]


def test_a_sweep_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        sweep.sweep_max_num_seqs(lambda value: None, [0], "w", [WorkloadRequest([1], 1)])


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
