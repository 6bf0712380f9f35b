"""Serving without batching: each request gets a process of its own, which loads the model, answers and exits.

    python benchmarks/process_per_request.py serve smollm2-135m --port 8000     # takes the options of `minivllm serve`

This is where the journey to continuous batching begins, and what benchmarks/serving_modes.py compares with. `ProcessPerRequestClient`
takes the place of the client of an EngineCore, so the same frontend and the same server run on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_client import CoreClient, OnMessage, ProcessClient
from minivllm.engine.core_messages import (
    AbortRequest,
    AddRequest,
    CoreFailed,
    CoreReady,
    EngineStats,
    FromCore,
    RequestDelta,
    StepDone,
    ToCore,
)
from minivllm.engine.tokenizer import Tokenizer
from minivllm.entrypoints import cli, serve_cli
from minivllm.errors import MinivllmError
from minivllm.models.hub import resolve_model
from minivllm.models.registry import load_model_config


class ProcessPerRequestClient(CoreClient):
    """Starts an engine process for each request and ends it with the request. Requests wait for a free process in their order.

    Args:
        args: The arguments of each process's engine.
        num_gpu_blocks: Blocks of each engine's KV cache.
        max_processes: The most processes at a time; one per core if None.
    """

    def __init__(self, args: EngineArgs, num_gpu_blocks: int, max_processes: int | None = None) -> None:
        num_cores = os.cpu_count() or 1
        self.max_processes = max_processes or num_cores
        self.ready = CoreReady(num_gpu_blocks)
        self.process_id = os.getpid()
        self._args = dataclasses.replace(args, num_gpu_blocks_override=num_gpu_blocks)
        self._num_threads = max(1, num_cores // self.max_processes)
        self._pool = ThreadPoolExecutor(self.max_processes, thread_name_prefix="process per request")
        self._lock = threading.Lock()
        self._requests: dict[str, _RequestProcess] = {}
        """The requests that wait or run."""
        self._on_message: OnMessage | None = None

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message

    def send(self, message: ToCore) -> None:
        with self._lock:
            if isinstance(message, AddRequest):
                request = self._requests[message.request_id] = _RequestProcess(message)
                self._pool.submit(self._serve, request)
            elif isinstance(message, AbortRequest) and (found := self._requests.get(message.request_id)):
                found.finished.set()

    def shutdown(self) -> None:
        with self._lock:
            for request in self._requests.values():
                request.finished.set()
        self._pool.shutdown(cancel_futures=True)

    def _serve(self, request: _RequestProcess) -> None:
        """In a thread of the pool: start the process, and wait until its request is finished or aborted."""
        try:
            if not request.finished.is_set():
                request.run(self._args, self._num_threads, self._forward)
        except MinivllmError as error:
            self._forward(request, StepDone([request.failure(str(error))], EngineStats()))
        finally:
            with self._lock:
                if self._requests.get(request.id) is request:
                    del self._requests[request.id]

    def _forward(self, request: _RequestProcess, message: FromCore) -> None:
        """Pass on a message of a process. One that dies fails its own request only."""
        if isinstance(message, CoreFailed):
            message = StepDone([request.failure(f"The engine has ended: {message.message}.")], EngineStats())
        if isinstance(message, StepDone) and self._on_message is not None:
            with self._lock:
                num_running = sum(other.is_running for other in self._requests.values())
                stats = EngineStats(num_running=num_running, num_waiting=len(self._requests) - num_running)
            self._on_message(StepDone(message.deltas, stats))


class _RequestProcess:
    """A request and its process."""

    def __init__(self, message: AddRequest) -> None:
        self.id = message.request_id
        self.is_running = False
        self.finished = threading.Event()
        """Set when its last output has come, or nobody waits for one."""
        self._message = message

    def run(self, args: EngineArgs, num_threads: int, forward) -> None:
        """Start the process, have it answer, and end it."""
        self._forward = forward
        client = ProcessClient(args, num_threads)
        try:
            self.is_running = True
            client.start(self._receive)
            client.send(self._message)
            self.finished.wait()
        finally:
            client.shutdown()

    def failure(self, error: str) -> RequestDelta:
        """The last message about this request, if it fails."""
        return RequestDelta(self.id, self._message.number, [], True, error=error)

    def _receive(self, message: FromCore) -> None:
        if not self.finished.is_set():
            self._forward(self, message)
        if isinstance(message, CoreFailed) or (isinstance(message, StepDone) and any(d.finished for d in message.deltas)):
            self.finished.set()


def start_engine(args: EngineArgs, max_processes: int | None = None) -> AsyncLLMEngine:
    """The usual frontend on a process for each request.

    Raises:
        ModelLoadError: The model cannot be found or used.
    """
    path = resolve_model(args.model)
    model_config = load_model_config(str(args.model), path, args.max_model_len)
    num_gpu_blocks = args.num_gpu_blocks_override or -(-model_config.max_model_len // args.block_size)
    client = ProcessPerRequestClient(args, num_gpu_blocks, max_processes)
    scheduler_config = args.scheduler_config(model_config.max_model_len)
    return AsyncLLMEngine(client, args, model_config, scheduler_config, Tokenizer(path))


def main(argv: Sequence[str] | None = None) -> int:
    """`minivllm serve` with a process for each request."""
    arguments = cli.make_parser().parse_args(argv)
    return serve_cli.serve(arguments, start_engine)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
