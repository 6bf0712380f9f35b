"""Messages between an executor and workers that may be on other machines: what `message_queue` does in shared memory, over ZeroMQ.

    executor ─► PUB ─► SUB: messages and marks, in order ─► every worker
    executor ◄─ PULL ◄─ PUSH: answers, and a sign of life now and then ◄─ every worker

A worker that waits for a mark reads the messages before it, and keeps them for later: so a mark overtakes them, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from minivllm.distributed.sockets import KeyPair, Sockets, make_key, tcp_address
from minivllm.errors import DistributedError
from minivllm.executor.processes import SIGN_SECONDS

_MESSAGE, _MARK = b"m", b"k"
"""The first byte of what is sent."""
_ALIVE = b""
"""In place of an answer: the worker lives."""
POLL_MS = 200


class WorkerAddresses(msgspec.Struct, frozen=True):
    """Where the executor listens, and the key that both ends need."""

    messages: str
    answers: str
    key: KeyPair


class ExecutorSockets:
    """The executor's end. It is the `Inbox` of its workers; a thread receives what they answer.

    Args:
        host: This machine's address, at which workers can reach it.
        world_size: How many workers there are.
    """

    def __init__(self, host: str, world_size: int) -> None:
        self._world_size = self._num_missing = world_size
        key = make_key()
        self._sockets = Sockets(key)
        self._messages, messages = self._sockets.bind(zmq.XPUB, tcp_address(host, 0), SNDHWM=0, XPUB_VERBOSE=1)
        self._answers, answers = self._sockets.bind(zmq.PULL, tcp_address(host, 0), RCVHWM=0)
        self.addresses = WorkerAddresses(messages, answers, key)
        self._received: deque[tuple[int, bytes]] = deque()
        self._arrived = threading.Condition()
        self._latest_sign = [time.monotonic()] * world_size
        self._is_closing = False
        self._thread = threading.Thread(target=self._receive, name="minivllm answers", daemon=True)
        self._thread.start()

    def write(self, message: bytes, while_full: Callable[[], object] | None = None) -> None:
        """Send a message to all workers; it never waits. To be used by one thread, as `set_mark`.

        Raises:
            DistributedError: The sockets are closed.
        """
        self._send(_MESSAGE, message)

    def set_mark(self, mark: int) -> None:
        """Show workers a number, for `WorkerSockets.wait_for_mark`."""
        self._send(_MARK, str(mark).encode())

    def wait_for_workers(self, check: Callable[[], object]) -> None:
        """Wait until all workers get what is sent, which they say by subscribing. Meanwhile `check` is called; it may raise an error."""
        while self._num_missing:
            if self._messages.poll(POLL_MS):
                self._messages.recv()
                self._num_missing -= 1
            else:
                check()

    def peek(self, timeout: float) -> tuple[int, bytes] | None:
        """The oldest answer, with its rank, which stays until `advance` is called; None if there is none within `timeout` seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._received, timeout)
        return self._received[0] if self._received else None

    def advance(self) -> None:
        """Take out the answer that `peek` has shown."""
        self._received.popleft()

    def find_silent(self, limit: float) -> int | None:
        """A rank that has shown no sign of life for `limit` seconds; None if all have."""
        oldest = min(self._latest_sign)
        return self._latest_sign.index(oldest) if time.monotonic() - oldest > limit else None

    def close(self) -> None:
        """Close the sockets. Safe to call again."""
        self._is_closing = True
        if self._thread is not threading.current_thread():  # the garbage collector may run anywhere
            self._thread.join()

    def _send(self, kind: bytes, content: bytes) -> None:
        try:
            self._messages.send(kind + content)  # one frame: Ctrl-C cannot leave half of a message
        except zmq.ZMQError:
            raise DistributedError("The connection to the workers is closed.") from None

    def _receive(self) -> None:
        latest_look = time.monotonic()
        while not self._is_closing:
            if self._answers.poll(POLL_MS):
                rank, answer = self._answers.recv_multipart()
                self._latest_sign[int(rank)] = time.monotonic()
                if answer != _ALIVE:
                    with self._arrived:
                        self._received.append((int(rank), answer))
                        self._arrived.notify()
            now = time.monotonic()
            if now - latest_look > 2 * SIGN_SECONDS:  # this process was stopped, or all were
                self._latest_sign = [now] * self._world_size
            latest_look = now
        self._sockets.close()


class WorkerSockets:
    """A worker's end: its inbox, and what its answers are written with."""

    def __init__(self, addresses: WorkerAddresses, rank: int) -> None:
        self._rank = str(rank).encode()
        self._sockets = Sockets(addresses.key)
        self._messages = self._sockets.connect(zmq.SUB, addresses.messages, RCVHWM=0, SUBSCRIBE=b"")
        self._answers = self._sockets.connect(zmq.PUSH, addresses.answers, SNDHWM=0)
        self._unread: deque[bytes] = deque()
        self._mark = -1
        threading.Thread(target=self._show_life, args=(addresses,), daemon=True).start()

    def write(self, answer: bytes) -> None:
        """Send an answer. To be used by one thread at a time."""
        self._answers.send_multipart([self._rank, answer])

    def read(self, timeout: float | None = None) -> bytes | None:
        """The next message; None if there is none within `timeout` seconds. As for the other methods, see `QueueReader`; the process ends with the
        executor's, so none of them raises EOFError."""
        message = self.peek(timeout)
        if message is not None:
            self.advance()
        return message

    def peek(self, timeout: float | None = None) -> bytes | None:
        """As `read`, but the message stays until `advance` is called."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._unread:
            if not self._receive(None if deadline is None else deadline - time.monotonic()):
                return None
        return self._unread[0]

    def advance(self) -> None:
        """Take out the message that `peek` has shown."""
        self._unread.popleft()

    def wait_for_mark(self, mark: int, timeout: float) -> bool:
        """Whether the executor's mark becomes this one, or a larger one, within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._mark < mark:
            if not self._receive(deadline - time.monotonic()):
                return False
        return True

    def _receive(self, timeout: float | None) -> bool:
        """Take in one message or mark. False if there is none within `timeout` seconds."""
        if not self._messages.poll(None if timeout is None else max(0, int(1000 * timeout))):
            return False
        received = self._messages.recv()
        if received[:1] == _MARK:
            self._mark = int(received[1:])
        else:
            self._unread.append(received[1:])
        return True

    def _show_life(self, addresses: WorkerAddresses) -> None:
        signs = self._sockets.connect(zmq.PUSH, addresses.answers)
        while True:
            with contextlib.suppress(zmq.Again):
                signs.send_multipart([self._rank, _ALIVE], zmq.NOBLOCK)
            time.sleep(SIGN_SECONDS)
