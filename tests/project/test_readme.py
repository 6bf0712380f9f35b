"""What the README says is so: its code runs, its files exist, its commands are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from minivllm.config import EngineArgs
from minivllm.entrypoints import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_its_python_runs(code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_its_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(targets) > 5
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_files_and_make_targets_that_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`|nightly )make ([a-z-]+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile, f"make {target}"
    for name in re.findall(r"`(?:python )?((?:tests|benchmarks|minivllm|\.ci)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


def test_its_measurements_are_as_they_were_written():
    """`python tools/readme_tables.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "tools" / "readme_tables.py")
    readme_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_tables)
    assert len(readme_tables.PLACE.findall(README)) >= 5
    assert readme_tables.fill(README) == README


def test_its_commands_exist():
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
    commands = re.findall(
        r"^minivllm ([a-z]+(?: (?:offline|scheduler|latency|kernels|calibrate|serve))?)", shell, flags=re.MULTILINE
    )
    assert len(commands) >= 5
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            cli.main([*command.split(), "--help"])
        assert stopped.value.code == 0


def test_the_arguments_that_it_names_exist():
    for arguments in re.findall(r"`LLM\(([^`]*=[^`]*)\)`", README):
        for name in re.findall(r"(\w+)=", arguments):
            assert name in EngineArgs.names(), name


def test_the_lessons_that_are_there_are_marked_so():
    rows = re.findall(r"^\| (\d\d) \| (.*?) \|.*\| (.*?) \|$", README, flags=re.MULTILINE)
    assert [number for number, _, _ in rows] == [f"{i:02}" for i in range(16)]
    for number, _, state in rows:
        exists = bool(list((ROOT / "notebooks").glob(f"{number}_*.ipynb")))
        assert ("there" in state) == exists, f"lesson {number}"
