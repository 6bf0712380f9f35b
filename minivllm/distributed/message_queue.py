"""Messages from one process to others of the same machine: written once into shared memory, however many read them.

The memory is a ring of slots. A message takes one, or several if it is long. When a slot is filled, a byte through a pipe wakes each reader,
which sleeps until then; the pipe also tells either side that the other has ended. A reader counts what it has read, so that the writer knows
which slots are free again. Mirrors `MessageQueue` of `vllm/distributed/device_communicators/shm_broadcast.py`, whose readers
spin.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from dataclasses import dataclass

from minivllm.distributed.shared_memory import LINE_BYTES, create_shared_memory
from minivllm.errors import DistributedError

NUM_SLOTS = 16
SLOT_BYTES = 2**16
_HEADER = struct.Struct("<II")
"""Of a slot: how many bytes it holds, and whether they are the last of a message."""
_COUNT = struct.Struct("<Q")


@dataclass
class QueueEnds:
    """The file descriptors of a queue, for its processes to inherit.

    Attributes:
        memory: The ring.
        bells: A pipe for each reader: the end that it waits on, and the end that the writer rings.
    """

    memory: int
    bells: list[tuple[int, int]]

    @classmethod
    def create(cls, num_readers: int) -> QueueEnds:
        """A new queue."""
        memory = create_shared_memory(LINE_BYTES * num_readers + NUM_SLOTS * SLOT_BYTES)
        return cls(memory, [os.pipe() for _ in range(num_readers)])

    def close(self, *, but: tuple[int, ...] = ()) -> None:
        """Close all of them except those that this process goes on using."""
        for descriptor in {self.memory, *(end for bell in self.bells for end in bell)} - set(but):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class _Ring:
    """The memory, as either side sees it."""

    def __init__(self, memory: int, num_readers: int) -> None:
        self._memory = mmap.mmap(memory, os.fstat(memory).st_size)
        self._num_readers = num_readers
        self._number = 0
        """Slots that this side has written or read."""

    def _offset(self) -> int:
        return LINE_BYTES * self._num_readers + self._number % NUM_SLOTS * SLOT_BYTES


class QueueWriter(_Ring):
    """The one end.

    Args:
        memory: From `QueueEnds`; may be closed afterwards.
        bells: The ends to ring, one for each reader.
    """

    def __init__(self, memory: int, bells: list[int]) -> None:
        super().__init__(memory, len(bells))
        self._bells = bells

    def write(self, message: bytes) -> None:
        """Give a message to all readers. Waits while a reader is so far behind that the ring is full.

        Raises:
            DistributedError: A reader has ended.
        """
        capacity = SLOT_BYTES - _HEADER.size
        view = memoryview(message)
        for start in range(0, max(1, len(view)), capacity):
            while self._number - self._slowest() >= NUM_SLOTS:
                self._check_readers()
                time.sleep(0.0005)
            piece, offset = view[start : start + capacity], self._offset()
            _HEADER.pack_into(self._memory, offset, len(piece), start + capacity >= len(view))
            self._memory[offset + _HEADER.size : offset + _HEADER.size + len(piece)] = piece
            self._number += 1
            for bell in self._bells:
                try:
                    os.write(bell, b"\0")
                except OSError:
                    raise DistributedError("A reader of the message queue has ended.") from None

    def close(self) -> None:
        """Tell the readers that nothing comes any more. Safe to call again."""
        bells, self._bells = self._bells, []
        for bell in bells:
            os.close(bell)

    def _slowest(self) -> int:
        counts: list[int] = [_COUNT.unpack_from(self._memory, LINE_BYTES * reader)[0] for reader in range(self._num_readers)]
        return min(counts)

    def _check_readers(self) -> None:
        poll = select.poll()
        for bell in self._bells:
            poll.register(bell, 0)
        if any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0)) or not self._bells:
            raise DistributedError("A reader of the message queue has ended.")


class QueueReader(_Ring):
    """One of the other ends.

    Args:
        memory: From `QueueEnds`; may be closed afterwards.
        bell: The end to wait on.
        index: Which reader this is.
        num_readers: How many there are.
    """

    def __init__(self, memory: int, bell: int, index: int = 0, num_readers: int = 1) -> None:
        super().__init__(memory, num_readers)
        self.bell, self._index = bell, index
        self._pieces: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def read(self, timeout: float | None = None) -> bytes | None:
        """The next message; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The writer has ended, or closed the queue.
        """
        while self._poll.poll(None if timeout is None else 1000 * timeout):
            if not os.read(self.bell, 1):
                raise EOFError("The writer of the message queue has ended.")
            offset = self._offset()
            size, is_last = _HEADER.unpack_from(self._memory, offset)
            self._pieces.append(self._memory[offset + _HEADER.size : offset + _HEADER.size + size])
            self._number += 1
            _COUNT.pack_into(self._memory, LINE_BYTES * self._index, self._number)
            if is_last:
                pieces, self._pieces = self._pieces, []
                return b"".join(pieces)
        return None

    def close(self) -> None:
        """Read no more."""
        os.close(self.bell)
