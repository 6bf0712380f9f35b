"""`.ci/run` runs what failed once more, alone, and says what it was."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

_spec = importlib.util.spec_from_file_location("rerun_failed", Path(__file__).parents[2] / "tools/rerun_failed.py")
rerun_failed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rerun_failed)

TESTS = """
import pathlib, pytest
ran = pathlib.Path(__file__).with_name("ran")

def test_of_chance():
    ran_before = ran.exists()
    ran.touch()
    assert ran_before

def test_that_passes():
    pass

@pytest.mark.parametrize("case", ["a, b::c[d]"])
def test_that_fails(case):
    assert not {fails}
"""


def run(folder, fails):
    (folder / "test_it.py").write_text(TESTS.format(fails=fails))
    (folder / "pytest.ini").touch()
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return rerun_failed.main(["-q"], folder)


@pytest.mark.slow
def test_what_failed_by_chance_passes_and_is_named(tmp_path, capfd):
    assert run(tmp_path, fails=False) == 0
    out = capfd.readouterr().out
    assert "1 passed" in out and out.endswith("to be mended:\n  test_it.py::test_of_chance\n"), "only what failed runs again"


@pytest.mark.long
@pytest.mark.slow
def test_what_fails_again_fails(tmp_path, capfd):
    assert run(tmp_path, fails=True) == 1
    assert "1 failed, 1 passed" in capfd.readouterr().out


def note_failed(folder, *names):
    cache = folder / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(names, True)))


def test_many_failures_are_no_chance(tmp_path, capfd):
    note_failed(tmp_path, *(f"tests/test_a.py::test_{number}" for number in range(rerun_failed.MOST + 1)))
    assert rerun_failed.main([], tmp_path) == 1
    assert "5 tests failed: too many to have failed by chance" in capfd.readouterr().out


def test_without_a_known_failure_nothing_passes(tmp_path, capfd):
    assert rerun_failed.main([], tmp_path) == 1
    assert "No test is known to have failed" in capfd.readouterr().out


def test_after_a_run_that_was_broken_off_nothing_passes(tmp_path, capfd):
    note_failed(tmp_path, "tests/test_b.py::test_c")
    status = tmp_path / ".pytest_cache/v/minivllm/exit_status"
    status.parent.mkdir()
    status.write_text("3")
    assert rerun_failed.main([], tmp_path) == 1
    assert "did not come to its end" in capfd.readouterr().out


def test_of_a_notebook_all_cells_run_again(tmp_path):
    note_failed(tmp_path, "notebooks/a.ipynb::Cell 3", "notebooks/a.ipynb::Cell 4", "tests/test_b.py::test_c")
    assert rerun_failed.find_failed(tmp_path) == ["notebooks/a.ipynb", "tests/test_b.py::test_c"]


@pytest.mark.slow
def test_a_notebook_alone_runs_without_the_option_of_tests(tmp_path, capfd):
    (tmp_path / "pytest.ini").touch()
    cell = nbformat.v4.new_code_cell(
        "1 + 1", execution_count=1, outputs=[nbformat.v4.new_output("execute_result", {"text/plain": "2"}, execution_count=1)]
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    note_failed(tmp_path, "a.ipynb::Cell 0")
    assert rerun_failed.main(["--long", "-q"], tmp_path) == 0
    assert "1 passed" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "outcome"), [("0", "1 passed, 4 skipped"), ("600", "5 passed")])
def test_what_is_long_is_skipped_when_there_is_no_time_and_the_report_says_so(seconds, outcome, tmp_path):
    (tmp_path / "solutions").mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{number} + 1") for number in range(4)])
    nbformat.write(notebook, tmp_path / "solutions/01_sums.ipynb")
    (tmp_path / "test_it.py").write_text("def test_that_is_short():\n    pass\n")
    root = Path(__file__).parents[2]
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "conftest", "--nbval-lax", "--long", "--long-within", seconds]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{root / 'tests'}:{root / 'tests/support'}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert outcome in ran.stdout, ran.stdout + ran.stderr
    assert ("there was no time left for more of the long tests" in ran.stdout) == ("skipped" in outcome)
