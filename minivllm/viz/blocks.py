"""The state of the cache's blocks in one step of a trace: owners, fill level, reference counts."""

from __future__ import annotations

from typing import NamedTuple

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.errors import ConfigError
from minivllm.viz.memo import remembered
from minivllm.viz.spans import find_context_lens


class Block(NamedTuple):
    """A physical block at one step.

    Attributes:
        owners: The sequences whose tables contain it.
        num_tokens: Filled slots.
        num_references: Its reference count.
        cached: Whether its contents are in the prefix cache.
        written: Whether a copy-on-write or swap wrote it just before the step.
    """

    owners: tuple[SequenceKey, ...] = ()
    num_tokens: int = 0
    num_references: int = 0
    cached: bool = False
    written: bool = False


def find_blocks(trace: EngineTrace, step: int, host: bool = False) -> list[Block]:
    """All blocks of the device, or of the host, by number, at the end of a step.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = step_number(trace, step)
    record, lens, size = trace[number], find_context_lens(trace)[number], trace.config.block_size
    owners: dict[int, list[SequenceKey]] = {}
    held: dict[int, int] = {}
    for key, table in (record.swapped_tables if host else record.block_tables).items():
        length = lens[key]
        for place, block in enumerate(table):
            owners.setdefault(block, []).append(key)
            held[block] = max(held.get(block, 0), min(size, max(0, length - place * size)))
    copies = record.blocks_to_swap_out if host else record.blocks_to_copy + record.blocks_to_swap_in
    written = {destination for _, destination in copies}
    cached = set() if host else set(record.cached_blocks)
    counts = {} if host else record.ref_counts
    return [
        Block(
            tuple(owners.get(block, ())),
            held.get(block, 0),
            counts.get(block, len(owners.get(block, ()))),
            block in cached,
            block in written,
        )
        for block in range(trace.config.num_cpu_blocks if host else trace.config.num_gpu_blocks)
    ]


def describe_step(trace: EngineTrace, step: int) -> str:
    """Describe a step in one line: its number, time, phase and size, and the free blocks.

    Raises:
        ConfigError: The trace has no such step.
    """
    number = step_number(trace, step)
    record = trace[number]
    time = record.start - time_origin(trace)
    count, tokens = len(record.scheduled), record.num_tokens
    what = f"{record.phase} of {count} sequence{'s' * (count != 1)}, {tokens} token{'s' * (tokens != 1)}"
    free = f"{record.num_free_blocks} of {trace.config.num_gpu_blocks} blocks free"
    lost = f"{len(record.preempted)} preempted; " if record.preempted else ""
    return f"step {number} / {len(trace) - 1}, at {time:.3f} s: {what}; {lost}{free}"


@remembered
def table_limits(trace: EngineTrace) -> tuple[int, int]:
    """The largest number of block tables in any step, and of blocks in any table."""
    num_rows = num_blocks = 1
    for record in trace:
        num_rows = max(num_rows, len(record.block_tables) + len(record.swapped_tables))
        for tables in (record.block_tables, record.swapped_tables):
            num_blocks = max(num_blocks, max(map(len, tables.values()), default=0))
    return num_rows, num_blocks


def step_number(trace: EngineTrace, step: int) -> int:
    """Resolve a step number that may be negative.

    Raises:
        ConfigError: The trace has no such step.
    """
    if not -len(trace) <= step < len(trace):
        steps = f"steps 0 to {len(trace) - 1}" if len(trace) else "no steps"
        raise ConfigError(f"There is no step {step} in the trace: it has {steps}.")
    return step % len(trace)
