"""When to start a process again that has died: soon, unless it keeps dying."""

from __future__ import annotations


class RestartPolicy:
    """At once after a long life; after a short one, following a pause that doubles each time; never after too many short lives in a row.

    Args:
        max_short_lives: How many in a row are too many.

    Attributes:
        num_short_lives: How many there have been in a row.
    """

    SHORT_LIFE_SECONDS = 10.0
    FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 32.0

    def __init__(self, max_short_lives: int) -> None:
        self.max_short_lives = max_short_lives
        self.num_short_lives = 0

    def next_pause(self, lived: float | None) -> float | None:
        """A process has died. Returns the seconds until the next may start; None if none should.

        Args:
            lived: Seconds since it was ready; None if it never was.
        """
        if lived is not None and lived >= self.SHORT_LIFE_SECONDS:
            self.num_short_lives = 0
            return 0.0
        self.num_short_lives += 1
        if self.num_short_lives >= self.max_short_lives:
            return None
        return min(self.FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_short_lives - 1, 10), self.MAX_PAUSE_SECONDS)
