"""What was handed in: whose it is, for which lesson, and the lesson's own cells restored in their place; what answers borrow, and what they lack."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import nbformat
import pytest
from course_notebooks import ADD, CHECK_ADD, by_id, of_code, solved_notebook, write

from minivllm.course.grading.borrowed import find_borrowed
from minivllm.course.grading.stubs import find_asked, find_defined, make_stubs
from minivllm.course.grading.submissions import (
    Cell,
    DamagedNotebook,
    find_lesson,
    find_submissions,
    load_lesson,
    load_lessons,
    restore,
)
from minivllm.entrypoints.cli.main import main
from minivllm.errors import CourseError


@pytest.fixture
def solutions(tmp_path):
    """Three lessons."""
    for name in ("04_paged_kv_cache", "07_the_scheduler", "14_paged_kv_cache_again"):
        write(tmp_path / "solutions", name=name)
    return tmp_path / "solutions"


@pytest.fixture
def find(tmp_path, solutions):
    """Finds submissions in `class`, or among these paths."""
    return lambda *paths: find_submissions(paths or [tmp_path / "class"], load_lessons(solutions))


@pytest.fixture
def lesson(solutions):
    """One of them."""
    return load_lesson(solutions / "07_the_scheduler.ipynb")


def hand_in(path, notebook=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook or solved_notebook()), encoding="utf-8")
    return path


def ids(cells):
    return [cell.cell_id or cell.source for cell in cells]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("04_paged_kv_cache", "04_paged_kv_cache"),
        ("04_Paged_KV_cache (1)", "04_paged_kv_cache"),
        ("alice-04_paged_kv_cache", "04_paged_kv_cache"),
        ("14_paged_kv_cache_again", "14_paged_kv_cache_again"),
        ("7_mine", "07_the_scheduler"),
        ("07", "07_the_scheduler"),
        ("70", None),
        ("notes", None),
    ],
)
def test_a_lesson_is_found_by_its_name_or_its_number(solutions, name, expected):
    found = find_lesson(Path(f"{name}.ipynb"), load_lessons(solutions))
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("path", "learner"),
    [
        ("alice/07_the_scheduler.ipynb", "alice"),
        ("alice/second/07_the_scheduler.ipynb", "alice"),
        ("alice/07_the_scheduler_bob.ipynb", "alice"),
        ("alice_07_the_scheduler.ipynb", "alice"),
        ("07_the_scheduler - Bob B..ipynb", "Bob B"),
        ("07_the_scheduler.ipynb", "class"),
        ("bob_07_the_scheduler (1).ipynb", "bob"),
        ("bob_07_the_scheduler-Copy1.ipynb", "bob"),
    ],
)
def test_a_learner_has_the_name_of_the_folder_or_what_the_file_has_besides_the_lesson(tmp_path, find, path, learner):
    hand_in(tmp_path / "class" / path)
    assert [item.learner for item in find()[0]] == [learner]


def test_a_named_file_needs_no_folder(tmp_path, find):
    paths = [hand_in(tmp_path / "alice" / "07_the_scheduler.ipynb"), hand_in(tmp_path / "bob_07_the_scheduler.ipynb")]
    assert [item.learner for item in find(*paths)[0]] == ["alice", "bob"]


def test_of_two_files_of_one_learner_the_newest_is_graded_and_the_learner_is_told(tmp_path, find):
    old = hand_in(tmp_path / "class" / "alice" / "07_the_scheduler.ipynb")
    new = hand_in(tmp_path / "class" / "alice" / "07_the_scheduler (1).ipynb")
    os.utime(old, (1, 1))
    (found,), _ = find(tmp_path / "class", old)
    assert found.path == new
    assert "the newest, 07_the_scheduler (1).ipynb, was graded" in found.notes[0]


@pytest.mark.parametrize(
    "target", ["../../solutions/07_the_scheduler.ipynb", "../ann/07_the_scheduler.ipynb", "07_the_scheduler.ipynb", "gone"]
)
def test_links_and_checkpoints_are_nobodys_submission_and_other_notebooks_are_told(tmp_path, find, target):
    kept = hand_in(tmp_path / "class" / "ann" / "07_the_scheduler.ipynb")
    hand_in(tmp_path / "class" / "ann" / ".ipynb_checkpoints" / "07_the_scheduler-checkpoint.ipynb")
    other = hand_in(tmp_path / "class" / "notes.ipynb")
    link = tmp_path / "class" / "bob" / "07_the_scheduler.ipynb"
    link.parent.mkdir()
    link.symlink_to(target)
    found, remarks = find()
    assert [item.path for item in found] == [kept]
    assert sorted(remarks) == [
        f"{link} is skipped: it is a link to another file.",
        f"{other} is skipped: it belongs to no lesson.",
    ]


@pytest.fixture
def restored(tmp_path, lesson):
    """The cells of a notebook as they are graded."""
    return lambda notebook: restore(hand_in(tmp_path / "x.ipynb", notebook), lesson)


def rename(cells):
    for number, cell in enumerate(cells):
        cell.id = f"new{number}"
    return cells


@pytest.mark.parametrize("change", [lambda cells: cells, rename], ids=["untouched", "ids that an editor gave anew"])
def test_a_notebook_is_restored_to_the_lesson_itself(restored, lesson, change):
    notebook = solved_notebook()
    notebook.cells = change(notebook.cells)
    assert restored(notebook) == restored(solved_notebook(title="# Mine now"))
    assert restored(notebook).cells == lesson.cells and restored(notebook).notes == ()


@pytest.mark.parametrize(
    ("handed_in", "graded"),
    [
        ("title answer mine between check-twice", "title imports answer mine check-add between check-twice"),
        ("mine check-twice title imports check-add answer between", "mine title imports answer check-add between check-twice"),
    ],
    ids=["deleted", "moved"],
)
def test_cells_go_back_to_their_place_and_the_learners_own_stay_behind_theirs(restored, handed_in, graded):
    notebook = solved_notebook()
    cells = {**by_id(notebook), "mine": nbformat.v4.new_code_cell("mine")}
    notebook.cells = [cells[name] for name in handed_in.split()]
    result = restored(notebook).cells
    assert ids(result) == graded.split()
    assert result[4].source == CHECK_ADD


def test_a_deleted_answer_does_not_come_back_solved(restored):
    notebook = solved_notebook()
    del notebook.cells[2]
    assert "return" not in restored(notebook).cells[2].source


def test_changed_cells_are_put_right_and_answers_are_kept(restored, lesson):
    mine = "def add(a, b): ...\ndef twice(a): ..."
    notebook = solved_notebook(imports="pass", check_add="print('✓')", answer=mine)
    notebook.cells[2].cell_type = "raw"
    result = restored(notebook)
    assert [cell.source for cell in result.cells] == [cell.source if cell.kind != "answer" else mine for cell in lesson.cells]
    assert [cell.cell_type for cell in result.cells] == [cell.cell_type for cell in lesson.cells]
    assert "was changed" in result.cells[3].note and "run as code" in result.cells[2].note
    assert len(result.notes) == 1


def test_an_answer_that_was_split_keeps_both_parts(restored):
    notebook = solved_notebook()
    notebook.cells.insert(3, copy.deepcopy(notebook.cells[2]))
    notebook.cells[2].source, notebook.cells[3].source = parts = ADD.split("\n\n\n")
    assert [cell.source for cell in restored(notebook).cells][2:4] == parts


def test_a_notebook_of_something_else_is_told_so(restored):
    assert "This notebook has no cell of lesson 07_the_scheduler" in restored(of_code("1")).notes[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[]", "no cells"),
        (b'{"cells": 3}', "no cells"),
        (b'{"worksheets": [], "nbformat": 3}', "format from before 2015"),
    ],
)
def test_a_file_that_is_no_notebook_is_refused_in_a_sentence(tmp_path, lesson, content, reason):
    path = tmp_path / "x.ipynb"
    path.write_bytes(content)
    with pytest.raises(DamagedNotebook, match=reason):
        restore(path, lesson)


def test_damaged_cells_are_left_out_and_the_others_kept(restored, lesson):
    notebook = json.loads(json.dumps(solved_notebook()))
    notebook["cells"][0] |= {"source": 7}
    notebook["cells"][1] |= {"cell_type": "film"}
    notebook["cells"] += [None, {}, {"cell_type": "code", "metadata": [], "id": ["x"], "source": ["a = '\ud800'\n", "b"]}]
    result = restored(notebook)
    assert ids(result.cells) == [*ids(lesson.cells), "a = '?'\nb"]
    assert sum("is damaged and was skipped" in note for note in result.notes) == 4


def test_a_folder_without_checks_is_no_folder_of_solutions(tmp_path):
    with pytest.raises(CourseError, match="no folder"):
        load_lessons(tmp_path / "missing")
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "01_x.ipynb")
    with pytest.raises(CourseError, match="has a check to grade"):
        load_lessons(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing"], "missing does not exist"),
        (["empty"], "No notebook of a lesson was found"),
        (["notes.ipynb"], "notes.ipynb belongs to no lesson"),
        (["alice", "--solutions", "empty"], "has a check to grade"),
        (["alice", "--output", "notes.ipynb"], "cannot be written"),
        (["alice", "--output", "notes.ipynb/below"], "cannot be written"),
        (["alice", "--jobs", "0"], "--jobs is 0, but must be more than 0"),
        (["alice", "--timeout", "-1"], "--timeout is -1"),
        (["alice", "--memory", "nan"], "--memory is nan"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_runs(tmp_path, solutions, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    hand_in(tmp_path / "alice" / "07_the_scheduler.ipynb")
    hand_in(tmp_path / "notes.ipynb")
    (tmp_path / "empty").mkdir()
    options = [] if "--solutions" in arguments else ["--solutions", "solutions"]
    options += [] if "--output" in arguments else ["--output", "graded"]
    assert main(["grade", *arguments, *options]) == 2
    said = capsys.readouterr().err.strip()
    assert reason in said and "\n" not in said
    assert not (tmp_path / "graded" / "grades.csv").exists()


# Answers that use what they are to rebuild are told, and honest ones are not; what is not written cannot come from the package.

SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("*.ipynb"))
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
