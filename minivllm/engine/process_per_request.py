"""How it is done without an engine that batches: a process for each request, which loads the model, answers and ends.

It has the interface of `AsyncLLMEngine`, so that the same server runs on it: where the journey to continuous batching begins, and
what the benchmark of serving modes compares with.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import EngineStats
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.metrics import Metrics
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.errors import EngineDeadError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


class ProcessPerRequestEngine:
    """Starts an engine for each request, and ends it with the request.

    Args:
        args: As for `AsyncLLMEngine.from_engine_args`.
        max_processes: How many may run at once; the others wait. As many as there are processors if None.

    Raises:
        ModelLoadError: The model cannot be found or used.
    """

    def __init__(self, args: EngineArgs, max_processes: int | None = None) -> None:
        from minivllm.models.hub import resolve_model
        from minivllm.models.registry import load_model_config

        path = resolve_model(args.model)
        self.max_processes = max_processes or os.cpu_count() or 1
        self.args = args
        self.model_config = load_model_config(str(args.model), path, args.max_model_len)
        self.scheduler_config = args.scheduler_config(self.model_config.max_model_len)
        self.tokenizer = None if args.skip_tokenizer_init else Tokenizer(path)
        self.num_gpu_blocks = args.num_gpu_blocks_override or -(-self.model_config.max_model_len // args.block_size)
        self.dead_error: EngineDeadError | None = None
        cache_tokens = self.num_gpu_blocks * args.block_size
        self.input_processor = InputProcessor(self.model_config, self.scheduler_config, self.tokenizer, cache_tokens)
        self._engine_args = dataclasses.replace(args, num_gpu_blocks_override=self.num_gpu_blocks)
        self._metrics = Metrics(self.model_config.name)
        self._places = asyncio.Semaphore(self.max_processes)
        self._engines: dict[str, AsyncLLMEngine | None] = {}
        """The engine of each request that lives; None while it waits for one."""
        self._ended = asyncio.Event()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> ProcessPerRequestEngine:
        """As the constructor, under the name that `AsyncLLMEngine` has for it."""
        return cls(args)

    @property
    def stats(self) -> EngineStats:
        """How many requests run and wait."""
        running = sum(engine is not None for engine in self._engines.values())
        return EngineStats(num_running=running, num_waiting=len(self._engines) - running)

    @property
    def metrics(self) -> Metrics:
        """Of all requests together; their times begin with the request, so that they have the start of its process in them."""
        self._metrics.set_stats(self.stats)
        return self._metrics

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLMEngine.generate`, from a process that is started for it. Requests wait for a place in the order they came."""
        self.check_health()
        arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        params = SamplingParams() if params is None else params
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        self.input_processor.check_request_id(request_id)
        _, token_ids = await asyncio.to_thread(self.input_processor.read_prompt, prompt)
        self.input_processor.check(len(token_ids), params, arrival_time, priority)
        if request_id in self._engines:
            raise RequestError(f"There is a request {request_id!r} already: choose another id, or wait until it has ended.")
        self._engines[request_id] = None
        try:
            async with self._places:
                engine = self._engines[request_id] = await self._start()
                engine.metrics = self._metrics
                outputs = engine.generate(prompt, params, request_id, priority=priority, arrival_time=arrival_time)
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                await asyncio.to_thread(engine.shutdown)
        finally:
            engine = self._engines.pop(request_id, None)
            if engine is not None and engine.dead_error is None:  # given up
                await asyncio.to_thread(engine.shutdown)

    async def _start(self) -> AsyncLLMEngine:
        self.check_health()
        threads = max(1, (os.cpu_count() or 1) // self.max_processes)
        starting = asyncio.ensure_future(
            asyncio.to_thread(AsyncLLMEngine.from_engine_args, self._engine_args, num_threads=threads)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # a thread cannot be cancelled: what it starts is ended when it is there
            starting.add_done_callback(_end_engine)
            raise

    async def abort(self, request_id: str) -> None:
        """End a request that runs: its stream ends with the finish reason "abort"."""
        engine = self._engines.get(request_id)
        if engine is not None:
            await engine.abort(request_id)

    def num_unfinished_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._engines)

    async def steps(self) -> AsyncGenerator[StepRecord, None]:
        """Nothing: there is no batch to watch. It ends when the engine is shut down."""
        await self._ended.wait()
        self.check_health()
        yield  # type: ignore[misc] # never reached: this is a generator

    def check_health(self) -> None:
        """Raise an EngineDeadError after `shutdown`; a process that fails ends its own request alone."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))

    async def wait_dead(self) -> EngineDeadError:
        """Return when it is shut down."""
        await self._ended.wait()
        assert self.dead_error is not None
        return self.dead_error

    def shutdown(self) -> None:
        """End all processes. Requests that run get an EngineDeadError."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError("The engine has ended: it was shut down.")
        for engine in list(self._engines.values()):
            if engine is not None:
                engine.shutdown()
        self._ended.set()


def _end_engine(starting: asyncio.Future[AsyncLLMEngine]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=starting.result().shutdown).start()
