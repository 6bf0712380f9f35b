"""The checks of lesson 05: a learner's Triton kernels, one by one, and in the engine."""

from minivllm.course.lessons.lesson_05.engine import check_engine, write_with
from minivllm.course.lessons.lesson_05.rows import (
    check_add,
    check_add_rms_norm,
    check_max_and_sum,
    check_scale_rows,
    check_silu_and_mul,
    check_softmax,
)
from minivllm.course.lessons.lesson_05.tiles import check_gather, check_matmul, check_running, check_transpose
