"""What can be seen of a learner's block manager and pool, and what must be true of it at any time."""

from __future__ import annotations

import copy
from collections import Counter
from operator import index
from typing import Any

from minivllm.course.observations import require
from minivllm.request import Sequence

PLACES = {"gpu_pool": "block_tables", "cpu_pool": "swapped_tables"}
"""The tables of each pool's blocks."""


def ask(manager: Any, question: str, *arguments: Any, **options: Any) -> Any:
    """Call a method that only answers, and require that it changed no table and no pool."""
    before = state_of(manager)
    answer = getattr(manager, question)(*arguments, **options)
    after = state_of(manager)
    changed = [what for what, value in before.items() if after[what] != value]
    name = f"{name_of(manager, question)} only answers a question and must change nothing"
    require([], changed, lambda: f"{name}, but {describe_change(changed[0], before[changed[0]], after[changed[0]])}.")
    return answer


def name_of(manager: Any, method: str) -> str:
    """The method with the class that wrote it: "Sharing.append_slots"."""
    owner = next((cls for cls in type(manager).__mro__ if method in vars(cls)), type(manager))
    return f"{owner.__name__}.{method}"


def count(number: int, noun: str) -> str:
    """A number with its noun: "no blocks", "1 block", "2 blocks"."""
    return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")


def table_of(manager: Any, seq: Sequence) -> list[int]:
    """A sequence's block table, copied: the manager's own list may change."""
    return list(map(index, manager.get_block_table(seq)))


def tables_of(manager: Any, place: str) -> dict[int, list[int]]:
    """All tables of blocks of a pool, by the sequence's number."""
    return {seq_id: list(map(index, table)) for seq_id, table in getattr(manager, PLACES[place]).items()}


def count_names(manager: Any, place: str) -> Counter[int]:
    """How many tables name each block of a pool."""
    return Counter(block for table in tables_of(manager, place).values() for block in table)


def count_references(pool: Any, num_blocks: int) -> list[int]:
    """The reference counts of a pool, which may be kept in a list, a dict or an array."""
    return [index(pool.ref_counts[block]) for block in range(num_blocks)]


def next_blocks(pool: Any) -> list[int]:
    """The free blocks of a pool in the order in which it would hand them out."""
    trial = copy.deepcopy(pool)
    return [index(block) for block in trial.allocate(index(trial.num_free))]


def pool_state(name: str, pool: Any, num_blocks: int) -> dict[str, Any]:
    """Everything in a pool that a question or a refused call must not change, by its name in messages."""
    order = f"the order in which {name} hands out its free blocks"
    return {
        f"{name}.num_free": index(pool.num_free),
        f"{name}.ref_counts": count_references(pool, num_blocks),
        order: next_blocks(pool),
    }


def check_references(case: str, manager: Any) -> None:
    """Require that each reference count is the number of tables that name the block, on the device and on the host."""
    for place, num_blocks in (("gpu_pool", manager.num_gpu_blocks), ("cpu_pool", manager.num_cpu_blocks)):
        pool, named = getattr(manager, place), count_names(manager, place)
        counts = count_references(pool, num_blocks)
        wrong = next((block for block in range(num_blocks) if counts[block] != named[block]), None)
        got, wanted = (0, 0) if wrong is None else (counts[wrong], named[wrong])
        said = f"After {case}: {count(wanted, 'table')} {'names' if wanted == 1 else 'name'} block {wrong} of {place}"
        why = "a release is missing, or a share" if got > wanted else "a share is missing, or a release"
        require(None, wrong, f"{said}, but its reference count is {got}: {why} is one too many.")
        num_free = num_blocks - len(named)
        said = f"After {case}: {count(num_free, 'block')} of {place} {'is' if num_free == 1 else 'are'} in no table"
        require(num_free, index(pool.num_free), f"{said}, but num_free is {pool.num_free}.")


def state_of(manager: Any) -> dict[str, Any]:
    """Everything that a question must not change, by its name in messages."""
    state: dict[str, Any] = {}
    for place, num_blocks in (("gpu_pool", manager.num_gpu_blocks), ("cpu_pool", manager.num_cpu_blocks)):
        state |= pool_state(place, getattr(manager, place), num_blocks) | {PLACES[place]: tables_of(manager, place)}
    return state


def describe_change(what: str, before: Any, after: Any) -> str:
    """What has changed in a part of the state."""
    if isinstance(before, dict):
        key = next(key for key in [*before, *after] if before.get(key) != after.get(key))
        return f"a table in {what} changed from {before.get(key)} to {after.get(key)}"
    if isinstance(before, list):
        place = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        return f"{what} changed: where {before[place]} stood, entry {place}, there is {after[place]} now"
    return f"{what} changed from {before} to {after}"
