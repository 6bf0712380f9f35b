"""Where time goes: a stopwatch for functions that call each other."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Adds up the time spent in each part; time in a nested part counts for that one only.

    Args:
        clock: Gives the time in seconds; with `time.thread_time`, that of the processor.

    Attributes:
        switches: How often the stopwatch switched away from each part.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.switches: Counter[str] = Counter()
        self._running = ["other"]
        self._since = self._clock()

    def _switch(self) -> None:
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._since
        self.switches[self._running[-1]] += 1
        self._since = now

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, its time counted for a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return call

    def take(self) -> tuple[dict[str, float], Counter[str]]:
        """Seconds and switches of each part since the last call."""
        self._switch()
        taken = self.seconds, self.switches
        self.seconds, self.switches = defaultdict(float), Counter()
        return taken
