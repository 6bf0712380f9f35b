"""The engine core: a scheduler and an executor. It deals in token ids and knows neither text nor users.

    add_request ─► Scheduler.schedule() ─► Executor.execute_model() ─► Scheduler.update() ─► EngineCoreOutputs
                          ▲                                                    │
                          └──────────────────── next step ◄────────────────────┘

Mirrors `EngineCore` in `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.core.structured_output import StructuredOutputManager
from minivllm.engine.core_messages import EngineCoreOutput, EngineCoreOutputs, NewTokens, SchedulerStats, StoppedSequence
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.trace import EngineTrace
from minivllm.engine.trace_recorder import TraceRecorder
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.executor.base import Executor
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput

logger = logging.getLogger(__name__)

PendingStep = Callable[[], list[SequenceOutput]]
"""A step that was launched. Calling it waits for the results."""


class EngineCore:
    """Advances requests, one step at a time.

    The parts are passed in, so that any of them can be another: a learner's scheduler, a simulated executor, a virtual clock.

    Args:
        model_config: Limits of the model.
        cache_config: Layout of the KV cache.
        scheduler_config: Limits and policies of the scheduler.
        executor: Runs the model.
        scheduler_cls, block_space_manager_cls: The classes to use.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        executor: Executor,
        *,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model_config = model_config
        self.cache_config = cache_config
        self.scheduler_config = scheduler_config
        self.executor = executor
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
        self.num_gpu_blocks = num_gpu_blocks
        self.num_requests = 0
        """Requests received so far."""
        self.num_steps = 0
        self.num_preemptions = 0
        """How often a sequence lost its cache blocks."""
        self.num_generated_tokens = 0
        self.has_failed = False
        """Whether the model failed in the last step."""
        self.structured_outputs = StructuredOutputManager(model_config)
        """Holds the requests whose grammar is being compiled, which the scheduler does not know yet."""
        self._recorder: TraceRecorder | None = None
        self._outputs: list[EngineCoreOutput] = []
        """What `report` returns next."""

    @classmethod
    def from_config(cls, config: EngineConfig, executor: Executor | None = None) -> EngineCore:
        """Load the model, size and allocate the KV cache.

        Args:
            config: Resolved.
            executor: One of `make_executor`, if that was called before; it is shut down if this fails.

        Raises:
            ModelLoadError: The model cannot be used.
            ConfigError: The configuration cannot work on this machine.
        """
        executor = executor or make_executor(config)
        try:
            return cls(
                config.model_config,
                config.cache_config,
                config.scheduler_config,
                executor,
                scheduler_cls=config.scheduler_cls,
                block_space_manager_cls=config.block_space_manager_cls,
            )
        except BaseException:
            executor.shutdown()
            raise

    def use_scheduler(self, scheduler_cls: type[Scheduler], scheduler_config: SchedulerConfig | None = None) -> None:
        """Replace the scheduler, to compare several on one loaded model.

        Args:
            scheduler_cls: The class to use.
            scheduler_config: Other limits; None keeps them.

        Raises:
            ConfigError: There are unfinished requests.
        """
        if self.has_unfinished_requests():
            raise ConfigError("The engine has unfinished requests: finish or abort them first.")
        self.scheduler_config = scheduler_config or self.scheduler_config
        self.scheduler = scheduler_cls(self.scheduler_config, self.block_manager)

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: Its id is in use, or a scheduler of your own cannot resume it.
        """
        if request.request_id in self.scheduler.requests or request.request_id in self.structured_outputs.compiling:
            raise RequestError(
                f"There is already a request {request.request_id!r}: choose another id, or wait until it has finished."
            )
        resumption = request.resumption
        if resumption is not None and not (hasattr(self.scheduler, "resume_request") and resumption.output_token_ids):
            raise RequestError(f"{type(self.scheduler).__name__} cannot go on with a request that another engine core has begun.")
        added = Request(request)
        added.ordinal = self.num_requests
        self.num_requests += 1
        if added.metrics.queued_time is None:  # unless another core had it before
            added.metrics.queued_time = self.clock()
        if added.sampling_params.structured_outputs is None:
            self._schedule_request(added)
        else:
            self.structured_outputs.add_request(added)

    def _schedule_request(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        if request.data.resumption is None:
            self.scheduler.add_request(request)
        else:
            self.scheduler.resume_request(request, request.data.resumption)
        if self._recorder is not None:
            self._recorder.add_request(request)

    def _schedule_compiled(self) -> None:
        """Hand over the requests whose grammars have been compiled."""
        for request, error in self.structured_outputs.take_compiled():
            if error is None:
                self._schedule_request(request)
            else:  # the frontend has compiled it, so this is a limit or a lack of memory
                request.metrics.finished_time = self.clock()
                ended = [NewTokens(index, [], finish_reason="error") for index in range(request.sampling_params.n)]
                self._outputs.append(make_output(request, ended, True, error))

    def requests_of(self, client_index: int) -> list[str]:
        """The ids of an API server's unfinished requests."""
        requests = [*self.scheduler.requests.values(), *(request for request, _ in self.structured_outputs.compiling.values())]
        return [request.request_id for request in requests if request.data.client_index == client_index]

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Finish requests and free their blocks. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            if request_id in self.structured_outputs.compiling:
                self.structured_outputs.abort_request(request_id)
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                self.scheduler.abort_request(request_id)
                request.metrics.finished_time = self.clock()
                if self._recorder is not None:
                    self._recorder.abort_request(request)
            self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def stop_sequences(self, sequences: Iterable[StoppedSequence]) -> None:
        """Finish sequences in whose text a stop string was found, and free their blocks. Finished ones are ignored."""
        for stopped in sequences:
            request = self.scheduler.requests.get(stopped.request_id)
            if request is None or request.data.number != stopped.number:
                continue
            seq = next((seq for seq in request.sequences if seq.index == stopped.index), None)
            if seq is None or seq.finished:
                continue
            self.scheduler.finish_sequence(seq, SequenceStatus.FINISHED_STOPPED, stopped.stop_reason)
            if request.finished:
                request.metrics.finished_time = self.clock()
            if self._recorder is not None:
                self._recorder.stop_sequence(seq)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished_requests() or bool(self.structured_outputs.compiling or self._outputs)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update, report: advance every scheduled sequence.

        If the model fails, the requests of the step finish with an error, and the others go on. After Ctrl-C in the model, the next
        step reports the requests that it ended.
        """
        scheduled = self.schedule()
        if scheduled is None:
            return self.report()
        try:
            results = self.collect(scheduled, self.launch(scheduled))
        except BaseException as error:
            self._fail_step(scheduled, error)
            return self.report()
        now = self.clock()
        self.update(scheduled, results, now)
        return self.report(now)

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step. None if there is nothing to compute now, or something to report first."""
        self.has_failed = False
        if self.structured_outputs.compiling:
            self._schedule_compiled()
        if self._outputs:
            return None
        start = self.clock()
        scheduled = self.scheduler.schedule()
        if not scheduled.scheduled and not scheduled.preempted:
            self._check_idle()
            if self.structured_outputs.compiling:
                self.structured_outputs.wait()
            return None
        self.num_steps += 1
        self.num_preemptions += len(scheduled.preempted)
        for item in scheduled.scheduled:
            metrics = item.seq.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = start
        if self._recorder is not None:
            self._recorder.begin_step(scheduled, self.scheduler, start)
        return scheduled

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Hand a step to the executor, which computes it when `collect` asks for the results."""
        return partial(self.executor.execute_model, scheduled.to_request())

    def collect(self, scheduled: SchedulerOutput, pending: PendingStep) -> list[SequenceOutput]:
        """Wait for the results of a step."""
        results = pending()
        if len(results) != len(scheduled.scheduled):
            raise RuntimeError(f"the executor returned {len(results)} results for {len(scheduled.scheduled)} sequences")
        return results

    def update(self, scheduled: SchedulerOutput, results: list[SequenceOutput], now: float) -> None:
        """Hand the results to the scheduler, and collect for `report` what they add to each request.

        Args:
            scheduled, results: The step.
            now: When the model had computed.
        """
        advanced = self.scheduler.update(scheduled, results)
        step = list(zip(scheduled.scheduled, results, strict=True))
        errors = {item.seq.request: result.error for item, result in step if result.error is not None}
        for request in errors:
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
        outputs: dict[Request, EngineCoreOutput] = {}
        for seq, i in advanced:
            request, (item, result) = seq.request, step[i]
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if request not in outputs:
                outputs[request] = make_output(request, [])
            outputs[request].sequences.append(self._take_new_tokens(seq, item.seq, result))
            if seq.grammar is not None and seq.grammar.error:
                errors.setdefault(request, f"structured_outputs cannot go on: {seq.grammar.error}")
        for item, result in step:
            request = item.seq.request
            if result.prompt_logprobs and (request in outputs or request.request_id in self.scheduler.requests):
                if request not in outputs:  # a chunk in the middle of the prompt
                    outputs[request] = make_output(request, [])
                outputs[request].prompt_logprobs = result.prompt_logprobs
        for request, output in outputs.items():
            if request.finished:
                request.metrics.finished_time = now
            output.finished, output.error, output.metrics = request.finished, errors.get(request), request.metrics.copy()
        self._outputs += outputs.values()
        if self._recorder is not None:
            requests = dict.fromkeys(seq.request for seq, _ in advanced)
            self._recorder.end_step(scheduled, requests, now, self.executor.take_timing(), results)

    def _take_new_tokens(self, seq: Sequence, parent: Sequence, result: SequenceOutput) -> NewTokens:
        """What a step added to a sequence. Its result has a token for each sibling forked from `parent`, or several for one sequence."""
        token_ids = seq.take_new_tokens()
        self.num_generated_tokens += len(token_ids)
        first = seq.index - parent.index
        logprobs = result.logprobs[first : first + len(token_ids)] if result.logprobs else None
        return NewTokens(seq.index, token_ids, logprobs, seq.finish_reason, seq.stop_reason)

    def report(self, timestamp: float | None = None) -> EngineCoreOutputs:
        """What there is to say to the frontend, and the state of the scheduler.

        Args:
            timestamp: When the model had computed; now if None.
        """
        outputs, self._outputs = self._outputs, []
        stats = SchedulerStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.structured_outputs.compiling),
            num_swapped=len(self.scheduler.swapped),
            num_used_blocks=int(self.num_gpu_blocks - self.block_manager.get_num_free_gpu_blocks()),  # may be NumPy's
            num_gpu_blocks=self.num_gpu_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_generated_tokens=self.num_generated_tokens,
        )
        return EngineCoreOutputs(outputs, self.clock() if timestamp is None else timestamp, stats)

    def _check_idle(self) -> None:
        """Nothing was scheduled: raise a RuntimeError if there are requests, which is a mistake in a learner's scheduler."""
        if self.scheduler.has_unfinished_requests():
            name, count = type(self.scheduler).__name__, len(self.scheduler.requests)
            unfinished = "1 request is" if count == 1 else f"{count} requests are"
            raise RuntimeError(f"{name} scheduled nothing, though {unfinished} unfinished: it would do so forever.")

    def _fail_step(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        """Finish every request of a failed step, because the contents of their cache blocks are unknown.

        Raises:
            EngineDeadError: There will be no more steps.
            KeyboardInterrupt: And whatever else is no `Exception`. Queues and tables have changed, so the step cannot be repeated.
        """
        if isinstance(error, EngineDeadError):
            raise error
        if isinstance(error, Exception):
            self.has_failed = True
            logger.exception("The model failed in a step of %d sequences; their requests finish.", len(scheduled.scheduled))
        sequences = [*(item.seq for item in scheduled.scheduled), *scheduled.preempted, *scheduled.swapped_in]
        requests, now = dict.fromkeys(seq.request for seq in sequences), self.clock()
        for request in requests:
            unfinished = [seq for seq in request.sequences if not seq.finished]
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
            request.metrics.finished_time = now
            ended = [NewTokens(seq.index, [], finish_reason=seq.finish_reason) for seq in unfinished]
            message = f"The model failed in a step: {type(error).__name__}: {error}."
            self._outputs.append(make_output(request, ended, True, message))
        if self._recorder is not None:
            timing = self.executor.take_timing()
            self._recorder.end_step(scheduled, requests, now, timing, error=f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            raise error

    # -- traces --------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> EngineTrace | None:
        """What has been recorded, or None if nothing is."""
        return None if self._recorder is None else self._recorder.trace

    def start_trace(self) -> EngineTrace:
        """Record from now on, in a new trace. An earlier one stays as it is."""
        configs = (self.model_config, self.cache_config, self.scheduler_config)
        self._recorder = TraceRecorder(*configs, self.scheduler, self.block_manager)
        self.executor.record_timing(True)
        return self._recorder.trace

    def snapshot_requests(self) -> None:
        """Describe all requests in the next step's record, and new ones in later records, for a reader who joins now."""
        if self._recorder is not None:
            self._recorder.snapshot_requests(self.scheduler.requests.values())

    def stop_trace(self) -> None:
        """Stop recording."""
        self._recorder = None
        self.executor.record_timing(False)

    def shutdown(self) -> None:
        """End the workers."""
        self.structured_outputs.shutdown()
        self.executor.shutdown()


def make_output(
    request: Request, sequences: list[NewTokens], finished: bool = False, error: str | None = None
) -> EngineCoreOutput:
    """What to tell the frontend of a request."""
    data, metrics = request.data, request.metrics.copy()
    return EngineCoreOutput(
        data.request_id, data.number, sequences, finished, metrics, error=error, client_index=data.client_index
    )


def make_executor(config: EngineConfig) -> Executor:
    """The executor that the configuration asks for, with the model loaded, or being loaded by other processes."""
    configs = (config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
    if config.parallel_config.uses_processes:
        from minivllm.executor.multiproc import MultiProcExecutor

        return MultiProcExecutor(*configs, config.parallel_config.tensor_parallel_size)
    from minivllm.executor.uniproc import UniProcExecutor  # a core on another executor does not load torch

    return UniProcExecutor(*configs)
