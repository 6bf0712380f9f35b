"""Assertions about block tables that several checks of lesson 04 share."""

from __future__ import annotations

from collections import Counter
from operator import index
from typing import Any

from minivllm.request import Sequence


def grow_and_compare(manager: Any, seq: Sequence, first: bool) -> None:
    """Append a token, and assert what happened to the block that it is written to."""
    before = list(manager.get_block_table(seq))
    place = seq.num_computed_tokens // manager.block_size
    shared = place < len(before) and manager.gpu_pool.ref_counts[before[place]] > 1
    copy = manager.append_slots(seq)
    table = list(manager.get_block_table(seq))
    where = f"Token {seq.num_computed_tokens} goes into entry {place} of the table {before}"
    if shared:
        assert copy is not None and tuple(copy) == (before[place], table[place]) and copy[0] != copy[1], (
            f"{where}, a block shared with others: append_slots must replace it with a fresh block and return (old, new). The table is now "
            f"{table}, and {copy!r} was returned."
        )
        assert table[:place] + table[place + 1 :] == before[:place] + before[place + 1 :], (
            f"{where}: only that entry may change, but the table is now {table}."
        )
    else:
        why = "where a new block begins" if place == len(before) else "a block that no other table contains"
        assert copy is None, f"{where}, {why}: nothing needs copying, but append_slots returned {copy!r}."
        assert table[: len(before)] == before, f"{where}, {why}: earlier blocks must stay, but the table is now {table}."


def check_references(manager: Any, sequences: list[Sequence]) -> None:
    """Assert that each reference count is the number of tables that contain the block."""
    named = Counter(block for seq in sequences for block in manager.get_block_table(seq))
    wanted = [named[block] for block in range(manager.num_gpu_blocks)]
    got = count_references(manager.gpu_pool, manager.num_gpu_blocks)
    for block, (theirs, ours) in enumerate(zip(wanted, got, strict=True)):
        assert ours == theirs, (
            f"{theirs} tables contain block {block}, but its reference count is {ours}: where is a share or a release missing?"
        )
    free = manager.get_num_free_gpu_blocks()
    assert free == wanted.count(0), f"{wanted.count(0)} blocks are in no table, but {free} are reported free."


def count_references(pool: Any, num_blocks: int) -> list[int]:
    """The reference counts of a pool, which may be kept in a list, a dict or an array."""
    return [index(pool.ref_counts[block]) for block in range(num_blocks)]


def last_actions(actions: list[str]) -> str:
    """The last few actions, as text."""
    return ("… " if len(actions) > 4 else "") + ", ".join(actions[-4:])
