"""Lesson 14's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named."""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "14"
    points = 19
    says = ("Expected", "Got", "Look at")
    every = 9
