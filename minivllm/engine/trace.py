"""What an engine did, step by step, as plain data for pictures, measurements and replay.

A trace is recorded by `engine/trace_recorder.py`, saved as JSON, drawn by `viz/`, and replayed by `simulation/replay.py`. Nothing in it
refers to a live engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import msgspec

from minivllm.config import SchedulerConfig
from minivllm.errors import ConfigError
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams
from minivllm.scheduler_output import FREED_BLOCK, Phase, RankTiming

VERSION = 1
"""Version of the JSON format, raised by incompatible changes."""

Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A time on the engine's clock."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A count or an index."""
TableEntry = Annotated[int, msgspec.Meta(ge=FREED_BLOCK, le=2**53)]


class SequenceKey(NamedTuple):
    """Identifies a sequence: its request, and its index among the request's `n` continuations."""

    request_id: str
    index: Count = 0  # type: ignore[assignment]  # shadows tuple.index, which is not used


class SequenceStep(NamedTuple):
    """A sequence's part in a step.

    Attributes:
        request_id, index: The sequence.
        action: "prefill" (a prompt, a chunk of one, or recomputation after preemption) or "decode".
        num_tokens: Tokens computed for it.
        context_len: Tokens in the KV cache after the step.
        num_new_tokens: Tokens generated: 0 after a chunk that does not end the prompt, more than 1 with speculation. Siblings forked in
            the step get one more each.
        num_drafts, num_accepted: Draft tokens among `num_tokens`, and those accepted: one less than `num_new_tokens`.
    """

    request_id: str
    index: Count  # type: ignore[assignment]  # shadows tuple.index, which is not used
    action: Literal["prefill", "decode"]
    num_tokens: Count
    context_len: Count
    num_new_tokens: Count = 1
    num_drafts: Count = 0
    num_accepted: Count = 0

    @property
    def key(self) -> SequenceKey:
        """The sequence."""
        return SequenceKey(self.request_id, self.index)


class RequestSnapshot(NamedTuple):
    """An unfinished request before a step.

    Attributes:
        request_id: As in the records.
        ordinal: How many requests the engine core had received before it.
        queued_time: When the first core received it, in seconds of the engine's clock.
        first_token_time: When its first token was generated; None if it has none.
        num_prompt_tokens, num_cached_tokens: Tokens of the prompt, and those of them found in the prefix cache.
        progress: Of its unfinished sequences, by index: tokens in the cache, and tokens generated.
    """

    request_id: str
    ordinal: Count
    queued_time: Seconds
    first_token_time: Seconds | None
    num_prompt_tokens: Count
    num_cached_tokens: Count
    progress: dict[Count, tuple[Count, Count]]


class Preemption(NamedTuple):
    """A sequence that lost its blocks, by "recompute" or by "swap"."""

    request_id: str
    index: Count  # type: ignore[assignment]  # shadows tuple.index, which is not used
    mode: str


class Finish(NamedTuple):
    """A sequence that finished, and its finish reason: "stop", "length", "abort" or "error"."""

    request_id: str
    index: Count  # type: ignore[assignment]  # shadows tuple.index, which is not used
    reason: str


@dataclass(slots=True)
class StepRecord:
    """One step of the engine.

    Queues, tables and counts are those after scheduling, before the new tokens were appended.

    Attributes:
        start, end: When scheduling began, and when the model had finished, in seconds of the engine's clock. Steps in flight overlap.
        phase: "prefill", "decode", "mixed", or "idle" where it only preempted.
        scheduled: What was computed, in the order of the batch.
        preempted, swapped_in: Sequences that lost their blocks, and those swapped back in.
        finished: Sequences that finished in the step.
        arrived, aborted: Requests added and aborted since the last step.
        request_snapshots: For readers of single records, and not saved: requests that have arrived.
        describes_all: Whether these are all unfinished requests, for a reader who joins here.
        num_running, num_waiting, num_swapped: Sequences in each queue.
        num_free_blocks: Free blocks on the device.
        block_tables: Device blocks of each running sequence, in the order of its tokens; -1 for those freed behind its sliding window.
        swapped_tables: Host blocks of each sequence that is swapped out.
        ref_counts: Reference counts of the blocks in `block_tables`, where they are not 1.
        cached_blocks: Blocks, free or not, in the prefix cache.
        blocks_to_copy: (source, destination) pairs on the device, copied before the step computed (copy-on-write).
        blocks_to_swap_out, blocks_to_swap_in: (device, host) and (host, device) pairs, copied likewise.
        error: Why the model failed, if it did.
        ranks: How each of several workers spent the step; empty if there is only one.
        launched, awaited: When it was handed to the executor, and when the core began to wait for its results; None if not known.
    """

    start: Seconds
    end: Seconds
    phase: Phase
    scheduled: list[SequenceStep]
    num_running: Count
    num_waiting: Count
    num_swapped: Count
    num_free_blocks: Count
    preempted: list[Preemption] = field(default_factory=list)
    swapped_in: list[SequenceKey] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    request_snapshots: list[RequestSnapshot] = field(default_factory=list)
    describes_all: bool = False
    block_tables: dict[SequenceKey, tuple[TableEntry, ...]] = field(default_factory=dict)
    swapped_tables: dict[SequenceKey, tuple[TableEntry, ...]] = field(default_factory=dict)
    ref_counts: dict[Count, Count] = field(default_factory=dict)
    cached_blocks: frozenset[Count] = frozenset()
    blocks_to_copy: list[tuple[Count, Count]] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[Count, Count]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[Count, Count]] = field(default_factory=list)
    error: str | None = None
    ranks: list[RankTiming] = field(default_factory=list)
    launched: Seconds | None = None
    awaited: Seconds | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(slots=True)
class RequestRecord:
    """A request: what it asked for, its times (seconds of the engine's clock), and its output so far.

    Attributes:
        params: The sampling parameters that differ from the defaults.
        max_num_tokens: Limit on prompt and output together.
        output_token_ids, finish_reasons, stop_reasons: One per sequence; the reasons are empty until it finishes.
        num_preemptions: How often one of its sequences lost its blocks.
        num_cached_tokens: Prompt tokens found in the prefix cache.
    """

    request_id: str
    arrival_time: Seconds
    prompt_token_ids: list[Count]
    max_num_tokens: Count
    params: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    first_scheduled_time: Seconds | None = None
    first_token_time: Seconds | None = None
    finished_time: Seconds | None = None
    num_preemptions: Count = 0
    num_cached_tokens: Count = 0
    output_token_ids: list[list[Count]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[int | str | None] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(slots=True)
class TraceConfig:
    """The recorded engine.

    `scheduler` and `block_space_manager` are the names of classes; `scheduler_config` has the fields of `SchedulerConfig`.
    `free_gpu_blocks` and `free_cpu_blocks` are the free blocks at the start of the trace in the order of allocation, None if ascending;
    `num_earlier_requests` and `num_cached_blocks` are the engine's requests and the blocks in its prefix cache at that time.
    """

    model: str
    scheduler: str
    block_space_manager: str
    block_size: Count
    num_gpu_blocks: Count
    num_cpu_blocks: Count
    watermark: float
    enable_prefix_caching: bool
    max_model_len: Count
    vocab_size: Count
    scheduler_config: dict[str, Any]
    free_gpu_blocks: list[Count] | None = None
    free_cpu_blocks: list[Count] | None = None
    num_earlier_requests: Count = 0
    num_cached_blocks: Count = 0


@dataclass
class EngineTrace:
    """The steps of an engine, its requests by id in order of arrival, and its configuration.

    It is a sequence of its steps: `len(trace)`, `trace[0]`, `for step in trace`.
    """

    config: TraceConfig
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        return self.steps[index]

    def is_idle_after(self, number: int) -> bool:
        """Whether the engine had nothing left to do after a step."""
        step = self.steps[number]
        first = next((i for i in range(number, 0, -1) if self.steps[i - 1].end <= step.start), 0)  # of those in flight then
        ended = {(finish.request_id, finish.index) for each in self.steps[first : number + 1] for finish in each.finished}
        num_left = max(0, step.num_running - len(ended)) + step.num_waiting + step.num_swapped
        return num_left == 0 and ended.issuperset(step.block_tables)

    # -- JSON ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON. It contains the requests' tokens: treat the file like their text.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> EngineTrace:
        """Read what `save` wrote.

        Raises:
            ConfigError: The file is missing, or not a trace of the supported version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"The trace {path} cannot be read ({error.strerror}).") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a trace: it is not valid JSON ({error}).") from None
        try:
            return cls.from_json(content)
        except ConfigError as error:
            raise ConfigError(f"{path} cannot be used. {error}") from None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data. Of block tables and cached blocks, a step has only the changes."""
        return {
            "minivllm_trace": VERSION,
            "config": dataclasses.asdict(self.config),
            "requests": [dataclasses.asdict(request) for request in self.requests.values()],
            "steps": [_step_to_json(step, before) for step, before in zip(self.steps, [None, *self.steps], strict=False)],
        }

    @classmethod
    def from_json(cls, content: Any) -> EngineTrace:
        """The trace that `to_json` gave.

        Raises:
            ConfigError: It is not a trace, has another version, or is inconsistent.
        """
        version = content.get("minivllm_trace") if isinstance(content, dict) else None
        if version is None:
            raise ConfigError("It is not a trace: save one with `engine.trace.save(...)`.")
        if version != VERSION:
            raise ConfigError(
                f"It is a trace of version {version!r}, and this minivllm reads version {VERSION}: record it again."
            )
        try:
            requests = msgspec.convert(content["requests"], list[RequestRecord])
            config = msgspec.convert(content["config"], TraceConfig)
            trace = cls(config, requests={request.request_id: request for request in requests})
            for item in content["steps"]:
                trace.steps.append(_step_from_json(item, trace.steps[-1] if trace.steps else None))
            _check(trace)
        except KeyError as error:
            raise ConfigError(f"It is a damaged trace: {error} is missing. Record it again.") from None
        except (AttributeError, TypeError, ValueError) as error:  # msgspec.ValidationError is a ValueError
            raise ConfigError(f"It is a damaged trace ({error}): record it again.") from None
        return trace


_TABLES = ("block_tables", "swapped_tables")
_TableRow = tuple[str, Count, tuple[TableEntry, ...] | None]  # request id, index, blocks; None where it has lost them


def _step_to_json(step: StepRecord, before: StepRecord | None) -> dict[str, Any]:
    """A step without its empty fields. Tables are [request_id, index, blocks]; null blocks mean that the table is gone."""
    content: dict[str, Any] = {}
    for item in dataclasses.fields(StepRecord):
        value = getattr(step, item.name)
        if item.name in _TABLES:
            old = getattr(before, item.name) if before else {}
            value = [[*key, table] for key, table in value.items() if old.get(key) != table]
            value += [[*key, None] for key in old if key not in getattr(step, item.name)]
        elif item.name == "ref_counts":
            value = list(value.items())
        elif item.name == "cached_blocks":
            old_blocks = before.cached_blocks if before else frozenset()
            value = [sorted(value - old_blocks), sorted(old_blocks - value)] if value != old_blocks else []
        if item.name not in ("request_snapshots", "describes_all") and (value or value == 0 or item.name == "scheduled"):
            content[item.name] = value
    return content


def _step_from_json(content: dict[str, Any], before: StepRecord | None) -> StepRecord:
    fields = dict(content)
    for name in _TABLES:
        tables = dict(getattr(before, name)) if before else {}
        for request_id, index, blocks in msgspec.convert(fields.get(name, []), list[_TableRow]):
            key = SequenceKey(request_id, index)
            if blocks is None:
                del tables[key]
            else:
                tables[key] = blocks
        fields[name] = tables
    fields["ref_counts"] = dict(fields.get("ref_counts", []))
    added, gone = fields.get("cached_blocks") or ([], [])
    old_blocks = before.cached_blocks if before else frozenset()
    fields["cached_blocks"] = (old_blocks | frozenset(added)) - frozenset(gone) if added or gone else old_blocks
    return msgspec.convert(fields, StepRecord)


def _check(trace: EngineTrace) -> None:
    """Raise a ValueError if blocks, requests or times are inconsistent."""
    config, launched, now = trace.config, -math.inf, -math.inf
    msgspec.convert(config.scheduler_config, SchedulerConfig)
    for request in trace.requests.values():
        params = {name: value for name, value in request.params.items() if name != "logit_bias"}
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        SamplingParams(**params)
        if not request.request_id.isprintable():
            raise ValueError(f"request {request.request_id!r} has an id that cannot be printed")
        if len(request.finish_reasons) not in (0, len(request.output_token_ids)):
            raise ValueError(f"request {request.request_id!r} has not as many finish reasons as sequences")
    if config.block_size < 1 or config.num_gpu_blocks < 1:
        raise ValueError("a cache without blocks")
    for number, step in enumerate(trace):
        moments = [moment for moment in (step.start, step.launched, step.awaited, step.end) if moment is not None]
        if moments != sorted(moments) or step.start < launched or step.end < now:
            raise ValueError(f"step {number} starts or ends before the last one, or its times are not in order")
        launched, now = step.start, step.end
        for rank in step.ranks:
            moments = [rank.start, *itertools.chain.from_iterable(rank.communication), rank.end]
            if moments != sorted(moments) or not all(map(math.isfinite, moments)):
                raise ValueError(f"step {number} has a rank whose times are not in order")
        named = {*step.arrived, *step.aborted, *(key.request_id for key in (*step.block_tables, *step.swapped_tables))}
        for items in (step.scheduled, step.preempted, step.finished, step.swapped_in):
            named.update(item.request_id for item in items)
        if not named <= trace.requests.keys():
            raise ValueError(f"step {number} names an unknown request {min(named - trace.requests.keys())!r}")
        gpu_blocks = (*step.block_tables.values(), step.ref_counts, step.cached_blocks, *step.blocks_to_copy)
        for tables, num_blocks in ((gpu_blocks, config.num_gpu_blocks), (step.swapped_tables.values(), config.num_cpu_blocks)):
            if max(itertools.chain.from_iterable(tables), default=-1) >= num_blocks:
                raise ValueError(f"step {number} has a block id beyond the {num_blocks} blocks of the cache")
