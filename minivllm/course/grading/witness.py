"""A second opinion on each check that passed: the learner's class is observed at work, and judged in the grader's process.

A learner's process belongs to the learner: whatever a check says in there can be forged. So a lesson's `witness` module calls the
learner's class with random input, and only reports what it saw. The grader does the same with the lesson's own solution, in another
kernel, and compares. Without a class that works there is nothing to report that would be equal.
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
class Witness:
    """What is asked in this run of the grader.

    Attributes:
        module: The lesson's module with `WITNESSES`.
        seed: Of the random input; nobody can know it before.
    """

    module: str
    seed: int

    def covers(self, check_id: str) -> bool:
        """Whether there is something to observe for a check."""
        return check_id in importlib.import_module(self.module).WITNESSES


def find_witness(lesson_name: str, seed: int) -> Witness | None:
    """The witness of a lesson such as "04_paged_kv_cache", if it has one."""
    number = re.match(r"\d\d(?=_)", lesson_name)
    if number is None:
        return None
    package = f"minivllm.course.lessons.lesson_{number[0]}"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(f"{package}.witness") is None:
        return None
    return Witness(f"{package}.witness", seed)


class NoSuchClass(LookupError):  # noqa: N818 - shown to the learner
    """The notebook has no class of the name that the witness asks for."""


def testify(module: str, check_id: str, namespace: Mapping[str, Any], seed: int) -> str:
    """Observe a learner's class, in its own process. Returns the facts as JSON."""
    class_name, observe = importlib.import_module(module).WITNESSES[check_id]
    if class_name not in namespace:
        raise NoSuchClass(f"there is no class {class_name}")
    return json.dumps(observe(namespace[class_name], random.Random(f"{check_id} {seed}")), default=index)


def find_difference(expected: str, testimony: str) -> str | None:
    """Where a testimony differs from the solution's, in words; None if it does not."""
    if testimony == expected:
        return None
    facts = json.loads(expected)
    try:
        others = json.loads(testimony)
        if others == facts:  # 3.0 and True are as good as 3 and 1
            return None
        number = next(i for i, fact in enumerate(facts) if i >= len(others) or others[i] != fact)
        wanted, got = _narrow(facts[number], others[number])
    except (ValueError, TypeError, KeyError, StopIteration, IndexError, RecursionError):
        return "nothing could be observed of it"
    return f"at observation {number + 1} of {len(facts)} it gave {_short(got)} instead of {_short(wanted)}"


def _narrow(wanted: Any, got: Any) -> tuple[Any, Any]:
    """The first part in which two facts differ."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        key = next(key for key in wanted if got.get(key) != wanted[key])
        return {key: wanted[key]}, {key: got.get(key)}
    return wanted, got


def _short(fact: Any) -> str:
    text = json.dumps(fact)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
