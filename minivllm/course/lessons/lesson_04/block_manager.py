"""The checks of lesson 04 for each part of a block manager.

Each takes a learner's class and tries it on inputs that are not in the notebook. Its assertions say what was expected, what was returned and
where to look. They use only names that the exercise introduces. A stage's check also tries what the stage inherits and may have broken, and
every question is asked through `ask`, which finds one that changes something.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from numbers import Integral
from operator import index
from typing import Any

from minivllm.course.lessons.block_tables import add_token, add_tokens, fork_sequence, make_sequence
from minivllm.course.lessons.lesson_04.tables import (
    BLOCK_SIZES,
    KEEP_WATERMARK,
    ask,
    check_references,
    count,
    count_references,
    format_call,
    grow_and_compare,
    last_actions,
    make_family,
    name_of,
    next_blocks,
    table_of,
)
from minivllm.request import Sequence


def check_pool(pool_class: type) -> None:
    """`allocate`, `share` and `release`, compared with a list of free blocks and a list of counts."""
    rng = random.Random(4)
    num_blocks = rng.randrange(9, 15)
    pool = pool_class(num_blocks)
    free, counts = list(range(num_blocks)), [0] * num_blocks
    actions: list[str] = []
    for _ in range(300):
        used = [block for block in range(num_blocks) if counts[block]]
        some = rng.sample(used, rng.randrange(min(len(used), 4) + 1))
        action = rng.choice(["allocate", "allocate", "share", "release", "release"])
        if action == "allocate":
            number = rng.randrange(min(len(free), 5) + 1)
            actions.append(f"allocate({number})")
            got, wanted = pool.allocate(number), free[:number]
            assert got is not None and [index(block) for block in got] == wanted, (
                f"After {last_actions(actions)}: expected {wanted}, the first blocks in the queue, in that order, but got {got!r}."
            )
            del free[:number]
            for block in wanted:
                counts[block] = 1
        elif action == "share":
            actions.append(f"share({some})")
            pool.share(list(some))
            for block in some:
                counts[block] += 1
        else:
            actions.append(f"release({some})")
            pool.release(list(some))
            for block in reversed(some):
                counts[block] -= 1
                if not counts[block]:
                    free.insert(0, block)
        assert index(pool.num_free) == len(free), (
            f"After {last_actions(actions)}: {count(len(free), 'block')} should be free, but num_free is {pool.num_free!r}. A block becomes free "
            f"only when its last reference is released."
        )
        assert count_references(pool, num_blocks) == counts, (
            f"After {last_actions(actions)}: ref_counts should be {counts}, but are {count_references(pool, num_blocks)}."
        )
        assert next_blocks(pool) == free, (
            f"After {last_actions(actions)}: the free blocks should be handed out in the order {free}, but would be in the order "
            f"{next_blocks(pool)}. A block that becomes free goes to the front. The last block of a list is released first, so its first block is handed out first."
        )
    _check_refusal(pool_class, "allocate", 3, "only 2 blocks are free")
    _check_refusal(pool_class, "share", [0, 3], "block 3 is free")
    _check_refusal(pool_class, "release", [0, 3], "block 3 is free")
    _check_refusal(pool_class, "release", [3, 0], "block 3 is free")


def _check_refusal(pool_class: type, method: str, argument: Any, why: str) -> None:
    """An invalid call raises a ValueError and changes nothing. Blocks 0 and 1 of four are taken."""
    pool = pool_class(4)
    pool.allocate(2)
    before = count_references(pool, 4), next_blocks(pool)
    call = f"{method}({argument})"
    try:
        getattr(pool, method)(argument)
    except ValueError:
        pass
    except IndexError as error:
        raise AssertionError(f"{call} must raise a ValueError, because {why}, but raised an IndexError: {error}.") from None
    else:
        raise AssertionError(f"{call} must raise a ValueError, because {why}, but it raised nothing.")
    after = count_references(pool, 4), next_blocks(pool)
    assert after == before, (
        f"{call} raises a ValueError, because {why}, and must then leave the pool as it was: ref_counts and free blocks were {before[0]} and "
        f"{before[1]}, but now are {after[0]} and {after[1]}. Look before you change anything."
    )


def check_allocate(manager_class: type) -> None:
    """Tables as long as the prompt needs, of blocks in no other table; and the cell's given code is still there."""
    rng = random.Random(40)
    for arguments, sizes_given in (({"num_cpu_blocks": 3, "watermark": 0.1}, (4, 40, 3)), ({}, (0, 40, 0))):
        manager = manager_class(4, 40, **arguments)
        given = manager.watermark_blocks, manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
        assert given == sizes_given, (
            f"In a new manager with 40 device blocks and {arguments}, watermark_blocks and the numbers of free device and host blocks should be "
            f"{sizes_given}, but are {given}: `__init__` and the methods that count blocks are given, leave them as they are."
        )
    for block_size in BLOCK_SIZES:
        manager = manager_class(block_size, 200, watermark=0.25)
        sizes = (1, block_size - 1, block_size, block_size + 1, rng.randrange(2, 9) * block_size, rng.randrange(20, 60))
        for num_tokens in sizes:
            wanted = (num_tokens + block_size - 1) // block_size
            got = ask(manager, "num_blocks_for", num_tokens)
            assert isinstance(got, Integral) and got == wanted, (
                f"{count(num_tokens, 'token')} in blocks of {block_size} should need {count(wanted, 'block')}, but num_blocks_for returned {got!r}."
            )
        sequences = []
        for _ in range(5):
            seq = make_sequence("a", rng.choice([block_size, 2 * block_size, rng.randrange(1, 30)]))
            manager.allocate(seq)
            _check_new_table(manager, seq)
            sequences.append(seq)
            check_references(manager, sequences)
    for num_blocks in (1, 5):
        manager = manager_class(4, num_blocks, watermark=0.5)
        seq = make_sequence("a", 4 * num_blocks)
        manager.allocate(seq)  # to the last block: allocate ignores the watermark
        _check_new_table(manager, seq)


def _check_new_table(manager: Any, seq: Sequence) -> None:
    table, wanted = table_of(manager, seq), -(-seq.num_tokens // manager.block_size)
    assert len(table) == wanted, (
        f"A prompt of {count(seq.num_tokens, 'token')} in blocks of {manager.block_size} needs {count(wanted, 'block')}, but its table is {table}."
    )


def check_free(manager_class: type) -> None:
    """All blocks return to the pool once, the last one of a table first."""
    rng = random.Random(41)
    for block_size in BLOCK_SIZES:
        manager = manager_class(block_size, 100, watermark=0.25)
        free = name_of(manager, "free")
        sequences = [make_sequence(f"{i}", rng.randrange(1, 12 * block_size)) for i in range(4)]
        for seq in sequences:
            manager.allocate(seq)
        rng.shuffle(sequences)
        for number, seq in enumerate(sequences, 1):
            before, table = manager.get_num_free_gpu_blocks(), table_of(manager, seq)
            manager.free(seq)
            got = manager.get_num_free_gpu_blocks() - before
            assert got == len(table), f"{free} must release {count(len(table), 'block')}, the whole table, but released {got}."
            manager.free(seq)  # a second time: no error, no effect
            got = manager.get_num_free_gpu_blocks() - before
            assert got == len(table), (
                f"A second {free} of the same sequence must do nothing, but now {got} blocks instead of {len(table)} have been released."
            )
            assert seq.seq_id not in manager.block_tables, (
                f"{free} must remove the sequence's table, but it is still in block_tables."
            )
            check_references(manager, sequences[number:])
    manager = manager_class(2, 4, watermark=0.25)
    seq = make_sequence("a", 8)
    manager.allocate(seq)
    table = table_of(manager, seq)
    manager.free(seq)
    manager.allocate(seq)
    again = table_of(manager, seq)
    assert again == table, (
        f"The table was {table}. Its last block must be released first, so that its first one is next in the queue: the next table of 4 "
        f"blocks should be the same, but is {again}."
    )


def check_can_allocate(manager_class: type) -> None:
    """The answer just below and above the limit, with and without the watermark."""
    rng = random.Random(42)
    for block_size in BLOCK_SIZES:
        for watermark in (0.0, 0.1, 0.25):
            manager = manager_class(block_size, 40, watermark=watermark)
            taken = make_sequence("a", block_size * rng.randrange(3, 9))
            manager.allocate(taken)
            free = manager.get_num_free_gpu_blocks()
            for options in KEEP_WATERMARK:
                room = free - (int(watermark * 40) if options.get("keep_watermark", True) else 0)
                for num_blocks in (1, room - 1, room, room + 1, free + 1):
                    num_tokens = max(1, num_blocks * block_size - rng.randrange(block_size))
                    seq = make_sequence("b", num_tokens)
                    got, wanted = ask(manager, "can_allocate", seq, **options), num_blocks <= room
                    assert bool(got) == wanted, (
                        f"With block size {block_size}, {free} free blocks and watermark_blocks = {int(watermark * 40)}: for a prompt of "
                        f"{count(num_tokens, 'token')}, which needs {count(num_blocks, 'block')}, {format_call('can_allocate', options)} should "
                        f"be {wanted}, but is {got!r}."
                    )


def check_append(manager_class: type) -> None:
    """The tables of several sequences that grow by one token or several, and share nothing."""
    rng = random.Random(43)
    for block_size in BLOCK_SIZES:
        manager = manager_class(block_size, 400, watermark=0.5)
        sequences = [make_sequence(f"{i}", rng.randrange(1, 3 * block_size + 2)) for i in range(3)]
        for seq in sequences:
            manager.allocate(seq)
        for number in range(3 * block_size + 5):
            seq = rng.choice(sequences)
            add_tokens(seq, 1 if number <= block_size else rng.choice([1, 2, block_size, 2 * block_size + 1]))
            grow_and_compare(manager, seq)
            check_references(manager, sequences)


def check_can_append(manager_class: type) -> None:
    """The answer for one token and for several, with just enough free blocks and with one too few, and nothing shared."""

    def holding(block_size: int, num_tokens: int, spare: int) -> tuple[Any, Sequence]:
        manager = manager_class(block_size, -(-num_tokens // block_size) + spare, watermark=0.5)
        seq = make_sequence("a", num_tokens)
        manager.allocate(seq)
        return manager, seq

    for block_size in BLOCK_SIZES:
        for num_tokens in range(1, 2 * block_size + 1):
            for num_new in (1, 2, block_size + 1, 2 * block_size + 1):
                _check_room(holding, block_size, num_tokens, num_new, shared=False)


def _check_room(
    holding: Callable[[int, int, int], tuple[Any, Sequence]], block_size: int, num_tokens: int, num_new: int, *, shared: bool
) -> None:
    """Ask `can_append_slots` with the blocks it needs, one fewer, and one more."""
    num_blocks = -(-num_tokens // block_size)
    growth = -(-(num_tokens + num_new) // block_size) - num_blocks
    copied = shared and num_tokens % block_size != 0
    needed = growth + copied
    for spare in {max(0, needed - 1), needed, needed + 1}:
        manager, seq = holding(block_size, num_tokens, spare)
        add_tokens(seq, num_new)
        got, wanted = ask(manager, "can_append_slots", seq), spare >= needed
        why = count(growth, "block") + " to grow by" + (" and 1 block for the copy of the shared one" if copied else "")
        watermark = f" The watermark of {manager.watermark_blocks} applies only to newcomers, not to running sequences."
        assert bool(got) == wanted, (
            f"With block size {block_size}, a table of {count(num_blocks, 'block')}{', shared by a sibling,' if shared else ''} holds "
            f"{count(num_tokens, 'token')}, and {count(num_new, 'new token')} must be placed. That takes {why}, and {count(spare, 'block')} "
            f"{'is' if spare == 1 else 'are'} free: {name_of(manager, 'can_append_slots')} should be {wanted}, but is {got!r}."
            + (watermark if wanted and manager.watermark_blocks else "")
        )


def check_fork(manager_class: type) -> None:
    """Siblings share the parent's blocks, each in its own list, and references are counted."""
    rng = random.Random(44)
    for block_size in BLOCK_SIZES:
        manager = manager_class(block_size, 60, watermark=0.25)
        parent = make_sequence("a", rng.randrange(2 * block_size, 5 * block_size) + 1)
        manager.allocate(parent)
        free = manager.get_num_free_gpu_blocks()
        family = [parent]
        for _ in range(3):
            child = fork_sequence(parent)
            manager.fork(parent, child)
            family.append(child)
            got, wanted = table_of(manager, child), table_of(manager, parent)
            assert got == wanted, f"The child's table should equal the parent's, {wanted}, but is {got}."
            table = manager.get_block_table(child)
            assert isinstance(table, tuple) or table is not manager.get_block_table(parent), (
                "Parent and child share one list, so when one table grows, the other does too. Give the child a copy."
            )
        assert manager.get_num_free_gpu_blocks() == free, "fork copies no block, so it must not take one."
        check_references(manager, family)
        rng.shuffle(family)
        for seq in family[:-1]:
            manager.free(seq)
            assert manager.get_num_free_gpu_blocks() == free, (
                "A sibling was freed while others still use the same blocks, yet some of these became free: fork must count references."
            )
        manager.free(family[-1])
        assert manager.get_num_free_gpu_blocks() == 60, (
            "All siblings are freed, but not all blocks are free: a reference was counted twice."
        )


def check_copy_on_write(manager_class: type) -> None:
    """Siblings that grow: the first write to a shared block copies it, full blocks stay shared, and sequences that share nothing grow as before."""
    check_append(manager_class)
    check_can_append(manager_class)
    rng = random.Random(45)
    for block_size in (2, 3, 4, 16):
        for num_tokens in (2 * block_size - 1, 2 * block_size, 2 * block_size + 1, rng.randrange(3 * block_size, 5 * block_size)):
            manager = manager_class(block_size, 90, watermark=0.5)
            family = make_family(manager, num_tokens, 3)
            for number in range(2 * block_size + 1):
                for seq in family:
                    add_tokens(seq, rng.choice([1, 1, block_size]) if number < 3 else 1)
                    ask(manager, "must_copy", seq)
                    grow_and_compare(manager, seq)
                    check_references(manager, family)
            full = num_tokens // block_size
            heads = [table_of(manager, seq)[:full] for seq in family]
            assert heads == heads[:1] * len(heads), (
                f"The first {count(full, 'block')} of the siblings are full and never written again, so they must still be shared, but the "
                f"tables begin with {', '.join(map(str, heads))}."
            )

    def holding(block_size: int, num_tokens: int, spare: int) -> tuple[Any, Sequence]:
        manager = manager_class(block_size, -(-num_tokens // block_size) + spare, watermark=0.5)
        return manager, make_family(manager, num_tokens, 2)[1]

    for block_size in (2, 4):
        for num_tokens in range(block_size, 3 * block_size + 1):
            for num_new in (1, 2, block_size + 1):
                _check_room(holding, block_size, num_tokens, num_new, shared=True)
    manager = manager_class(4, 3, watermark=0.5)
    parent, child = make_family(manager, 6, 2)
    for seq in (child, parent):
        add_token(seq)
    manager.append_slots(child)
    assert ask(manager, "can_append_slots", parent), (
        "The child has its copy, so the parent now writes to a block of its own and needs no free block: can_append_slots should be "
        "True. Only the block being written matters, not the ones still shared."
    )
