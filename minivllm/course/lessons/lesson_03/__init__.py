"""The checks of lesson 03: a learner's contiguous cache, from its memory to the loops, and then in the engine."""

from minivllm.course.lessons.lesson_03.attention import check_attend, check_mask, check_size, check_write
from minivllm.course.lessons.lesson_03.engine import check_engine, check_text, serve_watched
from minivllm.course.lessons.lesson_03.loops import check_generate, check_serve
from minivllm.course.lessons.lesson_03.runner import check_layout, check_rows, check_runner

STAND_INS = {"check-text": "check-serve"}
"""For checks on the real model, the check that the grader runs with other input; `check_engine` has such input itself."""
