"""The queue: every reader gets every message, whole and in order, also long ones; and both sides notice that the other has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.distributed.message_queue import NUM_SLOTS, SLOT_BYTES, QueueEnds, QueueReader, QueueWriter
from minivllm.errors import DistributedError


def make_queue(num_readers):
    ends = QueueEnds.create(num_readers)
    writer = QueueWriter(ends.memory, [ring for _, ring in ends.bells])
    readers = [QueueReader(ends.memory, wait, i, num_readers) for i, (wait, _) in enumerate(ends.bells)]
    os.close(ends.memory)
    return writer, readers


SIZES = st.one_of(
    st.integers(0, 100),
    st.sampled_from([SLOT_BYTES - 9, SLOT_BYTES - 8, SLOT_BYTES - 7, SLOT_BYTES, 3 * SLOT_BYTES, 20 * SLOT_BYTES]),
)


@settings(max_examples=settings().max_examples * 3 // 10)
@given(st.integers(1, 3), st.lists(SIZES, max_size=30))
def test_all_readers_get_all_messages(num_readers, sizes):
    writer, readers = make_queue(num_readers)
    messages = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    got = [[] for _ in readers]

    def read(reader, messages):
        try:
            while True:
                messages.append(reader.read())
        except EOFError:
            reader.close()

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, got, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    writer.close()
    for thread in threads:
        thread.join(30)
    assert got == [messages] * num_readers


def test_nothing_to_read_is_no_message():
    writer, (reader,) = make_queue(1)
    assert reader.read(timeout=0) is None
    writer.write(b"")
    assert reader.read(timeout=0) == b""
    writer.close()
    with pytest.raises(EOFError):
        reader.read()
    writer.close()
    reader.close()


def test_a_writer_notices_that_a_reader_has_gone():
    writer, (reader, other) = make_queue(2)
    reader.close()
    with pytest.raises(DistributedError, match="reader of the message queue has ended"):
        writer.write(b"x")
    writer.close()
    other.close()


def test_a_writer_waits_for_a_slow_reader_and_notices_when_it_goes():
    writer, (reader,) = make_queue(1)
    for _ in range(NUM_SLOTS):
        writer.write(b"x")
    threading.Timer(0.1, reader.close).start()
    with pytest.raises(DistributedError):
        writer.write(b"one too many")
    writer.close()


def test_a_reader_notices_that_the_process_of_the_writer_was_killed():
    ends = QueueEnds.create(1)
    ((wait, ring),) = ends.bells
    code = (
        "import os, signal\n"
        "from minivllm.distributed.message_queue import QueueWriter\n"
        f"QueueWriter({ends.memory}, [{ring}]).write(b'last words')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(ends.memory, ring))
    reader = QueueReader(ends.memory, wait)
    ends.close(but=(wait,))
    assert reader.read(30) == b"last words"
    with pytest.raises(EOFError):
        reader.read(30)
    process.wait()
    reader.close()


@given(st.lists(SIZES, max_size=6))
def test_a_message_that_was_only_looked_at_comes_again(sizes):
    writer, (reader,) = make_queue(1)
    messages = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    thread = threading.Thread(target=lambda: [writer.write(message) for message in messages])
    thread.start()
    for message in messages:
        assert reader.peek(30) == reader.peek(30) == message
        reader.advance()
    thread.join()
    assert reader.peek(0) is None
    writer.close()
    reader.close()


def test_a_writer_can_do_something_else_while_the_ring_is_full():
    writer, (reader,) = make_queue(1)
    for _ in range(NUM_SLOTS):
        writer.write(b"x")
    calls = []

    def read_after_three():
        calls.append(None)
        if len(calls) == 3:
            reader.read(0)

    writer.write(b"one more", while_full=read_after_three)
    assert len(calls) == 3
    writer.close()
    reader.close()


def test_a_mark_overtakes_messages():
    writer, (reader, other) = make_queue(2)
    for _ in range(NUM_SLOTS):
        writer.write(b"x")
    assert not reader.wait_for_mark(5, 0.01)
    threading.Timer(0.05, writer.set_mark, [5]).start()
    assert reader.wait_for_mark(5, 30) and other.wait_for_mark(4, 30)
    assert reader.read(0) == b"x", "messages stay"
    threading.Timer(0.05, writer.close).start()
    with pytest.raises(EOFError):
        reader.wait_for_mark(6, 30)
    reader.close()
    other.close()
