"""The synchronous engine: requests with text go in, and each step returns what is new.

    add_request ─► InputProcessor ─► EngineCoreClient ─► EngineCore.step() ─► OutputProcessor ─► RequestOutput

Mirrors `vllm/v1/engine/llm_engine.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core_client import InprocClient, SyncMPClient
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError, RequestError
from minivllm.executor.base import Executor
from minivllm.outputs import RequestOutput
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine:
    """Runs requests, one step at a time. Usually made by `LLMEngine.from_engine_args`.

    Args:
        engine_core: The way to the core, which was made with these configs, and has this clock.
        tokenizer: None for token ids only.
        seed: Requests without a seed draw theirs from a stream that starts here.
        detokenizer_cls: What makes the text of each sequence.
    """

    def __init__(
        self,
        engine_core: InprocClient | SyncMPClient,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        detokenizer_cls: type[IncrementalDetokenizer] | None = None,
    ) -> None:
        self.engine_core, self.tokenizer = engine_core, tokenizer
        self.model_config, self.cache_config, self.scheduler_config = model_config, cache_config, scheduler_config
        self.cache_tokens = engine_core.num_gpu_blocks * cache_config.block_size
        """Tokens that the whole KV cache holds."""
        in_process = isinstance(engine_core, InprocClient) and engine_core.core.executor.in_process
        self.input_processor = InputProcessor(
            model_config, scheduler_config, tokenizer, self.cache_tokens, seed, clock, in_process=in_process,
            block_size=cache_config.block_size,
        )  # fmt: skip
        self.output_processor = OutputProcessor(tokenizer, detokenizer_cls)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, in_process: bool = True) -> LLMEngine:
        """Resolve the model, load it, size and allocate the KV cache.

        Args:
            engine_args: What to run, and how.
            in_process: Run the engine core in this process, not in one of its own.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together.
        """
        from minivllm.engine.engine_config import EngineConfig

        config = EngineConfig.from_engine_args(engine_args)
        client: InprocClient | SyncMPClient
        if in_process and not config.parallel_config.has_replicas:
            executor = config.make_executor()  # first, because workers in other processes load the model meanwhile
            try:
                tokenizer = config.load_tokenizer()
            except BaseException:
                executor.shutdown()
                raise
            client = InprocClient(EngineCore.from_config(config, executor))
        else:
            if engine_args.trace:
                raise ConfigError(
                    "trace=True records one engine core in this process: leave it out, or run one core in this process."
                )
            from minivllm.data_parallel.client import make_async_mp_client

            tokenizer = config.load_tokenizer()
            client = SyncMPClient(make_async_mp_client(config))
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        engine = cls(client, *configs, tokenizer, seed=engine_args.seed, detokenizer_cls=config.detokenizer_cls)
        if engine_args.trace:
            engine.start_trace()
        return engine

    @classmethod
    def from_executor(
        cls,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> LLMEngine:
        """An engine in this process on an executor of your own, for example a simulated one."""
        configs = (model_config, cache_config, scheduler_config)
        core = EngineCore(
            *configs, executor, scheduler_cls=scheduler_cls, block_space_manager_cls=block_space_manager_cls, clock=clock
        )
        return cls(InprocClient(core), *configs, tokenizer, seed=seed, clock=clock)

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> EngineCoreRequest:
        """Validate a request and queue it. The arguments are those of `InputProcessor.process_inputs`.

        Raises:
            RequestError: It cannot be served. Nothing has been allocated for it, and no other request is affected.
        """
        if request_id in self.output_processor.states:
            raise RequestError(f"There is already a request {request_id!r}: choose another id, or wait until it has finished.")
        options: dict[str, Any] = {"arrival_time": arrival_time, "priority": priority}
        processed = self.input_processor.process_inputs(request_id, prompt, params, **options)
        state = self.output_processor.add_request(processed)
        state.engine_index = self.engine_core.add_request(state.request)
        return state.request

    def abort_request(self, request_id: str) -> None:
        """Finish a request and free its blocks. Unknown and finished ids are ignored."""
        self.output_processor.abort_request(request_id)
        self.engine_core.abort_requests([request_id])

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.output_processor.states)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self.output_processor.states)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence by one step.

        Returns:
            For each request with new tokens, or that finished, everything so far or what is new, as its `output_kind` says. If the
            model fails, the requests of the step finish with an error, and the others go on. After Ctrl-C in the model, the next
            step reports the requests that it ended.
        """
        if not self.has_unfinished_requests():
            return []
        outputs = self.engine_core.get_output()
        try:
            processed = self.output_processor.process_outputs(outputs)
            self.engine_core.stop_sequences(processed.stopped)
        except BaseException:  # Ctrl-C: these requests have lost tokens
            for output in outputs.outputs:
                self.abort_request(output.request_id)
            raise
        final_only = RequestOutputKind.FINAL_ONLY
        return [state.make_output() for state in processed.updated if state.finished or state.params.output_kind != final_only]

    @property
    def clock(self) -> Callable[[], float]:
        """Gives the time in seconds."""
        return self.input_processor.clock

    # -- the engine core in this process -------------------------------------------------------------------------

    @property
    def core(self) -> EngineCore:
        """The engine core.

        Raises:
            ConfigError: It runs in another process.
        """
        if not isinstance(self.engine_core, InprocClient):
            raise ConfigError(
                "The engine core runs in another process, out of reach: use one engine in this process (in_process=True, data_parallel_size=1)."
            )
        return self.engine_core.core

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler."""
        return self.core.scheduler

    @property
    def block_manager(self) -> BlockSpaceManager:
        """The core's block space manager."""
        return self.core.block_manager

    @property
    def executor(self) -> Any:
        """The core's executor."""
        return self.core.executor

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its cache blocks."""
        return self.core.num_preemptions

    @property
    def trace(self) -> EngineTrace | None:
        """What has been recorded, or None if nothing is."""
        return self.core.trace

    def start_trace(self) -> EngineTrace:
        """Record from now on, in a new trace. An earlier one stays as it is."""
        return self.core.start_trace()

    def stop_trace(self) -> None:
        """Stop recording."""
        self.core.stop_trace()

    def shutdown(self) -> None:
        """End the engine core, and its process if it has one."""
        self.engine_core.shutdown()
