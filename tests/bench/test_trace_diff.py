"""Two traces side by side: numbers that are those of their summaries, the first step that differs, and a page."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from minivllm.bench.trace_diff import COLORS, _bars, diff_traces, plan, to_page, to_svg
from minivllm.bench.trace_summary import summarize_trace
from minivllm.bench.workloads import generate_requests
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.cli.main import main
from minivllm.simulation.engine import simulate


def run(num_requests=20, seed=0, **options):
    return simulate(list(generate_requests(num_requests, arrival_rate=5.0, seed=seed)), num_gpu_blocks=40, **options).trace


@pytest.fixture(scope="module")
def traces():
    return run(), run(preemption_mode="swap", num_cpu_blocks=40)


def test_the_first_step_that_differs_is_found_and_told(traces):
    diff = diff_traces(("recompute", "swap"), traces)
    plans = [[plan(step) for step in trace] for trace in traces]
    assert plans[0][: diff.step] == plans[1][: diff.step]
    assert plans[0][diff.step] != plans[1][diff.step]
    assert f"The first step that differs is step {diff.step}. recompute: " in str(diff)
    assert diff.plans == (plans[0][diff.step], plans[1][diff.step])


@pytest.mark.parametrize("seed", range(6))
def test_runs_that_preempt_in_another_way_part_there(seed):
    requests = list(generate_requests(24, arrivals="at-once", seed=seed, max_len=300))
    recompute = simulate(requests, num_gpu_blocks=30).trace
    swap = simulate(requests, num_gpu_blocks=30, preemption_mode="swap", num_cpu_blocks=30).trace
    diff = diff_traces(("recompute", "swap"), (recompute, swap))
    assert diff.step == next(number for number, step in enumerate(recompute) if step.preempted)
    assert "recompute: preempt #" in str(diff) and "swap: swap out #" in str(diff)


def test_runs_of_other_requests_are_told_apart():
    other = simulate(list(generate_requests(20, arrival_rate=9.0)), num_gpu_blocks=40).trace
    longer = simulate(list(generate_requests(20, arrival_rate=5.0, mean_output_len=99)), num_gpu_blocks=40).trace
    for trace in (other, longer):
        assert ("requests", "20, not the same ones", "20, not the same ones") in diff_traces(("a", "b"), (run(), trace)).rows


def test_a_request_that_was_aborted_while_it_waited_has_a_bar_until_then():
    trace = run()
    last = list(trace.requests.values())[-1]
    last.first_scheduled_time = last.first_token_time = None
    last.finished_time = last.arrival_time + 0.25
    bars = [stop - start for i, (_, start, stop, _) in _bars(trace) if i == len(trace.requests) - 1]
    assert bars == [pytest.approx(0.25)]


def test_the_page_has_a_row_for_each_sequence_that_the_runs_treat_differently_in_that_step():
    diff = diff_traces(("static & slow", "continuous"), (run(scheduler="static"), run()))
    page = to_page(diff)
    table = page.split(f"<p>The first step that differs is step {diff.step}.</p>")[1].partition("<svg")[0]
    rows = [
        tuple(re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd].*?</t[hd]>", row))
        for row in re.findall("<tr>.*?</tr>", table)
    ]
    assert rows[0] == ("", "static &amp; slow", "continuous")
    decoded, prefilled = diff.plans
    assert {action for action, *_ in decoded} == {"decode"} and {action for action, *_ in prefilled} == {"prefill"}
    assert rows[1:] == [(name, "decode", "–") for _, name, _ in decoded] + [
        (name, "–", f"prefill, {tokens} tokens") for _, name, tokens in prefilled
    ]


def test_the_page_says_what_both_do_in_that_step_and_what_one_preempts(traces):
    both = ("decode", "#3", 1)
    diff = dataclasses.replace(
        diff_traces(("a", "b"), traces), plans=((("preempt", "#4", 0), both), (both, ("prefill", "#11/1", 7)))
    )
    page = to_page(diff)
    assert "#4</th><td>preempted</td><td>–</td>" in page and "#11/1</th><td>–</td><td>prefill, 7 tokens</td>" in page
    assert "<p>Both: decode #3.</p>" in page
    other_order = dataclasses.replace(diff, plans=((both, ("decode", "#5", 1)), (("decode", "#5", 1), both)))
    assert "<p>Both, in another order: decode #3, #5.</p>" in to_page(other_order)
    again = dataclasses.replace(diff, plans=((("preempt", "#4", 0), ("prefill", "#4", 9)), (("prefill", "#4", 9),)))
    assert "#4</th><td>preempted; prefill, 9 tokens</td><td>prefill, 9 tokens</td>" in to_page(again)
    ended = dataclasses.replace(diff, plans=((both,), ()))
    assert "#3</th><td>decode</td><td>it has ended</td>" in to_page(ended)
    many = dataclasses.replace(diff, plans=(tuple(("decode", f"#0/{i}", 1) for i in range(1, 31)), ()))
    assert "<p>And 6 more.</p>" in to_page(many)


def test_the_numbers_are_those_of_the_summaries(traces):
    rows = {name: values for name, *values in diff_traces(("a", "b"), traces).rows}
    for place, trace in enumerate(traces):
        summary = summarize_trace(trace)
        assert rows["output tokens/s"][place] == f"{summary.output_tokens_per_second:.0f}"
        assert rows["TTFT p99"][place] == f"{1000 * summary.ttft.p99:.0f} ms"
        assert rows["steps"][place] == str(len(trace))
    assert rows["preemptions"] != ["0", "0"]
    assert "requests" not in rows


def test_runs_that_are_the_same_have_no_such_step_and_one_that_ends_earlier_says_so(traces):
    assert diff_traces(("a", "b"), (traces[0], traces[0])).step is None
    shorter = run(num_requests=19)
    longer = run(num_requests=20)
    diff = diff_traces(("a", "b"), (shorter, longer))
    assert diff.step is not None and {name: values for name, *values in diff.rows}["requests"] == [
        "19, not the same ones",
        "20, not the same ones",
    ]
    empty = simulate(list(generate_requests(1)), num_gpu_blocks=40).trace
    empty.steps.clear()
    assert "a: it has ended" in str(diff_traces(("a", "b"), (empty, shorter)))


def test_the_page_is_whole_and_names_are_text(traces):
    diff = diff_traces(("a & b", "<script>"), traces)
    page = to_page(diff, "x < y")
    assert "<script>" not in page and "x &lt; y" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    picture = ElementTree.fromstring(to_svg(diff))
    bars = [bar for bar in picture.iter() if bar.tag.endswith("rect")]
    assert len(bars) == 2 * 3 * 20
    assert all(float(bar.get("x")) >= 44 and float(bar.get("x")) + float(bar.get("width")) <= 871 for bar in bars)


def test_the_command_prints_the_difference_and_writes_the_page(traces, tmp_path, capsys):
    for name, trace in zip(("one", "two"), traces, strict=True):
        trace.save(tmp_path / f"{name}.json")
    files = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    assert main(["trace", "diff", *files, "--html", str(tmp_path / "diff.html")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^output tokens/s +\d+ +\d+$", printed, flags=re.MULTILINE) and "The first step that differs" in printed
    assert (tmp_path / "diff.html").read_text().startswith("<!doctype html>")
    assert main(["trace", "diff", *files, "--html", files[1]]) == 2
    assert "is one of the traces" in capsys.readouterr().err and len(EngineTrace.load(tmp_path / "two.json"))
    assert main(["trace", "diff", *files, "--html", str(tmp_path / "nowhere/diff.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_colours_are_those_of_all_figures():
    """Which need matplotlib, as the command and the browser do not."""
    from minivllm.viz.palette import REQUEST_COLORS

    assert COLORS == REQUEST_COLORS
