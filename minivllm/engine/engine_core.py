"""The engine core: a scheduler and an executor. It deals in token ids and knows neither text nor users.

    add_request ─► Scheduler.schedule() ─► Executor.execute_model() ─► Scheduler.update() ─► EngineCoreOutputs
                          ▲                                                    │
                          └──────────────────── next step ◄────────────────────┘

With an `AsyncScheduler`, several steps are in flight: the next ones are scheduled and launched before the results of the oldest come. Mirrors
`EngineCore` in `vllm/v1/engine/core.py`, whose `step_with_batch_queue` is `step` here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.pipeline_scheduler import PipelineScheduler, settle_window
from minivllm.core.scheduler import Scheduler
from minivllm.core.structured_output import StructuredOutputManager
from minivllm.engine.core_messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats, StoppedSequence
from minivllm.engine.core_outputs import CoreOutputs
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.trace import EngineTrace
from minivllm.engine.trace_recorder import TraceRecorder
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.executor.base import Executor, PendingStep, fail_later
from minivllm.request import EngineCoreRequest, Request, SequenceStatus
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput

logger = logging.getLogger(__name__)


class EngineCore:
    """Advances requests, one step at a time.

    The parts are passed in, so that each can be replaced: by a learner's scheduler, a simulated executor, a virtual clock (in seconds).
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
        self.model_config, self.cache_config, self.scheduler_config = model_config, cache_config, scheduler_config
        self.executor, self.clock = executor, clock
        self.num_gpu_blocks, num_cpu_blocks = executor.determine_num_available_blocks()
        executor.initialize_cache(self.num_gpu_blocks, num_cpu_blocks)
        self._make_block_manager = partial(
            block_space_manager_cls,
            cache_config.block_size,
            self.num_gpu_blocks,
            num_cpu_blocks,
            watermark=cache_config.watermark,
            enable_prefix_caching=cache_config.enable_prefix_caching,
        )
        self.block_manager: BlockSpaceManager = self._make_block_manager()
        self.scheduler = scheduler_cls(scheduler_config, self.block_manager)
        self.num_requests = self.num_steps = 0  # so far
        self.num_preemptions = 0
        """How often a sequence lost its cache blocks."""
        self.has_failed: bool | None = None
        """Whether the model failed in the last `step`; None if no step ended there, or only steps that nobody waits for."""
        self.structured_outputs = StructuredOutputManager(model_config)
        """Requests wait here until their grammars are compiled."""
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        """Steps that were launched and not collected yet, the oldest first."""
        self._is_settled = True
        """Whether queues and tables are as a step should leave them, though it was interrupted."""
        self._recorder: TraceRecorder | None = None
        self.outputs = CoreOutputs()
        """What `report` returns next."""

    @classmethod
    def from_config(cls, config: EngineConfig, executor: Executor | None = None) -> EngineCore:
        """Load the model, unless the `executor` from `config.make_executor()` is doing so, size and allocate the KV cache.

        Raises:
            ModelLoadError: The model cannot be used.
            ConfigError: The configuration cannot work on this machine.
        """
        executor = executor or config.make_executor()
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        scheduler_cls, manager_cls = config.scheduler_cls, config.block_space_manager_cls
        try:
            return cls(*configs, executor, scheduler_cls=scheduler_cls, block_space_manager_cls=manager_cls)
        except BaseException:
            executor.shutdown()
            raise

    def use_scheduler(self, scheduler_cls: type[Scheduler], scheduler_config: SchedulerConfig | None = None) -> None:
        """Replace the scheduler, and perhaps its limits, to compare several on one loaded model.

        Raises:
            ConfigError: There are unfinished requests.
        """
        self.finish_surplus_steps()
        if self.has_unfinished_requests():
            raise ConfigError("The engine has unfinished requests: finish or abort them first.")
        self.scheduler_config = settle_window(scheduler_cls, scheduler_config or self.scheduler_config, self.block_manager)
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
        added.ordinal, self.num_requests = self.num_requests, self.num_requests + 1
        if added.metrics.queued_time is None:  # unless another core had it before
            added.metrics.queued_time = self.clock()
        if added.sampling_params.structured_outputs is None:
            self._schedule_request(added)
        else:
            self.structured_outputs.add_request(added)

    def _schedule_request(self, request: Request) -> None:
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
                self.outputs.add_failure(request, range(request.sampling_params.n), error, self.clock())

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
            self.outputs.forget(request_id)

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
        others = self.structured_outputs.compiling or self.outputs.waiting or self._in_flight
        return self.scheduler.has_unfinished_requests() or bool(others)

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def max_concurrent_batches(self) -> int:
        """How many steps may be in flight: as many as the executor takes, or one with a scheduler that is not made for several."""
        has_stages = self.scheduler_config.pipeline_parallel_size > 1
        needed = PipelineScheduler if has_stages else AsyncScheduler
        return self.executor.max_concurrent_batches if isinstance(self.scheduler, needed) else 1

    def step(self) -> EngineCoreOutputs:
        """Schedule and launch steps until enough are in flight; then wait for the oldest, update, report.

        If the model fails, the requests of the step finish with an error, and the others go on. After Ctrl-C, the next step reports the requests
        that it ended: those of the step that was launched or waited for; or all, if queues and tables may be half changed.
        """
        self.has_failed, self._is_settled = None, False
        try:
            timestamp = self._advance()
        except KeyboardInterrupt:
            if not self._is_settled:
                self._start_over()
            raise
        return self.report(timestamp)

    def _advance(self) -> float | None:
        """Launch steps, and finish the oldest. Returns when the model had finished that; None if it failed, or there is none."""
        while len(self._in_flight) < self.max_concurrent_batches and (scheduled := self.schedule()) is not None:
            try:
                pending = self.launch(scheduled)
            except Exception as error:
                pending = fail_later(error)  # after the steps that were launched before
            except BaseException as error:
                self._fail_step(scheduled, error)
            self._in_flight.append((scheduled, pending))
        return self._finish_oldest() if self._in_flight else None

    def _finish_oldest(self) -> float | None:
        """Wait for the oldest step in flight, and update. Returns when the model had finished; None if it failed."""
        scheduled, pending = self._in_flight.popleft()
        try:
            results = self.collect(scheduled, pending)
        except BaseException as error:
            self._fail_step(scheduled, error)
            return None
        now = self.clock()
        self.update(scheduled, results, now)
        self.has_failed = bool(self.has_failed)
        return now

    def finish_surplus_steps(self) -> None:
        """If no request is left, wait for the steps that are still in flight. Nobody needs their results."""
        while self._in_flight and not self.scheduler.has_unfinished_requests():
            self._finish_oldest()

    def report_again(self, outputs: list[EngineCoreOutput]) -> None:
        """Report outputs once more, with the next step: they did not arrive."""
        self.outputs.add_again(outputs)

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step. None if there is nothing to compute now, or something to collect or report first."""
        if self.structured_outputs.compiling:
            self._schedule_compiled()
        if self.outputs.waiting:
            return None
        start = self.clock()
        scheduled = self.scheduler.schedule()
        if not scheduled.scheduled and not scheduled.preempted:
            if self._in_flight:  # everybody waits for their results
                return None
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
        """Hand a step to the executor, which computes it in the background, or when `collect` asks for the results."""
        self.executor.launch_model(scheduled.to_request())
        pending = self.executor.sample_tokens(scheduled.masks())
        if isinstance(self.scheduler, AsyncScheduler):
            self.scheduler.advance(scheduled)
        if self._recorder is not None:
            self._recorder.launch_step(scheduled, self.clock())
        return pending

    def collect(self, scheduled: SchedulerOutput, pending: PendingStep) -> list[SequenceOutput]:
        """Wait for the results of a step."""
        if self._recorder is not None:
            self._recorder.await_step(scheduled, self.clock())
        results = pending()
        if (count := len(scheduled.scheduled)) != len(results):
            raise RuntimeError(f"the executor returned {len(results)} results for {count} sequences")
        return results

    def update(self, scheduled: SchedulerOutput, results: list[SequenceOutput], now: float) -> None:
        """Hand a step's results, which came at time `now`, to the scheduler, and note what they add to each request for `report`."""
        step = list(zip(scheduled.scheduled, results, strict=True))
        errors = {item.seq.request: result.error for item, result in step if result.error is not None and not item.seq.finished}
        advanced = self.scheduler.update(scheduled, results)
        for request in errors:
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
        self.outputs.add_step(step, advanced, errors, self.scheduler.requests, now)
        if self._recorder is not None:
            requests = dict.fromkeys(seq.request for seq, _ in advanced)
            self._recorder.end_step(scheduled, requests, now, self.executor.take_timing(), {i for _, i in advanced})

    def report(self, timestamp: float | None = None) -> EngineCoreOutputs:
        """Everything the frontend has not heard yet, and the scheduler's state. `timestamp` is when the model finished; None means now."""
        stats = SchedulerStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.structured_outputs.compiling),
            num_swapped=len(self.scheduler.swapped),
            num_used_blocks=int(self.num_gpu_blocks - self.block_manager.get_num_free_gpu_blocks()),  # may be NumPy's
            num_gpu_blocks=self.num_gpu_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_generated_tokens=self.outputs.num_generated_tokens,
        )
        return EngineCoreOutputs(self.outputs.take(), self.clock() if timestamp is None else timestamp, stats)

    def _check_idle(self) -> None:
        """Nothing was scheduled. Raise a RuntimeError if requests are unfinished: a bug in a learner's scheduler."""
        if self.scheduler.has_unfinished_requests():
            name, count = type(self.scheduler).__name__, len(self.scheduler.requests)
            unfinished = "1 request is" if count == 1 else f"{count} requests are"
            raise RuntimeError(f"{name} scheduled nothing, though {unfinished} unfinished: it would do so forever.")

    def _fail_step(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        """Finish every request of a failed step, because the contents of their cache blocks are unknown.

        Raises:
            EngineDeadError: There will be no more steps.
            BaseException: Ctrl-C. Queues and tables have changed, so the step cannot be repeated.
        """
        if isinstance(error, EngineDeadError):
            raise error
        sequences = [*(item.seq for item in scheduled.scheduled), *scheduled.preempted, *scheduled.swapped_in]
        requests = dict.fromkeys(seq.request for seq in sequences if not seq.finished)
        if isinstance(error, Exception) and requests:  # else an earlier step has failed, and ended them
            self.has_failed = True
            logger.exception("The model failed in a step of %d sequences; their requests finish.", len(scheduled.scheduled))
        now, cause = self.clock(), f"{type(error).__name__}: {error}"
        for request in requests:
            ended = [seq.index for seq in request.sequences if not seq.finished]
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
            self.outputs.add_failure(request, ended, f"The model failed in a step: {cause}.", now)
        if self._recorder is not None:
            self._recorder.end_step(scheduled, requests, now, self.executor.take_timing(), error=cause)
        if not isinstance(error, Exception):
            self._is_settled = True
            raise error

    def _start_over(self) -> None:
        """After Ctrl-C between the model's steps: end all requests, and begin anew with empty queues and an empty cache."""
        requests, in_flight = list(self.scheduler.requests.values()), list(self._in_flight)
        self._in_flight.clear()
        self.block_manager = self._make_block_manager()
        self.scheduler = type(self.scheduler)(self.scheduler_config, self.block_manager)
        for request in requests:
            ended = [seq for seq in request.sequences if not seq.finished]
            for seq in ended:
                seq.status = SequenceStatus.FINISHED_ERROR
            self.outputs.add_failure(request, [seq.index for seq in ended], "The engine was interrupted.", self.clock())
        if self._recorder is not None:
            self._recorder.start_over(requests, self.block_manager)
        for _, pending in in_flight:  # nobody needs their results, but the next step begins when they have ended
            with contextlib.suppress(Exception):
                pending()

    # -- traces --------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> EngineTrace | None:
        """What has been recorded, or None if nothing is."""
        return None if self._recorder is None else self._recorder.trace

    def start_trace(self) -> EngineTrace:
        """Record from now on, in a new trace. An earlier one stays as it is."""
        overlap = self.max_concurrent_batches > 1 and self.scheduler_config.pipeline_parallel_size == 1
        scheduler_config = replace(self.scheduler_config, async_scheduling=overlap)  # as it is, whatever was asked for
        configs = (self.model_config, self.cache_config, scheduler_config)
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
