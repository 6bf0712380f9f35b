"""Records the steps of an engine core in an `EngineTrace`.

The core tells it when a request is added, aborted or stopped, when a step is scheduled, and when its results are in. It only reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Literal

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.trace import (
    EngineTrace,
    Finish,
    Preemption,
    RequestRecord,
    RequestSnapshot,
    SequenceKey,
    SequenceStep,
    StepRecord,
    TraceConfig,
)
from minivllm.request import Request, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams
from minivllm.scheduler_output import FREED_BLOCK, RankTiming, ScheduledSequence, SchedulerOutput

_NOT_RECORDED = ("output_kind", "logits_processors")


def given_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, as JSON-ready data."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        value = _plain(getattr(params, field.name))
        if field.name not in _NOT_RECORDED and value != field.default and value != []:
            given[field.name] = value
    return given


def _plain(value: Any) -> Any:
    """A value as JSON-ready data: lists, dicts with string keys, no NumPy scalars."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, StructuredOutputsParams):
        return {name: _plain(item) for name, item in vars(value).items() if item is not None}
    return value.item() if hasattr(value, "item") else value


class TraceRecorder:
    """An observer of one engine core, whose requests are recorded as arrived.

    A block manager that does not derive from `BlockSpaceManager` is only asked for tables and the number of free blocks.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        scheduler: Scheduler,
        block_manager: BlockSpaceManager,
    ) -> None:
        self._block_manager = block_manager
        self._knows_pools = isinstance(block_manager, BlockSpaceManager)
        free_blocks = block_manager.get_free_blocks() if self._knows_pools else ([], [])
        free_gpu_blocks, free_cpu_blocks = (None if blocks == sorted(blocks) else blocks for blocks in free_blocks)
        self.trace = EngineTrace(
            TraceConfig(
                model=model_config.name,
                scheduler=type(scheduler).__name__,
                block_space_manager=type(block_manager).__name__,
                block_size=cache_config.block_size,
                num_gpu_blocks=block_manager.num_gpu_blocks,
                num_cpu_blocks=block_manager.num_cpu_blocks,
                watermark=cache_config.watermark,
                enable_prefix_caching=cache_config.enable_prefix_caching,
                max_model_len=model_config.max_model_len,
                vocab_size=model_config.vocab_size,
                scheduler_config=dataclasses.asdict(scheduler_config),
                free_gpu_blocks=free_gpu_blocks,
                free_cpu_blocks=free_cpu_blocks,
                num_earlier_requests=len(scheduler.requests),
                num_cached_blocks=len(self._cached_blocks()),
            )
        )
        self._pending: dict[int, tuple[SchedulerOutput, StepRecord]] = {}
        """The steps in flight, with their records, by `id()`."""
        self._arrived: list[str] = []
        self._aborted: list[str] = []
        self._takes_snapshots = False
        """Whether records describe requests that arrive."""
        self._to_snapshot: list[Request] = []
        self._describes_all = False
        """What the next step's record describes."""
        self._stopped: list[Finish] = []
        """Sequences stopped after the record of their step was removed from the trace."""
        self._names: dict[str, str] = {}
        """By id: the names in the trace of unfinished requests that reuse an id."""
        self._finished: set[SequenceKey] = set()
        """Finished sequences of unfinished requests."""
        self._tables: dict[SequenceKey, tuple[int, ...]] = {}
        """Of the last step: equal tables are stored once."""
        for request in scheduler.requests.values():
            self.add_request(request)

    def add_request(self, request: Request) -> None:
        """A request has been queued."""
        name, count = request.request_id, 1
        while name in self.trace.requests:
            count += 1
            name = self._names[request.request_id] = f"{request.request_id}#{count}"
        self._arrived.append(name)
        if self._takes_snapshots:
            self._to_snapshot.append(request)
        self.trace.requests[name] = RequestRecord(
            request_id=name,
            arrival_time=request.metrics.arrival_time,
            prompt_token_ids=request.prompt_token_ids,
            max_num_tokens=int(request.max_num_tokens),
            params=given_params(request.sampling_params),
            priority=request.data.priority,
            cache_salt=request.data.cache_salt,
        )

    def snapshot_requests(self, requests: Iterable[Request]) -> None:
        """Describe these, which are all there are, in the next step's record, and new ones in later records."""
        self._takes_snapshots = self._describes_all = True
        self._to_snapshot = list(requests)

    def start_over(self, requests: Iterable[Request], block_manager: BlockSpaceManager) -> None:
        """These requests have ended with everything that was in flight, and the blocks are managed anew."""
        for request in requests:
            self.abort_request(request)
        self._pending.clear()
        self._block_manager = block_manager

    def abort_request(self, request: Request) -> None:
        """A request has been aborted between two steps."""
        self._aborted.append(self._names.get(request.request_id, request.request_id))
        self._finish_request(request)

    def stop_sequence(self, seq: Sequence) -> None:
        """A stop string finished a sequence: recorded in the step that completed the string."""
        key = self._key(seq)
        self._finished.add(key)
        finished = self.trace.steps[-1].finished if self.trace.steps else self._stopped
        finished.append(Finish(*key, seq.finish_reason or ""))
        if seq.request.finished:
            self._finish_request(seq.request)

    def begin_step(self, output: SchedulerOutput, scheduler: Scheduler, start: float) -> None:
        """A step has been scheduled, and is about to be computed."""
        manager, tables = self._block_manager, {}
        for seq in scheduler.running:
            key, table = self._key(seq), tuple(map(int, manager.get_block_table(seq)))
            known = self._tables.get(key)
            tables[key] = known if known == table else table
        self._tables = tables
        record = StepRecord(
            start=start,
            end=start,
            phase=output.phase,
            scheduled=[self._sequence_step(item) for item in output.scheduled],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=len(scheduler.swapped),
            num_free_blocks=manager.get_num_free_gpu_blocks(),
            swapped_in=[self._key(seq) for seq in output.swapped_in],
            arrived=self._arrived,
            aborted=self._aborted,
            finished=self._stopped,
            request_snapshots=[self._snapshot(request) for request in self._to_snapshot if not request.finished],
            describes_all=self._describes_all,
            block_tables=tables,
            ref_counts=_shared_blocks(tables.values()),
            cached_blocks=self._cached_blocks(),
            blocks_to_copy=list(output.blocks_to_copy),
            blocks_to_swap_out=list(output.blocks_to_swap_out),
            blocks_to_swap_in=list(output.blocks_to_swap_in),
        )
        self._arrived, self._aborted, self._stopped = [], [], []
        self._to_snapshot, self._describes_all = [], False
        for seq in output.preempted:
            mode = "swap" if seq.status is SequenceStatus.SWAPPED else "recompute"
            record.preempted.append(Preemption(*self._key(seq), mode))
        if record.num_swapped:
            record.swapped_tables = {self._key(seq): tuple(manager.swapped_tables[seq.seq_id]) for seq in scheduler.swapped}
        self._pending[id(output)] = output, record

    def launch_step(self, output: SchedulerOutput, now: float) -> None:
        """A step has been handed to the executor."""
        if id(output) in self._pending:
            self._pending[id(output)][1].launched = now

    def await_step(self, output: SchedulerOutput, now: float) -> None:
        """The core begins to wait for a step's results."""
        if id(output) in self._pending:
            self._pending[id(output)][1].awaited = now

    def end_step(
        self,
        output: SchedulerOutput,
        requests: Iterable[Request],
        end: float,
        ranks: list[RankTiming],
        advanced: Collection[int] = (),
        error: str | None = None,
    ) -> None:
        """The tokens of a step have been appended, or it has failed. A step that was launched before the trace began is not recorded.

        Args:
            output: The step.
            requests: The requests that got tokens or finished.
            end: When the model had finished.
            ranks: How each of several workers spent it.
            advanced: Which of `output.scheduled` got tokens.
            error: Why it failed, if it did.
        """
        _, record = self._pending.pop(id(output), (output, None))
        self._end_requests(requests, self._stopped if record is None else record.finished)
        if record is None:
            return
        record.end, record.ranks, record.error = end, ranks, error
        for i, item in enumerate(output.scheduled):
            part, num_drafts = record.scheduled[i], len(item.draft_token_ids)
            if num_drafts:
                num_tokens_before = part.context_len - num_drafts
                num_new = item.seq.num_tokens - num_tokens_before if i in advanced else 0
                record.scheduled[i] = part._replace(
                    context_len=num_tokens_before + max(0, num_new - 1),
                    num_new_tokens=num_new,
                    num_drafts=num_drafts,
                    num_accepted=max(0, num_new - 1),
                )
            elif i not in advanced:
                record.scheduled[i] = part._replace(num_new_tokens=0)
        self.trace.steps.append(record)

    def _end_requests(self, requests: Iterable[Request], finished: list[Finish]) -> None:
        """Note what a step has done to requests, and add the sequences that finished to a list."""
        for request in requests:
            for seq in request.sequences:
                if seq.finished and (key := self._key(seq)) not in self._finished:
                    self._finished.add(key)
                    finished.append(Finish(*key, seq.finish_reason or ""))
            self._update_request(request)
            if request.finished:
                self._finish_request(request)

    def _cached_blocks(self) -> frozenset[int]:
        return self._block_manager.get_cached_blocks() if self._knows_pools else frozenset()

    def _snapshot(self, request: Request) -> RequestSnapshot:
        metrics = request.metrics
        return RequestSnapshot(
            self._names.get(request.request_id, request.request_id),
            request.ordinal,
            metrics.arrival_time if metrics.queued_time is None else metrics.queued_time,
            metrics.first_token_time,
            len(request.prompt_token_ids),
            metrics.num_cached_tokens,
            {seq.index: (seq.num_computed_tokens, seq.num_output_tokens) for seq in request.sequences if not seq.finished},
        )

    def _key(self, seq: Sequence) -> SequenceKey:
        request_id = seq.request.request_id
        return SequenceKey(self._names.get(request_id, request_id), seq.index)

    def _sequence_step(self, item: ScheduledSequence) -> SequenceStep:
        seq = item.seq
        action: Literal["prefill", "decode"] = "decode" if item.is_decode else "prefill"
        return SequenceStep(*self._key(seq), action, item.num_tokens, seq.num_computed_tokens + item.num_tokens)

    def _update_request(self, request: Request) -> None:
        record, metrics = self.trace.requests[self._names.get(request.request_id, request.request_id)], request.metrics
        for field in ("first_scheduled_time", "first_token_time", "num_preemptions", "num_cached_tokens"):
            setattr(record, field, getattr(metrics, field))
        for seq in request.sequences:
            while seq.index >= len(record.output_token_ids):
                record.output_token_ids.append([])
            tokens = record.output_token_ids[seq.index]
            tokens += seq.token_ids[seq.num_prompt_tokens + len(tokens) :]

    def _finish_request(self, request: Request) -> None:
        self._update_request(request)
        name = self._names.pop(request.request_id, request.request_id)
        record = self.trace.requests[name]
        record.finished_time = request.metrics.finished_time
        record.finish_reasons = [seq.finish_reason for seq in request.sequences]
        record.stop_reasons = [seq.stop_reason for seq in request.sequences]
        self._finished.difference_update(SequenceKey(name, seq.index) for seq in request.sequences)


def _shared_blocks(tables: Collection[tuple[int, ...]]) -> dict[int, int]:
    """The blocks that several tables name, each with how many."""
    blocks = list(itertools.chain.from_iterable(tables))
    if len(set(blocks)) == len(blocks):  # the usual case is quick
        return {}
    return {block: count for block, count in Counter(blocks).items() if count > 1 and block != FREED_BLOCK}
