"""Block tables without an engine: make sequences, call a block manager by hand, and draw its blocks.

A lesson calls `allocate`, `append_slots`, `fork` and so on itself, one at a time, and looks at the blocks after each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.engine.trace import EngineTrace, RequestRecord, SequenceKey, SequenceStep, StepRecord, TraceConfig
from minivllm.request import EngineCoreRequest, Request
from minivllm.request import Sequence as TokenSequence
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_seq_ids = itertools.count()


def make_sequence(name: str, num_tokens: int, num_computed_tokens: int = 0) -> TokenSequence:
    """Make a sequence outside any engine, to call a block manager with.

    Args:
        name: The id of its request.
        num_tokens: The length of its prompt.
        num_computed_tokens: How many of them have keys and values in the cache.
    """
    request = Request(EngineCoreRequest(name, list(range(1, num_tokens + 1)), SamplingParams(), max_num_tokens=2**20))
    seq = TokenSequence(next(_seq_ids), request)
    seq.num_computed_tokens = num_computed_tokens
    return seq


def add_token(seq: TokenSequence) -> None:
    """Apply the effect of a step to a sequence: all its tokens are computed, and a new one is appended."""
    add_tokens(seq, 1)


def add_tokens(seq: TokenSequence, count: int) -> None:
    """Apply the effect of a speculative step to a sequence: all its tokens are computed, and several new ones are appended."""
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.extend(range(seq.num_tokens + 1, seq.num_tokens + 1 + count))


def fork_sequence(seq: TokenSequence) -> TokenSequence:
    """Make a sibling with the same tokens except the newest, which each samples for itself. The block manager is not called."""
    siblings = seq.request.sequences
    if not siblings:
        siblings.append(seq)
    child = seq.fork(next(_seq_ids), len(siblings))
    child.token_ids[-1] += len(siblings)
    siblings.append(child)
    return child


def draw_tables(
    manager: Any,
    sequences: Iterable[TokenSequence],
    title: str = "",
    *,
    swapped: Iterable[TokenSequence] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> Figure:
    """Draw a block manager's blocks, and the block tables of some sequences.

    Args:
        manager: A `BlockSpaceManager`, or a lesson's own class with `block_size`, `num_gpu_blocks`, `num_cpu_blocks`,
            `get_block_table` and, for `swapped`, `swapped_tables`.
        sequences: Sequences with blocks on the GPU. A slot counts as filled if its token is known.
        title: Above the figure.
        swapped: Sequences with blocks on the host.
        copies: (source, destination) blocks being copied, drawn as arrows.
    """
    from minivllm.viz.block_map import draw_block_map

    running, hosted = list(sequences), list(swapped)
    tables = {_key(seq): tuple(manager.get_block_table(seq)) for seq in running}
    host_tables = {_key(seq): tuple(manager.swapped_tables[seq.seq_id]) for seq in hosted}
    references = Counter(itertools.chain.from_iterable(tables.values()))
    held = {seq: _num_held(seq, len(table) * manager.block_size) for seq, table in zip(running, tables.values(), strict=True)}
    held |= {seq: _num_held(seq, len(host_tables[_key(seq)]) * manager.block_size) for seq in hosted}
    step = StepRecord(
        start=0.0,
        end=0.0,
        phase="decode",
        scheduled=[SequenceStep(*_key(seq), "decode", 1, count) for seq, count in held.items()],
        num_running=len(running),
        num_waiting=0,
        num_swapped=len(hosted),
        num_free_blocks=manager.num_gpu_blocks - len(references),
        block_tables=tables,
        swapped_tables=host_tables,
        ref_counts={block: count for block, count in references.items() if count > 1},
        blocks_to_copy=list(copies),
    )
    requests = {seq.request.request_id: RequestRecord(seq.request.request_id, 0.0, [1], 1) for seq in held}
    config = TraceConfig(
        model="by hand", scheduler="", block_space_manager=type(manager).__name__, block_size=manager.block_size,
        num_gpu_blocks=manager.num_gpu_blocks, num_cpu_blocks=manager.num_cpu_blocks, watermark=0.0, enable_prefix_caching=False,
        max_model_len=2**20, vocab_size=2**20, scheduler_config={},
    )  # fmt: skip
    free = f"{step.num_free_blocks} of {manager.num_gpu_blocks} blocks free"
    return draw_block_map(EngineTrace(config, [step], requests), 0, f"{title}: {free}" if title else free)


def _key(seq: TokenSequence) -> SequenceKey:
    return SequenceKey(seq.request.request_id, seq.index)


def _num_held(seq: TokenSequence, num_slots: int) -> int:
    return min(seq.num_tokens, num_slots)
