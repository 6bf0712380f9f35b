"""The command line, as a person types it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest

from minivllm.config import EngineArgs
from minivllm.entrypoints.cli import demo
from minivllm.entrypoints.cli import main as cli

SMALL = ["--num-gpu-blocks-override", "60", "--max-model-len", "256"]


def test_every_command_has_help_with_an_example(capsys):
    benches = [["bench", name] for name in ("offline", "latency", "sweep", "serve", "calibrate")]
    for command in (["generate"], ["chat"], *benches, ["doctor"], ["demo"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main([*command, "--help"])
        assert stopped.value.code == 0
        assert f"Example: minivllm {' '.join(command)}" in " ".join(capsys.readouterr().out.split())


def test_every_engine_option_has_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(EngineArgs):
        option = f"--{field.name.replace('_', '-')}"
        if f"{option} " in text:
            assert len(field.metadata["help"]) > 10
            assert field.metadata["help"].split()[0] in text.split(f" {option}", 1)[1]


def test_commands_start_without_docstrings_and_assertions():
    command = [sys.executable, "-OO", "-m", "minivllm.entrypoints.cli.main", "generate", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Maximum number of sequences per step" in result.stdout


def test_generate_prints_prompt_and_text(capsys):
    assert cli.main(["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "2", *SMALL]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n\n"


def test_generate_reads_standard_input_and_writes_json(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is\n"))
    options = ["--json", "--temperature", "0", "--max-tokens", "1", "--n", "2", *SMALL]
    assert cli.main(["generate", "-", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "The capital of France is"
    assert [output["text"] for output in result["outputs"]] == [" Paris", " Paris"]
    assert result["error"] is None


def test_chat_streams_answers_and_remembers(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hi.\n\n/clear\nSay hi.\n/exit\nnever read\n"))
    assert cli.main(["chat", "--temperature", "0", "--max-tokens", "5", *SMALL]) == 0
    first, second = capsys.readouterr().out.strip().split("\n")
    assert first == second, "after /clear a new conversation begins"


def test_chat_says_when_the_context_is_full(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 300 + "\n/exit\n"))
    assert cli.main(["chat", *SMALL]) == 0
    assert "/clear starts a new conversation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (["generate", "hi", "--model", "nothing-here"], "minivllm: There is no model 'nothing-here'"),
        (["generate", "hi", "--top-p", "0"], "minivllm: top_p is 0"),
        (["generate", "", *SMALL], "minivllm: The prompt is empty"),
        (
            ["bench", "offline", "--workload", "no-such-file.json", *SMALL],
            "minivllm: There is no workload file no-such-file.json",
        ),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(capsys, arguments, sentence):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_bench_offline_compares_both_policies(capsys, tmp_path):
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ["--num-requests", "6", "--mean-prompt-len", "6", "--mean-output-len", "6", "--max-num-seqs", "2"]
    assert cli.main(["bench", "offline", *options, "--json", str(report), "--plot", str(plot), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "longtail: continuous batching gives" in out
    results = json.loads(report.read_text())["results"]
    assert [(r["workload"], r["scheduler"]) for r in results] == [
        ("uniform", "static"), ("uniform", "continuous"), ("longtail", "static"), ("longtail", "continuous"),
    ]  # fmt: skip
    assert all(r["output_tokens"] == 36 for r in results)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_doctor_finds_the_model(capsys):
    assert cli.main(["doctor"]) == 0
    assert "All is well" in capsys.readouterr().out


def test_doctor_names_a_library_that_is_not_installed(capsys, monkeypatch):
    from minivllm.entrypoints.cli import doctor

    def version(package):
        if package == "numba":
            raise doctor.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    assert cli.main(["doctor"]) == 0
    assert "numba (missing)" in capsys.readouterr().out


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    from minivllm.models import hub

    monkeypatch.setitem(hub.PACKAGED_MODELS, "smollm2-135m", hub.PackagedModel("llm-ghost==1", "llm_ghost", "x.gguf"))
    assert cli.main(["doctor"]) == 1
    assert "NOT FOUND" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_shows_text_a_table_and_a_picture(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "NUM_REQUESTS", 4)
    monkeypatch.setattr(demo, "MEAN_OUTPUT_LEN", 4)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for prompt in demo.PROMPTS:
        assert repr(prompt) in out
    assert "longtail  continuous" in out
    assert str(tmp_path / "static_vs_continuous.png") in out
    assert (tmp_path / "static_vs_continuous.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.slow
def test_without_matplotlib_the_demo_runs_and_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "NUM_REQUESTS", 4)
    monkeypatch.setattr(demo, "MEAN_OUTPUT_LEN", 4)
    for name in [name for name in sys.modules if name.startswith(("minivllm.viz", "matplotlib"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo", "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "longtail  continuous" in out and "What to do next" in out
    assert "Not drawn, because matplotlib is not installed: `pip install matplotlib`" in out
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "sweep", "--plot", "sweep.png"])
    assert stopped.value.code == 2
    assert "drawing needs matplotlib" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests,sentence",
    [
        ([], "it has no requests"),
        ([{"ids": [5, 6], "out": 500}], "Request 0 of the workload grows beyond the 256 tokens"),
        ([{"ids": [5], "out": 1}, {"ids": [10**9], "out": 1}], "Token id 1000000000 is out of range"),
        ([{"ids": [], "out": 3}], "`$[0].ids`): it must be a JSON list"),
        ([{"ids": [1], "out": 0}], "`$[0].out`): it must be a JSON list"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused_before_it_runs(capsys, tmp_path, requests, sentence):
    file = tmp_path / "w.json"
    file.write_text(json.dumps(requests))
    assert cli.main(["bench", "offline", "--workload", str(file), *SMALL]) == 2
    assert sentence in capsys.readouterr().err


def test_without_standard_input_the_reader_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["generate", "-"]) == 2
    assert cli.main(["chat"]) == 2
    assert "no standard input" in capsys.readouterr().err


def test_doctor_says_when_the_cache_cannot_be_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file"))
    assert cli.main(["doctor"]) == 1
    assert "CANNOT BE USED" in capsys.readouterr().out


@pytest.mark.nightly  # it compiles all kernels anew
@pytest.mark.slow
def test_closed_standard_error_is_no_error(tiny_llama, tmp_path):
    code = f"""
from minivllm import LLM, SamplingParams
llm = LLM({str(tiny_llama)!r}, skip_tokenizer_init=True, num_gpu_blocks_override=20)
out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
open({str(tmp_path / "out")!r}, "w").write(repr((out.error, len(out.outputs[0].token_ids))))
"""
    folder = tmp_path / "no kernels yet"
    command = f"exec 2>&-; NUMBA_CACHE_DIR={shlex.quote(str(folder))} exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    subprocess.run(["bash", "-c", command], timeout=300, check=True)
    assert (tmp_path / "out").read_text() == "(None, 4)"
