"""A second opinion on each check that passed: it is run once more with other input, and what it sees is judged in the grader's process.

A learner's process belongs to the learner: whatever a check says in there can be forged. So after a check has passed, it runs again with a
seed that nobody knows, and reports what it saw (see `course.observations`). The grader does the same with the lesson's own solution, in
another kernel, and compares. Only code that works yields equal observations.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.grading.submissions import Lesson
from minivllm.course.observations import NEAR, WITHIN

_MOST_SHOWN = 150


@dataclass(frozen=True)
class Observer:
    """What is asked in this run of the grader.

    Attributes:
        seed: Of the random input; it must be unpredictable.
        sources: For a check that takes no random input, such as one that runs the real model: the source of the one that is run instead.
    """

    seed: int
    sources: Mapping[str, str] = field(default_factory=dict)


def find_observer(lesson: Lesson, seed: int) -> Observer:
    """The observer of a lesson, whose package says which checks stand in for others: `STAND_INS`, from id to id."""
    number = re.match(r"\d\d(?=_)", lesson.name)
    package = f"minivllm.course.lessons.lesson_{number[0]}" if number else ""
    if not package or importlib.util.find_spec(package) is None:
        return Observer(seed)
    stand_ins = getattr(importlib.import_module(package), "STAND_INS", {})
    sources = {cell.cell_id: cell.source for cell in lesson.cells}
    return Observer(seed, {check: sources[other] for check, other in stand_ins.items() if other in sources})


def find_difference(expected: str, observations: str) -> str | None:
    """Where observations differ from the solution's, in words; None if they do not."""
    if observations == expected:
        return None
    wanted = json.loads(expected)
    try:
        got = json.loads(observations)
        if not _differ(wanted, got):
            return None
        number = next(i for i, observation in enumerate(wanted) if i >= len(got) or _differ(observation, got[i]))
        wanted_part, got_part = wanted[number], got[number]
    except (ValueError, TypeError, KeyError, StopIteration, IndexError, RecursionError):
        return "nothing could be observed of it"
    return f"at observation {number + 1} of {len(wanted)} it gave {_short(got_part)} instead of {_short(wanted_part)}"


def _differ(wanted: Any, got: Any) -> bool:
    """Whether two observations differ; 3.0 and True are as good as 3 and 1, and numbers may be rounded where the check says so."""
    if isinstance(wanted, dict) and isinstance(got, dict) and wanted.keys() == got.keys() == {NEAR, WITHIN}:
        pairs = zip(wanted[NEAR], got[NEAR], strict=True)
        return any(a != b if isinstance(a, str) else not abs(a - b) <= wanted[WITHIN] for a, b in pairs)
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) != len(got) or any(map(_differ, wanted, got))
    return bool(wanted != got)


def _short(observation: Any) -> str:
    text = json.dumps(observation)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
