"""`make gpu-check` tells what was not run from what passed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_check():
    """The module."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("missing", ["nbformat", "nbclient", "ipykernel"])
def test_a_lesson_that_cannot_run_here_is_not_run(gpu_check, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    passed, said = gpu_check.run_lesson("notebooks/05_triton.ipynb")
    assert passed is None and "notebooks/05_triton.ipynb was not run" in said and missing in said


@pytest.mark.parametrize(
    ("checks", "status", "words"),
    [
        ({"a": True, "b": True}, 0, ["passed  a", "passed  b"]),
        ({"a": True, "b": None}, 2, ["passed  a", "not run  b"]),
        ({"a": False, "b": None}, 1, ["FAILED  a", "not run  b"]),
    ],
)
def test_not_run_is_a_word_and_a_status_of_its_own(gpu_check, capsys, tmp_path, checks, status, words):
    assert gpu_check.summarize({"checks": checks}, tmp_path / "out.json") == status
    assert capsys.readouterr().out.split("\n")[1:3] == words
