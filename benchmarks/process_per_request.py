"""Serving without batching: each request gets a process of its own, which loads the model, answers and exits.

    python benchmarks/process_per_request.py serve smollm2-135m --port 8000     # takes the options of `minivllm serve`

This is where the journey to continuous batching begins, and what benchmarks/serving_modes.py compares with. `ProcessPerRequestCore`
takes the place of an engine core, so the same frontend and the same server run on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_client import AsyncMPClient
from minivllm.engine.core_handle import CoreProcess
from minivllm.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreLost,
    CoreReady,
    EngineCoreOutput,
    EngineCoreOutputs,
    SchedulerStats,
    StopSequences,
    ToCore,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.cli import main as cli
from minivllm.entrypoints.cli import serve as serve_cli
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest


class ProcessPerRequestCore:
    """Starts an engine process for each request and ends it with the request. Requests wait for a free process in their order.

    Used like a `CoreHandle`.

    Args:
        config: Of each process's engine.
        num_gpu_blocks: Blocks of each engine's KV cache.
        max_processes: The most processes at a time; one per processor if None.
    """

    def __init__(self, config: EngineConfig, num_gpu_blocks: int, max_processes: int | None = None) -> None:
        num_processors = os.cpu_count() or 1
        self.max_processes = max_processes or num_processors
        self.ready = CoreReady(num_gpu_blocks)
        self.process_id = os.getpid()
        self.last_heard: float | None = None
        cache_config = dataclasses.replace(config.cache_config, num_gpu_blocks_override=num_gpu_blocks)
        self._config = dataclasses.replace(config, cache_config=cache_config)
        self._num_threads = max(1, num_processors // self.max_processes)
        self._pool = ThreadPoolExecutor(self.max_processes, thread_name_prefix="process per request")
        self._lock = threading.Lock()
        self._requests: dict[str, _RequestProcess] = {}
        """The requests that wait or run."""
        self._messages: queue.SimpleQueue[EngineCoreOutputs | CoreLost | None] = queue.SimpleQueue()

    def send(self, message: ToCore) -> None:
        with self._lock:
            if isinstance(message, AddRequest):
                request = self._requests[message.request.request_id] = _RequestProcess(message.request)
                self._pool.submit(self._serve, request)
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    if found := self._requests.get(request_id):
                        found.finished.set()
            elif isinstance(message, StopSequences):
                for stopped in message.sequences:
                    if found := self._requests.get(stopped.request_id):
                        found.stop(stopped)

    def receive(self) -> EngineCoreOutputs | CoreLost | None:
        return self._messages.get()

    def shutdown(self) -> None:
        with self._lock:
            for request in self._requests.values():
                request.finished.set()
        self._pool.shutdown(cancel_futures=True)
        self._messages.put(None)

    def _serve(self, request: _RequestProcess) -> None:
        """In a thread of the pool: start the process, and forward its messages until its request is finished or aborted."""
        try:
            if not request.finished.is_set():
                request.run(self._config, self._num_threads, self._forward)
        except Exception as error:  # no memory, no process: this request fails alone
            self._forward(request, CoreLost(str(error)))
        finally:
            with self._lock:
                if self._requests.get(request.id) is request:
                    del self._requests[request.id]

    def _forward(self, request: _RequestProcess, message: EngineCoreOutputs | CoreLost) -> None:
        """Pass on a message of a process. One that dies fails its own request only."""
        if isinstance(message, CoreLost):
            message = EngineCoreOutputs([request.failure(str(message.error))], time.perf_counter(), SchedulerStats())
        if isinstance(message, EngineCoreOutputs):
            with self._lock:
                num_running = sum(other.is_running for other in self._requests.values())
                stats = SchedulerStats(num_running=num_running, num_waiting=len(self._requests) - num_running)
            self._messages.put(EngineCoreOutputs(message.outputs, message.timestamp, stats))


class _RequestProcess:
    """A request and its process."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.id = request.request_id
        self.is_running = False
        self.finished = threading.Event()
        """Set when its last output has come, or nobody waits for one."""
        self._request = request
        self._core: CoreProcess | None = None

    def run(self, config: EngineConfig, num_threads: int, forward) -> None:
        """Start the process, have it answer, and end it."""
        self._core = CoreProcess(config, num_threads)
        ender = threading.Thread(target=self._end_when_finished, args=(self._core,))
        ender.start()
        try:
            self.is_running = True
            self._core.send(AddRequest(self._request))
            while not self.finished.is_set() and (message := self._core.receive()) is not None:
                forward(self, message)
                if isinstance(message, CoreLost) or message.stats.num_running + message.stats.num_waiting == 0:
                    break
        finally:
            self.finished.set()
            ender.join()

    def stop(self, stopped) -> None:
        """A stop string was found in one of its sequences."""
        if self._request.sampling_params.n == 1:
            self.finished.set()
        elif self._core is not None:
            self._core.send(StopSequences([stopped]))

    def failure(self, error: str) -> EngineCoreOutput:
        """The last output of this request, if it fails."""
        return EngineCoreOutput(self.id, self._request.number, [], True, RequestMetrics(self._request.arrival_time), error=error)

    def _end_when_finished(self, core: CoreProcess) -> None:
        self.finished.wait()
        core.shutdown()


def start_engine(args: EngineArgs, max_processes: int | None = None) -> AsyncLLMEngine:
    """The usual frontend on a process for each request.

    Raises:
        ModelLoadError: The model cannot be found or used.
    """
    config = EngineConfig.from_engine_args(args)
    num_gpu_blocks = args.num_gpu_blocks_override or -(-config.model_config.max_model_len // args.block_size)
    client = AsyncMPClient(ProcessPerRequestCore(config, num_gpu_blocks, max_processes))
    configs = (config.model_config, config.cache_config, config.scheduler_config)
    return AsyncLLMEngine(client, *configs, config.load_tokenizer(), seed=args.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """`minivllm serve` with a process for each request."""
    arguments = cli.make_parser().parse_args(argv)
    return serve_cli.serve(arguments, start_engine)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
