"""The waiting queue: sequences in scheduling order, fast even with a hundred thousand of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from minivllm.request import Sequence


class SequenceQueue:
    """Sequences by their `order` key, smallest first: O(log n) to add and pop, O(1) to look at the first.

    A heap, not a list: a preempted sequence returns to its old place, and with priorities new ones do not go to the end. Removed
    sequences are dropped when they reach the top, or when they are most of the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def add(self, seq: Sequence) -> None:
        """Insert a sequence by its `order`."""
        self._members[seq.seq_id] = seq
        heapq.heappush(self._heap, (seq.order, seq))

    def first(self) -> Sequence | None:
        """The next sequence, or None."""
        while self._heap and self._heap[0][1].seq_id not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return the next sequence."""
        seq = self.first()
        if seq is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        del self._members[seq.seq_id]
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from anywhere in the queue."""
        del self._members[seq.seq_id]
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1].seq_id in self._members]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._members.values(), key=lambda seq: seq.order))
