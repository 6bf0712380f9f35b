"""The simulator: virtual time, costs of steps, arrivals, and results that agree with the trace."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.bench.workloads import ARRIVALS, DISTRIBUTIONS, WorkloadRequest, arrival_times, generate_requests
from minivllm.entrypoints.cli.main import main
from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel, SimulatedExecutor, StepWork, VirtualClock, count_work
from minivllm.simulation.costs import DEFAULT_COSTS, load_costs
from minivllm.simulation.engine import format_simulations, make_simulated_engine, simulate
from minivllm.simulation.replay import replay

SECOND = CostModel(fixed=1.0)
"""Every step takes a second."""


def requests_of(*lengths: tuple[int, int, float]) -> list[WorkloadRequest]:
    """Requests from (prompt length, output length, arrival)."""
    return [WorkloadRequest([5] * prompt_len, output_len, arrival) for prompt_len, output_len, arrival in lengths]


# -- costs -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.integers(0, 50))))
def test_work_is_counted_token_by_token(sequences):
    parts = [(is_decode, num_tokens, before + num_tokens) for is_decode, num_tokens, before in sequences]
    prefills = [(num_tokens, before) for is_decode, num_tokens, before in sequences if not is_decode]
    decodes = [(num_tokens, before) for is_decode, num_tokens, before in sequences if is_decode]
    assert count_work(parts) == StepWork(
        prefill_tokens=sum(num_tokens for num_tokens, _ in prefills),
        prefill_pairs=sum(before + i + 1 for num_tokens, before in prefills for i in range(num_tokens)),
        decode_seqs=sum(num_tokens for num_tokens, _ in decodes),
        context_tokens=sum(before + num_tokens for num_tokens, before in decodes),
    )


def test_a_step_costs_the_sum_of_its_parts():
    costs = CostModel(
        1.0, per_prefill_step=10.0, per_prefill_token=2.0, per_prefill_pair=0.5, per_decode_seq=3.0, per_context_token=0.1
    )
    assert costs(StepWork(0, 0, 2, 30)) == pytest.approx(1 + 2 * 3 + 30 * 0.1)
    assert costs(StepWork(4, 10, 0, 0)) == pytest.approx(1 + 10 + 4 * 2 + 10 * 0.5)
    assert costs(StepWork(4, 10, 2, 30)) == pytest.approx(1 + 10 + 8 + 5 + 6 + 3)


@given(st.dictionaries(st.integers(1, 60), st.floats(0, 10), min_size=1, max_size=6), st.integers(0, 100))
def test_the_decode_curve_is_straight_between_its_points(curve, num_seqs):
    points = tuple(sorted(curve.items()))
    costs = CostModel(0.0, per_decode_seq=2.0, decode_curve=points)
    sizes, seconds = zip((0, 0.0), *points, strict=True)
    beyond = max(0, num_seqs - sizes[-1])
    assert costs.decode_seconds(num_seqs) == pytest.approx(np.interp(num_seqs, sizes, seconds) + 2.0 * beyond)


# -- runs ------------------------------------------------------------------------------------------------------------


def test_one_request_alone():
    result = simulate(requests_of((10, 3, 5.0)), cost_model=SECOND)
    assert (result.num_steps, result.seconds, result.busy_seconds) == (3, 3.0, 3.0)
    assert (result.num_requests, result.prompt_tokens, result.output_tokens) == (1, 10, 3)
    assert result.ttft.mean == 1.0 and result.latency.mean == 3.0 and result.tpot.mean == 1.0
    assert result.output_tokens_per_second == 1.0
    assert [(step.start, step.end) for step in result.trace] == [(5.0, 6.0), (6.0, 7.0), (7.0, 8.0)]


def test_time_passes_to_the_next_arrival_when_nothing_is_to_do():
    result = simulate(requests_of((1, 2, 0.0), (1, 2, 10.0)), cost_model=SECOND)
    assert (result.seconds, result.busy_seconds, result.mean_running) == (12.0, 4.0, 1.0)


def test_static_batching_makes_a_latecomer_wait():
    requests = requests_of((1, 10, 0.0), (1, 2, 1.5))
    results = {name: simulate(requests, cost_model=SECOND, scheduler=name) for name in ("static", "continuous")}
    assert results["static"].seconds == 12.0
    assert results["continuous"].seconds == 11.0  # one more step for its prefill


def test_a_full_cache_preempts():
    result = simulate(requests_of((8, 20, 0.0), (8, 20, 0.0)), cost_model=SECOND, block_size=4, num_gpu_blocks=8)
    assert result.num_preemptions > 0
    assert result.peak_cache_use == 1.0
    assert result.num_requests == 2


@given(
    st.integers(1, 40), st.sampled_from(ARRIVALS), st.sampled_from(DISTRIBUTIONS), st.integers(0, 3), st.integers(1, 6),
    st.booleans(), st.sampled_from(["recompute", "swap"]), st.one_of(st.none(), st.integers(1, 10)),
)  # fmt: skip
def test_results_are_those_of_the_trace(count, arrivals, distribution, seed, max_num_seqs, chunked, preemption_mode, concurrency):
    workload = {"arrivals": arrivals, "arrival_rate": 3.0, "distribution": distribution, "mean_prompt_len": 12}
    options = {
        "max_num_seqs": max_num_seqs, "block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 20, "max_model_len": 100,
        "preemption_mode": preemption_mode,
    }  # fmt: skip
    if chunked:
        options |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
    requests = list(generate_requests(count, mean_output_len=10, max_len=100, seed=seed, **workload))
    result = simulate(requests, max_concurrency=concurrency, **options)
    trace = result.trace
    records = trace.requests.values()
    assert result.num_requests == count == len(records)
    assert result.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests)
    assert result.output_tokens == sum(request.output_len for request in requests)
    assert [len(record.output_token_ids[0]) for record in records] == [request.output_len for request in requests]
    assert result.num_steps == len(trace)
    assert result.num_preemptions == sum(len(step.preempted) for step in trace)
    lengths = [step.end - step.start for step in trace]
    assert result.busy_seconds == pytest.approx(sum(lengths))
    running = sum(step.num_running * length for step, length in zip(trace, lengths, strict=True)) / sum(lengths)
    assert result.mean_running == pytest.approx(running)
    assert result.peak_cache_use == pytest.approx(max(1 - step.num_free_blocks / 40 for step in trace))
    assert result.ttft.mean == pytest.approx(statistics.mean(r.first_token_time - r.arrival_time for r in records))
    assert result.latency.mean == pytest.approx(statistics.mean(r.finished_time - r.arrival_time for r in records))
    if concurrency is not None:
        assert max(step.num_running + step.num_waiting + step.num_swapped for step in trace) <= concurrency
    again = simulate(requests, max_concurrency=concurrency, trace=False, **options)
    assert again.to_json() == result.to_json()


@pytest.mark.slow
def test_a_finished_request_leaves_no_more_than_its_times():
    sizes = []

    def watched():
        for number, request in enumerate(generate_requests(2001, arrivals="at-once", mean_output_len=8)):
            if number in (400, 2000):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            yield request

    tracemalloc.start()
    try:
        simulate(watched(), max_concurrency=32, max_num_seqs=16, trace=False)
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 1600 * 40, "three numbers of 8 bytes, and room for the arrays to grow"


def test_the_simulated_model_says_something_else_to_each_request_and_forks():
    engine = make_simulated_engine()
    engine.add_request("a", [1, 2], SamplingParams(n=2, max_tokens=5))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=5))
    while engine.has_unfinished_requests():
        engine.step()
    said = [tuple(tokens) for request in engine.trace.requests.values() for tokens in request.output_token_ids]
    assert len(said) == len(set(said)) == 3
    assert {len(tokens) for tokens in said} == {5}


@pytest.mark.parametrize("options, message", [
    ({"scheduler": "random"}, "scheduler is 'random'"),
    ({"block_size": 0}, "block_size is 0"),
    ({"num_gpu_blocks": True}, "num_gpu_blocks is True"),
    ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_concurrency": 0}, "max_concurrency is 0"),
    ({"speed": 9}, "no such option: .*'speed'"),
    ({"num_gpu_blocks": 2, "block_size": 2}, "Request 0 grows to 12 tokens, but the whole cache holds only 4: raise num_gpu_blocks"),
    ({"max_model_len": 9}, "Request 0 grows to 12 tokens, but max_model_len is 9: raise it"),
    ({"max_num_batched_tokens": 20}, "a prompt may have up to max_model_len = 8192 tokens"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_told_in_a_sentence(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        simulate(requests_of((9, 3, 0.0)), **options)
    assert str(caught.value).endswith(".")


def test_requests_must_come_in_order_and_there_must_be_some():
    with pytest.raises(ConfigError, match="sort them"):
        simulate(requests_of((1, 1, 3.0), (1, 1, 2.0)))
    with pytest.raises(ConfigError, match="no requests"):
        simulate([])


@pytest.mark.parametrize("arrival", [float("nan"), float("inf"), -float("inf")])
def test_arrivals_must_be_moments(arrival):
    with pytest.raises(ConfigError, match="must be finite"):
        simulate(requests_of((1, 1, 0.0), (1, 1, arrival)))


def test_time_begins_with_the_first_arrival():
    for arrival in (-5.0, 1e9):
        result = simulate(requests_of((1, 2, arrival)), cost_model=SECOND)
        assert (result.seconds, result.completed) == (2.0, 1)
        assert result.ttft.mean == 1.0


def test_work_that_costs_nothing_takes_no_time():
    result = simulate(requests_of((1, 2, 0.0)), cost_model=CostModel(0.0))
    assert (result.seconds, result.output_tokens, result.output_tokens_per_second) == (0.0, 2, 0.0)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_step_must_end_after_it_began(seconds):
    with pytest.raises(ConfigError, match="must return a finite number"):
        simulate(requests_of((1, 2, 0.0)), cost_model=lambda work: seconds)


def test_clocks_do_not_go_back():
    clock = VirtualClock(5.0)
    clock.advance_to(3.0)
    assert clock() == 5.0
    clock.advance(2.0)
    clock.advance_to(8.0)
    assert clock() == 8.0


def test_an_executor_is_told_how_many_blocks_it_has():
    executor = SimulatedExecutor(VirtualClock(), SECOND, 7, 3)
    assert executor.determine_num_available_blocks() == (7, 3)


# -- arrivals and lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", ["poisson", "bursts"])
def test_arrivals_come_at_their_rate(arrivals):
    times = list(itertools.islice(arrival_times(arrivals, 5.0, burst_size=4), 8000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    gaps = np.diff(times)
    assert (np.count_nonzero(gaps == 0) == 6000) == (arrivals == "bursts")
    if arrivals == "poisson":  # gaps are exponential: their deviation is their mean
        assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_long_tailed_lengths_have_their_means():
    requests = list(generate_requests(5000, mean_prompt_len=40, mean_output_len=80))
    assert statistics.mean(len(request.prompt_token_ids) for request in requests) == pytest.approx(40, rel=0.08)
    assert statistics.mean(request.output_len for request in requests) == pytest.approx(80, rel=0.08)
    assert statistics.median(request.output_len for request in requests) < 60


def test_shared_beginnings_are_found_in_the_prefix_cache():
    requests = list(generate_requests(10, num_shared_prompt_tokens=64, mean_prompt_len=8, arrival_rate=0.1))
    trace = simulate(requests, enable_prefix_caching=True).trace
    assert [request.num_cached_tokens for request in trace.requests.values()] == [0] + [64] * 9


@pytest.mark.parametrize("arguments, message", [
    ({"num_requests": 0}, "num_requests is 0"),
    ({"arrivals": "never"}, "arrivals is 'never'"),
    ({"arrival_rate": 0}, "arrival_rate is 0"),
    ({"arrival_rate": float("nan")}, "arrival_rate is nan"),
    ({"arrivals": "bursts", "burst_size": 0}, "burst_size is 0"),
    ({"distribution": "normal"}, "distribution is 'normal'"),
    ({"mean_output_len": 0}, "mean_output_len is 0"),
    ({"max_len": 10, "num_shared_prompt_tokens": 5}, "leave no room"),
])  # fmt: skip
def test_arguments_of_a_workload_are_checked_before_it_is_drawn(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate_requests(**{"num_requests": 3} | arguments)


# -- files and the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("content, message", [
    ("{", "not valid JSON"),
    ("[1]", "must have 'fixed'"),
    ('{"fixed": 1, "colour": 2}', "must have 'fixed'"),
    ('{"fixed": -1}', r"Expected `float` >= 0.0 - at `\$.fixed`"),
    ('{"fixed": 1e9}', r"Expected `float` < 1000000000.0 - at `\$.fixed`"),
    ('{"fixed": "1"}', r"Expected `float`, got `str` - at `\$.fixed`"),
    ('{"fixed": 1, "per_decode_seq": NaN}', "not valid JSON"),
    ('{"fixed": 1, "decode_curve": 3}', "decode_curve is a list"),
    ('{"fixed": 1, "decode_curve": [[0, 1]]}', "Expected `int` >= 1"),
    ('{"fixed": 1, "decode_curve": [[2, 1], [1, 2]]}', "must increase"),
    ('{"fixed": 1, "decode_curve": [[1, -2]]}', r"Expected `float` >= 0.0 - at `\$.decode_curve"),
])  # fmt: skip
def test_a_file_that_is_no_cost_model_is_refused_in_a_sentence(tmp_path, content, message):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_costs(file)


def test_the_default_costs_are_those_that_were_measured():
    """Rounded to four digits."""
    measured = load_costs(Path(__file__).parents[2] / "benchmarks" / "results" / "calibrate_2026-11-21.json")
    assert (
        CostModel(
            **{name: float(f"{value:.4g}") for name, value in vars(measured).items() if name != "decode_curve"},
            decode_curve=tuple((size, float(f"{seconds:.4g}")) for size, seconds in measured.decode_curve),
        )
        == DEFAULT_COSTS
    )


def test_a_cost_model_is_read_alone_or_from_a_calibration(tmp_path):
    file = tmp_path / "costs.json"
    costs = {"fixed": 0.02, "per_decode_seq": 0.001, "decode_curve": [[1, 0.0], [4, 0.01]]}
    for content in (costs, {"machine": "mine", "calibration": {"costs": costs, "r_squared": 1}}):
        file.write_text(json.dumps(content))
        assert load_costs(file) == CostModel(0.02, per_decode_seq=0.001, decode_curve=((1, 0.0), (4, 0.01)))


def test_the_command_simulates_both_schedulers_and_saves(tmp_path, capsys):
    trace, results = tmp_path / "trace.json", tmp_path / "results.json"
    argv = ["simulate", "--num-requests", "20", "--mean-output-len", "8", "--save-trace", str(trace), "--json", str(results)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "static" in printed and "continuous" in printed and f"minivllm trace show {trace}" in printed
    content = json.loads(results.read_text())
    assert {"machine", "time", "command", "versions"} < content.keys()
    assert content["seconds"] > 0 and content["cpu_seconds"] > 0 and 2**23 < content["peak_memory_bytes"] < 2**40
    assert [result["num_requests"] for result in content["results"]] == [20, 20]
    assert json.loads(trace.read_text())["config"]["scheduler"] == "Scheduler"


@pytest.mark.parametrize("argv, message", [
    (["--num-gpu-blocks", "0"], "num_gpu_blocks is 0"),
    (["--arrival-rate", "-1"], "arrival_rate is -1.0"),
    (["--cost-model", "missing.json"], "no cost model missing.json"),
    (["--save-trace", "no/such/folder/trace.json"], "cannot be written"),
    (["--num-requests", "5000", "--save-trace", "trace.json"], "more than 2000 requests"),
])  # fmt: skip
def test_the_command_says_in_a_sentence_what_is_wrong(argv, message, capsys):
    assert main(["simulate", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_table_has_a_line_for_each_simulation():
    results = [simulate(requests_of((3, 3, 0.0)), scheduler=name) for name in ("static", "continuous")]
    lines = format_simulations(results).split("\n")
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("async_scheduling", "expected"), [(False, 8.0), (True, 6.0)])
def test_a_device_beside_the_host_does_not_wait_for_it(async_scheduling, expected):
    """The device takes 6 seconds for a step, and the host 2. Tokens are the same."""
    engine = make_simulated_engine(cost_model=lambda work: 6.0, async_scheduling=async_scheduling)
    schedule = engine.scheduler.schedule

    def schedule_slowly():
        engine.clock.advance(2.0)
        return schedule()

    engine.scheduler.schedule = schedule_slowly
    for i in range(3):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, seed=i))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert outputs == {str(i): [(i + 3 + k) % 50_000 for k in range(20)] for i in range(3)}
    ends = [step.end for step in engine.trace]
    assert {b - a for a, b in itertools.pairwise(ends)} == {expected}
    if async_scheduling:
        with pytest.raises(ConfigError, match="several steps in flight, which cannot be replayed"):
            replay(engine.trace)
