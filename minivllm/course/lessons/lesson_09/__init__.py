"""The checks of lesson 09: metrics from raw timestamps, a load generator, a static batcher, and a choice for a goal."""

from minivllm.course.lessons.lesson_09.batching import check_decisions, check_static_batcher, check_text
from minivllm.course.lessons.lesson_09.choice import check_choose
from minivllm.course.lessons.lesson_09.load import check_drive, check_poisson_times
from minivllm.course.lessons.lesson_09.metrics import (
    check_average_in_system,
    check_goodput,
    check_latencies,
    check_percentile,
    check_summarize,
    check_utilisation,
)

STAND_INS = {"check-text": "check-decisions"}
"""For a check on the real model, the check that the grader runs with other input."""
