"""The checks of lesson 12: layers of which each rank has a part, sums in a ring, an executor, and all of it on real processes."""

from minivllm.course.lessons.lesson_12.engine import Parts, check_real
from minivllm.course.lessons.lesson_12.executor import check_executor, check_serve
from minivllm.course.lessons.lesson_12.layers import (
    check_attention,
    check_column,
    check_embedding,
    check_head,
    check_mlp,
    check_row,
)
from minivllm.course.lessons.lesson_12.partition import check_split, check_split_heads
from minivllm.course.lessons.lesson_12.ring import check_all_reduce, check_reduce_scatter

STAND_INS = {"check-real": "check-executor"}
"""For a check on the real model, the check that the grader runs with other input."""
