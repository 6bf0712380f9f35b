"""The checks of lesson 01: a sampler for a batch and an incremental detokenizer, part by part, and then in the engine."""

from minivllm.course.lessons.lesson_01.detokenizer import (
    check_characters,
    check_detokenizer,
    check_detokenizer_text,
    check_stop_strings,
    load_tokenizer,
    token_bytes,
)
from minivllm.course.lessons.lesson_01.filters import (
    check_forbid_stops,
    check_min_p,
    check_penalties,
    check_temperature,
    check_top_k,
    check_top_p,
)
from minivllm.course.lessons.lesson_01.sampler import check_draw, check_sampler, check_sampler_text, watch

STAND_INS = {"check-sampler-text": "check-sampler", "check-detokenizer-text": "check-detokenizer"}
"""For checks on the real model, the check that the grader runs with other input."""
