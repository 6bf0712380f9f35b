"""`minivllm grade SUBMISSIONS… --output FOLDER`: grade learners' notebooks."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from minivllm.entrypoints.options import add_command, add_option
from minivllm.errors import CourseError

_DESCRIPTION = """Grade submissions: restore the original checks, run each notebook in a fresh kernel with limits, and write
grades.csv (a row per submission), junit.xml (a test case per check) and feedback/LEARNER_NOTEBOOK.html.

The learner is LEARNER in FOLDER/LEARNER/…, else what the file name adds to the lesson's (alice_04_paged_kv_cache.ipynb is alice's),
else the name of the notebook's folder. Of several files by one learner for one lesson, the latest is graded, and the feedback says so.

Grading withstands edited, deleted, copied or emptied checks, a replaced `check` or function behind it, printed ticks, reading
solutions or other submissions, writing into the project, killing the grader, endless loops, excessive memory, output or disk use, and
crashes of Python. It is not a sandbox: submissions run as you, in the process that checks them. They can read your other files and use
the network, and a determined attacker can cheat. Grade in a container or a virtual machine that holds nothing of value."""


def add_grade_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm grade`."""
    from minivllm.course.grading.limits import Limits

    default = Limits()
    grade = add_command(
        commands, "grade", run_grade, "grade learners' notebooks",
        "minivllm grade submissions/ --output grades --jobs 2",
    )  # fmt: skip
    grade.description = _DESCRIPTION
    grade.formatter_class = argparse.RawDescriptionHelpFormatter
    grade.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a notebook, or a folder that is searched for notebooks"
    )
    grade.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where grades and feedback go")
    solutions = "the solved notebooks, whose checks count (default: the project's solutions)"
    add_option(grade, "--solutions FOLDER", Path, solutions)
    add_option(grade, "--jobs", 1, "notebooks to run in parallel")
    add_option(grade, "--cell-timeout SECONDS", float(default.cell_seconds), "time limit per cell")
    add_option(grade, "--timeout SECONDS", float(default.total_seconds), "time limit per notebook")
    add_option(grade, "--memory GIB", default.memory_bytes / 1024**3, "memory limit per notebook")


def run_grade(arguments: argparse.Namespace) -> int:
    """Grade, write the results, and print a table of them."""
    for option in ("jobs", "cell_timeout", "timeout", "memory"):
        value = getattr(arguments, option)
        if not value > 0:
            raise CourseError(f"--{option.replace('_', '-')} is {value:g}, but must be more than 0.")
    try:
        import ipykernel  # noqa: F401
        import jupyter_client  # noqa: F401
        import nbconvert  # noqa: F401
        from tqdm import tqdm

        from minivllm.course.grading.grader import grade_all
        from minivllm.course.grading.report import FeedbackWriter, format_summary, write_csv, write_junit
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "minivllm":
            raise
        raise CourseError(f'Grading needs {error.name}: `pip install "minivllm[course]"`.') from None
    from minivllm.course.grading.limits import Limits
    from minivllm.course.grading.submissions import find_submissions, load_lessons, project_folders

    project = project_folders()
    solutions = arguments.solutions or project[0] / "solutions"
    submissions, remarks = find_submissions(arguments.submissions, load_lessons(solutions))
    feedback = _make_folder(arguments.output)
    limits = Limits(arguments.cell_timeout, arguments.timeout, arguments.memory * 1024**3)
    for remark in remarks:
        print(remark, file=sys.stderr)
    unreadable = [solutions, arguments.output]
    unwritable = [*project, *(path for path in arguments.submissions if path.is_dir())]
    grades = []
    writer = FeedbackWriter(feedback)
    running = grade_all(submissions, limits, arguments.jobs, unreadable, unwritable)
    for grade in tqdm(running, total=len(submissions), unit="notebook", file=sys.stderr, desc="grading"):
        grades.append(grade)
        writer.write(grade)
    places = {item: place for place, item in enumerate(submissions)}
    grades.sort(key=lambda grade: places[grade.submission])
    write_csv(grades, arguments.output / "grades.csv")
    write_junit(grades, arguments.output / "junit.xml")
    print(format_summary(grades, shutil.get_terminal_size((120, 24)).columns))
    print(f"\ngrades    {arguments.output / 'grades.csv'}\n          {arguments.output / 'junit.xml'}\nfeedback  {feedback}")
    return 0


def _make_folder(output: Path) -> Path:
    """Create the folder of the feedback, before anything runs."""
    feedback = output / "feedback"
    try:
        feedback.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CourseError(f"{output} cannot be written: {error.strerror}. Name another folder with --output.") from None
    return feedback
