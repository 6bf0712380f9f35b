"""What the blocks of a cache hold in one step of a trace: whose they are, how full, how often referenced."""

from __future__ import annotations

from typing import NamedTuple

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.errors import ConfigError
from minivllm.viz.memo import remembered
from minivllm.viz.spans import find_context_lens


class Block(NamedTuple):
    """A physical block in a step.

    Attributes:
        owners: The sequences that have it in their tables.
        num_tokens: Slots that hold a token.
        num_references: How many tables it counts to be in.
        cached: Whether the prefix cache knows what it holds.
        written: Whether a copy wrote it just before the step: copy-on-write, or a swap.
    """

    owners: tuple[SequenceKey, ...] = ()
    num_tokens: int = 0
    num_references: int = 0
    cached: bool = False
    written: bool = False


def find_blocks(trace: EngineTrace, step: int, host: bool = False) -> list[Block]:
    """All blocks of the device, or of the host, by number, as they are when a step is done.

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
    """A step in a line: its number, time, kind and size, and what is free.

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
    """The most rows that tables take in any step, and the most blocks of any table."""
    num_rows = num_blocks = 1
    for record in trace:
        num_rows = max(num_rows, len(record.block_tables) + len(record.swapped_tables))
        for tables in (record.block_tables, record.swapped_tables):
            num_blocks = max(num_blocks, max(map(len, tables.values()), default=0))
    return num_rows, num_blocks


def step_number(trace: EngineTrace, step: int) -> int:
    """The number of a step, counted from the beginning.

    Raises:
        ConfigError: The trace has no such step.
    """
    if not -len(trace) <= step < len(trace):
        steps = f"steps 0 to {len(trace) - 1}" if len(trace) else "no steps"
        raise ConfigError(f"There is no step {step} in the trace: it has {steps}.")
    return step % len(trace)
