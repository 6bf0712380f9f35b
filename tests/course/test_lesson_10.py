"""Lesson 10's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

Among the mistakes are those that other small engines made: see the names. `tests/support/mutate_lesson.py 10` makes many more, small ones.
"""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "10"
    points = 18
    says = ("Expected", "Got", "Look at")
    every = 7
    tries_mistakes_at_night = True
