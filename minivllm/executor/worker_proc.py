"""A worker in a process of its own, started by `MultiProcExecutor` through `worker_main`. Mirrors `WorkerProc` in
`vllm/v1/executor/multiproc_executor.py`.
"""

from __future__ import annotations

import logging
import pickle
import time

import msgspec

from minivllm.distributed.message_queue import QueueReader, QueueWriter
from minivllm.distributed.torch_group import join_group
from minivllm.errors import DistributedError, MinivllmError
from minivllm.executor.processes import ForwardLog
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
from minivllm.worker.worker import Worker, resolve_device

logger = logging.getLogger(__name__)


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
            model_config, cache_config, scheduler_config, worker_config = pickle.loads(self._setup.configs)
            setup, device = self._setup, resolve_device(worker_config.device, self._setup.rank)
            group = join_group(setup.rank, setup.world_size, device, setup.group_memory, setup.group_port)
            self._worker = Worker(model_config, cache_config, scheduler_config, worker_config, group)
            self._worker.load_model()
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
