"""The course's tools: graded checks, the package's source shown in a lesson, exercises, grading.

Lessons import these names from here. All are cheap: they load neither torch nor matplotlib.

    from minivllm.course import check, my_parts, show_results, show_source
"""

from minivllm.course.checks import CheckFailed, check
from minivllm.course.parts import my_parts
from minivllm.course.results import show_results
from minivllm.course.sources import show_source

__all__ = ["CheckFailed", "check", "my_parts", "show_results", "show_source"]
