"""The machinery of the course: checks with points, the source of the package shown in a lesson, exercises, grades.

A lesson imports two names from here, and both are quick to import: neither torch nor matplotlib is loaded for them.

    from minivllm.course import check, show_source
"""

from minivllm.course.checks import CheckFailed, check
from minivllm.course.sources import show_source

__all__ = ["CheckFailed", "check", "show_source"]
