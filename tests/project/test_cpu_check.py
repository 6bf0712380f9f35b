"""`make cpu-check` runs what it says, with what it refuses to the kernels, and says what went wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm.kernels.cpu.features import KNOWN

ROOT = Path(__file__).parents[2]
RESULT = r" --json benchmarks/results/([a-z_0-9]+)_[^_ ]+_\d{4}-\d\d-\d\d\.json$"


@pytest.fixture
def cpu_check(monkeypatch, tmp_path):
    """The module, whose commands are only recorded, as (command, MINIVLLM_CPU_FEATURES); those in `fails` fail."""
    spec = importlib.util.spec_from_file_location("cpu_check", ROOT / "tools/cpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls, module.fails = [], set()

    def call(command, cwd, env):
        assert command[0] == sys.executable and cwd == tmp_path
        module.calls.append((" ".join(command[1:]), env.get("MINIVLLM_CPU_FEATURES", "")))
        return int(any(name in module.calls[-1][0] for name in module.fails))

    monkeypatch.delenv("MINIVLLM_CPU_FEATURES", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(call=call))
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


def test_what_needs_vllm_is_left_out_without_it(cpu_check, capsys):
    assert cpu_check.run_with("--only", "offline", "products") == 0
    assert [command.split(" --json")[0] for command, _ in cpu_check.calls] == ["benchmarks/bfloat16_products.py"]
    assert "Without offline: vLLM is not there." in capsys.readouterr().out


def test_a_failure_is_named_and_the_others_still_run(cpu_check, capsys):
    cpu_check.fails = {"memory.py"}
    assert cpu_check.run_with("--only", "memory", "quality") == 1
    assert len(cpu_check.calls) == 2
    printed = capsys.readouterr().out
    assert re.search(r"FAILED, or a bar was missed\s+memory\n", printed) and re.search(r"good\s+quality\n", printed)


def test_an_unknown_name_is_refused(cpu_check, capsys):
    with pytest.raises(SystemExit):
        cpu_check.run_with("--only", "gpu")
    assert "invalid choice: 'gpu'" in capsys.readouterr().err
