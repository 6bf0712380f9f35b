"""Caches what is computed from a whole trace, to avoid recomputing it for each picture."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from minivllm.engine.trace import EngineTrace

Found = TypeVar("Found")


def remembered(find: Callable[[EngineTrace], Found]) -> Callable[[EngineTrace], Found]:
    """Cache a function's result for the last trace it was called with, until the trace grows.

    Callers must not modify the result.
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
