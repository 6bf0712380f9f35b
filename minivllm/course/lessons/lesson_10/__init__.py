"""The checks of lesson 10: a prefix cache, a scheduler with one token budget, and both in the engine."""

from minivllm.course.lessons.lesson_10.budget import check_admit, check_continuing, check_decisions
from minivllm.course.lessons.lesson_10.cache import check_hash_blocks, check_pool
from minivllm.course.lessons.lesson_10.engine import check_chat, check_spike
from minivllm.course.lessons.lesson_10.manager import (
    check_allocate,
    check_cache_full_blocks,
    check_can_allocate,
    check_find_cached_blocks,
)

STAND_INS = {"check-chat": "check-decisions", "check-spike": "check-decisions"}
"""For checks on the real model, the check that the grader runs with other input."""
