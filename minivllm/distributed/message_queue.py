"""Messages from one process to others of the same machine: written once into shared memory, however many read them.

The memory is a ring of slots; a long message takes several. The writer counts the slots it has filled, and each reader those it has read,
where the other side can see it. A byte through a pipe wakes a sleeping reader; the pipe also tells each side when the other has ended. A number
beside the writer's count, its mark, tells readers something at once, however many messages they have not read yet.

Mirrors `MessageQueue` of `vllm/distributed/device_communicators/shm_broadcast.py`, whose readers spin.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minivllm.distributed.shared_memory import LINE_BYTES, create_shared_memory, keep_off_standard_streams
from minivllm.errors import DistributedError

NUM_SLOTS = 16
SLOT_BYTES = 2**16
_HEADER = struct.Struct("<I??2x")
"""Of a slot: its number of bytes, and whether they start and end a message."""
_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
_COUNT = struct.Struct("<Q")
_MARK = _COUNT.size
"""Where the mark is, behind the writer's count."""
SECONDS_WHILE_FULL = 0.0005
"""How often a writer looks whether a full ring has room again."""
SECONDS_BETWEEN_MARKS = 0.001
"""How often a reader that waits for a mark looks for it."""


@dataclass
class QueueEnds:
    """The file descriptors of a queue, for its processes to inherit: the ring's memory, and a pipe for each reader, as the end it waits on
    and the end the writer rings.
    """

    memory: int
    bells: list[tuple[int, int]]

    @classmethod
    def create(cls, num_readers: int) -> QueueEnds:
        """A new queue."""
        memory = create_shared_memory(LINE_BYTES * (1 + num_readers) + NUM_SLOTS * SLOT_BYTES)
        ends = cls(memory, [])
        with ends.closed_on_error():
            for _ in range(num_readers):
                wait, ring = map(keep_off_standard_streams, os.pipe())
                ends.bells.append((wait, ring))
                os.set_blocking(ring, False)
        return ends

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close all of them on an error, such as too many open files."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self, *, but: Sequence[int] = ()) -> None:
        """Close all of them except the ones this process keeps using."""
        for descriptor in {self.memory, *(end for bell in self.bells for end in bell)} - set(but):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class _Ring:
    """The shared memory: a line with the writer's count, one for each reader's, then the slots."""

    def __init__(self, memory: int, num_readers: int) -> None:
        self._memory = mmap.mmap(memory, os.fstat(memory).st_size)
        self._num_readers = num_readers
        self._number = 0
        """Slots that this side has written or read."""

    def _offset(self) -> int:
        return LINE_BYTES * (1 + self._num_readers) + self._number % NUM_SLOTS * SLOT_BYTES

    def _get_count(self, line: int) -> int:
        count: int = _COUNT.unpack_from(self._memory, LINE_BYTES * line)[0]
        return count

    def _set_count(self, line: int) -> None:
        _COUNT.pack_into(self._memory, LINE_BYTES * line, self._number)


class QueueWriter(_Ring):
    """The end that writes, into memory whose descriptor may be closed afterwards, and rings a bell for each reader."""

    def __init__(self, memory: int, bells: list[int]) -> None:
        super().__init__(memory, len(bells))
        self._bells = bells

    def write(self, message: bytes, while_full: Callable[[], object] | None = None) -> None:
        """Send a message to all readers. Waits while the ring is full because a reader is behind.

        Args:
            message: Of any length.
            while_full: Called again and again while it waits, instead of sleeping.

        Raises:
            DistributedError: A reader has ended.
        """
        capacity = SLOT_BYTES - _HEADER.size
        view = memoryview(message)
        for start in range(0, max(1, len(view)), capacity):
            while self._number - min(map(self._get_count, range(1, 1 + self._num_readers))) >= NUM_SLOTS:
                self._check_readers()
                if while_full is None:
                    time.sleep(SECONDS_WHILE_FULL)
                else:
                    while_full()
            piece, offset = view[start : start + capacity], self._offset()
            _HEADER.pack_into(self._memory, offset, len(piece), start == 0, start + capacity >= len(view))
            self._memory[offset + _HEADER.size : offset + _HEADER.size + len(piece)] = piece
            self._number += 1
            self._set_count(0)
            for bell in self._bells:
                try:
                    os.write(bell, b"\0")
                except BlockingIOError:  # the pipe is full of rings, so the reader will wake up
                    pass
                except OSError:
                    raise DistributedError("A reader of the message queue has ended.") from None

    def set_mark(self, mark: int) -> None:
        """Show readers a number, which overtakes the messages; for `QueueReader.wait_for_mark`."""
        _COUNT.pack_into(self._memory, _MARK, mark)

    def close(self) -> None:
        """Tell the readers that there are no more messages. Safe to call again."""
        bells, self._bells = self._bells, []
        for bell in bells:
            os.close(bell)

    def _check_readers(self) -> None:
        poll = select.poll()
        for bell in self._bells:
            poll.register(bell, 0)
        if not self._bells or any(event & _GONE for _, event in poll.poll(0)):
            raise DistributedError("A reader of the message queue has ended.")


class QueueReader(_Ring):
    """An end that reads, from memory whose descriptor may be closed afterwards, and waits on its bell."""

    def __init__(self, memory: int, bell: int, index: int = 0, num_readers: int = 1) -> None:
        super().__init__(memory, num_readers)
        self.bell, self._index = bell, index
        self._pieces: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def read(self, timeout: float | None = None) -> bytes | None:
        """The next message; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The writer has ended, or closed the queue, and all is read.
        """
        message = self.peek(timeout)
        if message is not None:
            self.advance()
        return message

    def peek(self, timeout: float | None = None) -> bytes | None:
        """As `read`, but the message stays in the queue until `advance` is called: whoever is interrupted between the two gets it again."""
        while True:
            while self._number < self._get_count(0):
                if (message := self._peek_slot()) is not None:
                    return message
            if not self._poll.poll(None if timeout is None else 1000 * timeout):
                return None
            if not os.read(self.bell, NUM_SLOTS) and self._number == self._get_count(0):
                raise EOFError("The writer of the message queue has ended.")

    def advance(self) -> None:
        """Take the message that `peek` has shown out of the queue."""
        self._count_piece([])

    def wait_for_mark(self, mark: int, timeout: float) -> bool:
        """Whether the writer's mark becomes this one, or a larger one, within `timeout` seconds.

        Raises:
            EOFError: The writer has ended, or closed the queue.
        """
        hung_up, deadline = select.poll(), time.monotonic() + timeout
        hung_up.register(self.bell, 0)
        while _COUNT.unpack_from(self._memory, _MARK)[0] < mark:
            if hung_up.poll(0):
                raise EOFError("The writer of the message queue has ended.")
            if time.monotonic() > deadline:
                return False
            time.sleep(SECONDS_BETWEEN_MARKS)
        return True

    def close(self) -> None:
        """Stop reading."""
        os.close(self.bell)

    def _peek_slot(self) -> bytes | None:
        """The whole message, if the next piece is its last; else that piece is kept for later."""
        offset = self._offset()
        size, is_first, is_last = _HEADER.unpack_from(self._memory, offset)
        piece = self._memory[offset + _HEADER.size : offset + _HEADER.size + size]
        # Pieces before a first one were left by a writer that Ctrl-C interrupted.
        pieces = [piece] if is_first else [*self._pieces, piece]
        if is_last:
            return b"".join(pieces)
        self._count_piece(pieces)
        return None

    def _count_piece(self, pieces: list[bytes]) -> None:
        # A single assignment, so that a reader that is interrupted has counted the piece if and only if it has it.
        self._pieces, self._number = pieces, self._number + 1
        self._set_count(1 + self._index)
