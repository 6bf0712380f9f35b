"""`minivllm course export FOLDER`: write the exercises as an nbgrader course."""

from __future__ import annotations

import argparse
from pathlib import Path

from minivllm.entrypoints.options import add_command, add_option


def add_course_commands(commands) -> None:  # noqa: ANN001
    """Register the commands below `minivllm course`."""
    summary = "write the exercises as an nbgrader course"
    export = add_command(commands, "export", run_course_export, summary, "minivllm course export my_class")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    add_option(export, "--solutions FOLDER", Path, "the solved notebooks (default: the project's solutions)")


def run_course_export(arguments: argparse.Namespace) -> int:
    """Write the nbgrader course, and print the next commands."""
    from minivllm.course.grading.submissions import project_folders
    from minivllm.course.nbgrader_export import export_course

    sources = export_course(arguments.solutions or project_folders()[0] / "solutions", arguments.folder)
    for source in sources:
        print(source)
    print(f"\nNext, in an activated environment with nbgrader:\n  cd {arguments.folder}")
    print(f"  nbgrader generate_assignment {sources[0].stem} --create")
    return 0
