"""What a notebook can do to others while it is graded: in bubblewrap's sandbox, nothing. And what a killed grader loses: nothing."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import psutil
import pytest
from course_notebooks import solved_notebook
from submissions import GOOD, STUB, case, written

import minivllm
from minivllm.course.grading import bubblewrap, grader
from minivllm.course.grading.limits import CellRun, Limits
from minivllm.course.grading.submissions import Lesson, Submission
from minivllm.entrypoints.cli import main

PACKAGE = Path(minivllm.__file__).parent
ROOT = PACKAGE.parent
SECRET = "only-for-the-teacher"


def escapes(solutions: Path, victim: Path) -> dict:
    """Attempts to reach beyond the notebook, with ctypes where the audit hook would refuse: learner to submission."""
    libc = "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\n"
    solution, package = str(solutions / "99_adding.ipynb"), str(PACKAGE)
    read = "\n".join(
        [
            "import json, readline, torch",
            f"path = {solution!r}",
            "for read in (readline.read_history_file, lambda path: torch.from_file(path, size=9, dtype=torch.uint8)):",
            "    try:",
            "        read(path)",
            "        print('has read the solution')",
            "    except Exception as error:",
            "        print(type(error).__name__)",
        ]
    )
    return {
        "victim": case(5),
        "kills_the_grader": case(5, own=libc + "libc.kill(os.getppid(), 9); libc.kill(-1, 9)"),
        "limits_the_grader": case(5, own="import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))"),
        "removes_a_file": case(5, own=libc + f"assert libc.unlink({str(victim)!r}.encode()) == 0, 'it stayed'"),
        "outlives_grading": case(5, own=libc + "import time\nif libc.fork() == 0:\n    libc.setsid()\n    os.environ.clear()\n    time.sleep(600)"),
        "plants_a_module": case(5, own=libc + "import sysconfig\nassert libc.creat((sysconfig.get_path('purelib') + '/planted.pth').encode(), 0o600) > 0, 'nothing'"),
        "changes_the_package": case(5, own=libc + f"assert libc.open({package + '/__init__.py'!r}.encode(), os.O_RDWR) > 0, 'nothing'"),
        "poisons_kernels": case(5, own=f"import pathlib\nfor file in pathlib.Path({package!r}, 'kernels/cpu/__pycache__').glob('*'):\n    file.write_bytes(b'')"),
        "reads_the_solution": case(0, "Not written yet", answer=STUB, own=read),
        "calls_home": case(5, own="import socket\nsocket.create_connection(('192.0.2.1', 80), 5)"),
        "fills_the_memory": case(5, own="with open('/dev/shm/full', 'wb') as file:\n    for _ in range(30):\n        file.write(b'x' * 10**8)"),
        "prints_secrets": case(5, own="import os\nprint(dict(os.environ), os.listdir('/proc'))"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The results of one run over all of them."""
    folder = tmp_path_factory.mktemp("sandbox")
    solutions, handed_in, output = (folder / name for name in ("solutions", "handed_in", "graded"))
    solutions.mkdir()
    nbformat.write(solved_notebook(), solutions / "99_adding.ipynb")
    submitted = escapes(solutions, handed_in / "victim" / "99_adding.ipynb")
    for learner, made in submitted.items():
        path = handed_in / learner / "99_adding.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(made.content)
    compiled = PACKAGE / "kernels" / "cpu" / "__pycache__"
    before = {file.name: file.stat().st_size for file in compiled.glob("*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEACHERS_KEY", SECRET)
        options = ["--solutions", solutions, "--output", output, "--jobs", 2, "--cell-timeout", 20, "--sandbox", "always"]
        assert main(["grade", str(handed_in), *map(str, options)]) == 0
    with (output / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    after = {file.name: file.stat().st_size for file in compiled.glob("*")}
    return SimpleNamespace(cases=submitted, rows=rows, output=output, handed_in=handed_in, kernels=(before, after))


@pytest.mark.slow
@pytest.mark.skipif(not bubblewrap.is_available(), reason="bubblewrap is not installed, or may not make namespaces")
class TestTheSandbox:
    def test_everybody_gets_the_points_of_their_own_work(self, graded):
        scores = {learner: float(row["score"]) for learner, row in graded.rows.items()}
        assert scores == {learner: made.score for learner, made in graded.cases.items()}
        assert {row["sandbox"] for row in graded.rows.values()} == {"yes"}

    def test_nothing_outside_was_changed(self, graded):
        for learner, made in graded.cases.items():
            assert (graded.handed_in / learner / "99_adding.ipynb").read_text() == made.content
        before, after = graded.kernels
        assert {name: after.get(name) for name in before} == before
        assert "nothing" in graded.rows["changes_the_package"]["reason"]
        assert "nothing" in graded.rows["plants_a_module"]["reason"]
        assert "it stayed" in graded.rows["removes_a_file"]["reason"]

    def test_no_process_is_left(self, graded):
        kernels = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "minivllm.course.grading.kernel" in str(process.info["cmdline"])
        ]
        assert [process.pid for process in kernels if "grade-" in str(process.info["cmdline"])] == []

    def test_there_is_no_network_and_a_limit_to_memory_files(self, graded):
        assert "Network is unreachable" in graded.rows["calls_home"]["reason"]
        assert "No space left" in graded.rows["fills_the_memory"]["reason"]

    def test_neither_solutions_nor_secrets_are_inside(self, graded):
        pages = {learner: (graded.output / "feedback" / f"{learner}_99_adding.html").read_text() for learner in graded.cases}
        assert "has read the solution\n" not in pages["reads_the_solution"]
        assert SECRET not in pages["prints_secrets"]


def test_without_bubblewrap_a_required_sandbox_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    (tmp_path / "99_adding.ipynb").write_text(written(solved_notebook(answer=GOOD)))
    monkeypatch.setattr(bubblewrap, "is_available", lambda: False)
    options = ["--solutions", tmp_path / "solutions", "--output", tmp_path / "out", "--sandbox", "always"]
    assert main(["grade", str(tmp_path / "99_adding.ipynb"), *map(str, options)]) == 2
    assert "There is no sandbox here: install bubblewrap" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_grader_loses_no_grade_and_makes_none_twice(tmp_path):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    learners = ["ann", "bob", "cy", "dee"]
    for learner in learners:
        (tmp_path / "in" / learner).mkdir(parents=True)
        (tmp_path / "in" / learner / "99_adding.ipynb").write_text(case(5).content)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "minivllm.entrypoints.cli", "grade", str(tmp_path / "in"), "--output", str(output)]
    command += ["--solutions", str(tmp_path / "solutions")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = output / "grades.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with journal.open("a") as file:
        file.write('{"key": "cut o')
    first = journal.read_text().splitlines()[:2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    assert "of 4 were graded in an earlier run and are unchanged" in done.stderr
    with (output / "grades.csv").open(newline="") as file:
        assert [(row["learner"], row["score"]) for row in csv.DictReader(file)] == [(learner, "5") for learner in learners]
    assert len(ElementTree.parse(output / "junit.xml").getroot()) == 4
    assert len(list((output / "feedback").iterdir())) == 4
    assert journal.read_text().splitlines()[:2] == first


def test_a_submission_without_a_processor_is_graded_again_alone(monkeypatch, tmp_path):
    lesson = Lesson("99_x", ())
    submissions = [Submission(name, lesson, tmp_path / f"{name}.ipynb") for name in ("ann", "bob")]
    calls = []

    def fake(submission, limits, surroundings, stopped):
        calls.append((submission.learner, surroundings.num_threads))
        starved = submission.learner == "bob" and len([name for name, _ in calls if name == "bob"]) == 1
        return grader.Grade(submission, (), runs={0: CellRun("slow" if starved else "ok", starved=starved)})

    monkeypatch.setattr(grader, "grade", fake)
    monkeypatch.setattr(grader, "_num_processors", lambda: 4)
    grades = list(grader.grade_all(submissions, Limits(), 2, (), ()))
    assert [grade.submission.learner for grade in grades] == ["ann", "bob"]
    assert all(grade.runs[0].status == "ok" for grade in grades)
    assert sorted(calls[:2]) == [("ann", 2), ("bob", 2)]
    assert calls[2:] == [("bob", 4)]
