"""`minivllm course`: the lessons and the learner's points. `course play` serves the playground, `course export` makes an nbgrader course, `course new`
a lesson's files. `minivllm grade SUBMISSIONS… --output FOLDER` grades learners' notebooks."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from minivllm.entrypoints.cli.options import add_command, add_option
from minivllm.errors import CourseError, MinivllmError

_GRADE_DESCRIPTION = """Grade submissions: restore the original checks, run each notebook in a fresh kernel with limits, and write
grades.csv (a row per submission), junit.xml (a test case per check) and feedback/LEARNER_NOTEBOOK.html.

The learner is LEARNER in FOLDER/LEARNER/…, else what the file name adds to the lesson's (alice_04_paged_kv_cache.ipynb is alice's),
else the name of the notebook's folder. Of several files by one learner for one lesson, the latest is graded, and the feedback says so.

Grades are written as they are made: an interrupted run resumes when it is started again with the same --output. A notebook that ran
out of time because the machine was busy is tried once more, alone.

Grading withstands edited, deleted, copied or emptied checks, a replaced `check` or function behind it, printed ticks, endless loops,
excessive memory, output or disk use, and crashes of Python. Each notebook runs in the sandbox of bubblewrap (Linux: `apt install
bubblewrap`): it sees Python, its packages, the course and its own folder, no network, no other process and none of your files, and
nothing that it starts or writes outlives it. With --sandbox never, a notebook runs as you: ordinary means keep it from opening the
solutions and other submissions, but a malicious one can read them and your files, use the network, and change grades after its own.

Each check that passes is repeated with random input. The learner's class is observed at work and compared with the solution's outside
the learner's process, so a forged check earns nothing. Methods that a notebook does not define get their stubs back. Whose work it is
cannot be proved: a notebook that visibly uses more of the package than the lesson does gets a remark, one that hides it does not."""


def add_course_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm course` and the commands below it."""
    course = add_command(commands, "course", run_course, "list the lessons and your points", "minivllm course")
    add_option(course, "--exercises FOLDER", Path, "where you work (default: the project's exercises)")
    below = course.add_subparsers(title="commands", metavar="COMMAND")

    play = add_command(below, "play", run_course_play, "serve the playground: the engine in the browser", "minivllm course play")
    add_option(play, "--port PORT", 8008, "where it is served, on this machine only")
    add_option(play, "--folder FOLDER", Path, "the playground's files (default: those of the package, or of `make book`)")

    summary = "write the exercises as an nbgrader course"
    export = add_command(below, "export", run_course_export, summary, "minivllm course export my_class")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    add_option(export, "--solutions FOLDER", Path, "the solved notebooks (default: the project's solutions)")

    new = add_command(below, "new", run_course_new, "make the files of a lesson", "minivllm course new 11_async_engine")
    new.add_argument("name", metavar="NAME", help="two digits and words, such as 11_async_engine")
    add_option(new, "--project FOLDER", Path, "where the notebooks and the package are (default: this project)")


@contextlib.contextmanager
def _extra(what: str) -> Iterator[None]:
    """Say how to install a package of the extra "course" that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "minivllm":
            raise
        raise CourseError(f'{what} needs {error.name}: `pip install "minivllm[course]"`.') from None


@_extra("The course")
def run_course(arguments: argparse.Namespace) -> int:
    """Print the lessons and the learner's points."""
    from minivllm.course.progress import find_progress, format_progress

    print(format_progress(find_progress(_folder("notebooks"), arguments.exercises or _folder("exercises"))))
    return 0


def run_course_play(arguments: argparse.Namespace) -> int:
    """Serve the playground until Ctrl-C."""
    from minivllm.entrypoints.playground.server import serve_playground

    serve_playground(arguments.folder, arguments.port)
    return 0


@_extra("The course")
def run_course_export(arguments: argparse.Namespace) -> int:
    """Write the nbgrader course, and print the next commands."""
    from minivllm.course.nbgrader_export import export_course

    sources = export_course(arguments.solutions or _folder("solutions"), arguments.folder)
    for source in sources:
        print(source)
    print(f"\nNext, in an activated environment with nbgrader:\n  cd {arguments.folder}")
    print(f"  nbgrader generate_assignment {sources[0].stem} --create")
    return 0


@_extra("The course")
def run_course_new(arguments: argparse.Namespace) -> int:
    """Write the files of a lesson, and print their paths and the next commands."""
    from minivllm.course.new_lesson import make_lesson

    written = make_lesson(arguments.name, arguments.project or _folder("notebooks").parent)
    for path in written:
        print(path)
    print(f"\nNext (see docs/writing_a_lesson.md):\n  make exercises\n  python -m pytest -n 0 {written[-2]}")
    return 0


def _folder(name: str) -> Path:
    """A folder of the repository."""
    from minivllm.course.grading.submissions import project_folders

    return project_folders()[0] / name


# -- grading ---------------------------------------------------------------------------------------------------------


def add_grade_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm grade`."""
    from minivllm.course.grading.limits import Limits

    default = Limits()
    grade = add_command(
        commands, "grade", run_grade, "grade learners' notebooks",
        "minivllm grade submissions/ --output grades --jobs 2",
    )  # fmt: skip
    grade.description = _GRADE_DESCRIPTION
    grade.formatter_class = argparse.RawDescriptionHelpFormatter
    grade.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a notebook, or a folder that is searched for notebooks"
    )
    grade.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where grades and feedback go")
    solutions = "the solved notebooks, whose checks count (default: the project's solutions)"
    add_option(grade, "--solutions FOLDER", Path, solutions)
    add_option(grade, "--jobs", 1, "notebooks to run in parallel")
    sandbox = "run each notebook in bubblewrap's sandbox"
    add_option(grade, "--sandbox", "always", sandbox, choices=("always", "never"))
    add_option(grade, "--cell-timeout SECONDS", float(default.cell_seconds), "time limit per cell")
    add_option(grade, "--timeout SECONDS", float(default.total_seconds), "time limit per notebook")
    add_option(grade, "--memory GIB", default.memory_bytes / 1024**3, "memory limit per notebook")


def run_grade(arguments: argparse.Namespace) -> int:
    """Grade, write the results, and print a table of them."""
    for option in ("jobs", "cell_timeout", "timeout", "memory"):
        value = getattr(arguments, option)
        if not value > 0:
            raise CourseError(f"--{option.replace('_', '-')} is {value:g}, but must be more than 0.")
    with _extra("Grading"):
        import ipykernel  # noqa: F401
        import jupyter_client  # noqa: F401
        import nbconvert  # noqa: F401
        from tqdm import tqdm

        from minivllm.course.grading.grader import grade_all
        from minivllm.course.grading.progress import Progress
        from minivllm.course.grading.report import FeedbackWriter, format_summary, write_csv, write_junit
    from minivllm.course.grading.limits import Limits
    from minivllm.course.grading.submissions import find_submissions, load_lessons, project_folders

    project = project_folders()
    solutions = arguments.solutions or project[0] / "solutions"
    submissions, remarks = find_submissions(arguments.submissions, load_lessons(solutions))
    feedback = _make_folder(arguments.output)
    limits = Limits(arguments.cell_timeout, arguments.timeout, arguments.memory * 1024**3)
    for remark in remarks:
        print(remark, file=sys.stderr)
    sandboxed = _use_sandbox(arguments.sandbox)
    if sandboxed:
        _prepare_model()
    unreadable = [solutions, arguments.output]
    unwritable = [*project, *(path for path in arguments.submissions if path.is_dir())]
    progress = Progress(arguments.output / "grades.jsonl", limits, sandboxed)
    kept = {
        submission: found for submission in submissions if (found := progress.find(submission)) and (feedback / found[1]).exists()
    }
    if kept:
        print(f"{len(kept)} of {len(submissions)} were graded in an earlier run and are unchanged.", file=sys.stderr)
    grades = {submission: grade for submission, (grade, _) in kept.items()}
    writer = FeedbackWriter(feedback, [page for _, page in kept.values()])
    left = [submission for submission in submissions if submission not in kept]
    if left:
        names = ", ".join(sorted({submission.lesson.name for submission in left}))
        print(f"First, the solutions run (on a new machine that compiles kernels, too): {names}.", file=sys.stderr)
    running = grade_all(left, limits, arguments.jobs, unreadable, unwritable, sandboxed, progress.seed)
    for grade in tqdm(running, total=len(left), unit="notebook", file=sys.stderr, desc="grading"):
        progress.add(grade, writer.write(grade).name)
        grades[grade.submission] = grade
        so_far = [grades[submission] for submission in submissions if submission in grades]
        write_csv(so_far, arguments.output / "grades.csv", sandboxed)
    in_order = [grades[submission] for submission in submissions]
    write_csv(in_order, arguments.output / "grades.csv", sandboxed)
    write_junit(in_order, arguments.output / "junit.xml")
    print(format_summary(in_order, shutil.get_terminal_size((120, 24)).columns))
    print(f"\ngrades    {arguments.output / 'grades.csv'}\n          {arguments.output / 'junit.xml'}\nfeedback  {feedback}")
    return 0


def _use_sandbox(choice: str) -> bool:
    """Whether to use the sandbox; says what happens without it."""
    from minivllm.course.grading import bubblewrap

    if choice == "never":
        print(
            "Without a sandbox, a notebook that means harm can read the solutions and your files, and change grades.",
            file=sys.stderr,
        )
        return False
    if bubblewrap.is_available():
        return True
    raise CourseError(
        "There is no sandbox here: install bubblewrap 0.6 or newer on Linux, where user namespaces are allowed. To grade notebooks that you "
        "trust without one, add --sandbox never."
    )


def _prepare_model() -> None:
    """Convert the model that lessons load now, if it is not yet: in the sandbox, its folder cannot be written to."""
    from minivllm.config import EngineArgs
    from minivllm.models.hub import resolve_model

    with contextlib.suppress(MinivllmError, OSError):  # the notebooks that need it will say so
        resolve_model(EngineArgs.model)


def _make_folder(output: Path) -> Path:
    """Create the folder of the feedback, before anything runs."""
    feedback = output / "feedback"
    try:
        feedback.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CourseError(f"{output} cannot be written: {error.strerror}. Name another folder with --output.") from None
    return feedback
