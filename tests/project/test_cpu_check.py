"""`make cpu-check` runs each measurement with its settings, and names what failed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm.kernels.cpu.native.features import KNOWN

ROOT = Path(__file__).parents[2]
RESULT = r" --json benchmarks/results/([a-z_0-9]+)_[^_ ]+_\d{4}-\d\d-\d\d\.json$"


@pytest.fixture
def cpu_check(monkeypatch, tmp_path):
    """The module, whose commands are only recorded, as (command, MINIVLLM_CPU_FEATURES); `ends` says how some end, by a part of them."""
    spec = importlib.util.spec_from_file_location("cpu_check", ROOT / "tools/cpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls, module.ends = [], {}

    class Process:
        def __init__(self, command, cwd, env):
            assert command[0] == sys.executable and cwd == tmp_path
            self.command = " ".join(command[1:])
            module.calls.append((self.command, env.get("MINIVLLM_CPU_FEATURES", "")))
            self.ends = next((list(ends) for part, ends in module.ends.items() if part in self.command), [0])

        def wait(self):
            end = self.ends.pop(0)
            if end is KeyboardInterrupt:
                raise end
            return end

    monkeypatch.delenv("MINIVLLM_CPU_FEATURES", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Process))
    module.run_with = lambda *arguments: (monkeypatch.setattr(sys, "argv", ["cpu_check.py", *arguments]), module.main())[1]
    return module


def test_all_is_measured_and_stored_under_its_name(cpu_check, tmp_path):
    vllm = tmp_path / cpu_check.VLLM_PYTHON
    vllm.parent.mkdir(parents=True)
    vllm.touch()
    assert cpu_check.run_with() == 0
    (tests, _), *measurements = cpu_check.calls
    assert "pytest" in tests and "--long" in tests
    names = [re.search(RESULT, command)[1] for command, _ in measurements]
    assert names == list(cpu_check.MEASUREMENTS)
    assert [features for _, features in measurements] == [features for _, features in cpu_check.MEASUREMENTS.values()]


@pytest.mark.slow
@pytest.mark.long
def test_scripts_and_their_options_exist(cpu_check):
    helps = {}
    for command, features in cpu_check.MEASUREMENTS.values():
        words = command.split()
        script = words[:4] if words[0] == "-m" else words[:1]
        if tuple(script) not in helps:
            shown = subprocess.run([sys.executable, *script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
            helps[tuple(script)] = shown.stdout.split()
        for option in (*(word for word in words[len(script) :] if word.startswith("--")), "--json"):
            assert option in {word.strip("[],") for word in helps[tuple(script)]}, (script, option)
        for workload in re.findall(r"benchmarks/workloads/\S+", command):
            assert (ROOT / workload).exists()
        assert all(change[1:] in KNOWN for change in filter(None, features.split(",")))


def test_what_needs_vllm_is_not_run_without_it(cpu_check, capsys):
    assert cpu_check.run_with("--only", "offline", "prefill_attention") == 1
    assert [command.split(" --json")[0] for command, _ in cpu_check.calls] == ["benchmarks/prefill_attention.py"]
    printed = capsys.readouterr().out
    assert "tools/setup_vllm.py" in printed
    assert re.search(r"offline +not run: vLLM is not there\n", printed) and re.search(r"prefill_attention +good\n", printed)
    assert cpu_check.run_with("--only", "prefill_attention") == 0
    assert "vLLM" not in capsys.readouterr().out


def test_a_failure_is_named_and_the_others_still_run(cpu_check, capsys):
    cpu_check.ends = {"memory.py": [3]}
    assert cpu_check.run_with("--only", "memory", "quality") == 1
    assert len(cpu_check.calls) == 2
    printed = capsys.readouterr().out
    assert re.search(r"memory +failed, or missed a bar: status 3\n", printed) and re.search(r"quality +good\n", printed)


def test_ctrl_c_waits_for_what_runs_and_says_what_there_is(cpu_check, capsys):
    cpu_check.ends = {"memory.py": [KeyboardInterrupt, -2]}
    assert cpu_check.run_with("--only", "prefill_attention", "memory", "quality") == 1
    assert len(cpu_check.calls) == 2
    printed = capsys.readouterr().out
    assert "Stopped." in printed
    assert all(re.search(line, printed) for line in (r"prefill_attention +good\n", r"memory +not run\n", r"quality +not run\n"))


def test_results_of_before_are_kept(cpu_check, tmp_path):
    files = []
    for _ in range(3):
        assert cpu_check.run_with("--only", "prefill_attention") == 0
        files.append(tmp_path / cpu_check.calls[-1][0].split(" --json ")[1])
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].touch()
    assert len(set(files)) == 3
    assert [file.stem[-1] for file in files[1:]] == ["b", "c"]


def test_what_would_change_all_measurements_is_refused(cpu_check, monkeypatch, capsys):
    monkeypatch.setenv("MINIVLLM_CPU_FEATURES", "-amx-tile")
    with pytest.raises(SystemExit):
        cpu_check.run_with()
    assert "MINIVLLM_CPU_FEATURES is set" in capsys.readouterr().err
    assert cpu_check.calls == []


def test_an_unknown_name_is_refused(cpu_check, capsys):
    with pytest.raises(SystemExit):
        cpu_check.run_with("--only", "gpu")
    assert "invalid choice: 'gpu'" in capsys.readouterr().err
