"""Serving without batches: worker processes, each with a model of its own, that take one request after another from a queue.

Many services begin like this. `benchmarks/process_per_request.py` is slower still.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from minivllm.bench.summary import EngineRun, RequestLatency
from minivllm.bench.workloads import WorkloadRequest
from minivllm.config import EngineArgs, check_at_least
from minivllm.engine.core_client import AsyncMPClient, SyncMPClient
from minivllm.engine.core_handle import CoreProcess
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import MinivllmError
from minivllm.sampling_params import RequestOutputKind


class Workers:
    """Processes that share the machine's processors; each loads the model and computes one request at a time.

    Use it in a `with` statement, which ends the processes.

    Args:
        args: Of each worker's engine; at most one request runs in it.
        num_workers: How many. Each gets its share of the processors.

    Raises:
        ModelLoadError: The model cannot be found or used.
        ConfigError: The arguments cannot work together.
    """

    def __init__(self, args: EngineArgs, num_workers: int) -> None:
        check_at_least("num_workers", num_workers, 1)
        config = EngineConfig.from_engine_args(dataclasses.replace(args, max_num_seqs=1, num_speculative_tokens=0))
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        num_threads = max(1, (os.cpu_count() or 1) // num_workers)
        self._engines: list[LLMEngine] = []
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")
        starts = [self._pool.submit(CoreProcess, config, num_threads) for _ in range(num_workers)]
        try:
            self._engines += [LLMEngine(SyncMPClient(AsyncMPClient(start.result())), *configs, None) for start in starts]
        except BaseException:
            for start in starts:
                if start.exception() is None:
                    start.result().shutdown()
            self._pool.shutdown()
            raise

    def run(self, requests: Sequence[WorkloadRequest]) -> EngineRun:
        """Answer requests that all arrive at the start. Each worker first answers an unmeasured one, to warm up.

        Raises:
            MinivllmError: A request failed.
        """
        starts: list[float] = []
        warm = threading.Barrier(len(self._engines), action=lambda: starts.append(time.perf_counter()))
        waiting = iter(enumerate(requests))
        done: list[RequestLatency] = []

        def stop() -> None:
            """Let each worker end its request, and take no other."""
            warm.abort()
            list(waiting)

        def work(engine: LLMEngine) -> None:
            try:
                _answer(engine, WorkloadRequest([1, 2, 3], 2))
                warm.wait()
                for number, request in waiting:
                    times = _answer(engine, request)
                    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
                    lengths = len(times), len(request.prompt_token_ids), len(times)
                    done.append(RequestLatency(str(number), times[0] - starts[0], times[-1] - starts[0], gaps, *lengths))
            except BaseException:
                stop()
                raise

        workers = [self._pool.submit(work, engine) for engine in self._engines]
        try:
            failures = [error for error in (worker.exception() for worker in workers) if error is not None]
        except BaseException:  # Ctrl-C
            stop()
            raise
        for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # the cause, not a broken barrier in another worker
        return EngineRun.of(done, time.perf_counter() - starts[0], scheduler=f"{len(workers)} workers")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self._engines:
            engine.engine_core.shutdown()
        self._pool.shutdown()


def _answer(engine: LLMEngine, request: WorkloadRequest) -> list[float]:
    """Answer one request. Returns when each of its tokens came."""
    params = request.sampling_params(RequestOutputKind.DELTA)
    engine.add_request("the only one", request.prompt_token_ids, params)
    times: list[float] = []
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise MinivllmError(output.error)
                times.append(time.perf_counter())
    finally:
        engine.abort_request("the only one")
    return times
