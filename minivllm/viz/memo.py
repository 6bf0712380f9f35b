"""What is found by looking through a whole trace is found once, not again for each picture of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from minivllm.engine.trace import EngineTrace

Found = TypeVar("Found")


def remembered(find: Callable[[EngineTrace], Found]) -> Callable[[EngineTrace], Found]:
    """Make a function remember what it found in the trace that it was asked about last, until that grows.

    Nobody may change what it returns.
    """
    last: tuple[weakref.ref[EngineTrace], int, int, Found] | None = None

    @wraps(find)
    def found(trace: EngineTrace) -> Found:
        nonlocal last
        size = len(trace.steps), len(trace.requests)
        known = last
        if known is not None and known[0]() is trace and known[1:3] == size:
            return known[3]
        result = find(trace)
        last = (weakref.ref(trace), *size, result)
        return result

    return found
