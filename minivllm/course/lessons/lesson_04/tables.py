"""Assertions about block tables that several checks of lesson 04 share."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from operator import index
from typing import Any

from minivllm.course.lessons.block_tables import fork_sequence, make_sequence
from minivllm.request import Sequence

BLOCK_SIZES = (1, 3, 4, 16)
KEEP_WATERMARK: tuple[dict[str, bool], ...] = ({"keep_watermark": True}, {"keep_watermark": False}, {})
"""The arguments of a question about the watermark; without the argument, it is kept."""


def name_of(manager: Any, method: str) -> str:
    """The method with the class that wrote it: "Sharing.append_slots"."""
    owner = next((cls for cls in type(manager).__mro__ if method in vars(cls)), type(manager))
    return f"{owner.__name__}.{method}"


def count(number: int, noun: str) -> str:
    """A number with its noun: "no blocks", "1 block", "2 blocks"."""
    return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")


def ask(manager: Any, question: str, *arguments: Any, **options: Any) -> Any:
    """Call a method that only answers, and assert that it changed no table and no pool."""
    before = _state_of(manager)
    answer = getattr(manager, question)(*arguments, **options)
    after = _state_of(manager)
    for what, value in before.items():
        assert after[what] == value, (
            f"{name_of(manager, question)} only answers a question and must change nothing, but {_change(what, value, after[what])}."
        )
    return answer


def _change(what: str, before: Any, after: Any) -> str:
    """What has changed in a part of the state."""
    if isinstance(before, dict):
        key = next(key for key in [*before, *after] if before.get(key) != after.get(key))
        return f"a table in {what} changed from {before.get(key)} to {after.get(key)}"
    if isinstance(before, list):
        place = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        return f"{what} changed: where {before[place]} stood, entry {place}, there is {after[place]} now"
    return f"{what} changed from {before} to {after}"


def _state_of(manager: Any) -> dict[str, Any]:
    """Everything that a question must not change, by its name in messages."""
    state: dict[str, Any] = {}
    for name in ("gpu_pool", "cpu_pool"):
        pool = getattr(manager, name)
        state[f"{name}.num_free"] = index(pool.num_free)
        state[f"{name}.ref_counts"] = [
            index(pool.ref_counts[block]) for block in range(getattr(manager, f"num_{name[:3]}_blocks"))
        ]
        state[f"the order in which {name} hands out its free blocks"] = next_blocks(pool)
    for name in ("block_tables", "swapped_tables"):
        state[name] = {seq_id: list(table) for seq_id, table in getattr(manager, name).items()}
    return state


def next_blocks(pool: Any) -> list[int]:
    """The free blocks of a pool in the order in which it would hand them out."""
    trial = copy.deepcopy(pool)
    return [index(block) for block in trial.allocate(index(trial.num_free))]


def table_of(manager: Any, seq: Sequence) -> list[int]:
    """A sequence's block table, copied: the manager's own list may change."""
    return list(manager.get_block_table(seq))


def grow_and_compare(manager: Any, seq: Sequence) -> None:
    """Call `append_slots` for a sequence with new tokens, and check its table afterwards."""
    before = table_of(manager, seq)
    place = seq.num_computed_tokens // manager.block_size
    shared = place < len(before) and manager.gpu_pool.ref_counts[before[place]] > 1
    wanted = -(-seq.num_tokens // manager.block_size)
    copied = manager.append_slots(seq)
    table = table_of(manager, seq)
    method = name_of(manager, "append_slots")
    new = count(seq.num_tokens - seq.num_computed_tokens, "new token")
    case = f"With block size {manager.block_size}, a table {before} and {new} from position {seq.num_computed_tokens} on"
    assert len(table) == wanted, (
        f"{case}: {count(seq.num_tokens, 'token')} in all need {count(wanted, 'block')}, but after {method} the table is {table}."
        + (" It must grow whether or not a block was copied." if shared else "")
    )
    kept = [block for i, block in enumerate(before) if i != place or not shared]
    kept_now = [block for i, block in enumerate(table[: len(before)]) if i != place or not shared]
    if shared:
        case += f". Entry {place}, block {before[place]}, is shared"
        assert table[place] != before[place], (
            f"{case} and about to be written: {method} must put a fresh block in its place, but the table is now {table}."
        )
        assert copied is not None and tuple(copied) == (before[place], table[place]), (
            f"{case}: {method} must return (old block, new block), here {(before[place], table[place])}, but returned {copied!r}."
        )
    else:
        assert copied is None, f"{case}: no shared block is written, so nothing needs copying, but {method} returned {copied!r}."
    assert kept_now == kept, f"{case}: all other entries must stay as they are, but {method} made the table {table}."
    again = manager.append_slots(seq)
    assert table_of(manager, seq) == table, (
        f"A second {method} for the same tokens has nothing to do, but the table {table} became {table_of(manager, seq)}."
    )
    assert again is None, f"A second {method} for the same tokens has nothing to copy, but it returned {again!r}."


def check_references(manager: Any, sequences: Iterable[Sequence], swapped: Iterable[Sequence] = ()) -> None:
    """Assert that each reference count is the number of tables that contain the block, on the device and on the host."""
    device = [table_of(manager, seq) for seq in sequences]
    host = [list(manager.swapped_tables[seq.seq_id]) for seq in swapped]
    for pool, tables, name, num_blocks in (
        (manager.gpu_pool, device, "gpu_pool", manager.num_gpu_blocks),
        (manager.cpu_pool, host, "cpu_pool", manager.num_cpu_blocks),
    ):
        named = Counter(block for table in tables for block in table)
        for block, got in enumerate(count_references(pool, num_blocks)):
            wanted = named[block]
            verb = "names" if wanted == 1 else "name"
            assert got == wanted, (
                f"{count(wanted, 'table').capitalize()} {verb} block {block} of {name}, but its reference count is {got}: "
                + (
                    "a release is missing, or a share is one too many."
                    if got > wanted
                    else "a share is missing, or a release is one too many."
                )
            )
        num_free = num_blocks - len(named)
        assert index(pool.num_free) == num_free, (
            f"{count(num_free, 'block').capitalize()} of {name} {'is' if num_free == 1 else 'are'} in no table, but num_free is {pool.num_free}."
        )


def count_references(pool: Any, num_blocks: int) -> list[int]:
    """The reference counts of a pool, which may be kept in a list, a dict or an array."""
    return [index(pool.ref_counts[block]) for block in range(num_blocks)]


def last_actions(actions: list[str]) -> str:
    """The last few actions, as text."""
    return ("… " if len(actions) > 4 else "") + ", ".join(actions[-4:])


def make_family(manager: Any, num_tokens: int, size: int) -> list[Sequence]:
    """A computed prompt and its siblings, which share all of its blocks."""
    parent = make_sequence("a", num_tokens)
    manager.allocate(parent)
    family = [parent]
    for _ in range(size - 1):
        child = fork_sequence(parent)
        manager.fork(parent, child)
        family.append(child)
    return family


def format_call(question: str, options: dict[str, bool]) -> str:
    """A question as it was asked: "can_allocate(seq, keep_watermark=True)"."""
    return f"{question}({', '.join(['seq', *(f'{name}={value}' for name, value in options.items())])})"
