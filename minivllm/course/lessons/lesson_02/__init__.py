"""The checks of lesson 02: a learner's model, part by part, and then in the engine."""

from minivllm.course.lessons.lesson_02.blocks import check_attention, check_layer, check_mlp, check_model
from minivllm.course.lessons.lesson_02.engine import check_engine, check_logits, check_text
from minivllm.course.lessons.lesson_02.layers import check_attend, check_norm, check_rotary
from minivllm.course.lessons.lesson_02.loading import check_load_weights, check_read_checkpoint

STAND_INS = {"check-logits": "check-model", "check-text": "check-engine"}
"""For checks on the real model, the check that the grader runs with other input."""
