"""A second opinion on each check that passed: the learner's class is observed at work, and judged in the grader's process.

A learner's process belongs to the learner: whatever a check says in there can be forged. So a lesson's `observe` module calls the
learner's class with random input, and only reports its observations. The grader does the same with the lesson's own solution, in another
kernel, and compares. Only a class that works yields equal observations.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

_MOST_SHOWN = 150


@dataclass(frozen=True)
class Observer:
    """What is asked in this run of the grader.

    Attributes:
        module: The lesson's module with `OBSERVERS`.
        seed: Of the random input; it must be unpredictable.
    """

    module: str
    seed: int

    def covers(self, check_id: str) -> bool:
        """Whether the lesson has an observer for this check."""
        return check_id in importlib.import_module(self.module).OBSERVERS


def find_observer(lesson_name: str, seed: int) -> Observer | None:
    """The observer of a lesson such as "04_paged_kv_cache", if it has one."""
    number = re.match(r"\d\d(?=_)", lesson_name)
    if number is None:
        return None
    package = f"minivllm.course.lessons.lesson_{number[0]}"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(f"{package}.observe") is None:
        return None
    return Observer(f"{package}.observe", seed)


class NoSuchClass(LookupError):  # noqa: N818 - shown to the learner
    """The notebook has no class of the name that the observer asks for."""


def observe_class(module: str, check_id: str, namespace: Mapping[str, Any], seed: int) -> str:
    """Observe a learner's class in its own process, and return the observations as JSON."""
    class_name, observe = importlib.import_module(module).OBSERVERS[check_id]
    if class_name not in namespace:
        raise NoSuchClass(f"there is no class {class_name}")
    return json.dumps(observe(namespace[class_name], random.Random(f"{check_id} {seed}")), default=index)


def find_difference(expected: str, observations: str) -> str | None:
    """Where observations differ from the solution's, in words; None if they do not."""
    if observations == expected:
        return None
    wanted = json.loads(expected)
    try:
        got = json.loads(observations)
        if got == wanted:  # 3.0 and True are as good as 3 and 1
            return None
        number = next(i for i, observation in enumerate(wanted) if i >= len(got) or got[i] != observation)
        wanted_part, got_part = _narrow(wanted[number], got[number])
    except (ValueError, TypeError, KeyError, StopIteration, IndexError, RecursionError):
        return "nothing could be observed of it"
    return f"at observation {number + 1} of {len(wanted)} it gave {_short(got_part)} instead of {_short(wanted_part)}"


def _narrow(wanted: Any, got: Any) -> tuple[Any, Any]:
    """The first part in which two observations differ."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        key = next(key for key in wanted if got.get(key) != wanted[key])
        return {key: wanted[key]}, {key: got.get(key)}
    return wanted, got


def _short(observation: Any) -> str:
    text = json.dumps(observation)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
