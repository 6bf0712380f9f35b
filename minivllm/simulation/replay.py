"""Replays a recorded run: the real scheduler and block manager, without the model, on the recorded requests.

Scheduling depends only on requests' arrivals, tokens and ends, all of which a trace has. So a replay must produce the same batches, block
tables and preemptions, step by step; `first_difference` finds where it does not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from minivllm.bench.offline import SCHEDULERS
from minivllm.core.block_allocator import BlockAllocator
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core_messages import EngineCoreOutputs, StoppedSequence
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace, RequestRecord, StepRecord
from minivllm.errors import ConfigError
from minivllm.executor.simulated import SimulatedExecutor, VirtualClock
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData, SequenceOutput
from minivllm.simulation.engine import make_simulated_engine

KNOWN_SCHEDULERS = {cls.__name__: cls for cls in SCHEDULERS.values()}


def replay(
    trace: EngineTrace,
    *,
    scheduler_cls: type[Scheduler] | None = None,
    block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager,
) -> EngineTrace:
    """Replay a trace without a model.

    Requests are added and aborted before the same steps, steps take the same time, and requests get the same tokens. After a decision
    that differs from the recorded one, the rest of the replay means nothing.

    Args:
        trace: It must begin with no requests in the engine and nothing in its prefix cache.
        scheduler_cls: The scheduler's class; by default the one named in the trace.
        block_space_manager_cls: The block manager's class.

    Returns:
        The trace of the replay.

    Raises:
        ConfigError: The trace began too late, its scheduler is unknown, or steps were in flight together.
    """
    config = trace.config
    if config.scheduler_config.get("async_scheduling") or config.scheduler == PipelineScheduler.__name__:
        raise ConfigError(
            "The trace has several steps in flight, which cannot be replayed: record it with async_scheduling=False and one pipeline stage."
        )
    scheduler = scheduler_cls or KNOWN_SCHEDULERS.get(config.scheduler)
    if scheduler is None:
        raise ConfigError(f"The trace was recorded with {config.scheduler}: give that class as scheduler_cls.")
    for count, what in (
        (config.num_earlier_requests, "requests in the engine"),
        (config.num_cached_blocks, "blocks in its prefix cache"),
    ):
        if count:
            raise ConfigError(f"The trace began with {count} {what}, which it does not describe: start it before them.")
    engine = make_simulated_engine(
        scheduler=scheduler,
        block_space_manager_cls=block_space_manager_cls,
        block_size=config.block_size,
        num_gpu_blocks=config.num_gpu_blocks,
        num_cpu_blocks=config.num_cpu_blocks,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size + 1,
        eos_token_ids=(config.vocab_size,),
        **config.scheduler_config,
    )
    assert isinstance(engine.clock, VirtualClock)
    _order_free_blocks(engine.block_manager.gpu_allocator, config.free_gpu_blocks)
    _order_free_blocks(engine.block_manager.cpu_allocator, config.free_cpu_blocks)
    core = engine.core
    core.executor = _RecordedModel(engine.clock, trace)
    replayed = core.start_trace()
    num_tokens: Counter[tuple[str, int]] = Counter()
    for step in trace:
        engine.clock.advance_to(step.start)
        _add_and_abort(engine, trace, step)
        if not core.has_unfinished_requests():
            break  # a step was recorded, but nothing is left to do: the replay has diverged
        core.stop_sequences(_recorded_stops(core.step(), trace, num_tokens))
    return replayed


def _order_free_blocks(allocator: BlockAllocator, blocks: list[int] | None) -> None:
    """Make the allocator allocate its blocks in this order."""
    if blocks is not None:
        for _ in blocks:
            allocator.allocate()
        for block in reversed(blocks):  # the last one to be freed is handed out first
            allocator.release(block)


def first_difference(recorded: EngineTrace, replayed: EngineTrace) -> str | None:
    """The first step and field in which two traces differ, except for times and errors, with both values; None if they agree."""
    for number, (step, other) in enumerate(zip(recorded, replayed, strict=False)):
        for item in dataclasses.fields(StepRecord):
            ours, theirs = getattr(step, item.name), getattr(other, item.name)
            if item.name not in ("start", "launched", "awaited", "end", "error") and ours != theirs:
                return f"step {number}, {item.name}: {ours} is recorded, {theirs} is replayed"
    if len(recorded) != len(replayed):
        return f"{len(recorded)} steps are recorded, {len(replayed)} are replayed"
    return None


def _add_and_abort(engine: LLMEngine, trace: EngineTrace, step: StepRecord) -> None:
    """Add and abort the requests that were added and aborted before a step."""
    for request_id in step.arrived:
        record = trace.requests[request_id]
        processed = engine.input_processor.process_inputs(
            request_id,
            {"prompt_token_ids": record.prompt_token_ids, "cache_salt": record.cache_salt},
            _params_of(record),
            arrival_time=record.arrival_time,
            priority=record.priority,
        )
        engine.core.add_request(processed.core_request)
    for request_id in step.aborted:
        engine.core.abort_requests([request_id])


def _params_of(record: RequestRecord) -> SamplingParams:
    """The recorded parameters that affect scheduling; stops are taken from the record instead."""
    params = {name: value for name, value in record.params.items() if name in ("n", "prompt_logprobs") or "penalty" in name}
    return SamplingParams(**params, max_tokens=record.max_num_tokens - record.num_prompt_tokens)


class _RecordedModel(SimulatedExecutor):
    """Returns the recorded tokens, takes the recorded time, and fails where the model failed.

    Where a stop token finished a sequence, it returns the end-of-sequence token: a last token's keys and values are never read, so
    nothing else changes.
    """

    def __init__(self, clock: VirtualClock, trace: EngineTrace) -> None:
        super().__init__(clock, lambda work: 0.0, trace.config.num_gpu_blocks, trace.config.num_cpu_blocks)
        self._trace = trace
        self._steps: Iterator[StepRecord] = iter(trace)
        self._end_token = trace.config.vocab_size

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        step = next(self._steps)
        self.clock.advance_to(step.end)
        if step.error is not None:
            raise RuntimeError(step.error)
        return super().execute_model(request)

    def _tokens(self, seq: SequenceData) -> list[int]:
        record, first = self._trace.requests[seq.request.request_id], seq.num_output_tokens
        if seq.num_drafts:
            return [self._token(record, seq.index, first + i) for i in range(1 + seq.num_drafts)]
        return [self._token(record, index, first) for index in range(seq.index, seq.index + seq.num_samples)]

    def _token(self, record: RequestRecord, index: int, position: int) -> int:
        tokens = record.output_token_ids[index] if index < len(record.output_token_ids) else []
        stopped = record.finish_reasons[index : index + 1] == ["stop"]
        if stopped and position >= len(tokens) - 1 and not isinstance(record.stop_reasons[index], str):
            return self._end_token
        return tokens[position] if position < len(tokens) else 0


def _recorded_stops(
    outputs: EngineCoreOutputs, trace: EngineTrace, num_tokens: Counter[tuple[str, int]]
) -> list[StoppedSequence]:
    """Sequences that a stop string finished after this step, which only the frontend can know. Updates `num_tokens`."""
    stopped = []
    for output in outputs.outputs:
        record = trace.requests[output.request_id]
        for new in output.sequences:
            key = (output.request_id, new.index)
            num_tokens[key] += len(new.token_ids)
            stop = record.stop_reasons[new.index] if new.index < len(record.stop_reasons) else None
            if isinstance(stop, str) and num_tokens[key] >= len(record.output_token_ids[new.index]):
                stopped.append(StoppedSequence(output.request_id, output.number, new.index, stop))
    return stopped
