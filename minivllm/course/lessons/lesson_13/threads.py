"""The check of lesson 13 for a replica's three threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from minivllm.course.lessons.fake_replicas import (
    PATIENCE,
    FakeCore,
    Wire,
    make_request,
    within,
)
from minivllm.course.lessons.lesson_13.replica import describe
from minivllm.course.observations import expect, rounds, seeded
from minivllm.engine.core_messages import (
    AddRequest,
    Shutdown,
    decode_from_core,
    encode,
)

_OVERLAP = {
    "two steps": "`run`: an input thread, an output thread, and `run_core`",
    "in the input queue": "which thread receives: while the main thread is in a step, another one must decode what comes",
    "sent": "which thread sends: CoreReady and the outputs of step 1 must not wait for the end of step 2",
    "threads": "`daemon=True`: the input thread may wait for bytes forever, and the process must end nevertheless",
    "`run` goes on": "what `run` waits for: the input thread may be waiting for bytes that never come",
}


def check_threads(cls: Any) -> None:
    """While a step runs, messages come in and outputs go out; and when `run` returns, the last word has been sent."""
    for number, rng in enumerate(rounds("run", 6)):
        _check_last_words(cls, rng, fails=rng.random() < 0.5, pause=0.01 if number else 0.5)
    _check_overlap(cls)
    _check_closed(cls)


class MainThreads(threading.Thread):
    """Threads as the main thread of a process makes them: they are daemons only if that is said."""

    def __init__(self, *args: Any, daemon: bool = False, **options: Any) -> None:
        super().__init__(*args, daemon=daemon, **options)


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    limit = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < limit:
        time.sleep(0.002)
    return condition()


def _check_overlap(cls: Any) -> None:
    """A step that takes as long as we want."""
    go_on, entered, before = threading.Event(), threading.Event(), set(threading.enumerate())

    def hold(number: int) -> None:
        if number == 2:
            entered.set()
            go_on.wait(4 * PATIENCE)

    wire = Wire()
    replica = wire.replica(cls, FakeCore(hold))
    thread = threading.Thread(target=replica.run, daemon=True)
    with patch.object(threading, "Thread", MainThreads):
        thread.start()
        entered.wait(0.2)
    try:
        wire.to_core.put(encode(AddRequest(make_request(seeded("overlap 0"), "r0", max_tokens=4, n=1, ignore_eos=True))))
        expect("A request arrives.", "two steps", True, entered.wait(PATIENCE), _OVERLAP["two steps"])
        wire.to_core.put(encode(AddRequest(make_request(seeded("overlap 1"), "r1", max_tokens=4, n=1))))
        said, came = "Step 2 takes long. Meanwhile a request arrives.", lambda: replica.input_queue.qsize() == 1
        for what, condition in (("in the input queue", came), ("sent", lambda: len(wire.sent) == 2)):
            expect(said, f"{what} before step 2 ends", True, wait_until(condition), _OVERLAP[what])
    finally:
        go_on.set()
        wire.to_core.put(encode(Shutdown()))
        thread.join(PATIENCE)
    expect("A Shutdown arrives.", "`run` goes on", False, thread.is_alive(), _OVERLAP["`run` goes on"])
    left = [other for other in threading.enumerate() if other not in before and not other.daemon]
    wire.to_core.put(None)
    expect("`run` has returned.", "threads that keep the process from ending", 0, len(left), _OVERLAP["threads"])


def _check_last_words(cls: Any, rng: Any, fails: bool, pause: float) -> None:
    sent: list[bytes] = []

    def send(data: bytes) -> None:
        time.sleep(pause if len(sent) == 1 else 0.01)
        sent.append(data)

    def end(number: int) -> None:
        if number == count and fails:
            raise RuntimeError("the device is lost")
        if number == count:
            replica.input_queue.put(Shutdown())

    count = rng.randint(2, 5)
    core, wire = FakeCore(end), Wire()
    replica = wire.replica(cls, core, send)
    wire.to_core.put(encode(AddRequest(make_request(rng, "r0", max_tokens=14, n=1, ignore_eos=True))))
    said = f"A socket that takes 10 ms for each message{' but the second, which takes 500 ms' if pause > 0.1 else ''}; in step {count} {'the core raises a RuntimeError' if fails else 'a Shutdown comes'}. `run` returns, and the process ends."
    look = "`run`: a CoreReady into the output queue, two threads started (`target=self.run_output`, without parentheses), `run_core`, and at the end a `join` of the output thread alone, or its last messages die with the process"
    within(replica.run, said, look)
    got = [type(decode_from_core(data)).__name__ for data in list(sent)]
    outputs = ["EngineCoreOutputs"] * (count - fails)
    expect(said, "sent by then", ["CoreReady", *outputs, *["CoreFailed"] * fails], got, look)
    blocks = decode_from_core(sent[0]).num_gpu_blocks
    expect(said, "blocks that CoreReady tells", core.num_gpu_blocks, blocks, "CoreReady(self.core.num_gpu_blocks)")


def _check_closed(cls: Any) -> None:
    wire = Wire()
    wire.to_core.put(None)
    said = "The socket is closed at once: `receive` returns None."
    within(wire.replica(cls, FakeCore()).run, said, "`run_input`, which puts a Shutdown into the queue then")
    got = [describe(decode_from_core(data)) for data in wire.sent]
    expect(said, "sent", ["CoreReady"], got, "the first and the last message")
    asked = []

    def send(data: bytes) -> None:
        asked.append(data)
        raise OSError("the socket is broken")

    wire = Wire()
    said = "`send` raises an OSError at the first message."
    within(wire.replica(cls, FakeCore(), send).run, said, "`run_output`: its `finally` ends the core")
    expect(said, "messages that it tried to send", 1, len(asked), "`run_output`: after an error it ends")
