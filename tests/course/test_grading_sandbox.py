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

import pytest
from submissions import STUB, case, grade_class, hand_in

import minivllm
from minivllm.course.grading import bubblewrap, grader
from minivllm.course.grading.limits import CellRun, Limits
from minivllm.course.grading.progress import Progress
from minivllm.course.grading.submissions import Lesson, Submission
from minivllm.entrypoints.cli.main import main
from minivllm.models import hub

PACKAGE = Path(minivllm.__file__).parent
SECRET = "only-for-the-teacher"


def escapes(solutions: Path, victim: Path) -> dict:
    """Attempts to reach beyond the notebook, with ctypes where the audit hook would refuse: learner to submission."""
    libc = "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\n"
    solution, package = str(solutions / "99_adding.ipynb"), str(PACKAGE)
    read = (
        f"import json, readline, torch\npath = {solution!r}\n"
        "for read in (readline.read_history_file, lambda path: torch.from_file(path, size=9, dtype=torch.uint8)):\n"
        "    try:\n        read(path)\n        print('has read the solution')\n"
        "    except Exception as error:\n        print(type(error).__name__)"
    )
    return {
        "victim": case(5),
        "kills_the_grader": case(5, own=libc + "libc.kill(os.getppid(), 9); libc.kill(-1, 9)"),
        "limits_the_grader": case(5, own="import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))"),
        "removes_a_file": case(5, "it stayed", own=libc + f"assert libc.unlink({str(victim)!r}.encode()) == 0, 'it stayed'"),
        "outlives_grading": case(5, own=libc + "import time\nif libc.fork() == 0:\n    libc.setsid()\n    os.environ.clear()\n    time.sleep(600)"),
        "plants_a_module": case(5, "nothing", own=libc + "import sysconfig\nassert libc.creat((sysconfig.get_path('purelib') + '/planted.pth').encode(), 0o600) > 0, 'nothing'"),
        "changes_the_package": case(5, "nothing", own=libc + f"assert libc.open({package + '/__init__.py'!r}.encode(), os.O_RDWR) > 0, 'nothing'"),
        "poisons_kernels": case(5, own=f"import pathlib\nfor file in pathlib.Path({package!r}, 'kernels/cpu/__pycache__').rglob('*.nb?'):\n    file.write_bytes(b'')"),
        "finds_compiled_kernels": case(5, "Cell 2 uses minivllm.kernels.cpu.rows", own=f"from minivllm.kernels.cpu.rows import _norm\nassert _norm._cache.cache_path.startswith({package!r}), _norm._cache.cache_path"),
        "reads_the_solution": case(0, "Not written yet", answer=STUB, own=read),
        "calls_home": case(5, "Network is unreachable", own="import socket\nsocket.create_connection(('192.0.2.1', 80), 5)"),
        "fills_the_memory": case(5, "No space left", own="with open('/dev/shm/full', 'wb') as file:\n    for _ in range(30):\n        file.write(b'x' * 10**8)"),
        "fills_more_memory": case(5, "no room", own=libc + "assert libc.creat(b'/full', 0o600) > 0 or libc.creat(b'/dev/filled', 0o600) > 0, 'no room'"),
        "mounts_again": case(5, "it is still read-only", own=libc + f"MS_REMOUNT, MS_BIND = 32, 4096\nassert libc.mount(b'none', {package!r}.encode(), None, MS_REMOUNT | MS_BIND, None) == 0, 'it is still read-only'"),
        "prints_secrets": case(5, own="import os\nprint(dict(os.environ), os.listdir('/proc'))"),
    }  # fmt: skip


def kernels():
    """The compiled kernels, and their sizes."""
    return {file: file.stat().st_size for file in (PACKAGE / "kernels" / "cpu" / "__pycache__").rglob("*.nb?")}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The results of one run over all of them, and the kernels before it."""
    folder, before = tmp_path_factory.mktemp("sandbox"), kernels()
    cases = escapes(folder / "solutions", folder / "handed_in" / "victim" / "99_adding.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEACHERS_KEY", SECRET)
        return grade_class(folder, cases, "--jobs", 2, "--cell-timeout", 20, "--sandbox", "always"), before


@pytest.mark.slow
@pytest.mark.skipif(not bubblewrap.is_available(), reason="bubblewrap is not installed, or may not make namespaces")
class TestTheSandbox:
    def test_attempts_fail_and_everybody_gets_the_points_of_their_own_work(self, graded):
        assert graded[0].find_wrong() == {}
        assert {row["sandbox"] for row in graded[0].rows.values()} == {"yes"}

    def test_nothing_outside_was_changed_and_no_process_is_left(self, graded):
        assert graded[0].find_changed() == graded[0].find_left() == []
        after = kernels()
        assert {name: after.get(name) for name in graded[1]} == graded[1]

    def test_compiled_kernels_are_found(self, graded):
        """Numba ignores a folder in which it may not write: each notebook would compile them for half a minute."""
        assert "Error" not in graded[0].rows["finds_compiled_kernels"]["reason"] and graded[1]

    def test_neither_solutions_nor_secrets_are_inside(self, graded):
        assert "has read the solution\n" not in graded[0].page("reads_the_solution")
        assert SECRET not in graded[0].page("prints_secrets")


@pytest.fixture
def grade(tmp_path, monkeypatch):
    """Runs `minivllm grade` on one notebook, or what stands in for it; `happened` has how many notebooks each run would have graded."""
    hand_in(tmp_path, {"ann": case(5)})
    happened = []

    def grade_none(submissions, *_):
        happened.append(len(submissions))
        return (grader._nothing(submission, "not run here") for submission in submissions)

    monkeypatch.setattr(grader, "grade_all", grade_none)
    arguments = ["grade", tmp_path / "handed_in", "--solutions", tmp_path / "solutions", "--output", tmp_path / "graded"]
    return SimpleNamespace(run=lambda *options: main([*map(str, arguments), *options]), happened=happened)


def test_without_bubblewrap_no_sandbox_must_be_asked_for(grade, monkeypatch, capsys):
    monkeypatch.setattr(bubblewrap, "is_available", lambda: False)
    assert grade.run() == 2
    said = capsys.readouterr().err
    assert "There is no sandbox here: install bubblewrap" in said and "add --sandbox never" in said


def test_a_lost_feedback_page_is_made_again(grade, tmp_path):
    assert grade.run("--sandbox", "never") == grade.run("--sandbox", "never") == 0
    [page] = (tmp_path / "graded" / "feedback").iterdir()
    page.unlink()
    assert grade.run("--sandbox", "never") == 0
    assert grade.happened == [1, 0, 1] and page.exists()


def test_the_model_is_converted_before_it_can_only_be_read(grade, monkeypatch):
    monkeypatch.setattr(bubblewrap, "is_available", lambda: True)
    monkeypatch.setattr(hub, "resolve_model", lambda name: grade.happened.append(name))
    assert grade.run() == 0
    assert grade.happened == ["smollm2-135m", 1]


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


@pytest.fixture
def submission(tmp_path):
    (tmp_path / "ann.ipynb").write_text("first")
    return Submission("ann", Lesson("99_x", ()), tmp_path / "ann.ipynb")


@pytest.fixture
def start(tmp_path):
    """Begins a run beside the grades of the last."""
    return lambda name="grades.jsonl": Progress(tmp_path / name, Limits(), sandboxed=False)


class TestProgress:
    def test_a_grade_is_found_again_until_the_file_changes(self, submission, start, tmp_path):
        (tmp_path / "grades.jsonl").write_text('{"key": "a line cut o')
        progress, grade = start(), grader.Grade(submission, (), ("late",))
        assert progress.find(submission) is None
        progress.add(grade, "ann.html")
        assert start().find(submission) == (grade, "ann.html")
        submission.path.write_text("second")
        assert start().find(submission) is None

    def test_what_is_handed_in_during_the_run_or_failed_in_the_grader_is_graded_in_the_next(self, submission, start, monkeypatch):
        monkeypatch.setattr(grader, "_grade", lambda *_: 1 / 0)
        failure = grader.grade(submission, Limits(), None, None)
        for grade, content in ((failure, "first"), (grader.Grade(submission, ()), "second")):
            progress = start()
            progress.find(submission)
            submission.path.write_text(content)
            progress.add(grade, "ann.html")
            assert start().find(submission) is None

    def test_the_seed_is_kept_beside_the_grades(self, start, tmp_path):
        (tmp_path / "other").mkdir()
        seeds = [start(name).seed for name in ("grades.jsonl", "grades.jsonl", "other/grades.jsonl")]
        assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_grader_loses_no_grade_and_makes_none_twice(tmp_path):
    learners = ["ann", "bob", "cy", "dee"]
    hand_in(tmp_path, dict.fromkeys(learners, case(5)))
    output = tmp_path / "graded"
    command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "grade", "handed_in", "--output", "graded"]
    command += ["--solutions", "solutions", "--sandbox", "never"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}}
    killed = subprocess.Popen(command, **options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = output / "grades.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with journal.open("a") as file:
        file.write('{"key": "cut o')
    first = journal.read_text().splitlines()[:2]
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=240, check=True)
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
