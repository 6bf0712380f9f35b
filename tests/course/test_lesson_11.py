"""Lesson 11's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

`tests/support/mutate_lesson.py 11` makes many more mistakes, small ones.
"""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "11"
    points = 19
    says = ("Expected", "Got", "Look at")
    every = 7
    tries_mistakes_at_night = True
