"""What learners hand in for the small lesson of `course_notebooks`: good, bad and hostile, with the score and the reason of each."""

from __future__ import annotations

import copy
import csv
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
from course_notebooks import ADD, solved_notebook

from minivllm.course.exercise_cells import STUB as WRITE_THIS
from minivllm.entrypoints.cli.main import main

GOOD = ADD
STUB = re.sub("### BEGIN SOLUTION.*?### END SOLUTION", WRITE_THIS, ADD, flags=re.DOTALL)
FAKE_CHECKS = {"check_add": "print('✓ two numbers are added (2 points)')", "check_twice": "print('✓')"}
ESCAPES = "tried to open the solutions"


@dataclass(frozen=True)
class Case:
    """One submission: what is in the file, its score (of 5), and what its reason must say."""

    content: str | bytes
    score: int
    reason: str = ""

    @property
    def data(self) -> bytes:
        """What is in the file."""
        return self.content if isinstance(self.content, bytes) else self.content.encode()


@dataclass(frozen=True)
class Graded:
    """What a run of `minivllm grade` over a class left: its table's rows by learner, and its files."""

    cases: dict[str, Case]
    rows: dict[str, dict[str, str]]
    folder: Path
    lesson: str

    @property
    def output(self) -> Path:
        """Where it wrote."""
        return self.folder / "graded"

    def find_wrong(self) -> dict[str, tuple[str, str]]:
        """The learners who got another score or reason than they should: which."""
        rows = {learner: (row["score"], row["reason"]) for learner, row in self.rows.items()}
        return {
            name: rows[name]
            for name, made in self.cases.items()
            if float(rows[name][0]) != made.score or made.reason not in rows[name][1]
        }

    def page(self, learner: str) -> str:
        """A learner's feedback."""
        return (self.output / "feedback" / f"{learner}_{self.lesson}.html").read_text(encoding="utf-8")

    def find_changed(self) -> list[str]:
        """The learners whose file is no longer what they handed in."""
        file = f"{self.lesson}.ipynb"
        return [
            learner
            for learner, made in self.cases.items()
            if (self.folder / "handed_in" / learner / file).read_bytes() != made.data
        ]

    def find_left(self) -> list:
        """Kernels that still run, told from those of other tests by their folder, and their temporary files."""
        temporary = self.folder / "t"
        processes = psutil.process_iter(["cmdline", "environ"])
        return [process for process in processes if str(temporary) in str(process.info)] + list(temporary.iterdir())


def hand_in(folder, cases, *, lesson="99_adding", solution=None):
    """Write a folder of solutions, and one of submissions."""
    for name in ("solutions", "t"):
        (folder / name).mkdir()
    nbformat.write(solution or solved_notebook(), folder / "solutions" / f"{lesson}.ipynb")
    for learner, made in cases.items():
        path = folder / "handed_in" / learner / f"{lesson}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.data)


def grade_class(folder, cases, *options, lesson="99_adding", solution=None):
    """Hand in all cases and grade them in one run."""
    hand_in(folder, cases, lesson=lesson, solution=solution)
    arguments = ["grade", folder / "handed_in", "--solutions", folder / "solutions", "--output", folder / "graded", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "t"))
        assert main([*map(str, arguments)]) == 0
    with (folder / "graded" / "grades.csv").open(newline="", encoding="utf-8") as file:
        return Graded(cases, {row["learner"]: row for row in csv.DictReader(file)}, folder, lesson)


def notebook(answer=GOOD, own="", *, own_after="imports", **sources):
    """The lesson with an answer, and a cell of the learner's own."""
    made = solved_notebook(answer=answer, **sources)
    if own:
        place = [cell.id for cell in made.cells].index(own_after)
        made.cells.insert(place + 1, nbformat.v4.new_code_cell(own))
    return made


def written(made):
    """The text of a file; unlike nbformat's own it may have one id twice."""
    return json.dumps(made)


def case(score, reason="", **arguments):
    return Case(written(notebook(**arguments)), score, reason)


def without(made, *names):
    made.cells = [cell for cell in made.cells if cell.id not in names]
    return made


def twice(made, *names):
    made.cells = [copy.deepcopy(cell) for cell in made.cells for _ in range(1 + (cell.id in names))]
    return made


def in_check(line):
    """An answer that adds right, but has another line in `twice`."""
    return ADD.replace("result = 2 * a", line)


def cases(solutions, project):
    """Learner to submission."""
    solution = str(solutions / "99_adding.ipynb")
    steal = f"import json\nfor cell in json.load(open({solution!r}))['cells']:\n    exec(''.join(cell['source']))"
    checks = ("check-add", "check-twice")
    return {
        "good": case(5),
        "partial": case(2, "Expected 16, but got 12", answer=in_check("result = a + 4")),
        "untouched": case(0, "Not written yet", answer=STUB),
        "syntax_error": case(0, "Your cell 2 raised an error, SyntaxError", answer="def add(a, b:\n"),
        "endless_loop": case(5, "Your cell 2 ran longer than 6 s and was stopped.", own="while True: pass"),
        "endless_loop_in_check": case(
            2, "called by the check in cell 5, ran longer than 6 s", answer=in_check("while True: pass")
        ),
        "deaf": case(
            5,
            "Your cell 2 could not be stopped",
            own="import time\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass",
        ),
        "sys_exit": case(5, "Your cell 2 called exit or sys.exit", own="import sys\nsys.exit()"),
        "exit": case(5, "Your cell 2 called exit or sys.exit", own="exit()"),
        "os_exit": case(5, "Your cell 2 made Python exit", own="import os\nos._exit(0)"),
        "os_exit_in_check": case(
            2, "called by the check in cell 5, made Python exit", answer="import os\n" + in_check("os._exit(0)")
        ),
        "sys_exit_in_check": case(2, answer="import sys\n" + in_check("sys.exit(0)")),
        "crash": case(
            5, "Your cell 2 made Python exit", own="import ctypes, faulthandler\nfaulthandler.disable()\nctypes.string_at(0)"
        ),
        "edited_checks": case(0, "This check was changed; the original was graded.", answer=STUB, **FAKE_CHECKS),
        "edited_checks_good": case(5, answer=GOOD, check_add="1 / 0", check_twice="### nothing"),
        "deleted_checks": Case(written(without(notebook(STUB), *checks)), 0, "the original was restored"),
        "deleted_checks_good": Case(written(without(notebook(), "imports", *checks)), 5, "were changed or deleted"),
        "deleted_answer": Case(written(without(notebook(), "answer")), 0, "The answer above was deleted."),
        "duplicated_checks": Case(written(twice(notebook(), *checks)), 5, "duplicated check was graded once"),
        "duplicated_checks_bad": Case(written(twice(notebook(in_check("result = 0")), *checks)), 2, "Expected 16"),
        "broken_json": Case(written(notebook())[:500], 0, "it is not valid JSON"),
        "deep_json": Case("[" * 200_000, 0, "it is not valid JSON"),
        "not_a_notebook": Case(json.dumps([1, 2]), 0, "it has no cells"),
        "binary": Case(b"\x89PNG\r\n\xff\xfe", 0, "it is not UTF-8 text"),
        "empty": Case("", 0, "The file is empty."),
        "prints_100_mb": case(5, "Your cell 2 printed more than 8 MB and was stopped.", own="print('x' * 100_000_000)"),
        "prints_for_ever": case(5, "Your cell 2 printed more than 8 MB", own="while True: print('y' * 1000)"),
        "prints_past_python": case(5, own="import os\nfor _ in range(100): os.write(1, b'z' * 1_000_000)"),
        "shows_100_mb": case(5, own="from IPython.display import HTML, display\ndisplay(HTML('x' * 100_000_000))"),
        "memory_hog": case(
            5, "Your cell 2 used more than 0.5 GiB", own="import time\nhog = []\nwhile True: hog.append(b'x' * 30_000_000)"
        ),
        "writes_files": case(5, own="open('mine.txt', 'w').write('x')\nassert open('mine.txt').read() == 'x'"),
        "empties_what_is_parsed": case(
            0, answer="import ast\nparse = ast.parse\nast.parse = lambda *a, **k: parse('0')\n" + STUB
        ),
        "ends_the_grader": case(5, "tried to end another program", own="import os\nos.kill(os.getppid(), 9)"),
        "huge_error": case(5, "ValueError: xxx", own="raise ValueError('x' * 20_000_000)"),
        "odd_check": case(2, answer=in_check("raise ValueError('\\ud800' * 9)")),
        "breaks_the_shell": case(
            5, own="get_ipython().run_cell = None\nget_ipython().run_cell_async = None", own_after="between"
        ),
        "ignores_interrupts": case(
            2,
            "could not be stopped",
            answer="import signal\n" + in_check("signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"),
        ),
        "writes_into_project": case(
            5, "tried to write outside of its own folder", own=f"open({str(project / 'planted.py')!r}, 'w').write('x')"
        ),
        "deletes_submissions": case(
            5,
            "tried to write outside of its own folder",
            own=f"import os\nos.rename({str(solutions.parent / 'handed_in' / 'victim')!r}, 'gone')",
        ),
        "replaces_check": case(
            0,
            answer=STUB + "\nimport contextlib\n@contextlib.contextmanager\ndef check(name, points):\n"
            "    try: yield\n    except BaseException: pass\n    print('✓', name)",
        ),
        "replaces_check_modules": case(
            0,
            answer=STUB + "\nimport contextlib, minivllm.course, minivllm.course.checks as checks, sys\n"
            "@contextlib.contextmanager\ndef fake(name, points):\n    try: yield\n    except BaseException: pass\n"
            "minivllm.course.check = checks.check = fake\nsys.modules['minivllm.course.checks'] = fake\n"
            "checks.CheckFailed.__init__ = None\n"
            "contextlib._GeneratorContextManager.__exit__ = lambda *arguments: True",
        ),
        "reads_solutions": case(0, ESCAPES, answer=STUB + "\n" + steal),
        "links_solutions": case(0, ESCAPES, answer=STUB + f"\nimport os\nos.symlink({solution!r}, 's')\nopen('s').read()"),
        "runs_solutions": case(0, ESCAPES, answer=STUB + f"\nget_ipython().run_line_magic('run', {solution!r})"),
        "lists_solutions": case(0, ESCAPES, answer=STUB + f"\nimport os\nos.listdir({str(solutions)!r})"),
        "starts_a_program": case(
            0,
            "tried to start another program",
            answer=STUB + f"\nimport subprocess\nsubprocess.run(['cat', {solution!r}], check=True)",
        ),
        "starts_a_program_in_a_given_cell": case(
            0,
            "your code that it calls, tried to start another program",
            answer=STUB + f"\ndef print(*things):\n    import subprocess\n    subprocess.run(['cat', {solution!r}], check=True)",
        ),
        "looks_into_memory": case(0, "tried to look into the grader's memory", answer=STUB + "\nimport gc\ngc.get_objects()"),
        "starts_a_shell": case(0, "tried to start another program", answer=STUB + f"\n!cat {solution}"),
        "prints_ticks": case(0, answer=STUB + "\nprint('✓ two numbers are added (2 points)')", own="print('✓')"),
        "empties_cells": case(
            0,
            answer=STUB + "\nshell = get_ipython()\nshell.input_transformers_cleanup.append(lambda lines: [])\n"
            "shell.run_cell = lambda *arguments, **more: None",
        ),
        "swallows_errors": case(
            0, answer=STUB + "\nshell = get_ipython()\nshell.set_custom_exc((Exception,), lambda *arguments: None)"
        ),
        "recursion": case(5, "Your cell 2", own="def f(): return f()\nf()"),
        "threads": case(
            5,
            own="import threading, time\ndef work():\n    while True: time.sleep(0.01); print('still here')\n"
            "threading.Thread(target=work).start()",
        ),
        "leaves_a_process": case(
            5, own="import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)"
        ),
        "odd_characters": case(
            5,
            own="# <script>alert(1)</script>\nfrom IPython.display import HTML, display\n"
            "display(HTML('<script>alert(2)</script><b onclick=\"alert(3)\">bold</b>'))\n"
            "print('\\x00\\x08 </pre><script>alert(4)</script>')\nraise ValueError('\\x00 <script>alert(5)</script> \\ud800')",
        ),
        "odd_source": case(5, "Your cell 2 raised an error", own="print('\x00\x1b </pre><script>alert(6)</script>')"),
        "odd_text": Case(written(notebook()).replace("Write two functions.", "<script>alert(7)</script>"), 5),
        "=cmd|'calc'!A0": case(5),
        "<script>alert(0)<": case(0, "Not written yet", answer=STUB),
    }
