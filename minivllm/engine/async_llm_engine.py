"""The asynchronous engine, for servers: requests come and go at any time, and each gets its tokens as a stream.

    generate() ─► InputProcessor ─► AsyncMPClient ─► EngineCore (in a process or a thread of its own): step, step, step, ...
        ▲                                                │
        └── RequestStream ◄── OutputProcessor ◄── EngineCoreOutputs

The core never steps on the event loop, so that HTTP stays responsive while the model runs. Mirrors `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.data_parallel.client import DPLBAsyncMPClient
from minivllm.data_parallel.failover import Failover, give_up_error
from minivllm.data_parallel.launcher import FrontendPlace, OtherFrontends, ReplicaLauncher
from minivllm.engine.core_client import AsyncMPClient
from minivllm.engine.core_handle import CoreProcess, CoreThread
from minivllm.engine.core_messages import CoreLost, EngineCoreOutputs, SchedulerStats, SetTracing, ToFrontend
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.metrics import Metrics, TokenRate
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.request_stream import RequestStream, StepQueue
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.5
"""How often to look whether requests that wait for a replica can be sent, or must be given up."""


class AsyncLLMEngine:
    """Runs an engine core in the background and streams what it generates.

    Usually made by `from_engine_args`, or from an existing engine by `from_engine`.

    Args:
        client: The way to the core.
        model_config, cache_config, scheduler_config: What the core was made with.
        tokenizer: None for token ids only.
        seed: Requests without a seed draw theirs from a stream that starts here.
        failover_timeout: Seconds that requests wait for a core when none is left but one may come, until they fail.
        input_processor: Of an engine that this one takes over, whose stream of seeds goes on.

    Attributes:
        num_gpu_blocks: Blocks of the KV cache on the device; of the replica that has fewest, if there are several.
        num_engines: How many replicas there may be.
        stats: The scheduler's state after the latest step; the sum over replicas if there are several.
        stats_by_engine: That of each replica, by rank.
        metrics: For Prometheus.
        replicas: What the replicas do, and how to restart one.
        dead_error: Why the engine does nothing now; None while it is alive.

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
        client: AsyncMPClient | DPLBAsyncMPClient,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        failover_timeout: float = 60.0,
        input_processor: InputProcessor | None = None,
        detokenizer_cls: type[IncrementalDetokenizer] | None = None,
    ) -> None:
        self.model_config = model_config
        self.cache_config = cache_config
        self.scheduler_config = scheduler_config
        self.tokenizer = tokenizer
        self.num_gpu_blocks, self.num_engines = client.num_gpu_blocks, client.num_engines
        self.stats_by_engine = {0: SchedulerStats(num_gpu_blocks=self.num_gpu_blocks)}
        self.stats = SchedulerStats.sum(self.stats_by_engine.values())
        self._token_rates = [TokenRate() for _ in range(client.num_engines)]
        self.metrics = Metrics(model_config.name, client.num_engines, is_shared=client.client_count > 1)
        self.replicas = client.replicas
        if client.client_index == 0:
            for status in self.replicas.statuses():
                self.metrics.set_stats(status.rank, SchedulerStats())  # shared gauges are shown once they are set
                self.metrics.set_replica(status.rank, is_ready=status.state == "ready")
                if status.state == "ready":
                    self.metrics.set_cache_config(status.rank, cache_config, status.num_gpu_blocks)
        self.dead_error: EngineDeadError | None = None
        self._client = client
        self.input_processor = input_processor or InputProcessor(
            model_config, scheduler_config, tokenizer, self.num_gpu_blocks * cache_config.block_size, seed
        )
        self.input_processor.load_grammar_tokenizer()
        self.output_processor = OutputProcessor(tokenizer, detokenizer_cls)
        self.failover = Failover(self.output_processor, client)
        self._failover_timeout = failover_timeout
        self._closed_since: float | None = None
        """Since when no core has taken requests that wait for one; in seconds of `time.monotonic`."""
        self._is_tending = False
        self._streams: dict[str, RequestStream] = {}
        self._watchers: set[StepQueue] = set()
        self._waiting_for_death: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_restarting = False
        self._is_final = False
        """Whether it is dead for good. Set on the event loop; `dead_error` is known before that."""
        client.start(self._receive)

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        in_process: bool = False,
        num_threads: int | None = None,
        restart: bool = False,
        others: OtherFrontends | None = None,
    ) -> AsyncLLMEngine:
        """Start an engine and wait until it is ready. That takes seconds, so call it by `asyncio.to_thread` in a coroutine.

        Args:
            args: As for `LLMEngine`. Use `steps` instead of a trace.
            in_process: Run the core in a thread of this process, not in a process of its own.
            num_threads: Threads that the core's own process computes with; one for each processor if None.
            restart: Start another core when one dies, where its requests go on. With replicas, they go on at others meanwhile.
            others: Further frontends, in processes of their own, that use the same cores and `join`.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together, or name a class that another process cannot import.
            EngineDeadError: The process ended before it was ready.
        """
        if args.trace:
            raise ConfigError(
                "trace=True would keep every step of a server forever: leave it out, and watch AsyncLLMEngine.steps()."
            )
        if in_process:
            if restart or num_threads is not None:
                raise ConfigError("restart and num_threads need a core in a process of its own: leave out in_process.")
            if args.parallel_config().has_replicas:
                raise ConfigError("Replicas run in processes of their own: leave out in_process, or data_parallel_size.")
            return cls._from_engine(LLMEngine.from_engine_args(args), owns_core=True)
        config = EngineConfig.from_engine_args(args)
        tokenizer = config.load_tokenizer()
        client: AsyncMPClient | DPLBAsyncMPClient
        if args.parallel_config().has_replicas or others is not None:
            if num_threads is not None:
                raise ConfigError("num_threads is for one core: leave it out, and replicas divide the processors among them.")
            launcher = ReplicaLauncher(config, restart, others)
            client = DPLBAsyncMPClient(config, launcher.place, launcher)
        else:
            client = AsyncMPClient(lambda: CoreProcess(config, num_threads), restart=restart)
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        timeout = config.parallel_config.failover_timeout
        return cls(client, *configs, tokenizer, seed=args.seed, failover_timeout=timeout, detokenizer_cls=config.detokenizer_cls)

    @classmethod
    def join(cls, config: EngineConfig, place: FrontendPlace, seed: int) -> AsyncLLMEngine:
        """One of the `others` of `from_engine_args`, in its process. Waits until the cores are ready.

        Args:
            config, place: As they were given to the others' `start`.
            seed: Requests without a seed draw theirs from a stream that starts here, another for each frontend.

        Raises:
            ModelLoadError, ConfigError, EngineDeadError: A core cannot be started.
        """
        tokenizer = config.load_tokenizer()
        client = DPLBAsyncMPClient(config, place)
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        timeout = config.parallel_config.failover_timeout
        return cls(client, *configs, tokenizer, seed=seed + (place.client_index << 64), failover_timeout=timeout)

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> AsyncLLMEngine:
        """Run the core of an existing engine in a thread of this process. Until `shutdown`, use the other engine for nothing.

        Raises:
            ConfigError: It has unfinished requests, or records a trace.
        """
        return cls._from_engine(engine, owns_core=False)

    @classmethod
    def _from_engine(cls, engine: LLMEngine, *, owns_core: bool) -> AsyncLLMEngine:
        if engine.has_unfinished_requests():
            raise ConfigError("The engine has unfinished requests: finish or abort them first.")
        core = engine.core
        if core.trace is not None:
            raise ConfigError("The engine records a trace, which would grow forever: stop_trace() first.")
        client = AsyncMPClient(lambda: CoreThread(core, owns_core=owns_core))
        return cls(
            client,
            core.model_config,
            core.cache_config,
            core.scheduler_config,
            engine.tokenizer,
            input_processor=engine.input_processor,
            detokenizer_cls=engine.output_processor.detokenizer_cls,
        )

    @property
    def process_id(self) -> int:
        """The process that computes."""
        return self._client.process_id

    # -- requests ------------------------------------------------------------------------------------------------

    async def process_inputs(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        data_parallel_rank: int | None = None,
    ) -> ProcessedRequest:
        """Validate, tokenize and seed a request, for `generate`.

        Args:
            prompt: Text, token ids, or a dict with "prompt" or "prompt_token_ids".
            params: How to generate, and by `output_kind` in which pieces; the defaults if None.
            request_id: Your name for it; one is made up if None.
            priority: With the "priority" policy, smaller goes first.
            arrival_time: Seconds of `time.perf_counter`; now if None.
            data_parallel_rank: The replica that it should go to, if that takes requests; None for the router's choice.

        Raises:
            RequestError: It cannot be served.
        """
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < self.num_engines:
            raise RequestError(f"data_parallel_rank is {data_parallel_rank}, but must be from 0 to {self.num_engines - 1}.")
        arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.wrap_future(self.input_processor.submit_grammar(params))  # these hold up each other alone
        process = self.input_processor.process_inputs
        # In a thread: a long text takes long to encode, and other requests must not wait for it.
        processed = await asyncio.to_thread(process, request_id, prompt, params, arrival_time=arrival_time, priority=priority)
        if data_parallel_rank is None:
            return processed
        return replace(processed, core_request=replace(processed.core_request, data_parallel_rank=data_parallel_rank))

    async def generate(
        self,
        prompt: Prompt | ProcessedRequest,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come. The last one has `finished` set; that of a request that failed, `error` too.

        When tokens come faster than they are read, one output has several. Closing the generator early, or cancelling the task that
        waits for it, aborts the request.

        Args:
            prompt: As for `process_inputs`, or what that returned.
            params, request_id, priority, arrival_time, data_parallel_rank: As for `process_inputs`.

        Raises:
            RequestError: It cannot be served; raised before anything is queued.
            EngineDeadError: The engine has failed, before or meanwhile.
        """
        self.check_takes_requests()
        self._bind_to_loop()
        if not isinstance(prompt, ProcessedRequest):
            prompt = await self.process_inputs(
                prompt,
                params,
                request_id,
                priority=priority,
                arrival_time=arrival_time,
                data_parallel_rank=data_parallel_rank,
            )
            self.check_takes_requests()
        request = prompt.core_request
        if request.request_id in self._streams:
            raise RequestError(
                f"There is already a request {request.request_id!r}: choose another id, or wait until it has finished."
            )
        stream = RequestStream(self.output_processor.add_request(prompt))
        self._streams[request.request_id] = stream
        try:
            if self.failover.submit(stream.state):
                self._closed_since = None
            else:
                self._resume_requests()
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._abort(stream)

    async def abort(self, request_id: str) -> None:
        """Finish a request: its stream ends with the finish reason "abort". Unknown and finished ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abort(stream)
            stream.state.abort()
            stream.notify()

    def _abort(self, stream: RequestStream) -> None:
        """Give up a stream, if it has not finished."""
        request_id = stream.state.request.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.output_processor.abort_request(request_id)
            self.metrics.record_finish(stream.state, "abort", time.perf_counter())
            self._client.abort_requests([request_id])
            if self.failover.forget(request_id):
                self._resume_requests()

    def num_unfinished_requests(self) -> int:
        """Requests whose stream has not finished."""
        return len(self._streams)

    def tokens_per_second(self, engine_index: int = 0) -> float:
        """How fast a core has generated in the last two seconds, for all its frontends together."""
        return self._token_rates[engine_index].rate(time.monotonic())

    # -- observation and health ----------------------------------------------------------------------------------

    async def steps(self) -> AsyncGenerator[StepRecord, None]:
        """The steps of the core from now on; of the first replica, if there are several. A slow reader misses some.

        Raises:
            EngineDeadError: The engine has failed, before or meanwhile.
        """
        async with contextlib.aclosing(self.steps_of_all()) as steps:
            async for engine_index, record in steps:
                if engine_index == 0:
                    yield record

    async def steps_of_all(self) -> AsyncGenerator[tuple[int, StepRecord], None]:
        """As `steps`, of all replicas, each step with the rank of its replica."""
        self.check_health()
        self._bind_to_loop()
        watcher = StepQueue()
        self._client.send(SetTracing(True))  # the next record then describes all requests
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.news.wait()
                if watcher.has_missed:
                    watcher.has_missed = False
                    self._client.send(SetTracing(True))
                while watcher.records:
                    yield watcher.records.popleft()
                if watcher.failure is not None:
                    raise watcher.failure
                watcher.news.clear()
        finally:
            if watcher in self._watchers:  # not if the core has died, or another event loop has taken over
                self._watchers.remove(watcher)
                if not self._watchers:
                    self._client.send(SetTracing(False))

    def check_health(self) -> None:
        """Raise an EngineDeadError if the engine has failed, or is not responding."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))
        self._client.check_health()

    def check_takes_requests(self) -> None:
        """As `check_health`; but while a core is being started, requests wait for it, up to a limit."""
        if self.dead_error is None or not self._is_restarting or self._has_waited_in_vain():
            self.check_health()

    async def wait_dead(self) -> EngineDeadError:
        """Return the reason when the engine has failed for good, or was shut down."""
        self._bind_to_loop()
        if not self._is_final:
            future = asyncio.get_running_loop().create_future()
            self._waiting_for_death.add(future)
            try:
                await future
            finally:
                self._waiting_for_death.discard(future)
        assert self.dead_error is not None
        return self.dead_error

    def shutdown(self) -> None:
        """End the engine, and its process if it has one; waits for the current step.

        Streams that have not finished get an EngineDeadError. Safe to call again, and from any thread.
        """
        self._client.shutdown()
        self._receive(CoreLost("it was shut down", has_died=False))

    # -- messages from the core ----------------------------------------------------------------------------------

    def _bind_to_loop(self) -> None:
        """Streams belong to the running event loop; those of an earlier one, which was closed, have no reader any more."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RequestError("This engine serves another event loop: use it from one thread.")
        self._loop, self._is_tending = loop, False
        self._waiting_for_death.clear()
        if self._watchers:
            self._watchers.clear()
            self._client.send(SetTracing(False))
        for stream in list(self._streams.values()):
            self._abort(stream)

    def _receive(self, message: ToFrontend) -> None:
        """Take a message from a thread of the client's to the event loop."""
        if isinstance(message, CoreLost) and message.is_last and (self.dead_error is None or self._is_restarting):
            self._is_restarting = message.may_return
            again = " Another engine is being started: try again in some seconds." if message.may_return else ""
            self.dead_error = EngineDeadError(f"{message.error}{again}")  # known at once, whatever the event loop does
        loop = self._loop
        if loop is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                loop.call_soon_threadsafe(self._handle, message)
                return
        self._handle(message)  # there is no event loop whose streams it could disturb

    def _handle(self, message: ToFrontend) -> None:
        if isinstance(message, CoreLost):
            if message.may_return or not message.is_last:
                self._lose_core(message)
            else:
                self._fail_streams(message)
        elif self._is_final:
            return
        elif isinstance(message, EngineCoreOutputs):
            try:
                self._handle_outputs(message)
            except Exception as error:  # the requests of this step have lost tokens: go no further
                logger.exception("The outputs of a step could not be processed.")
                threading.Thread(target=self._client.shutdown).start()
                self._receive(CoreLost(f"{type(error).__name__}: {error}"))
        else:
            self.dead_error, self._is_restarting = None, False
            if self._client.client_index == 0:
                self.metrics.set_replica(message.engine_index, is_ready=True)
                num_gpu_blocks = self.replicas.statuses()[message.engine_index].num_gpu_blocks
                self.metrics.set_cache_config(message.engine_index, self.cache_config, num_gpu_blocks)
            self.num_gpu_blocks = message.num_gpu_blocks
            self.input_processor.cache_tokens = self.num_gpu_blocks * self.cache_config.block_size
            if self._watchers:
                self._client.send(SetTracing(True))
            self._resume_requests()

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._set_stats(outputs.engine_index, outputs.stats)
        processed = self.output_processor.process_outputs(outputs)
        self._client.stop_sequences(processed.stopped)
        now = time.perf_counter()
        has_cache = self.cache_config.enable_prefix_caching
        self.metrics.record_outputs(outputs.engine_index, processed.updated, now, outputs.timestamp, has_cache)
        for state in processed.updated:
            stream = self._streams[state.request.request_id]
            stream.notify()
            if state.finished:
                del self._streams[state.request.request_id]
        if self.failover.note_tokens(state.request.request_id for state in processed.updated):
            self._resume_requests()
        if outputs.record is not None:
            for watcher in self._watchers:
                watcher.put(outputs.engine_index, outputs.record)

    def _lose_core(self, lost: CoreLost) -> None:
        """A core is gone, and there are others, or will be: its requests go on there."""
        self._forget_stats(lost.engine_index)
        if self._client.client_index == 0:
            self.metrics.set_replica(lost.engine_index, is_ready=False, has_died=lost.has_died)
        requests = lost.requests
        if requests is None:
            requests = self.failover.sent
            self._client.abort_requests([request_id for request_id, _ in requests])  # if another core has been started since
        for state in self.failover.lose(requests, has_died=lost.has_died, was_killed=lost.was_killed):
            self._fail_stream(self._streams.pop(state.request.request_id), give_up_error(lost))
        self._resume_requests()

    def _resume_requests(self) -> None:
        """Send requests that wait for a core, or fail them if they have waited for too long."""
        for state in self.failover.resume():
            self.metrics.record_resumption(state)
        if not self.failover.is_stuck:
            self._closed_since = None
        elif self._closed_since is None:
            self._closed_since = time.monotonic()
        if self._has_waited_in_vain():
            reason = self.dead_error or EngineDeadError("There is no replica of the model that takes requests.")
            for state in self.failover.waiting:
                self._fail_stream(self._streams.pop(state.request.request_id), reason)
        if self.failover.waiting and not self._is_tending and self._loop is not None and self._loop.is_running():
            self._is_tending = True
            self._loop.call_later(_PATIENCE_SECONDS, self._tend)

    def _tend(self) -> None:
        self._is_tending = False
        self._resume_requests()

    def _has_waited_in_vain(self) -> bool:
        return self._closed_since is not None and time.monotonic() - self._closed_since > self._failover_timeout

    def _fail_stream(self, stream: RequestStream, error: EngineDeadError) -> None:
        self.metrics.record_lost_request(stream.state)
        self.output_processor.abort_request(stream.state.request.request_id)
        self.failover.forget(stream.state.request.request_id)
        self.metrics.record_finish(stream.state, "error", time.perf_counter())
        stream.fail(error)

    def _fail_streams(self, lost: CoreLost) -> None:
        """The core is gone, or the last of several, and no other will come: tell everybody who waits."""
        if self._client.client_index == 0:
            self.metrics.set_replica(lost.engine_index, is_ready=False, has_died=lost.has_died)
        error = lost.error
        for engine_index in list(self.stats_by_engine):
            self._forget_stats(engine_index)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._fail_stream(stream, error)
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.fail(error)
        self._is_final = True
        for future in self._waiting_for_death:
            if not future.done():
                future.set_result(None)

    def _forget_stats(self, engine_index: int) -> None:
        """A core is gone, and with it what it had; its counts go on if it is back."""
        known = self.stats_by_engine.get(engine_index, SchedulerStats())
        counts = {name: getattr(known, name) for name in ("num_steps", "num_preemptions", "num_generated_tokens")}
        self._set_stats(engine_index, SchedulerStats(num_gpu_blocks=known.num_gpu_blocks, **counts))

    def _set_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        self.stats_by_engine[engine_index] = stats
        self.stats = SchedulerStats.sum(self.stats_by_engine.values())
        self._token_rates[engine_index].update(stats.num_generated_tokens, time.monotonic())
        if self._client.client_index == 0:  # one frontend is enough to tell of the cores
            self.metrics.set_stats(engine_index, stats)
