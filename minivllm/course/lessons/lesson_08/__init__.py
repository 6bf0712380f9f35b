"""The checks of lesson 08: a learner's engine, from start-up to `generate`, part by part, and then all of it on the real model."""

from minivllm.course.lessons.lesson_08.core import check_compute, check_fail
from minivllm.course.lessons.lesson_08.engine import built_components, check_parts, check_text
from minivllm.course.lessons.lesson_08.frontend import check_entrance, check_generate, check_take
from minivllm.course.lessons.lesson_08.inputs import check_execute_model, check_find_slots, check_lay_out, check_prepare_inputs
from minivllm.course.lessons.lesson_08.start_up import check_count_blocks, check_start_up, check_worker

STAND_INS = {"check-text": "check-parts"}
"""For a check on the real model, the check that the grader runs with other input."""
