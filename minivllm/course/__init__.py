"""The course's tools: graded checks, the package's source shown in a lesson, exercises, grading.

Lessons import these names from here. All are cheap: they load neither torch nor matplotlib.

    from minivllm.course import check, my_parts, predict, show_results, show_source
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.course.checks import CheckFailed, check
from minivllm.course.predictions import predict
from minivllm.course.results import show_results
from minivllm.course.sources import show_source

if TYPE_CHECKING:
    from minivllm.course.parts import EngineParts

__all__ = ["CheckFailed", "check", "my_parts", "predict", "show_results", "show_source"]


def my_parts(folder: Path | str = ".") -> EngineParts:
    """A learner's classes from solved exercises; see `minivllm.course.parts.my_parts`."""
    from minivllm.course import parts  # not at the top: it reads notebooks, and pytest's plugin loads this module in every run

    return parts.my_parts(folder)
