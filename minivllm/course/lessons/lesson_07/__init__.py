"""The checks of lesson 07: a learner's scheduler, one method after another, and then in the engine."""

from minivllm.course.lessons.lesson_07.engine import check_decisions, check_text
from minivllm.course.lessons.lesson_07.scheduler import (
    check_abort_request,
    check_add_request,
    check_admit,
    check_fits,
    check_recompute,
    check_schedule,
    check_swap_in,
    check_swap_out,
    check_update,
)

STAND_INS = {"check-11": "check-10"}
"""For a check on the real model, the check that the grader runs with other input."""
