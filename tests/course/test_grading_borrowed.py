"""Answers that use what they are to rebuild are told, and honest ones are not; what is not written cannot come from the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.course.grading.borrowed import find_borrowed
from minivllm.course.grading.stubs import find_asked, find_defined, make_stubs
from minivllm.course.grading.submissions import Cell, load_lesson

ROOT = Path(__file__).parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
LESSON = load_lesson(next(path for path in SOLUTIONS if path.stem.startswith("07")))


def found_in(source, kind="answer"):
    return find_borrowed([Cell("a", kind, "code", source)], {0: 7}, LESSON)


@pytest.mark.parametrize(
    "source,name",
    [
        ("from minivllm.core.block_allocator import BlockAllocator as B", "minivllm.core.block_allocator.BlockAllocator"),
        ("def f():\n    import minivllm.core.scheduler as s\n    return s", "minivllm.core.scheduler"),
        ("from minivllm.core import scheduler", "minivllm.core.scheduler"),
        ("from minivllm import core", "minivllm.core"),
        ("from minivllm import StaticBatchScheduler", "minivllm.StaticBatchScheduler"),
        ("import minivllm\nclass Mine(minivllm.core.scheduler.Scheduler): pass", "minivllm.core.scheduler.Scheduler"),
        ("import importlib\nimportlib.import_module('minivllm.core.scheduler')", "minivllm.core.scheduler"),
        ("from minivllm.worker import sampler", "minivllm.worker.sampler"),
        ("from minivllm.bench.summary import percentile", "minivllm.bench.summary.percentile"),
        ("from minivllm.entrypoints.llm import LLM", "minivllm.entrypoints.llm.LLM"),
        ("class Mine:\n    def fits(self, seq):\n        return lesson_07._fits(self, seq)", "lesson_07._fits"),
        ("fits = lesson_07.stages.correct_fits", "lesson_07.stages.correct_fits"),
    ],
)
def test_what_the_lesson_does_not_use_is_told(source, name):
    (sentence,) = found_in(source)
    assert sentence == f"Cell 7 uses {name}, which the lesson does not: its points may not be for the learner's own work."
    assert found_in(source, kind="own") == [sentence]
    assert found_in(source, kind="given") == found_in(source, kind="check") == []


@pytest.mark.parametrize(
    "source",
    ["from minivllm import LLM", "lesson_07.check_fits(Limits)", "x = 'minivllm'", "def broken(", "self._free = 1"],
)
def test_everything_else_is_nobodys_business(source):
    assert found_in(source) == []


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_the_solutions_are_own_work(path):
    lesson = load_lesson(path)
    answers = [cell.source for cell in lesson.cells if cell.kind == "answer"]
    assert find_borrowed(lesson.cells, dict(enumerate(range(len(lesson.cells)))), lesson) == []
    asked = {name: is_property for source in answers for name, is_property in find_asked(source).items()}
    assert len(asked) >= 9 and make_stubs(asked, find_defined(answers)) == ("", [])


# -- stubs -----------------------------------------------------------------------------------------------------------

ASKED = {"hash_blocks": False, "Pool.num_free": True, "Pool.share": False}
ALL, METHODS = [*ASKED], [*ASKED][1:]


@pytest.mark.parametrize(
    "source,missing",
    [
        ("", ALL),
        ("from somewhere import hash_blocks\nPool = type(manager.pool)", ALL),
        ("def hash_blocks(x): ...\nclass Pool(Given): pass", METHODS),
        ("def hash_blocks(x): ...\nclass Pool(Given):\n    share = Given.share\n    num_free = 3", METHODS),
        ("%%time\nhash_blocks = lambda x: x\nif True:\n    class Pool:\n        def num_free(self): ...\n        @cache\n        def share(self): ...", []),
        ("def share(self): ...\ndef hash_blocks(x): ...\nclass Pool:\n    def num_free(self): ...\nPool.share = share", []),
        ("def hash_blocks(x:", ALL),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_defined_or_has_a_stub(source, missing):
    stubs, names = make_stubs(ASKED, find_defined([source]))
    assert names == missing
    space = {"Pool": type("Pool", (), {})}
    exec(stubs, space)
    for name in missing:
        with pytest.raises(NotImplementedError):
            eval(f"{name.replace('Pool', 'Pool()')}()", space)
