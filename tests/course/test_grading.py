"""`minivllm grade` without a sandbox: a whole class in one run, good, bad and hostile; each gets the right score and a reason."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from submissions import cases, grade_class

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]
NAMES = sorted(cases(Path("/solutions"), Path("/project")))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    (folder / "handed_in" / "victim").mkdir(parents=True)
    (folder / "handed_in" / "good").mkdir()
    (folder / "handed_in" / "good" / "notes.ipynb").write_text("{}")
    options = "--jobs 2 --cell-timeout 6 --timeout 60 --memory 0.5 --sandbox never"
    return grade_class(folder, cases(folder / "solutions", ROOT), *options.split())


@pytest.mark.parametrize("learner", NAMES)
def test_each_submission_gets_its_score_and_its_reason(graded, learner):
    row = graded.rows[learner if learner[0] != "=" else f"'{learner}"]
    case = graded.cases[learner]
    assert (float(row["score"]), float(row["max"])) == (case.score, 5), row["reason"]
    assert case.reason in row["reason"]
    assert row["reason"] or case.score == 5


def test_one_run_grades_all_of_them(graded):
    suites = ElementTree.parse(graded.output / "junit.xml").getroot()
    assert len(graded.rows) == len(graded.cases) == len(list((graded.output / "feedback").iterdir())) == len(suites) >= 30


def test_table_junit_and_page_have_the_points_of_each_check_and_the_notebook_as_it_was_run(graded):
    row = graded.rows["partial"]
    assert row == row | {"notebook": "99_adding", "two numbers are added": "2", "a number is doubled, twice": "0"}
    assert graded.rows["good"]["reason"] == "" == graded.rows["writes_files"]["reason"]
    suite = ElementTree.parse(graded.output / "junit.xml").getroot().find("testsuite[@name='partial/99_adding']")
    assert [case.find("failure") is None for case in suite] == [True, False] and suite.get("failures") == "1"
    assert "Expected 16" in suite.find("testcase/failure").text
    for text in (
        "2 of 5 points",
        "Expected 16, but got 12",
        r"In\s\[5\]",
        "<h1[^>]*>99 · Adding",
        r"✓ two numbers are added \(2 points\)",
    ):
        assert re.search(text, graded.page("partial")), text


def test_nothing_is_left_and_nothing_was_written_where_it_must_not_be(graded):
    assert graded.find_left() == []
    assert graded.find_changed() == []
    assert not (ROOT / "planted.py").exists()
    assert (graded.folder / "handed_in" / "victim").is_dir()


def test_a_page_runs_nothing_that_a_learner_wrote_and_is_not_large_whatever_was_printed(graded):
    pages = {file.name: file.read_text(encoding="utf-8") for file in (graded.output / "feedback").iterdir()}
    for text in pages.values():
        assert "<script" not in text.lower()
        assert "Content-Security-Policy" in text.split("<title>")[0]
        assert not re.search(r"<[^>]*\sonclick", text)
    assert "&lt;script&gt;alert(1)" in re.sub("<span[^>]*>|</span>", "", graded.page("odd_characters"))
    sizes = {name: len(text.encode()) for name, text in pages.items()}
    assert max(sizes.values()) < 5_000_000, sizes
    assert sum(size > 1_000_000 for size in sizes.values()) <= 6


def test_solutions_are_in_no_page(graded):
    for learner in ("untouched", "deleted_answer", "reads_solutions", "runs_solutions", "starts_a_shell"):
        assert "a + b" not in re.sub("<[^>]*>", "", graded.page(learner))
