"""Lesson 13's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

And the solved client loses nothing in twenty kills. `tests/support/mutate_lesson.py 13` makes many more mistakes, small ones.
"""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "13"
    points = 19
    says = ("Expected", "Got", "Look at")
    every = 9
