"""`minivllm course`: the lessons and the learner's points. `course html` makes web pages, `course export` an nbgrader course."""

from __future__ import annotations

import argparse
from pathlib import Path

from minivllm.entrypoints.cli.options import add_command, add_option


def add_course_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm course` and the commands below it."""
    course = add_command(commands, "course", run_course, "list the lessons and your points", "minivllm course")
    add_option(course, "--exercises FOLDER", Path, "where you work (default: the project's exercises)")
    below = course.add_subparsers(title="commands", metavar="COMMAND")

    html = add_command(below, "html", run_course_html, "write the lessons as web pages", "minivllm course html pages")
    html.add_argument("folder", type=Path, metavar="FOLDER", help="where the pages go")
    add_option(html, "--lessons FOLDER", Path, "the lessons (default: the project's notebooks)")

    summary = "write the exercises as an nbgrader course"
    export = add_command(below, "export", run_course_export, summary, "minivllm course export my_class")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    add_option(export, "--solutions FOLDER", Path, "the solved notebooks (default: the project's solutions)")


def run_course(arguments: argparse.Namespace) -> int:
    """Print the lessons and the learner's points."""
    from minivllm.course.progress import find_progress, format_progress

    print(format_progress(find_progress(_folder("notebooks"), arguments.exercises or _folder("exercises"))))
    return 0


def run_course_html(arguments: argparse.Namespace) -> int:
    """Write the lessons as web pages, and print their paths."""
    from minivllm.course.pages import export_pages

    for page in export_pages(arguments.lessons or _folder("notebooks"), arguments.folder):
        print(page)
    return 0


def run_course_export(arguments: argparse.Namespace) -> int:
    """Write the nbgrader course, and print the next commands."""
    from minivllm.course.nbgrader_export import export_course

    sources = export_course(arguments.solutions or _folder("solutions"), arguments.folder)
    for source in sources:
        print(source)
    print(f"\nNext, in an activated environment with nbgrader:\n  cd {arguments.folder}")
    print(f"  nbgrader generate_assignment {sources[0].stem} --create")
    return 0


def _folder(name: str) -> Path:
    """A folder of the repository."""
    from minivllm.course.grading.submissions import project_folders

    return project_folders()[0] / name
