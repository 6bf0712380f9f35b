"""Lesson 01's checks, tested as code is: right solutions pass, and a plausible mistake fails where it was made.

`tests/support/mutate_lesson.py 01` makes many more mistakes, small ones.
"""

from __future__ import annotations

from lesson_checks import LessonChecks

from minivllm.course.lessons.lesson_01.sampler import check_distribution
from minivllm.worker.sampler import Sampler


class TestChecks(LessonChecks):
    number = "01"
    says = ("ook ",)
    every = 13


def test_the_engines_own_sampler_draws_20_000_tokens_as_the_probabilities_say():
    check_distribution(Sampler())
