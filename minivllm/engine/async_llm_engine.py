"""The asynchronous engine, for servers: requests come and go at any time, and each gets its tokens as a stream.

    generate() ─► InputProcessor ─► AsyncMPClient ─► EngineCore (in a process or a thread of its own): step, step, step, ...
        ▲                                                │
        └── RequestStream ◄── OutputHandler ◄── EngineCoreOutputs

The core never steps on the event loop, so that HTTP stays responsive while the model runs. Mirrors `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.data_parallel.client import DPLBAsyncMPClient, make_async_mp_client
from minivllm.data_parallel.launcher import FrontendPlace, OtherFrontends
from minivllm.engine.core_client import AsyncMPClient
from minivllm.engine.core_handle import CoreThread
from minivllm.engine.core_messages import CoreLost, ReplicaChanged, SchedulerStats, ToFrontend
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.metrics import Metrics
from minivllm.engine.output_handler import OutputHandler
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


class AsyncLLMEngine:
    """Runs an engine core in the background and streams what it generates. Usually made by `from_engine_args`.

    Args:
        client: The way to the core, or to several, which were made with these configs.
        tokenizer: None for token ids only.
        seed: Requests without a seed draw theirs from a stream that starts here.
        input_processor: That of an engine which this one takes over; its stream of seeds continues.
        detokenizer_cls: What makes the text of each sequence.

    Attributes:
        stats_by_engine: The state of each replica's scheduler after its latest step, by rank.
        metrics, replicas: For Prometheus; and what the replicas do, and how to restart one.

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
        input_processor: InputProcessor | None = None,
        detokenizer_cls: type[IncrementalDetokenizer] | None = None,
    ) -> None:
        self.model_config, self.cache_config, self.scheduler_config = model_config, cache_config, scheduler_config
        self.tokenizer, self._client = tokenizer, client
        self.replicas = client
        cache_tokens = self.num_gpu_blocks * cache_config.block_size
        self.input_processor = input_processor or InputProcessor(
            model_config, scheduler_config, tokenizer, cache_tokens, seed, block_size=cache_config.block_size
        )
        self.input_processor.num_engines = self.num_engines
        self.input_processor.load_grammar_tokenizer()
        self.output_processor = OutputProcessor(tokenizer, detokenizer_cls)
        self.metrics = Metrics(model_config.name, cache_config, client.num_engines, client.client_index, client.client_count)
        for status in self.replicas.statuses():
            self.metrics.record_change(ReplicaChanged(status.rank, status.state == "ready", status.num_gpu_blocks))
        self.stats_by_engine = self.metrics.stats_by_engine
        self._outputs = OutputHandler(client, self.output_processor, self.metrics)
        client.start(self._receive)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        in_process: bool = False,
        num_threads: int | None = None,
        restart: bool = False,
        others: OtherFrontends | None = None,
    ) -> AsyncLLMEngine:
        """Start an engine and wait until it is ready. That takes seconds, so call it by `asyncio.to_thread` in a coroutine.

        Args:
            engine_args: As for `LLMEngine`. Use `steps` instead of a trace.
            in_process: Run the core in a thread of this process, not in a process of its own.
            num_threads: Threads that the core's own process computes with; one for each processor if None.
            restart: Start another core when one dies; its requests continue there. With replicas, they continue on the others meanwhile.
            others: Further frontends, in processes of their own, that use the same cores and `join`.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together, or name a class that another process cannot import.
            EngineDeadError: A process ended before it was ready.
        """
        if engine_args.trace:
            raise ConfigError("A server's trace would grow forever: leave trace=True out, and watch AsyncLLMEngine.steps().")
        if in_process:
            if restart or num_threads is not None:
                raise ConfigError("restart and num_threads need a core in a process of its own: leave out in_process.")
            if engine_args.parallel_config().has_replicas:
                raise ConfigError("Replicas run in processes of their own: leave out in_process, or data_parallel_size.")
            return cls.from_engine(LLMEngine.from_engine_args(engine_args), owns_core=True)
        config = EngineConfig.from_engine_args(engine_args)
        tokenizer = config.load_tokenizer()
        client = make_async_mp_client(config, num_threads, restart, others)
        return cls(client, *_configs(config), tokenizer, seed=engine_args.seed, detokenizer_cls=config.detokenizer_cls)

    @classmethod
    def join(cls, config: EngineConfig, place: FrontendPlace, seed: int) -> AsyncLLMEngine:
        """One of the `others` of `from_engine_args`, in its process. Waits until the cores are ready. Raises the same errors.

        Args:
            config, place: As they were given to the others' `start`.
            seed: As in the constructor; each frontend has a stream of its own.
        """
        tokenizer, client = config.load_tokenizer(), DPLBAsyncMPClient(config, place)
        return cls(client, *_configs(config), tokenizer, seed=seed + (place.client_index << 64))

    @classmethod
    def from_engine(cls, engine: LLMEngine, *, owns_core: bool = False) -> AsyncLLMEngine:
        """Run the core of an existing engine in a thread of this process. Until `shutdown`, do not use the other engine.

        Args:
            engine: The other engine.
            owns_core: Whether `shutdown` ends the core, too.

        Raises:
            ConfigError: It has unfinished requests, or records a trace.
        """
        if engine.has_unfinished_requests():
            raise ConfigError("The engine has unfinished requests: finish or abort them first.")
        core = engine.core
        if core.trace is not None:
            raise ConfigError("The engine records a trace, which would grow forever: stop_trace() first.")
        return cls(
            AsyncMPClient(CoreThread(core, owns_core=owns_core)),
            *_configs(core),
            engine.tokenizer,
            input_processor=engine.input_processor,
            detokenizer_cls=engine.output_processor.detokenizer_cls,
        )

    @property
    def num_engines(self) -> int:
        """How many replicas there are to be."""
        return self._client.num_engines

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the KV cache on the device; of the replica that has fewest, if there are several."""
        return self._client.num_gpu_blocks

    async def process_inputs(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> ProcessedRequest:
        """Validate, tokenize and seed a request, for `generate`.

        Args:
            prompt, params: As for `InputProcessor.process_inputs`. `SamplingParams.output_kind` says in which pieces to generate.
            request_id: Your name for it; one is made up if None.
            options: `arrival_time`, `priority` and `data_parallel_rank`, as for `InputProcessor.process_inputs`.

        Raises:
            RequestError: It cannot be served.
        """
        if options.get("arrival_time") is None:
            options["arrival_time"] = time.perf_counter()
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.wrap_future(self.input_processor.submit_grammar(params))  # grammars hold up only each other
        # In a thread: a long text takes long to encode, and other requests must not wait for it.
        return await asyncio.to_thread(self.input_processor.process_inputs, request_id, prompt, params, **options)

    async def generate(
        self,
        prompt: Prompt | ProcessedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come. The last one has `finished` set; that of a request that failed, `error` too.

        When tokens come faster than they are read, one output has several. Closing the generator early, or cancelling the task that
        waits for it, aborts the request. The arguments are those of `process_inputs`; or give as `prompt` what that returned.

        Raises:
            RequestError: It cannot be served; raised before anything is queued.
            EngineDeadError: The engine has failed, before or meanwhile.
        """
        self.check_takes_requests()
        self._outputs.bind_to_loop()
        if not isinstance(prompt, ProcessedRequest):
            prompt = await self.process_inputs(prompt, sampling_params, request_id, **options)
            self.check_takes_requests()
        request_id = prompt.core_request.request_id
        if request_id in self._outputs.streams:
            raise RequestError(f"There is already a request {request_id!r}: choose another id, or wait until it has finished.")
        stream = self._outputs.open(prompt)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._outputs.abort(stream)

    async def abort(self, request_id: str) -> None:
        """End a request's stream with the finish reason "abort". Unknown and finished ids are ignored."""
        self._outputs.finish(request_id)

    def num_unfinished_requests(self) -> int:
        """Requests whose stream has not finished."""
        return len(self._outputs.streams)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has failed for good; None while it has not."""
        return self._outputs.dead_error

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state after the latest step; the sum over replicas if there are several."""
        return SchedulerStats.sum(self.stats_by_engine.values())

    def tokens_per_second(self, engine_index: int = 0) -> float:
        """How fast a core has generated in the last two seconds, for all its frontends together."""
        return self.metrics.tokens_per_second(engine_index)

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
        self._outputs.bind_to_loop()
        async with contextlib.aclosing(self._outputs.watchers.watch()) as steps:
            async for step in steps:
                yield step

    def check_health(self) -> None:
        """Raise an EngineDeadError if the engine has failed, or is not responding."""
        self._outputs.check_alive()
        self._client.check_health()

    def check_takes_requests(self) -> None:
        """As `check_health`; but while a core is being started, requests wait for it, up to a limit."""
        self._outputs.check_alive()
        self._client.check_takes_requests()

    async def wait_dead(self) -> EngineDeadError:
        """Return the reason when the engine has failed for good, or was shut down."""
        return await self._outputs.wait_dead()

    def shutdown(self) -> None:
        """End the engine, and its process if it has one; waits for the current step.

        Streams that have not finished get an EngineDeadError. Safe to call again, and from any thread.
        """
        self._client.shutdown()
        self._receive(CoreLost("it was shut down"))

    def _receive(self, message: ToFrontend) -> None:
        """Handle a message from the client, in the client's thread."""
        self.input_processor.num_engines = self.num_engines
        if isinstance(message, ReplicaChanged):
            self.input_processor.cache_tokens = self.num_gpu_blocks * self.cache_config.block_size
        self._outputs.receive(message)


def _configs(of: EngineConfig | EngineCore) -> tuple[ModelConfig, CacheConfig, SchedulerConfig]:
    return of.model_config, of.cache_config, of.scheduler_config
