"""The checks of lesson 14: what a step must cost, 8-bit weights, drafts, and steps in flight."""

from minivllm.course.lessons.lesson_14.drafts import check_draft, check_draw, check_gain, check_verify
from minivllm.course.lessons.lesson_14.engine import check_real
from minivllm.course.lessons.lesson_14.flight import check_in_flight
from minivllm.course.lessons.lesson_14.method import check_method
from minivllm.course.lessons.lesson_14.roof import check_amdahl, check_roofline, check_step_cost
from minivllm.course.lessons.lesson_14.rounding import check_multiply, check_rotate, check_rounding

STAND_INS = {"check-real": "check-method"}
"""For a check on the real model, the check that the grader runs with other input."""
