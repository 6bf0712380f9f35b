"""A worker in a process of its own: `python -m minivllm.executor.worker_proc`, started by `MultiProcExecutor`; or an actor of `RayExecutor`.

The process ends when its inbox closes or its parent ends. Mirrors `WorkerProc` in `vllm/v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import msgspec

from minivllm.distributed.message_queue import QueueReader, QueueWriter
from minivllm.errors import DistributedError, MinivllmError
from minivllm.executor.processes import ForwardLog, read_setup
from minivllm.executor.worker_messages import (
    Call,
    CallResult,
    Failed,
    FromWorker,
    Step,
    StepMasks,
    StepResult,
    WorkerLog,
    WorkerProcessSetup,
    WorkerSetup,
    decode_kind,
    decode_to_worker,
    encode,
    to_request,
)
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import Masks, RankTiming

if TYPE_CHECKING:
    from minivllm.worker.worker import Worker

logger = logging.getLogger("minivllm.executor.worker_proc")  # also as the main module of its process
PR_SET_PDEATHSIG = 1
SECONDS_UNTIL_SAID_AGAIN = 0.2
"""How often a worker that has failed says so again. Once is enough, unless Ctrl-C comes while the executor reads it."""


class WorkerInbox(Protocol):
    """Where a worker reads messages: a `QueueReader`, or sockets. Methods and errors are those of `QueueReader`."""

    def read(self, timeout: float | None = None) -> bytes | None:
        """The next message."""

    def peek(self, timeout: float | None = None) -> bytes | None:
        """The next message, which stays."""

    def advance(self) -> None:
        """Take out the message that `peek` has shown."""

    def wait_for_mark(self, mark: int, timeout: float) -> bool:
        """Whether the executor's mark becomes as large as this one."""


class WorkerProc:
    """One rank.

    Args:
        setup: What it is told first.
        inbox: Where it reads.
        write: Sends an answer to the executor; used by one thread at a time.
    """

    def __init__(self, setup: WorkerSetup, inbox: WorkerInbox, write: Callable[[bytes], object]) -> None:
        self._setup, self._inbox, self._outbox = setup, inbox, Outbox(write)
        self._number = 0
        """Of the message that is being handled."""
        logging.basicConfig(level=setup.log_level, format="%(message)s", handlers=[ForwardLog(self._log)], force=True)
        self._requests: dict[int, EngineCoreRequest] = {}
        self._worker: Worker
        self._samples = False
        """Whether this rank has the results of steps: the first of the last stage."""

    def run(self) -> None:
        """Load the model, then handle messages until the executor closes the queue."""
        try:
            self._worker = self._make_worker()
        except Exception as error:
            self._outbox.write(encode(Failed(0, type(error).__name__, str(error))))
            while self._inbox.read() is not None:  # until the executor has read it
                pass
        self._outbox.write(encode(CallResult(0, None)))
        if self._worker.device.type == "cuda":
            self._outbox.answer_in_background()
        while True:
            data = self._inbox.read()
            assert data is not None
            self._handle(data)

    def _make_worker(self) -> Worker:
        # Imported here: what loads torch waits until `main` has done what is urgent.
        from minivllm.distributed.torch_group import join_groups
        from minivllm.worker.worker import Worker, resolve_device

        setup = self._setup
        model_config, cache_config, scheduler_config, worker_config, parallel_config = pickle.loads(setup.configs)
        self._samples = setup.rank == parallel_config.world_size - parallel_config.tensor_parallel_size
        device = resolve_device(worker_config.device, setup.rank)
        group, pipeline = join_groups(
            setup.rank, parallel_config, device, setup.group_memory, setup.pipeline_memory, setup.meeting
        )
        worker = Worker(model_config, cache_config, scheduler_config, worker_config, group, pipeline)
        worker.load_model()
        return worker

    def _handle(self, data: bytes) -> None:
        """Do what a message asks for. After a failure, wait until all ranks have left it."""
        is_step = False
        try:
            message = decode_to_worker(data)  # strict: a learner's scheduler may have put anything into it
            if isinstance(message, StepMasks):
                return  # of a step that has failed
            self._number, is_step = message.number, isinstance(message, Step)
            finish = self._begin(message) if isinstance(message, Step) else self._call(message)
        except Exception as error:
            self._number = decode_kind(data).number
            failed = self._fail(is_step, self._number, error)
            self._outbox.answer(lambda: failed)
            while not self._inbox.wait_for_mark(self._number, SECONDS_UNTIL_SAID_AGAIN):
                self._outbox.answer(lambda: failed)
            return
        self._outbox.answer(partial(self._finish, is_step, self._number, finish))

    def _call(self, call: Call) -> Callable[[], FromWorker]:
        value = getattr(self._worker, call.method)(*call.arguments)
        return partial(CallResult, call.number, msgspec.to_builtins(value))

    def _begin(self, step: Step) -> Callable[[], FromWorker]:
        """Launch a step. The function that is returned waits for its results."""
        start, worker = time.perf_counter(), self._worker
        worker.take_timing()
        worker.launch_model(to_request(step, self._requests))
        masks = self._read_masks() if step.masks_follow else {}
        if masks is None:
            return partial(StepResult, step.number, [])
        pending, timing, wait = worker.sample_tokens(masks), worker.take_timing(), self._mark_launched()

        def finish() -> StepResult:
            outputs = pending()
            wait()
            communication, num_bytes = timing
            spent = RankTiming(start, time.perf_counter(), num_bytes, communication) if step.timed else None
            return StepResult(step.number, outputs if self._samples else [], spent)

        return finish

    def _mark_launched(self) -> Callable[[], object]:
        """A function that waits until the device has computed what has been launched: a rank without results may not say earlier that all went well."""
        if self._worker.device.type == "cpu":
            return lambda: None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def _read_masks(self) -> Masks | None:
        """The masks of the step that was begun; None if another message comes, as the executor was interrupted."""
        data = self._inbox.peek()
        assert data is not None
        if decode_kind(data).type != StepMasks.__name__:
            return None
        self._inbox.advance()
        message = decode_to_worker(data)
        assert isinstance(message, StepMasks)
        return message.masks

    def _finish(self, is_step: bool, number: int, finish: Callable[[], FromWorker]) -> bytes:
        """The encoded answer, once the results are there."""
        try:
            return encode(finish())
        except Exception as error:
            return self._fail(is_step, number, error)

    def _fail(self, is_step: bool, number: int, error: Exception) -> bytes:
        """The encoded answer to a message that failed."""
        # A DistributedError is caused by another rank, and errors caused by the user need no traceback.
        if not isinstance(error, DistributedError if is_step else MinivllmError):
            logger.error("A worker failed.", exc_info=error)  # the same text on every rank, so that it is logged once
        return encode(Failed(number, type(error).__name__, str(error)))

    def _log(self, level: int, name: str, text: str) -> None:
        self._outbox.write(encode(WorkerLog(level, name, text, self._number)))


class Outbox:
    """Sends answers in order. In the background it waits for a device that has not computed them yet, while the next step is launched."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._pending: SimpleQueue[Callable[[], bytes]] | None = None

    def answer_in_background(self) -> None:
        """Wait for results in a thread from now on."""
        self._pending = SimpleQueue()
        threading.Thread(target=self._run, args=(self._pending,), daemon=True).start()

    def answer(self, finish: Callable[[], bytes]) -> None:
        """Send what a function returns, after the answers before it."""
        if self._pending is None:
            self.write(finish())
        else:
            self._pending.put(finish)

    def write(self, message: bytes) -> None:
        """Send a message now."""
        with self._lock:
            self._write(message)

    def _run(self, pending: SimpleQueue[Callable[[], bytes]]) -> None:
        with contextlib.suppress(DistributedError):  # the executor has ended
            while True:
                self.write(pending.get()())


def main() -> None:
    """Read the setup from standard input and run."""
    if sys.platform == "linux":  # has this process killed when its parent ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    setup = read_setup(WorkerProcessSetup)
    if os.getppid() != setup.parent:
        sys.exit(1)
    inbox = QueueReader(*setup.inbox, index=setup.rank, num_readers=setup.world_size)
    outbox = QueueWriter(setup.outbox[0], [setup.outbox[1]])
    with contextlib.suppress(DistributedError, EOFError):  # the executor has ended, or closed the queue
        WorkerProc(setup, inbox, outbox.write).run()
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed would wait for dead ranks


if __name__ == "__main__":
    main()
