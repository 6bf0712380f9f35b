"""Lesson 15's checks: the solution passes, a stub fails, and a mistake fails where it belongs and is named."""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "15"
    points = 2
    says = ("Expected", "Got", "Look at")
