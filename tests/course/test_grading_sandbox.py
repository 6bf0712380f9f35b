"""What a notebook can do to others while it is graded: in bubblewrap's sandbox, nothing. And what a killed grader loses: nothing."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import tempfile
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
from minivllm.course.grading.progress import Progress
from minivllm.course.grading.submissions import Lesson, Submission
from minivllm.entrypoints.cli.main import main
from minivllm.models import hub

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
        "poisons_kernels": case(5, own=f"import pathlib\nfor file in pathlib.Path({package!r}, 'kernels/cpu/__pycache__').rglob('*.nb?'):\n    file.write_bytes(b'')"),
        "finds_compiled_kernels": case(5, own=f"from minivllm.kernels.cpu.rows import _norm\nassert _norm._cache.cache_path.startswith({package!r}), _norm._cache.cache_path"),
        "reads_the_solution": case(0, "Not written yet", answer=STUB, own=read),
        "calls_home": case(5, own="import socket\nsocket.create_connection(('192.0.2.1', 80), 5)"),
        "fills_the_memory": case(5, own="with open('/dev/shm/full', 'wb') as file:\n    for _ in range(30):\n        file.write(b'x' * 10**8)"),
        "fills_more_memory": case(5, own=libc + "assert libc.creat(b'/full', 0o600) > 0 or libc.creat(b'/dev/filled', 0o600) > 0, 'no room'"),
        "mounts_again": case(5, own=libc + f"MS_REMOUNT, MS_BIND = 32, 4096\nassert libc.mount(b'none', {package!r}.encode(), None, MS_REMOUNT | MS_BIND, None) == 0, 'it is still read-only'"),
        "prints_secrets": case(5, own="import os\nprint(dict(os.environ), os.listdir('/proc'))"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The results of one run over all of them."""
    folder = tmp_path_factory.mktemp("sandbox")
    solutions, handed_in, output, temporary = (folder / name for name in ("solutions", "handed_in", "graded", "t"))
    solutions.mkdir()
    temporary.mkdir()
    nbformat.write(solved_notebook(), solutions / "99_adding.ipynb")
    submitted = escapes(solutions, handed_in / "victim" / "99_adding.ipynb")
    for learner, made in submitted.items():
        path = handed_in / learner / "99_adding.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(made.content)
    compiled = PACKAGE / "kernels" / "cpu" / "__pycache__"
    before = {file: file.stat().st_size for file in compiled.rglob("*.nb?")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEACHERS_KEY", SECRET)
        patch.setattr(tempfile, "tempdir", str(temporary))  # its kernels are told from those of other tests by their folder
        options = ["--solutions", solutions, "--output", output, "--jobs", 2, "--cell-timeout", 20, "--sandbox", "always"]
        assert main(["grade", str(handed_in), *map(str, options)]) == 0
    with (output / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    after = {file: file.stat().st_size for file in compiled.rglob("*.nb?")}
    return SimpleNamespace(
        cases=submitted, rows=rows, output=output, handed_in=handed_in, temporary=temporary, kernels=(before, after)
    )


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
        assert "it is still read-only" in graded.rows["mounts_again"]["reason"]

    def test_compiled_kernels_are_found(self, graded):
        """Numba ignores a folder in which it may not write: each notebook would compile them for half a minute."""
        reason = graded.rows["finds_compiled_kernels"]["reason"]
        assert reason.startswith("Cell 2 uses minivllm.kernels.cpu.rows") and "Error" not in reason
        assert graded.kernels[0]

    def test_no_process_is_left(self, graded):
        commands = [str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
        assert [command for command in commands if str(graded.temporary) in command] == []

    def test_there_is_no_network_and_a_limit_to_memory_files(self, graded):
        assert "Network is unreachable" in graded.rows["calls_home"]["reason"]
        assert "No space left" in graded.rows["fills_the_memory"]["reason"]
        assert "no room" in graded.rows["fills_more_memory"]["reason"]

    def test_neither_solutions_nor_secrets_are_inside(self, graded):
        pages = {learner: (graded.output / "feedback" / f"{learner}_99_adding.html").read_text() for learner in graded.cases}
        assert "has read the solution\n" not in pages["reads_the_solution"]
        assert SECRET not in pages["prints_secrets"]


def test_without_bubblewrap_no_sandbox_must_be_asked_for(tmp_path, monkeypatch, capsys):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    (tmp_path / "99_adding.ipynb").write_text(written(solved_notebook(answer=GOOD)))
    monkeypatch.setattr(bubblewrap, "is_available", lambda: False)
    options = ["--solutions", tmp_path / "solutions", "--output", tmp_path / "out"]
    assert main(["grade", str(tmp_path / "99_adding.ipynb"), *map(str, options)]) == 2
    said = capsys.readouterr().err
    assert "There is no sandbox here: install bubblewrap" in said and "add --sandbox never" in said


def test_a_bubblewrap_that_cannot_start_python_is_no_sandbox(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text('#!/bin/sh\necho "bwrap: Unknown option --size" >&2\nexit 1\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not bubblewrap.is_available.__wrapped__()


def test_links_are_followed_and_the_cache_may_be_named_relative_to_the_grader(tmp_path, monkeypatch):
    (tmp_path / "python3.11").symlink_to(sys.base_prefix)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "python3.11"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIVLLM_CACHE", "cache")
    command = bubblewrap.wrap(["true"], tmp_path, {})
    real = os.path.realpath(sys.base_prefix)
    assert str(tmp_path / "python3.11") in command and (real in command or real.startswith("/usr"))
    assert command[command.index("MINIVLLM_CACHE") + 1] == str(tmp_path / "cache")


class TestProgress:
    @pytest.fixture
    def submission(self, tmp_path):
        path = tmp_path / "ann.ipynb"
        path.write_text("first")
        return Submission("ann", Lesson("99_x", ()), path)

    @pytest.fixture
    def start(self, tmp_path):
        return lambda: Progress(tmp_path / "grades.jsonl", Limits(), sandboxed=False)

    def test_a_grade_is_found_again_until_the_file_changes(self, submission, start):
        progress = start()
        assert progress.find(submission) is None
        progress.add(grader.Grade(submission, (), ("late",)), "ann.html")
        assert start().find(submission) == (grader.Grade(submission, (), ("late",)), "ann.html")
        submission.path.write_text("second")
        assert start().find(submission) is None

    def test_what_is_handed_in_during_the_run_is_graded_in_the_next(self, submission, start):
        progress = start()
        progress.find(submission)
        submission.path.write_text("second")
        progress.add(grader.Grade(submission, ()), "ann.html")
        assert start().find(submission) is None

    def test_a_failure_of_the_grader_is_not_kept(self, submission, start, monkeypatch):
        monkeypatch.setattr(grader, "_grade", lambda *_: 1 / 0)
        progress = start()
        progress.find(submission)
        progress.add(grader.grade(submission, Limits(), None, None), "ann.html")
        assert start().find(submission) is None

    def test_a_line_cut_off_does_not_spoil_the_next(self, submission, start, tmp_path):
        (tmp_path / "grades.jsonl").write_text('{"key": "cut o')
        progress = start()
        progress.find(submission)
        progress.add(grader.Grade(submission, ()), "ann.html")
        assert start().find(submission) is not None


def test_a_lost_feedback_page_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    (tmp_path / "99_adding.ipynb").write_text(written(solved_notebook(answer=GOOD)))
    runs = []

    def fake(submissions, *_):
        runs.append(len(submissions))
        return (grader._nothing(submission, "not run here") for submission in submissions)

    monkeypatch.setattr(grader, "grade_all", fake)
    options = ["--solutions", tmp_path / "solutions", "--output", tmp_path / "out", "--sandbox", "never"]
    command = ["grade", str(tmp_path / "99_adding.ipynb"), *map(str, options)]
    assert main(command) == main(command) == 0
    [page] = (tmp_path / "out" / "feedback").iterdir()
    page.unlink()
    assert main(command) == 0
    assert runs == [1, 0, 1] and page.exists()


def test_the_model_is_converted_before_it_can_only_be_read(tmp_path, monkeypatch):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    (tmp_path / "99_adding.ipynb").write_text(written(solved_notebook(answer=GOOD)))
    happened = []
    monkeypatch.setattr(bubblewrap, "is_available", lambda: True)
    monkeypatch.setattr(hub, "resolve_model", lambda name: happened.append(name))

    def fake(submissions, *_):
        happened.append("graded")
        return (grader._nothing(submission, "not run here") for submission in submissions)

    monkeypatch.setattr(grader, "grade_all", fake)
    options = ["--solutions", tmp_path / "solutions", "--output", tmp_path / "out"]
    assert main(["grade", str(tmp_path / "99_adding.ipynb"), *map(str, options)]) == 0
    assert happened == ["smollm2-135m", "graded"]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_grader_loses_no_grade_and_makes_none_twice(tmp_path):
    (tmp_path / "solutions").mkdir()
    nbformat.write(solved_notebook(), tmp_path / "solutions" / "99_adding.ipynb")
    learners = ["ann", "bob", "cy", "dee"]
    for learner in learners:
        (tmp_path / "in" / learner).mkdir(parents=True)
        (tmp_path / "in" / learner / "99_adding.ipynb").write_text(case(5).content)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "grade", str(tmp_path / "in"), "--output", str(output)]
    command += ["--solutions", str(tmp_path / "solutions"), "--sandbox", "never"]
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

    def fake(submission, limits, surroundings, *_):
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
