"""Answers that use what they are to rebuild are told, and honest ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.course.grading.borrowed import find_borrowed
from minivllm.course.grading.submissions import Cell, load_lesson

ROOT = Path(__file__).parents[2]


def found_in(source, kind="answer"):
    return find_borrowed([Cell("a", kind, "code", source)], {0: 7})


@pytest.mark.parametrize(
    "source,name",
    [
        ("from minivllm.core.block_space_manager import BlockSpaceManager as B", "minivllm.core.block_space_manager"),
        ("def f():\n    import minivllm.core.scheduler as s\n    return s", "minivllm.core.scheduler"),
        ("from minivllm.core import scheduler", "minivllm.core"),
        ("from minivllm import core", "minivllm.core"),
        ("from minivllm import StaticBatchScheduler", "minivllm.StaticBatchScheduler"),
        ("import minivllm\nclass Mine(minivllm.core.scheduler.Scheduler): pass", "minivllm.core"),
        ("import importlib\nimportlib.import_module('minivllm.core.scheduler')", "minivllm.core.scheduler"),
        ("from minivllm.worker.sampler import apply_top_p, random_key", "minivllm.worker.sampler"),
        ("from minivllm.worker import sampler", "minivllm.worker.sampler"),
        ("from minivllm.engine.detokenizer import DecodeStream", "minivllm.engine.detokenizer"),
        ("class Mine:\n    def fits(self, seq):\n        return lesson_07._fits(self, seq)", "lesson_07._fits"),
    ],
)
def test_the_core_and_the_insides_of_checks_are_told(source, name):
    (sentence,) = found_in(source)
    assert sentence == f"Cell 7 uses {name}, which this exercise asks you to rebuild: its points may not be for your own work."
    assert found_in(source, kind="own") == [sentence]
    assert found_in(source, kind="given") == found_in(source, kind="check") == []


@pytest.mark.parametrize(
    "source",
    [
        "from minivllm import LLM",
        "from minivllm.worker.sampler import SampledToken, exponential_noise, random_key",
        "lesson_04.check_pool(BlockPool)",
        "x = 'minivllm.corex'",
        "def broken(",
        "self._free = 1",
    ],
)
def test_everything_else_is_nobodys_business(source):
    assert found_in(source) == []


@pytest.mark.parametrize("path", sorted((ROOT / "solutions").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_solutions_are_own_work(path):
    cells = load_lesson(path).cells
    assert find_borrowed(cells, dict(enumerate(range(len(cells))))) == []
