"""A worker in a process of its own: `python -m minivllm.executor.worker_proc`, started by `MultiProcExecutor`.

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
import time
from typing import TYPE_CHECKING

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
    StepResult,
    ToWorker,
    WorkerLog,
    WorkerSetup,
    decode_to_worker,
    encode,
    to_request,
)
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import RankTiming

if TYPE_CHECKING:
    from minivllm.worker.worker import Worker

logger = logging.getLogger("minivllm.executor.worker_proc")  # also as the main module of its process
PR_SET_PDEATHSIG = 1


class WorkerProc:
    """One rank."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._inbox = QueueReader(*setup.inbox, index=setup.rank, num_readers=setup.world_size)
        self._outbox = QueueWriter(setup.outbox[0], [setup.outbox[1]])
        logging.basicConfig(level=setup.log_level, format="%(message)s", handlers=[ForwardLog(self._log)], force=True)
        self._requests: dict[int, EngineCoreRequest] = {}
        self._worker: Worker

    def run(self) -> None:
        """Load the model, then handle messages until the executor closes the queue."""
        try:
            self._worker = self._make_worker()
        except Exception as error:
            self._send(Failed(0, type(error).__name__, str(error)))
            while self._read() is not None:  # until the executor has read it
                pass
            return
        self._send(CallResult(0, None))
        while (data := self._read()) is not None:
            is_step = False
            try:
                message = decode_to_worker(data)  # strict: a learner's scheduler may have put anything into it
                is_step = isinstance(message, Step)
                answer = self._handle(message)
                encoded = encode(answer) if answer is not None else None
            except Exception as error:
                # A DistributedError is caused by another rank, and errors caused by the user need no traceback.
                if not isinstance(error, DistributedError if is_step else MinivllmError):
                    logger.exception("A worker failed.")  # the same text on every rank, so that it is logged once
                encoded = encode(Failed(msgspec.msgpack.decode(data)["number"], type(error).__name__, str(error)))
            if encoded is not None:
                self._outbox.write(encoded)

    def _make_worker(self) -> Worker:
        # Imported here: what loads torch waits until `main` has done what is urgent.
        from minivllm.distributed.torch_group import join_group
        from minivllm.worker.worker import Worker, resolve_device

        setup = self._setup
        model_config, cache_config, scheduler_config, worker_config = pickle.loads(setup.configs)
        device = resolve_device(worker_config.device, setup.rank)
        group = join_group(setup.rank, setup.world_size, device, setup.group_memory, setup.group_port)
        worker = Worker(model_config, cache_config, scheduler_config, worker_config, group)
        worker.load_model()
        return worker

    def _handle(self, message: ToWorker) -> FromWorker | None:
        if isinstance(message, Call):
            value = getattr(self._worker, message.method)(*message.arguments)
            return CallResult(message.number, msgspec.to_builtins(value))
        assert isinstance(message, Step)
        start = time.perf_counter()
        self._worker.group.take_timing()
        outputs = self._worker.execute_model(to_request(message, self._requests))
        if message.timed:
            communication, num_bytes = self._worker.group.take_timing()
            timing = RankTiming(start, time.perf_counter(), num_bytes, communication)
            return StepResult(message.number, outputs, timing)
        return StepResult(message.number, outputs) if self._setup.rank == 0 else None

    def _read(self) -> bytes | None:
        try:
            return self._inbox.read()
        except EOFError:
            return None

    def _log(self, level: int, name: str, text: str) -> None:
        self._send(WorkerLog(level, name, text))

    def _send(self, message: FromWorker) -> None:
        self._outbox.write(encode(message))


def main() -> None:
    """Read the setup from standard input and run."""
    if sys.platform == "linux":  # has this process killed when its parent ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    setup = read_setup(WorkerSetup)
    if os.getppid() != setup.parent:
        sys.exit(1)
    with contextlib.suppress(DistributedError):  # the executor has ended
        WorkerProc(setup).run()
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed would wait for dead ranks


if __name__ == "__main__":
    main()
