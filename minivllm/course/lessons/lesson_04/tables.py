"""What several checks of lesson 04 ask of block tables."""

from __future__ import annotations

from collections import Counter
from operator import index
from typing import Any

from minivllm.request import Sequence


def grow_and_compare(manager: Any, seq: Sequence, first: bool) -> None:
    """Append, and say what should have become of the block that is written."""
    before = list(manager.get_block_table(seq))
    place = seq.num_computed_tokens // manager.block_size
    shared = place < len(before) and manager.gpu_pool.ref_counts[before[place]] > 1
    copy = manager.append_slots(seq)
    table = list(manager.get_block_table(seq))
    where = f"Token {seq.num_computed_tokens} goes into place {place} of the table {before}"
    if shared:
        assert copy is not None and tuple(copy) == (before[place], table[place]) and copy[0] != copy[1], (
            f"{where}, a block that others name too: append_slots must put a fresh block in its place and return (old, new). The table is "
            f"{table}, and {copy!r} came back."
        )
        assert table[:place] + table[place + 1 :] == before[:place] + before[place + 1 :], (
            f"{where}: only that one may change, not {table}."
        )
    else:
        why = "where a new block begins" if place == len(before) else "a block that nobody else names"
        assert copy is None, f"{where}, {why}: nothing is to be copied, but append_slots returned {copy!r}."
        assert table[: len(before)] == before, f"{where}, {why}: the blocks before must stay, but the table is {table}."


def check_references(manager: Any, sequences: list[Sequence]) -> None:
    """Reference counts are the numbers of tables that name each block."""
    named = Counter(block for seq in sequences for block in manager.get_block_table(seq))
    wanted = [named[block] for block in range(manager.num_gpu_blocks)]
    got = count_references(manager.gpu_pool, manager.num_gpu_blocks)
    for block, (theirs, ours) in enumerate(zip(wanted, got, strict=True)):
        assert ours == theirs, (
            f"{theirs} tables name block {block}, but its reference count is {ours}: who forgot to count, or to release?"
        )
    free = manager.get_num_free_gpu_blocks()
    assert free == wanted.count(0), f"{wanted.count(0)} blocks are in no table, but {free} are free."


def count_references(pool: Any, num_blocks: int) -> list[int]:
    """The reference counts of a pool, which may keep them in a list, a dict or an array."""
    return [index(pool.ref_counts[block]) for block in range(num_blocks)]


def tell_end(story: list[str]) -> str:
    """The last actions of a story."""
    return ("… " if len(story) > 4 else "") + ", ".join(story[-4:])
