"""`minivllm grade` without a sandbox: a whole class in one run, good, bad and hostile; each gets the right score and a reason."""

from __future__ import annotations

import csv
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import psutil
import pytest
from course_notebooks import solved_notebook
from submissions import cases

from minivllm.entrypoints.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]
NAMES = sorted(cases(Path("/solutions"), Path("/project")))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The results of one run over all submissions."""
    folder = tmp_path_factory.mktemp("class")
    solutions, handed_in, output, temporary = (folder / name for name in ("solutions", "handed_in", "graded", "t"))
    solutions.mkdir()
    temporary.mkdir()
    nbformat.write(solved_notebook(), solutions / "99_adding.ipynb")
    submitted = cases(solutions, ROOT)
    for learner, case in submitted.items():
        path = handed_in / learner / "99_adding.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes(case.content.encode() if isinstance(case.content, str) else case.content)
    (handed_in / "victim").mkdir()
    (handed_in / "good" / "notes.ipynb").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        before = {process.pid for process in psutil.process_iter()}
        options = [
            "--solutions",
            solutions,
            "--output",
            output,
            "--jobs",
            "2",
            "--cell-timeout",
            "6",
            "--timeout",
            "60",
            "--sandbox",
            "never",
        ]
        status = main(["grade", str(handed_in), *map(str, options), "--memory", "0.5"])
    with (output / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    return SimpleNamespace(
        status=status, cases=submitted, rows=rows, output=output, handed_in=handed_in, temporary=temporary, before=before
    )


def page(graded, learner):
    """A learner's feedback."""
    return (graded.output / "feedback" / f"{learner}_99_adding.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("learner", NAMES)
def test_each_submission_gets_its_score_and_its_reason(graded, learner):
    row = graded.rows[learner if learner[0] != "=" else f"'{learner}"]
    case = graded.cases[learner]
    assert (float(row["score"]), float(row["max"])) == (case.score, 5), row["reason"]
    assert case.reason in row["reason"]
    if case.score < 5:
        assert row["reason"]


def test_one_run_grades_all_of_them(graded):
    assert graded.status == 0
    assert len(graded.rows) == len(graded.cases) == len(list((graded.output / "feedback").iterdir())) >= 30


def test_a_row_has_the_points_of_each_check(graded):
    row = graded.rows["partial"]
    assert row == row | {"notebook": "99_adding", "two numbers are added": "2", "a number is doubled, twice": "0"}
    assert graded.rows["good"]["reason"] == "" == graded.rows["writes_files"]["reason"]


def test_no_process_and_no_temporary_file_is_left(graded):
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid not in graded.before and str(graded.temporary) in process.environ().get("TMPDIR", ""):
                left.append(process)
        except (psutil.Error, OSError):
            continue
    assert left == []
    assert list(graded.temporary.iterdir()) == []


def test_nothing_was_written_where_it_must_not_be(graded):
    assert not (ROOT / "planted.py").exists()
    assert (graded.handed_in / "victim").is_dir()
    for learner, case in graded.cases.items():
        content = (graded.handed_in / learner / "99_adding.ipynb").read_bytes()
        assert content == (case.content.encode() if isinstance(case.content, str) else case.content)


def test_junit_has_a_case_for_each_check(graded):
    root = ElementTree.parse(graded.output / "junit.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert len(suites) == len(graded.cases)
    assert [case.find("failure") is None for case in suites["partial/99_adding"]] == [True, False]
    assert suites["partial/99_adding"].get("failures") == "1"
    assert "Expected 16" in suites["partial/99_adding"].find("testcase/failure").text


def test_a_page_has_the_table_and_the_notebook_as_it_was_run(graded):
    text = page(graded, "partial")
    assert "2 of 5 points" in text
    assert "Expected 16, but got 12" in text
    assert re.search(r"In\s\[5\]", text)
    assert re.search(r"<h1[^>]*>99 · Adding", text)
    assert "✓ two numbers are added (2 points)" in text


def test_a_page_runs_nothing_that_a_learner_wrote(graded):
    for file in (graded.output / "feedback").iterdir():
        text = file.read_text(encoding="utf-8")
        assert "<script" not in text.lower()
        assert "Content-Security-Policy" in text.split("<title>")[0]
        assert not re.search(r"<[^>]*\sonclick", text)
    assert "&lt;script&gt;alert(1)" in re.sub("<span[^>]*>|</span>", "", page(graded, "odd_characters"))


def test_no_page_is_large_whatever_was_printed(graded):
    sizes = {file.name: file.stat().st_size for file in (graded.output / "feedback").iterdir()}
    assert max(sizes.values()) < 5_000_000, sizes
    assert sum(size > 1_000_000 for size in sizes.values()) <= 6


def test_solutions_are_in_no_page(graded):
    for learner in ("untouched", "deleted_answer", "reads_solutions", "runs_solutions", "starts_a_shell"):
        assert "a + b" not in re.sub("<[^>]*>", "", page(graded, learner))
