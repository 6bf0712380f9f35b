"""The checks of lesson 06: attention in pieces, a learner's kernels over a paged cache, and their backend in the engine."""

from minivllm.course.lessons.lesson_06.engine import check_engine, check_forward, write_with
from minivllm.course.lessons.lesson_06.kernels import check_decode, check_prefill, check_write
from minivllm.course.lessons.lesson_06.softmax import check_attend_in_pieces, check_merge

STAND_INS = {"check-engine": "check-forward"}
"""For the check on the real model, the check that the grader runs with other input."""
