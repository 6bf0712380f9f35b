"""The engine: takes requests at any time, and with each step brings all that run one token further.

Mirrors `vllm/v1/engine/llm_engine.py`. Everything that decides is in `core/`, everything that computes is behind the
Executor.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import EngineTrace, StepRecord
from minivllm.engine.trace_recorder import TraceRecorder
from minivllm.errors import ConfigError, RequestError
from minivllm.executor.base import Executor
from minivllm.outputs import RequestOutput
from minivllm.request import Request, SequenceStatus
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)


class LLMEngine:
    """Runs requests to their end, a step at a time.

    Usually made by `LLMEngine.from_engine_args`. The parts are given in, so that any of them can be another: a
    learner's scheduler, a simulated executor, a virtual clock.

    Args:
        model_config: Limits of the model.
        cache_config: How the cache is cut up.
        scheduler_config: Limits and policies of the scheduler.
        executor: Who computes.
        tokenizer: None for token ids only.
        scheduler_cls, block_space_manager_cls: The classes to make.
        seed: From it come the random streams of requests without a seed.
        clock: Gives the time in seconds.
        trace: Record what is done in `self.trace`, from the start.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        trace: bool = False,
    ) -> None:
        self.model_config = model_config
        self.cache_config = cache_config
        self.scheduler_config = scheduler_config
        self.executor = executor
        self.tokenizer = tokenizer
        self.clock = clock
        num_gpu_blocks, num_cpu_blocks = executor.determine_num_available_blocks()
        executor.initialize_cache(num_gpu_blocks, num_cpu_blocks)
        self.block_manager = block_space_manager_cls(
            cache_config.block_size,
            num_gpu_blocks,
            num_cpu_blocks,
            watermark=cache_config.watermark,
            enable_prefix_caching=cache_config.enable_prefix_caching,
        )
        self.scheduler = scheduler_cls(scheduler_config, self.block_manager)
        self.cache_tokens = num_gpu_blocks * cache_config.block_size
        """Tokens that the whole cache holds."""
        self.input_processor = InputProcessor(model_config, scheduler_config, tokenizer, self.cache_tokens)
        self.output_processor = OutputProcessor(tokenizer)
        self.num_preemptions = 0
        """How often a sequence lost its cache blocks, since the engine was made."""
        self._recorder: TraceRecorder | None = None
        self._undelivered: list[RequestOutput] = []
        """Outputs of a step that was interrupted; the next one gives them out."""
        self._random = random.Random(seed)
        eos = set(model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos if 0 <= token_id < model_config.vocab_size))
        if trace:
            self.start_trace()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Resolve the model, load it, size and allocate the cache.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together.
        """
        # Imported here, so that an engine on another executor needs no torch.
        from minivllm.executor.uniproc import UniProcExecutor
        from minivllm.models.hub import resolve_model
        from minivllm.models.registry import load_model_config

        _check_plugin("scheduler_cls", args.scheduler_cls)
        _check_plugin("block_space_manager_cls", args.block_space_manager_cls)
        path = resolve_model(args.model)
        model_config = load_model_config(str(args.model), path, args.max_model_len)
        configs = (model_config, args.cache_config(), args.scheduler_config(model_config.max_model_len))
        tokenizer = None if args.skip_tokenizer_init else Tokenizer(path)
        return cls(
            *configs,
            UniProcExecutor(*configs, args.worker_config()),
            tokenizer,
            scheduler_cls=args.scheduler_cls or Scheduler,
            block_space_manager_cls=args.block_space_manager_cls or BlockSpaceManager,
            seed=args.seed,
            trace=args.trace,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> Request:
        """Check a request and queue it.

        Args:
            request_id: Your name for it, unique among the requests that live.
            prompt: Text, token ids, or a dict with "prompt" or "prompt_token_ids".
            params: What is wanted; the defaults if None.
            arrival_time: Seconds of the engine's clock; now if None.
            priority: With the "priority" policy, smaller numbers go first.

        Raises:
            RequestError: It cannot be served. Nothing has been allocated for it, and no other request is affected.
        """
        self.input_processor.check_request_id(request_id)
        if request_id in self.output_processor.states:
            raise RequestError(f"There is a request {request_id!r} already: choose another id, or wait until it has ended.")
        params = SamplingParams() if params is None else params
        text, token_ids = self.input_processor.read_prompt(prompt)
        max_num_tokens = self.input_processor.check(len(token_ids), params, arrival_time, priority)
        request = Request(
            request_id,
            token_ids,
            params,
            max_num_tokens=max_num_tokens,
            arrival_time=self.clock() if arrival_time is None else arrival_time,
            eos_token_ids=self._eos_token_ids,
            prompt=text,
            priority=priority,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
        )
        self.scheduler.add_request(request)
        self.output_processor.add_request(request)
        if self._recorder is not None:
            self._recorder.add_request(request)
        return request

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks. Unknown and finished ids are ignored."""
        self.scheduler.abort_request(request_id)
        state = self.output_processor.states.pop(request_id, None)
        if state is not None:
            state.request.metrics.finished_time = self.clock()
            if self._recorder is not None:
                self._recorder.abort_request(state.request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished_requests() or bool(self._undelivered)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self.scheduler.requests)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, compute and take in one step.

        Returns:
            For each request that ended, or got a token and wants to know, all there is of it so far (or what is new). If the
            model fails, the requests of the step end with the error; the others go on. After Ctrl-C the next step tells of
            those that ended.
        """
        if self._undelivered:
            outputs, self._undelivered = self._undelivered, []
            return outputs
        recorder = self._recorder
        start = self.clock()
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted)
        if not output.scheduled and not output.preempted:
            if self.scheduler.has_unfinished_requests():
                name, count = type(self.scheduler).__name__, len(self.scheduler.requests)
                raise RuntimeError(
                    f"{name} scheduled nothing, though {count} requests are unfinished: it would go on so for ever."
                )
            return []
        for scheduled in output.scheduled:
            metrics = scheduled.seq.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = start
        record = None if recorder is None else recorder.begin_step(output, start)
        try:
            results = self.executor.execute_model(output)
            if len(results) != len(output.scheduled):
                raise RuntimeError(f"the executor gave {len(results)} results for {len(output.scheduled)} sequences")
        except Exception as error:
            logger.exception("The model failed in a step of %d sequences; their requests end.", len(output.scheduled))
            return self._fail_step(output, error, record)
        except BaseException as error:  # Ctrl-C: what was decided has not been done, so the step cannot be taken again
            self._undelivered = self._fail_step(output, error, record)
            raise
        now = self.clock()
        advanced = self.scheduler.update(output, results)
        for seq, stop in self.output_processor.process(output, results, advanced, now):
            if seq.finished:  # a token ended it in the same step; the stop string comes before that token
                seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, stop
            self.scheduler.finish_sequence(seq, SequenceStatus.FINISHED_STOPPED, stop)
        requests = dict.fromkeys(seq.request for seq, _ in advanced)
        outputs = [
            self.output_processor.make_output(request, now)
            for request in requests
            if request.finished or request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        ]
        if recorder is not None and record is not None:
            recorder.end_step(record, output, results, requests, now)
        return outputs

    def _fail_step(self, output: SchedulerOutput, error: BaseException, record: StepRecord | None) -> list[RequestOutput]:
        """End every request that the failed step touched: what is in their cache blocks is unknown."""
        sequences = [*(scheduled.seq for scheduled in output.scheduled), *output.preempted, *output.swapped_in]
        requests, outputs, now = dict.fromkeys(seq.request for seq in sequences), [], self.clock()
        for request in requests:
            request.error = f"The model failed while it computed a step: {type(error).__name__}: {error}."
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
            outputs.append(self.output_processor.make_output(request, now))
        if record is not None and self._recorder is not None:
            record.error = f"{type(error).__name__}: {error}"
            self._recorder.end_step(record, output, [], requests, now)
        return outputs

    # -- traces --------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> EngineTrace | None:
        """What has been recorded, or None if nothing is."""
        return None if self._recorder is None else self._recorder.trace

    def start_trace(self) -> EngineTrace:
        """Record from now on, in a new trace. One that was recorded before stays as it is."""
        self._recorder = TraceRecorder(self)
        return self._recorder.trace

    def stop_trace(self) -> None:
        """Record no longer."""
        self._recorder = None


def _check_plugin(name: str, plugin: Any) -> None:
    if plugin is not None and not isinstance(plugin, type):
        raise ConfigError(f"{name} must be a class, not {plugin!r}.")
