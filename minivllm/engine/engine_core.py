"""The engine core: a scheduler and an executor. It deals in token ids and knows neither text nor users.

    add_request ─► Scheduler.schedule() ─► Executor.execute_model() ─► Scheduler.update() ─► EngineCoreOutputs
                          ▲                                                    │
                          └──────────────────── next step ◄────────────────────┘

Mirrors `EngineCore` in `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.core.structured_output import GrammarCompiler, StructuredOutputGrammar
from minivllm.engine.core_messages import EngineCoreOutput, EngineCoreOutputs, NewTokens, SchedulerStats, StoppedSequence
from minivllm.engine.trace import EngineTrace, StepRecord
from minivllm.engine.trace_recorder import TraceRecorder
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.executor.base import Executor
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput

if TYPE_CHECKING:
    from minivllm.engine.engine_config import EngineConfig

logger = logging.getLogger(__name__)


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

    GRAMMAR_SECONDS = 0.01
    """How long a step waits for a grammar to be compiled, if there is nothing else to do."""

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
        self._recorder: TraceRecorder | None = None
        self._grammar_compiler = GrammarCompiler(model_config.path, model_config.vocab_size)
        self._compiling: dict[str, tuple[Request, Future[StructuredOutputGrammar]]] = {}
        """Requests whose grammar is being compiled, by id; the scheduler does not know them yet."""
        self._undelivered: list[EngineCoreOutput] = []
        """Outputs of a step that was interrupted; the next step returns them."""

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
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        executor = executor or make_executor(config)
        try:
            return cls(
                *configs,
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
        if request.request_id in self.scheduler.requests or request.request_id in self._compiling:
            raise RequestError(
                f"There is already a request {request.request_id!r}: choose another id, or wait until it has finished."
            )
        added = Request(request)
        resumption = request.resumption
        if resumption is not None and not (hasattr(self.scheduler, "resume_request") and resumption.output_token_ids):
            raise RequestError(f"{type(self.scheduler).__name__} cannot go on with a request that another engine core has begun.")
        added.ordinal = self.num_requests
        self.num_requests += 1
        if added.metrics.queued_time is None:  # another core had it before, else
            added.metrics.queued_time = self.clock()
        params = added.sampling_params
        if params.structured_outputs is None:
            self._schedule_request(added)
            return
        grammar = self._grammar_compiler.submit(params.structured_outputs, request.eos_token_ids, params.ignore_eos)
        self._compiling[request.request_id] = added, grammar

    def _schedule_request(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        if request.data.resumption is None:
            self.scheduler.add_request(request)
        else:
            self.scheduler.resume_request(request, request.data.resumption)
        if self._recorder is not None:
            self._recorder.add_request(request)

    def load_grammar_tokenizer(self) -> None:
        """Do now what the first request with structured outputs would do, while others wait."""
        with contextlib.suppress(RequestError):  # the model has none
            self._grammar_compiler.load_tokenizer(tuple(sorted(self.model_config.eos_token_ids)))

    def _schedule_compiled(self) -> None:
        """Hand the requests to the scheduler whose grammars have been compiled."""
        for request_id, (request, grammar) in list(self._compiling.items()):
            if not grammar.done():
                continue
            del self._compiling[request_id]
            try:
                request.grammar = grammar.result()
            except Exception as error:  # the frontend has compiled it, so this is a limit or a lack of memory
                request.metrics.finished_time = self.clock()
                ended = [NewTokens(index, [], finish_reason="error") for index in range(request.sampling_params.n)]
                metrics, client = request.metrics.copy(), request.data.client_index
                failed = EngineCoreOutput(
                    request_id, request.data.number, ended, True, metrics, error=str(error), client_index=client
                )
                self._undelivered.append(failed)
            else:
                self._schedule_request(request)

    def requests_of(self, client_index: int) -> list[str]:
        """The ids of an API server's unfinished requests."""
        requests = [*self.scheduler.requests.values(), *(request for request, _ in self._compiling.values())]
        return [request.request_id for request in requests if request.data.client_index == client_index]

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Finish requests and free their blocks. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            if request_id in self._compiling:
                self._compiling.pop(request_id)[1].cancel()
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                self.scheduler.abort_request(request_id)
                request.metrics.finished_time = self.clock()
                if self._recorder is not None:
                    self._recorder.abort_request(request)
            self._undelivered = [output for output in self._undelivered if output.request_id != request_id]

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
        return self.scheduler.has_unfinished_requests() or bool(self._compiling or self._undelivered)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update: advance every scheduled sequence.

        If the model fails, the requests of the step finish with an error, and the others go on. After Ctrl-C in the model, the next
        step reports the requests that it ended.
        """
        self.has_failed = False
        if self._compiling:
            self._schedule_compiled()
        if self._undelivered:
            outputs, self._undelivered = self._undelivered, []
            return self.make_outputs(outputs)
        start = self.clock()
        scheduled = self.scheduler.schedule()
        if not scheduled.scheduled and not scheduled.preempted:
            self._check_idle()
            wait([grammar for _, grammar in self._compiling.values()], self.GRAMMAR_SECONDS, FIRST_COMPLETED)
            return self.make_outputs([])
        self._note_scheduled(scheduled, start)
        record = self._recorder.begin_step(scheduled, start) if self._recorder is not None else None
        try:
            results = self.executor.execute_model(scheduled.to_request())
            if len(results) != len(scheduled.scheduled):
                raise RuntimeError(f"the executor returned {len(results)} results for {len(scheduled.scheduled)} sequences")
        except EngineDeadError:  # there will be no more steps
            raise
        except Exception as error:
            self.has_failed = True
            logger.exception("The model failed in a step of %d sequences; their requests finish.", len(scheduled.scheduled))
            return self.make_outputs(self._fail_step(scheduled, error, record))
        except BaseException as error:  # Ctrl-C: queues and tables have changed already, so the step cannot be repeated
            self._undelivered = self._fail_step(scheduled, error, record)
            raise
        now = self.clock()
        advanced = self.scheduler.update(scheduled, results)
        outputs = self._collect_outputs(scheduled, results, advanced, now)
        if self._recorder is not None and record is not None:
            requests = dict.fromkeys(seq.request for seq, _ in advanced)
            self._recorder.end_step(record, scheduled, results, requests, now)
        return self.make_outputs(outputs, now)

    def make_outputs(self, outputs: list[EngineCoreOutput], timestamp: float | None = None) -> EngineCoreOutputs:
        """Outputs, with the time and the state of the scheduler."""
        manager, scheduler = self.block_manager, self.scheduler
        stats = SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_swapped=len(scheduler.swapped),
            num_used_blocks=int(self.num_gpu_blocks - manager.get_num_free_gpu_blocks()),  # a learner's may count in NumPy
            num_gpu_blocks=self.num_gpu_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_generated_tokens=self.num_generated_tokens,
        )
        return EngineCoreOutputs(outputs, self.clock() if timestamp is None else timestamp, stats)

    def _check_idle(self) -> None:
        """Nothing was scheduled: raise a RuntimeError if there is something to do, which is a mistake in a learner's scheduler."""
        if self.scheduler.has_unfinished_requests():
            name, count = type(self.scheduler).__name__, len(self.scheduler.requests)
            unfinished = "1 request is" if count == 1 else f"{count} requests are"
            raise RuntimeError(f"{name} scheduled nothing, though {unfinished} unfinished: it would do so forever.")

    def _note_scheduled(self, scheduled: SchedulerOutput, start: float) -> None:
        """Count the step, and note which requests it is the first for."""
        self.num_steps += 1
        self.num_preemptions += len(scheduled.preempted)
        for item in scheduled.scheduled:
            metrics = item.seq.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = start

    def _collect_outputs(
        self, scheduled: SchedulerOutput, results: list[SequenceOutput], advanced: list[tuple[Sequence, int]], now: float
    ) -> list[EngineCoreOutput]:
        """What the step added to each request, from what `Scheduler.update` returned."""
        outputs: dict[Request, EngineCoreOutput] = {}
        errors: dict[Request, str] = {}
        for item, result in zip(scheduled.scheduled, results, strict=True):
            if result.error is not None:
                errors[item.seq.request] = result.error
                self.scheduler.abort_request(item.seq.request.request_id, SequenceStatus.FINISHED_ERROR)
        for seq, i in advanced:
            # A result has one token for each sibling forked from its sequence, by index; or several for one sequence, with drafts.
            first, logprobs = seq.index - scheduled.scheduled[i].seq.index, results[i].logprobs
            token_ids = seq.take_new_tokens()
            self.num_generated_tokens += len(token_ids)
            new = NewTokens(seq.index, token_ids, logprobs[first : first + len(token_ids)] if logprobs else None)
            if seq.finished:
                new.finish_reason, new.stop_reason = seq.finish_reason, seq.stop_reason
            if seq.grammar is not None and seq.grammar.error:
                errors.setdefault(seq.request, f"structured_outputs cannot go on: {seq.grammar.error}")
            request = seq.request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            output = outputs.get(request)
            if output is None:
                output = outputs[request] = EngineCoreOutput(request.request_id, request.data.number, [], False, request.metrics)
            output.sequences.append(new)
        for item, result in zip(scheduled.scheduled, results, strict=True):
            request = item.seq.request
            if not result.prompt_logprobs or (request.request_id not in self.scheduler.requests and request not in outputs):
                continue  # aborted during the step
            if request not in outputs:  # a chunk in the middle of the prompt
                outputs[request] = EngineCoreOutput(request.request_id, request.data.number, [], False, request.metrics)
            outputs[request].prompt_logprobs = result.prompt_logprobs
        for request, output in outputs.items():
            output.finished, output.client_index = request.finished, request.data.client_index
            output.error = errors.get(request)
            if request.finished:
                request.metrics.finished_time = now
            output.metrics = request.metrics.copy()
        return list(outputs.values())

    def _fail_step(self, scheduled: SchedulerOutput, error: BaseException, record: StepRecord | None) -> list[EngineCoreOutput]:
        """Finish every request of the failed step: the contents of their cache blocks are unknown."""
        sequences = [*(item.seq for item in scheduled.scheduled), *scheduled.preempted, *scheduled.swapped_in]
        requests, outputs, now = dict.fromkeys(seq.request for seq in sequences), [], self.clock()
        message = f"The model failed in a step: {type(error).__name__}: {error}."
        for request in requests:
            unfinished = [seq for seq in request.sequences if not seq.finished]
            self.scheduler.abort_request(request.request_id, SequenceStatus.FINISHED_ERROR)
            request.metrics.finished_time = now
            ended = [NewTokens(seq.index, [], finish_reason=seq.finish_reason) for seq in unfinished]
            metrics = request.metrics.copy()
            client = request.data.client_index
            outputs.append(
                EngineCoreOutput(
                    request.request_id, request.data.number, ended, True, metrics, error=message, client_index=client
                )
            )
        if record is not None and self._recorder is not None:
            record.error = f"{type(error).__name__}: {error}"
            self._recorder.end_step(record, scheduled, [], requests, now)
        return outputs

    # -- traces --------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> EngineTrace | None:
        """What has been recorded, or None if nothing is."""
        return None if self._recorder is None else self._recorder.trace

    def start_trace(self) -> EngineTrace:
        """Record from now on, in a new trace. An earlier one stays as it is."""
        self._recorder = TraceRecorder(self)
        self.executor.record_timing(True)
        return self._recorder.trace

    def snapshot_requests(self) -> None:
        """Describe all requests in the next step's record, and new ones in later records, for a reader who joins now."""
        if self._recorder is not None:
            self._recorder.snapshot_requests()

    def stop_trace(self) -> None:
        """Stop recording."""
        self._recorder = None
        self.executor.record_timing(False)

    def shutdown(self) -> None:
        """End the workers."""
        self._grammar_compiler.shutdown()
        self.executor.shutdown()


def make_executor(config: EngineConfig) -> Executor:
    """The executor that the configuration asks for, with the model loaded, or being loaded by other processes."""
    configs = (config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
    if config.parallel_config.uses_processes:
        from minivllm.executor.multiproc import MultiProcExecutor

        return MultiProcExecutor(*configs, config.parallel_config.tensor_parallel_size)
    from minivllm.executor.uniproc import UniProcExecutor  # a core on another executor does not load torch

    return UniProcExecutor(*configs)
