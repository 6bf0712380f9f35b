"""Traces on the command line: recorded, shown, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shadow import set_clock, shadow_engine

from minivllm.bench.summary import percentile
from minivllm.bench.trace_summary import count_output_tokens
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.cli import main as cli
from minivllm.entrypoints.cli.trace import format_summary, with_trace_command
from minivllm.sampling_params import SamplingParams

SMALL = ["--num-gpu-blocks-override", "60", "--max-model-len", "256"]
PNG = b"\x89PNG"


def make_trace(num_blocks: int = 12, num_requests: int = 6) -> EngineTrace:
    """Requests that preempt each other, one of which is given up."""
    engine, executor = shadow_engine(num_blocks)
    set_clock(engine, lambda: 50.0 + executor.num_steps * 0.1)
    trace = engine.start_trace()
    for i in range(num_requests):
        engine.add_request(f"r{i}", [1 + i] * (4 + i), SamplingParams(n=1 + i % 2, max_tokens=10, ignore_eos=True, seed=i))
    for _ in range(8):
        engine.step()
    engine.abort_request(f"r{num_requests - 1}")
    while engine.has_unfinished_requests():
        engine.step()
    return trace


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A saved trace, in a folder where we are."""
    monkeypatch.chdir(tmp_path)
    make_trace().save("run.json")
    return Path("run.json")


def test_both_commands_have_help_with_an_example(capsys):
    for command in ("show", "export"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["trace", command, "--help"])
        assert stopped.value.code == 0
        assert f"Example: minivllm trace {command}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trace", "--help"])
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    "words,expected",
    [
        ("trace show f", "trace show f"),
        ("trace f --step 3", "trace show f --step 3"),
        ("trace --to chrome f", "trace export --to chrome f"),
        ("trace f --to=chrome --output g", "trace export f --to=chrome --output g"),
        ("trace export f", "trace export f"),
        ("trace", "trace"),
        ("trace -h", "trace -h"),
        ("generate trace --to", "generate trace --to"),
    ],
)
def test_the_command_may_be_left_out(words, expected):
    assert with_trace_command(words.split()) == expected.split()


def test_show_draws_all_figures_and_prints_the_numbers(capsys, file):
    assert cli.main(["trace", "show", str(file)]) == 0
    out = capsys.readouterr().out
    trace = EngineTrace.load(file)
    assert format_summary(trace) in out
    fullest = min(range(len(trace)), key=lambda number: trace[number].num_free_blocks)
    names = {"requests", "batches", "curves", "latencies", "cache_use", f"block_map_{fullest}"}
    assert {path.stem for path in Path("out/run").iterdir()} == names
    for path in Path("out/run").iterdir():
        assert path.read_bytes().startswith(PNG)
        assert str(path) in out


def test_show_takes_a_step_and_a_folder(file):
    assert cli.main(["trace", str(file), "--step", "2", "--output", "a/b"]) == 0
    assert Path("a/b/block_map_2.png").exists()


def test_the_summary_counts_what_the_trace_has():
    trace = make_trace()
    lines = dict(line.split(maxsplit=1) for line in format_summary(trace).splitlines() if line.strip())
    finished = [r for r in trace.requests.values() if "abort" not in r.finish_reasons]
    assert len(finished) == 5
    assert lines["requests"] == "6 (1 unfinished, aborted or failed)"
    assert lines["steps"] == str(len(trace))
    assert lines["time"] == f"{trace[-1].end - 50.0:.3f} s"
    output_tokens = sum(len(ids) for r in trace.requests.values() for ids in r.output_token_ids)
    assert lines["tokens"] == f"{sum(range(4, 10))} of prompts, {output_tokens} generated"
    assert int(lines["preemptions"]) == sum(r.num_preemptions for r in trace.requests.values()) > 0
    latencies = [1e3 * (r.finished_time - r.arrival_time) for r in finished]
    assert lines["latency"].split()[::2] == [f"{percentile(latencies, percent):.1f}" for percent in (50, 95, 99)]
    used = sum(len({block for table in step.block_tables.values() for block in table}) for step in trace) / len(trace)
    assert lines["mean"] == f"cache use  {used / 12:.1%}", "all steps are equally long"


def test_tokens_of_unfinished_requests_count_too():
    engine, _ = shadow_engine(40)
    trace = engine.start_trace()
    engine.add_request("a", [1, 2, 3], SamplingParams(n=3, max_tokens=10, ignore_eos=True))
    for step in range(4):
        assert count_output_tokens(trace) == 3 * step
        engine.step()
    assert "speed" in format_summary(trace)
    while engine.has_unfinished_requests():
        engine.step()
    assert count_output_tokens(trace) == 30


@pytest.mark.parametrize("command", [["trace", "--to", "chrome"], ["trace", "export"]])
def test_export_writes_what_perfetto_reads(capsys, file, command):
    assert cli.main([*command, str(file)]) == 0
    content = json.loads(Path("run.chrome.json").read_text())
    assert content["traceEvents"]
    assert "run.chrome.json" in capsys.readouterr().out
    assert cli.main([*command, str(file), "--output", "elsewhere.json"]) == 0
    assert json.loads(Path("elsewhere.json").read_text()) == content


def write_bad_files() -> None:
    Path("not_json.json").write_text("{")
    Path("other.json").write_text('{"results": []}')
    content = json.loads(Path("run.json").read_text())
    Path("old.json").write_text(json.dumps(content | {"minivllm_trace": 0}))
    Path("damaged.json").write_text(json.dumps({key: value for key, value in content.items() if key != "config"}))
    shadow_engine(10)[0].start_trace().save("empty.json")
    Path("a_file").write_text("")


@pytest.mark.parametrize(
    "words,sentence",
    [
        ("nowhere.json", "The trace nowhere.json cannot be read"),
        (".", "The trace . cannot be read"),
        ("not_json.json", "not_json.json is not a trace: it is not valid JSON"),
        ("other.json", "other.json cannot be used. It is not a trace"),
        ("old.json", "old.json cannot be used. It is a trace of version 0"),
        ("damaged.json", "damaged.json cannot be used. It is a damaged trace"),
        ("empty.json", "empty.json has no steps"),
        ("run.json --step 1000", "--step is 1000, but the trace has the steps 0 to"),
        ("run.json --step -1", "--step is -1, but"),
        ("run.json --output a_file", "a_file is a file, but the figures need a folder"),
        ("run.json --output a_file/folder", "a_file/folder cannot be used"),
        ("--to chrome nowhere.json", "The trace nowhere.json cannot be read"),
        ("--to chrome empty.json", "empty.json has no steps"),
        ("--to chrome run.json --output no/folder.json", "no/folder.json cannot be written"),
        ("--to chrome run.json --output a_file/x.json", "a_file/x.json cannot be"),
        ("--to chrome run.json --output ./run.json", "run.json is the trace itself"),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(capsys, file, words, sentence):
    write_bad_files()
    before = file.read_text()
    assert cli.main(["trace", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert f"minivllm: {sentence}" in error
    assert len(error.strip().splitlines()) == 1
    assert out == ""
    assert file.read_text() == before


def test_another_form_is_refused_with_those_there_are(capsys, file):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trace", "--to", "svg", str(file)])
    assert stopped.value.code == 2
    assert "invalid choice: 'svg'" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_saves_its_trace(capsys, tmp_path):
    path = tmp_path / "run.json"
    options = ["--temperature", "0", "--max-tokens", "3", "--save-trace", str(path), *SMALL]
    assert cli.main(["generate", "The capital of France is", *options]) == 0
    assert capsys.readouterr().out.startswith("The capital of France is Paris")
    trace = EngineTrace.load(path)
    assert len(trace) == 3
    assert [len(ids) for request in trace.requests.values() for ids in request.output_token_ids] == [3]


@pytest.mark.slow
def test_bench_offline_saves_a_trace_of_each_run(capsys, tmp_path):
    options = ["--num-requests", "3", "--mean-prompt-len", "4", "--mean-output-len", "4", "--max-num-seqs", "2", *SMALL]
    command = ["bench", "offline", "--distribution", "uniform", *options]
    assert cli.main([*command, "--save-trace", str(tmp_path / "run.json")]) == 0
    out = capsys.readouterr().out
    for policy, scheduler in (("static", "StaticBatchScheduler"), ("continuous", "Scheduler")):
        path = tmp_path / f"run.uniform.{policy}.json"
        assert str(path) in out
        assert EngineTrace.load(path).config.scheduler == scheduler
    assert cli.main([*command, "--scheduler", "static", "--save-trace", str(tmp_path / "one.json")]) == 0
    assert len(EngineTrace.load(tmp_path / "one.json").requests) == 3


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (["generate", "hi", "--save-trace", "no/folder.json"], "no/folder.json cannot be written"),
        (["bench", "offline", "--save-trace", "no/folder.json"], "no/folder.json cannot be written"),
    ],
)
def test_what_cannot_be_saved_is_said_before_the_work(capsys, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minivllm.entrypoints.llm.LLM.__init__", lambda *args, **kwargs: pytest.fail("the work has begun"))
    assert cli.main(arguments) == 2
    assert sentence in capsys.readouterr().err
