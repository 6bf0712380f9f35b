"""The checks of lesson 04: a learner's block manager, one method after another, and then in the engine."""

from minivllm.course.lessons.lesson_04.block_manager import (
    check_allocate,
    check_append,
    check_can_allocate,
    check_can_append,
    check_copy_on_write,
    check_fork,
    check_free,
    check_pool,
    check_swap,
)
from minivllm.course.lessons.lesson_04.engine import check_block_manager, check_text

STAND_INS = {"check-text": "check-engine"}
"""For the check on the real model, the check that the grader runs with other input."""
