"""The engine for servers: requests come and go at any time, and each gets its tokens as a stream.

    generate() ─► InputProcessor ─► AddRequest ─► EngineCore (a process or a thread of its own): step, step, step, ...
        ▲                                             │
        └── RequestStream ◄── event loop ◄── StepDone ┘

The loop that steps never runs on the event loop, so that HTTP stays responsive while the model computes. Mirrors
`vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator

from minivllm.config import EngineArgs, ModelConfig, SchedulerConfig
from minivllm.engine.core_client import CoreClient, InProcessClient, ProcessClient
from minivllm.engine.core_messages import AbortRequest, AddRequest, CoreFailed, EngineStats, FromCore, SetTracing, StepDone
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.metrics import Metrics
from minivllm.engine.request_stream import RequestStream
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.engine.trace_recorder import given_params
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

_KEPT_STEPS = 256
"""Steps that wait for a slow reader of `steps`; older ones are dropped."""


class AsyncLLMEngine:
    """Runs an engine in the background and streams what it generates.

    Usually made by `from_engine_args`, or from an engine that exists by `from_engine`.

    Attributes:
        model_config, scheduler_config, args: What the engine is.
        num_gpu_blocks: Blocks of its cache on the device.
        tokenizer: None with skip_tokenizer_init=True.
        stats: What it was doing after its latest step.
        metrics: For Prometheus.
        dead_error: Why it does nothing any more; None while it lives.
        process_id: Of the process that computes.

    Example:
        >>> engine = AsyncLLMEngine.from_engine_args(EngineArgs("smollm2-135m"), in_process=True)
        >>> async for output in engine.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2)):
        ...     print(output.outputs[0].text)
         Paris
         Paris.
        >>> engine.shutdown()
    """

    def __init__(
        self,
        client: CoreClient,
        args: EngineArgs,
        model_config: ModelConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.args = args
        self.model_config = model_config
        self.scheduler_config = scheduler_config
        self.num_gpu_blocks = client.ready.num_gpu_blocks
        self.tokenizer = tokenizer
        self.stats = EngineStats(num_gpu_blocks=self.num_gpu_blocks)
        self.metrics = Metrics(model_config.name)
        self.dead_error: EngineDeadError | None = None
        self.process_id = client.process_id
        self._client = client
        self.input_processor = InputProcessor(model_config, scheduler_config, tokenizer, self.num_gpu_blocks * args.block_size)
        self._streams: dict[str, RequestStream] = {}
        self._numbers = itertools.count()
        self._watchers: set[_StepQueue] = set()
        self._deaths: set[asyncio.Future[None]] = set()
        """Who waits for the end."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False
        """Whether the last message has been handled; `dead_error` is known before that."""
        client.start(self._receive)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, in_process: bool = False, num_threads: int | None = None) -> AsyncLLMEngine:
        """Start an engine and wait until it is ready: seconds, so a coroutine calls this by `asyncio.to_thread`.

        Args:
            args: As for `LLMEngine`. Instead of a trace there is `steps`.
            in_process: Step in a thread of this process, not in a process of its own.
            num_threads: Threads that the engine's own process computes with; one for each processor if None.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together, or name a class that another process cannot import.
            EngineDeadError: The process ended before it was ready.
        """
        from minivllm.models.hub import resolve_model
        from minivllm.models.registry import load_model_config

        if args.trace:
            raise ConfigError(
                "trace=True would keep every step of a server for ever: leave it out, and watch AsyncLLMEngine.steps()."
            )
        if in_process:
            return cls.from_engine(LLMEngine.from_engine_args(args), args)
        path = resolve_model(args.model)
        model_config = load_model_config(str(args.model), path, args.max_model_len)
        scheduler_config = args.scheduler_config(model_config.max_model_len)
        tokenizer = None if args.skip_tokenizer_init else Tokenizer(path)
        return cls(ProcessClient(args, num_threads), args, model_config, scheduler_config, tokenizer)

    @classmethod
    def from_engine(cls, engine: LLMEngine, args: EngineArgs | None = None) -> AsyncLLMEngine:
        """Run an engine that exists, in a thread of this process. Until `shutdown` nobody else may use it.

        Raises:
            ConfigError: It has unfinished requests, or records a trace.
        """
        if engine.has_unfinished_requests():
            raise ConfigError("The engine has unfinished requests: finish or abort them first.")
        if engine.trace is not None:
            raise ConfigError("The engine records a trace, which would grow for ever: stop_trace() first.")
        if args is None:
            cache = engine.cache_config
            args = EngineArgs(block_size=cache.block_size, enable_prefix_caching=cache.enable_prefix_caching)
        return cls(InProcessClient(engine), args, engine.model_config, engine.scheduler_config, engine.tokenizer)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come, the last one with `finished` set; of a request that failed, with `error` too.

        When tokens come faster than they are taken, one output has several. Closing the generator before its end, or
        cancelling the task that waits for it, aborts the request.

        Args:
            prompt: Text, token ids, or a dict with "prompt" or "prompt_token_ids".
            params: What is wanted, and by `output_kind` in which outputs; the defaults if None.
            request_id: Your name for it; one is made if None.
            priority: With the "priority" policy, smaller numbers go first.
            arrival_time: When it came, in seconds of `time.perf_counter`; now if None.

        Raises:
            RequestError: It cannot be served; raised before anything is queued.
            EngineDeadError: The engine has failed, before or meanwhile.
        """
        self.check_health()
        self._bind_to_loop()
        arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        params = SamplingParams() if params is None else params
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        self.input_processor.check_request_id(request_id)
        # In a thread: a long text takes long to encode, and others want to be served meanwhile.
        text, token_ids = await asyncio.to_thread(self.input_processor.read_prompt, prompt)
        self.input_processor.check(len(token_ids), params, arrival_time, priority)
        self.check_health()
        if request_id in self._streams:
            raise RequestError(f"There is a request {request_id!r} already: choose another id, or wait until it has ended.")
        number = next(self._numbers)
        stream = self._streams[request_id] = RequestStream(request_id, number, text, token_ids, params, arrival_time)
        try:
            self._client.send(AddRequest(request_id, number, token_ids, given_params(params), arrival_time, priority))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._abort(stream)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with the finish reason "abort". Unknown and finished ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abort(stream)
            stream.abort()

    def _abort(self, stream: RequestStream) -> None:
        """Give a stream up, if it has not ended."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.metrics.take_end(stream, "abort", time.perf_counter())
            self._client.send(AbortRequest(stream.request_id))

    def num_unfinished_requests(self) -> int:
        """Requests whose stream has not ended."""
        return len(self._streams)

    # -- what the engine does, and whether -----------------------------------------------------------------------

    async def steps(self) -> AsyncGenerator[StepRecord, None]:
        """What the engine does from now on, step by step. Who reads too slowly misses steps.

        Raises:
            EngineDeadError: The engine has failed, before or meanwhile.
        """
        self.check_health()
        self._bind_to_loop()
        watcher = _StepQueue()
        if not self._watchers:
            self._client.send(SetTracing(True))
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.news.wait()
                while watcher.records:
                    yield watcher.records.popleft()
                self.check_health()
                watcher.news.clear()
        finally:
            if watcher in self._watchers:  # not when another event loop has taken over
                self._watchers.remove(watcher)
                if not self._watchers and self.dead_error is None:
                    self._client.send(SetTracing(False))

    def check_health(self) -> None:
        """Raise an EngineDeadError if the engine has failed."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))

    async def wait_dead(self) -> EngineDeadError:
        """Return the reason when the engine has failed, or was shut down; wait while it lives."""
        self._bind_to_loop()
        if self.dead_error is None:
            future = asyncio.get_running_loop().create_future()
            self._deaths.add(future)
            try:
                await future
            finally:
                self._deaths.discard(future)
        assert self.dead_error is not None
        return self.dead_error

    def shutdown(self) -> None:
        """End the engine, and its process if it has one; waits for the step that runs.

        Streams that have not ended get an EngineDeadError. Safe to call again, and from any thread.
        """
        self._client.shutdown()
        self._receive(CoreFailed("", "it was shut down"))

    # -- messages from the core ----------------------------------------------------------------------------------

    def _bind_to_loop(self) -> None:
        """Streams belong to the event loop that runs now; those of an earlier one, which was closed, have nobody to read them."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RequestError("This engine serves another event loop: use it from one thread.")
        self._loop = loop
        self._deaths.clear()
        if self._watchers:
            self._watchers.clear()
            self._client.send(SetTracing(False))
        for stream in list(self._streams.values()):
            self._abort(stream)

    def _receive(self, message: FromCore) -> None:
        """Take a message, in a thread of the client's, to the event loop."""
        if isinstance(message, CoreFailed) and self.dead_error is None:  # known at once, whatever the loop does
            cause = f"{message.error_type}: {message.message}" if message.error_type else message.message
            self.dead_error = EngineDeadError(f"The engine has ended: {cause.rstrip('.')}.")
        loop = self._loop
        if loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                loop.call_soon_threadsafe(self._handle, message)
                return
        self._handle(message)  # there is no loop whose streams it could disturb

    def _handle(self, message: FromCore) -> None:
        if isinstance(message, CoreFailed):
            self._end_streams()
        elif isinstance(message, StepDone) and not self._has_ended:
            self.stats = message.stats
            self.metrics.set_stats(message.stats)
            now = time.perf_counter()
            for delta in message.deltas:
                stream = self._streams.get(delta.request_id)
                if stream is None or stream.number != delta.number:  # given up meanwhile
                    continue
                self.metrics.take_delta(stream, delta, now, self.args.enable_prefix_caching)
                stream.put(delta)
                if delta.finished:
                    del self._streams[delta.request_id]
            if message.record is not None:
                for watcher in self._watchers:
                    watcher.put(message.record)

    def _end_streams(self) -> None:
        """Nothing more will come: tell everybody who waits."""
        error, self._has_ended = self.dead_error, True
        assert error is not None
        self.stats = EngineStats(num_gpu_blocks=self.num_gpu_blocks)
        self.metrics.set_stats(self.stats)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self.metrics.take_end(stream, "error", time.perf_counter())
            stream.fail(error)
        for watcher in self._watchers:
            watcher.news.set()
        for future in self._deaths:
            if not future.done():
                future.set_result(None)


class _StepQueue:
    """Steps for one reader."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self.news = asyncio.Event()

    def put(self, record: StepRecord) -> None:
        self.records.append(record)
        self.news.set()
