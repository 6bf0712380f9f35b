"""`make gpu-check`: what is run, what is kept of it, and what was not run is told from what passed."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_engine
import gpu_kernels
import psutil
import pytest

from minivllm.errors import ConfigError

ROOT = Path(__file__).parents[2]


def load(name, file=None):
    """A module of tools/, or another file."""
    spec = importlib.util.spec_from_file_location(name, ROOT / (file or f"tools/{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_check():
    return load("gpu_check")


@pytest.fixture(scope="module")
def amx():
    """The benchmark: tests have a module of this name, too."""
    return load("benchmark_of_amx", "benchmarks/amx.py")


@pytest.fixture
def pretended(gpu_check, monkeypatch):
    """gpu_check with scripts in place of the parts: what each does, and by default nothing. Returns these, and a list of parts that were run."""
    scripts, ran = {}, []

    def command_of(name, folder, results):
        ran.append(name)
        return ["-c", scripts.get(name, "").replace("RESULTS", repr(str(results)))]

    monkeypatch.setattr(gpu_check, "command_of", command_of)
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "find_origin", lambda: {"machine": "a machine"})
    return scripts, ran


def run(gpu_check, monkeypatch, out, *parts):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *parts, "--out", str(out)])
    return gpu_check.main()


@pytest.mark.parametrize("missing", ["nbformat", "nbclient", "ipykernel"])
def test_a_lesson_that_cannot_run_here_is_not_run(gpu_check, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    passed, said = sys.modules["gpu_checks"].run_lesson("notebooks/05_triton.ipynb")
    assert passed is None and "notebooks/05_triton.ipynb was not run" in said and missing in said


@pytest.mark.parametrize(
    ("statuses", "status", "words"),
    [
        ({"logits": 0, "tests": 0}, 0, ["passed   logits", "passed   tests"]),
        ({"logits": 0, "tests": 2}, 2, ["passed   logits", "not run  tests"]),
        ({"logits": 1, "tests": 2}, 1, ["FAILED   logits", "not run  tests"]),
    ],
)
def test_not_run_is_a_word_and_a_status_of_its_own(gpu_check, pretended, monkeypatch, capsys, tmp_path, statuses, status, words):
    scripts, _ = pretended
    scripts.update({name: f"exit({code})" for name, code in statuses.items()})
    assert run(gpu_check, monkeypatch, tmp_path / "out.json", *statuses) == status
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


def test_a_part_that_dies_takes_no_other_with_it_and_its_output_is_shown(gpu_check, pretended, monkeypatch, capfd, tmp_path):
    scripts, _ = pretended
    scripts["draws"] = "import os; print('as far as here', flush=True); os.abort()"
    scripts["kernels"] = "import json; json.dump({'kernels': [{'name': 'slow', 'goal': 2, 'met': False}]}, open(RESULTS, 'w'))"
    assert run(gpu_check, monkeypatch, tmp_path / "out.json", "draws", "kernels", "tokens") == 1
    printed = capfd.readouterr().out
    assert "as far as here" in printed and "FAILED   draws" in printed and "passed   tokens" in printed
    assert "goals missed: slow" in printed


def test_parts_are_kept_beside_those_that_were_run_before(gpu_check, pretended, monkeypatch, capsys, tmp_path):
    scripts, ran = pretended
    out, found = tmp_path / "out.json", {"kernels": [{"name": "slow", "goal": 2, "met": False}]}
    scripts["kernels"] = f"import json; json.dump({found}, open(RESULTS, 'w'))"
    run(gpu_check, monkeypatch, out, "kernels")
    assert "goals missed: slow" in capsys.readouterr().out
    assert run(gpu_check, monkeypatch, out, "tests") == 0
    assert "goals missed: none" in capsys.readouterr().out, "those of the parts that were run now"
    result = json.loads(out.read_text())
    assert list(result["checks"]) == ["kernels", "tests"] and result["kernels"] == found
    assert ran == ["kernels", "tests"]  # and no model was made for these


def test_all_parts_are_run_but_those_that_take_minutes(gpu_check, pretended, monkeypatch, tmp_path):
    _, ran = pretended
    assert run(gpu_check, monkeypatch, tmp_path / "out.json") == 0
    lessons = sys.modules["gpu_checks"].LESSONS
    assert ran[:3] == ["kernels", "engine", "model"]  # the timed ones alone and first
    assert sorted(ran[3:]) == sorted(["logits", "replays", "tokens", "draws", "ranks", "tests", *lessons])


def test_without_its_model_a_check_is_not_run(gpu_check, pretended, monkeypatch, tmp_path):
    scripts, ran = pretended
    scripts["model"] = "exit(1)"
    assert run(gpu_check, monkeypatch, tmp_path / "out.json", "logits", "tests") == 2
    assert ran == ["model", "tests"]


def test_a_part_that_hangs_is_stopped(gpu_check, pretended, monkeypatch, capsys, tmp_path):
    scripts, _ = pretended
    scripts["tests"] = "import time; time.sleep(60)"
    monkeypatch.setattr(gpu_check, "LONGEST", 0.5)
    assert run(gpu_check, monkeypatch, tmp_path / "out.json", "tests") == 1
    assert "Stopped after" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_ends_its_parts_at_once(tmp_path, number):
    """By Ctrl-C, or by a time limit. Scripts that wait take the place of Python in its parts."""
    waits = tmp_path / "waits"
    waits.write_text(f"#!/bin/sh\ntouch {tmp_path}/$$.pid\nexec sleep 60\n")
    waits.chmod(0o755)
    script = f"""
import runpy, signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is not so in the background of a shell
torch.cuda.is_available, torch.cuda.get_device_name = lambda: True, lambda: "a GPU"
sys.executable = {str(waits)!r}
sys.argv = ["gpu_check.py", "tests", "amx-tests", "--out", {str(tmp_path / "out.json")!r}]
runpy.run_path("tools/gpu_check.py", run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while len(parts := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert "Stopped." in process.communicate(timeout=30)[0]
    assert process.returncode == 1
    assert not any(psutil.pid_exists(part) for part in parts)


@pytest.mark.parametrize("content", [None, '{"checks": {'], ids=["a folder", "half a file"])
def test_results_that_cannot_be_added_to_a_file_are_refused_before_anything_runs(
    gpu_check, pretended, monkeypatch, capsys, tmp_path, content
):
    _, ran = pretended
    out = tmp_path / "out.json"
    out.mkdir() if content is None else out.write_text(content)
    with pytest.raises(SystemExit):
        run(gpu_check, monkeypatch, out, "tests")
    assert "choose another file with --out" in capsys.readouterr().err
    assert not ran


@pytest.mark.parametrize("module", [gpu_engine, gpu_kernels])
def test_a_benchmark_refuses_a_file_that_it_cannot_write_before_it_measures(monkeypatch, tmp_path, module):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "measure_copy_bandwidth", lambda: pytest.fail("it measures"))
    monkeypatch.setattr(module, "compare_with_reference", lambda: pytest.fail("it measures"), raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json" if module is gpu_engine else "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be written"):
        module.main()


def test_no_rounds_are_refused(monkeypatch, capsys, amx):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rounds", "0"])
    for module in (gpu_engine, amx):
        with pytest.raises(SystemExit):
            module.main()
        assert "--rounds must be at least 1." in capsys.readouterr().err


def test_why_a_measurement_of_amx_failed_is_shown(monkeypatch, capfd, amx):
    monkeypatch.setattr(amx, "__file__", "no_such_script.py")
    with pytest.raises(subprocess.CalledProcessError):
        amx.run_side("")
    assert "no_such_script.py" in capfd.readouterr().err


def test_a_check_says_what_it_lacks(gpu_check, monkeypatch, capsys, tmp_path):
    gpu_checks = sys.modules["gpu_checks"]
    monkeypatch.setattr(gpu_checks.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "logits", "--model", str(tmp_path)])
    assert gpu_checks.main() == gpu_checks.NOT_RUN
    assert "There is no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "logits"])
    with pytest.raises(SystemExit):
        gpu_checks.main()
    assert "logits needs --model" in capsys.readouterr().err


def test_a_part_that_does_not_exist_is_refused(gpu_check, pretended, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run(gpu_check, monkeypatch, tmp_path / "out.json", "kernel")
    assert "there is no part 'kernel', only kernels, engine" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_the_engines_benchmark_runs(tmp_path):
    """Its rehearsal, on a CPU."""
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/gpu_engine.py", "--rehearse", "--rounds", "1", "--budgets", "300", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == 10 and all(row["tokens_per_second"][0] > 0 for row in rows.values())
    assert rows["256 requests, greedy"]["share"] == pytest.approx(
        rows["256 requests, greedy"]["tokens_per_second"][0] / result["limit_tokens_per_second"]
    )
    http = rows["HTTP, 4 streams, 300 tokens a step"]
    assert http["p50"] is None or http["p95"] >= http["p50"] > 0  # on a busy machine, all tokens of an answer can come together
    assert "these figures mean nothing" in done.stdout


def test_latencies_that_were_not_measured_are_none():
    assert gpu_engine.median_ms([0.002, math.nan, 0.004]) == pytest.approx(3.0)
    assert gpu_engine.median_ms([math.nan]) is None
