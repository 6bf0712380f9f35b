"""What was handed in: whose it is, for which lesson, and the lesson's own cells restored in their place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from course_notebooks import ADD, CHECK_ADD, solved_notebook

from minivllm.course.grading.submissions import (
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
    folder = tmp_path / "solutions"
    folder.mkdir()
    for name in ("04_paged_kv_cache", "07_the_scheduler", "14_paged_kv_cache_again"):
        nbformat.write(solved_notebook(), folder / f"{name}.ipynb")
    return folder


@pytest.fixture
def lesson(solutions):
    """One of them."""
    return load_lesson(solutions / "07_the_scheduler.ipynb")


def hand_in(path, notebook=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook or solved_notebook()), encoding="utf-8")
    return path


def restored(tmp_path, lesson, notebook):
    return restore(hand_in(tmp_path / "x.ipynb", notebook), lesson)


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
def test_a_learner_has_the_name_of_the_folder_or_what_the_file_has_besides_the_lesson(tmp_path, solutions, path, learner):
    hand_in(tmp_path / "class" / path)
    submissions, _ = find_submissions([tmp_path / "class"], load_lessons(solutions))
    assert [item.learner for item in submissions] == [learner]


def test_a_named_file_needs_no_folder(tmp_path, solutions):
    paths = [hand_in(tmp_path / "alice" / "07_the_scheduler.ipynb"), hand_in(tmp_path / "bob_07_the_scheduler.ipynb")]
    submissions, _ = find_submissions(paths, load_lessons(solutions))
    assert [item.learner for item in submissions] == ["alice", "bob"]


def test_of_two_files_of_one_learner_the_newest_is_graded_and_the_learner_is_told(tmp_path, solutions):
    old = hand_in(tmp_path / "class" / "alice" / "07_the_scheduler.ipynb")
    new = hand_in(tmp_path / "class" / "alice" / "07_the_scheduler (1).ipynb")
    os.utime(old, (1, 1))
    submissions, _ = find_submissions([tmp_path / "class", old], load_lessons(solutions))
    assert [item.path for item in submissions] == [new]
    assert "the newest, 07_the_scheduler (1).ipynb, was graded" in submissions[0].notes[0]


def test_checkpoints_are_no_submissions_and_other_notebooks_are_told(tmp_path, solutions):
    kept = hand_in(tmp_path / "class" / "alice" / "07_the_scheduler.ipynb")
    hand_in(tmp_path / "class" / "alice" / ".ipynb_checkpoints" / "07_the_scheduler-checkpoint.ipynb")
    other = hand_in(tmp_path / "class" / "notes.ipynb")
    submissions, remarks = find_submissions([tmp_path / "class"], load_lessons(solutions))
    assert [item.path for item in submissions] == [kept]
    assert remarks == [f"{other} is skipped: it belongs to no lesson."]


def test_an_untouched_notebook_is_restored_to_itself(tmp_path, lesson):
    result = restored(tmp_path, lesson, solved_notebook())
    assert result.cells == lesson.cells
    assert result.notes == ()


def test_deleted_cells_come_back_to_their_place(tmp_path, lesson):
    notebook = solved_notebook()
    own = nbformat.v4.new_code_cell("mine = 1")
    notebook.cells = [cell for cell in notebook.cells if cell.id not in ("imports", "check-add")]
    notebook.cells.insert(2, own)
    cells = restored(tmp_path, lesson, notebook).cells
    assert ids(cells) == ["title", "imports", "answer", "mine = 1", "check-add", "between", "check-twice"]
    assert cells[4].source == CHECK_ADD


def test_a_deleted_answer_does_not_come_back_solved(tmp_path, lesson):
    notebook = solved_notebook()
    del notebook.cells[2]
    assert "return" not in restored(tmp_path, lesson, notebook).cells[2].source


def test_changed_cells_are_put_right_and_answers_are_kept(tmp_path, lesson):
    mine = "def add(a, b): ...\ndef twice(a): ..."
    notebook = solved_notebook(imports="pass", check_add="print('✓')", answer=mine)
    notebook.cells[2].cell_type = "raw"
    result = restored(tmp_path, lesson, notebook)
    assert [cell.source for cell in result.cells] == [cell.source if cell.kind != "answer" else mine for cell in lesson.cells]
    assert [cell.cell_type for cell in result.cells] == [cell.cell_type for cell in lesson.cells]
    assert "was changed" in result.cells[3].note
    assert "run as code" in result.cells[2].note
    assert len(result.notes) == 1


def test_moved_cells_go_back_and_the_learners_own_stay_behind_theirs(tmp_path, lesson):
    notebook = solved_notebook()
    helper = nbformat.v4.new_code_cell("helper = 1")
    title, imports, answer, check_add, between, check_twice = notebook.cells
    notebook.cells = [helper, check_twice, title, imports, check_add, answer, between]
    result = restored(tmp_path, lesson, notebook)
    assert ids(result.cells) == ["helper = 1", "title", "imports", "answer", "check-add", "between", "check-twice"]


def test_notes_in_the_text_of_a_lesson_are_nobody_s_fault(tmp_path, lesson):
    notebook = solved_notebook(title="# Mine now")
    assert restored(tmp_path, lesson, notebook) == restored(tmp_path, lesson, solved_notebook())


def test_an_answer_that_was_split_keeps_both_parts(tmp_path, lesson):
    notebook = solved_notebook()
    first, second = ADD.split("\n\n\n")
    notebook.cells[2].source = first
    rest = nbformat.from_dict(json.loads(json.dumps(notebook.cells[2])))
    rest.source = second
    notebook.cells.insert(3, rest)
    sources = [cell.source for cell in restored(tmp_path, lesson, notebook).cells]
    assert sources[2:4] == [first, second]


def test_ids_that_an_editor_gave_anew_do_not_matter(tmp_path, lesson):
    notebook = solved_notebook()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"new{number}"
    assert restored(tmp_path, lesson, notebook).cells == lesson.cells


def test_a_notebook_of_something_else_is_told_so(tmp_path, lesson):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    assert "This notebook has no cell of lesson 07_the_scheduler" in restored(tmp_path, lesson, notebook).notes[0]


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


def test_damaged_cells_are_left_out_and_the_others_kept(tmp_path, lesson):
    notebook = json.loads(json.dumps(solved_notebook()))
    notebook["cells"][0] |= {"source": 7}
    notebook["cells"][1] |= {"cell_type": "film"}
    notebook["cells"] += [None, {}, {"cell_type": "code", "metadata": [], "id": ["x"], "source": ["a = '\ud800'\n", "b"]}]
    result = restored(tmp_path, lesson, notebook)
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
    assert reason in said
    assert "\n" not in said
    assert not (tmp_path / "graded" / "grades.csv").exists()


@pytest.mark.parametrize(
    "target", ["../../solutions/07_the_scheduler.ipynb", "../ann/07_the_scheduler.ipynb", "07_the_scheduler.ipynb", "gone"]
)
def test_a_link_is_nobodys_submission(tmp_path, solutions, target):
    hand_in(tmp_path / "handed_in" / "ann" / "07_the_scheduler.ipynb")
    link = tmp_path / "handed_in" / "bob" / "07_the_scheduler.ipynb"
    link.parent.mkdir()
    link.symlink_to(target)
    found, remarks = find_submissions([tmp_path / "handed_in"], load_lessons(solutions))
    assert [item.learner for item in found] == ["ann"]
    assert remarks == [f"{link} is skipped: it is a link to another file."]
