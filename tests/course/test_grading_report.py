"""What is written about foreign text stays harmless: for spreadsheets, for XML, for browsers and for terminals."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import nbconvert
import pytest

from minivllm.course.exercise_cells import GradedCell
from minivllm.course.grading.grader import CheckResult, Grade
from minivllm.course.grading.limits import CellRun
from minivllm.course.grading.report import FeedbackWriter, format_summary, write_csv, write_junit
from minivllm.course.grading.submissions import Cell, Lesson, Submission

CHECKS = (GradedCell("a", "first", 2, True), GradedCell("b", "=second", 1.5, True))
LESSON = Lesson("04_x", tuple(Cell(check.cell_id, "check", "code", "pass", check) for check in CHECKS))
ODD = "\x00\x1b[31m=1+1 <b>&\ud800\n\u202e|\x9b2J"


def make_grade(learner="ann", reason="", lesson=LESSON, cells=(), runs=None):
    results = (CheckResult(CHECKS[0], True), CheckResult(CHECKS[1], False, reason))
    return Grade(Submission(learner, lesson, Path("x.ipynb")), results, (), tuple(cells), runs or {})


def table(folder, *grades):
    write_csv(grades, folder / "g.csv")
    with (folder / "g.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_scores_are_sums_of_points_and_with_several_lessons_each_check_has_its_lesson_s_name(tmp_path):
    assert table(tmp_path, make_grade(reason="Wrong.")) == [
        ["learner", "notebook", "score", "max", "sandbox", "first", "'=second", "reason"],
        ["ann", "04_x", "2", "3.5", "no", "2", "0", "Wrong."],
    ]
    assert [row[5:9] for row in table(tmp_path, make_grade(), make_grade(lesson=Lesson("07_y", LESSON.cells)))] == [
        ["04_x: first", "04_x: =second", "07_y: first", "07_y: =second"],
        ["2", "0", "", ""],
        ["", "", "2", "0"],
    ]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r\n=1", " =1"])
def test_no_cell_of_the_table_is_a_formula(tmp_path, text):
    for row in table(tmp_path, make_grade(text, text)):
        assert not [cell for cell in row if cell.lstrip()[:1] in ("=", "+", "-", "@")]


def test_odd_characters_leave_all_files_valid(tmp_path):
    grade = make_grade(ODD, ODD)
    assert len(table(tmp_path, grade)) == 2
    write_junit([grade], tmp_path / "g.xml")
    suite = ElementTree.parse(tmp_path / "g.xml").getroot()[0]
    assert "<b>&" in suite.get("name") and (suite.get("tests"), suite.get("failures")) == ("2", "1")
    page = FeedbackWriter(tmp_path).write(grade).read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;" in page and "\x1b" not in page


def test_a_terminal_gets_no_commands_from_learners():
    text = format_summary([make_grade(ODD, ODD)], 100)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert len(text.splitlines()) == 2


def test_pages_of_learners_with_like_names_do_not_replace_each_other(tmp_path):
    writer = FeedbackWriter(tmp_path)
    names = ["a/b", "a b", "A:B", "../..", "é" * 300, ""]
    paths = [writer.write(make_grade(name)) for name in names]
    assert len(set(paths)) == len(list(tmp_path.iterdir())) == len(names)
    assert all(path.parent == tmp_path for path in paths)


def data(kind, text):
    return {"output_type": "display_data", "data": {kind: text, "text/plain": "a plot"}}


OUTPUTS = [
    data("text/html", "<table style='color: red; position: fixed'><script>x</script></table>"),
    data("image/svg+xml", "<svg onload='x'/>"),
    data("image/png", '" onerror="x'),
    {"output_type": "display_data", "data": "nonsense"},
    data("text/html", "<iframe src='//x'></iframe><form action='//x'><meta http-equiv=refresh>"),
    {"output_type": "stream", "name": "stdout", "text": "\x1b[31mred</pre><script>x</script>"},
    {"output_type": "stream", "text": None},
    {"output_type": "error", "ename": None, "evalue": 3, "traceback": "none"},
    {"output_type": "error", "ename": "E", "evalue": "", "traceback": ["<script>x</script>", 3]},
]


def test_a_page_shows_what_was_shown_without_what_runs_or_loads(tmp_path):
    cells = [
        Cell("", "own", "code", "</pre><script>x</script>"),
        Cell("", "own", "markdown", "```\n</code><script>x</script>\n<img src=x onerror=y> $$x$$"),
        Cell("", "own", "raw", "<script>x</script>"),
    ]
    runs = {0: CellRun(status="slow", outputs=OUTPUTS)}
    page = FeedbackWriter(tmp_path).write(make_grade(cells=cells, runs=runs)).read_text(encoding="utf-8")
    for tag in ("<script", "<iframe", "<form", "<svg", "http-equiv=refresh", "position: fixed", 'onerror="x'):
        assert tag not in page.split("</style>")[-1], tag
    assert "<img" not in page and "color: red" in page and "a plot" in page


def test_a_notebook_that_cannot_be_shown_still_has_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(nbconvert.HTMLExporter, "from_notebook_node", lambda self, notebook: 1 / 0)
    page = FeedbackWriter(tmp_path).write(make_grade(reason="Wrong.")).read_text(encoding="utf-8")
    assert "cannot be shown (ZeroDivisionError)" in page and "Wrong." in page
