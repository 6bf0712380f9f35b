"""The checks of lesson 04 for each part of a block manager.

Each takes a learner's class and tries it on inputs that are not in the notebook. Its assertions say what was expected, what came and
where to look. They use only names that the exercise introduces.
"""

from __future__ import annotations

import random
from numbers import Integral
from operator import index
from typing import Any

from minivllm.course.lessons.block_tables import add_token, fork_sequence, make_sequence
from minivllm.course.lessons.lesson_04.tables import check_references, count_references, grow_and_compare, last_actions
from minivllm.request import Sequence

_BLOCK_SIZES = (1, 3, 4, 16)


def check_pool(pool_class: type) -> None:
    """`allocate`, `share` and `release`, compared with a list of free blocks and a list of counts."""
    rng = random.Random(4)
    num_blocks = rng.randrange(9, 15)
    pool = pool_class(num_blocks)
    free, counts = list(range(num_blocks)), [0] * num_blocks
    actions: list[str] = []
    for _ in range(300):
        used = [block for block in range(num_blocks) if counts[block]]
        action = rng.choice(["allocate", "allocate", "share", "release", "release"])
        if action == "allocate" and free:
            actions.append("allocate()")
            got, wanted = index(pool.allocate()), free.pop(0)
            assert got == wanted, (
                f"After {last_actions(actions)}: expected block {wanted}, which has been free the longest, but got {got!r}."
            )
            counts[wanted] = 1
        elif action == "share" and used:
            block = rng.choice(used)
            actions.append(f"share({block})")
            pool.share(block)
            counts[block] += 1
        elif action == "release" and used:
            block = rng.choice(used)
            actions.append(f"release({block})")
            pool.release(block)
            counts[block] -= 1
            if not counts[block]:
                free.append(block)
        assert index(pool.num_free) == len(free), (
            f"After {last_actions(actions)}: {len(free)} blocks are free, but num_free is {pool.num_free!r}. A block becomes free when its last "
            f"reference is released, and not before."
        )
        assert count_references(pool, num_blocks) == counts, (
            f"After {last_actions(actions)}: ref_counts should be {counts}, but are {pool.ref_counts}."
        )
    pool = pool_class(3)
    block = pool.allocate()
    pool.release(block)
    before = pool.num_free, count_references(pool, 3)
    try:
        pool.release(block)
    except ValueError:
        pass
    else:
        raise AssertionError(f"release({block}) of a free block must raise a ValueError: it was released twice.")
    assert (pool.num_free, count_references(pool, 3)) == before, (
        "A release that raises a ValueError must leave the pool unchanged, but something changed."
    )


def check_allocate(manager_class: type) -> None:
    """Tables as long as the prompt needs, of blocks in no other table."""
    rng = random.Random(40)
    for block_size in _BLOCK_SIZES:
        manager = manager_class(block_size, 200, watermark=0.0)
        for num_tokens in (
            1,
            block_size - 1,
            block_size,
            block_size + 1,
            rng.randrange(2, 9) * block_size,
            rng.randrange(20, 60),
        ):
            wanted = (num_tokens + block_size - 1) // block_size
            got = manager.num_blocks_for(num_tokens)
            assert isinstance(got, Integral) and got == wanted, (
                f"{num_tokens} tokens in blocks of {block_size} need {wanted} blocks, but num_blocks_for returned {got!r}."
            )
        seen: list[int] = []
        for _ in range(5):
            num_tokens = rng.choice([block_size, 2 * block_size, rng.randrange(1, 30)])
            seq = make_sequence("a", num_tokens)
            manager.allocate(seq)
            table = list(manager.get_block_table(seq))
            wanted = (num_tokens + block_size - 1) // block_size
            assert len(table) == wanted, (
                f"A prompt of {num_tokens} tokens in blocks of {block_size} needs {wanted} blocks, but its table is {table}."
            )
            seen += table
            assert len(set(seen)) == len(seen), f"Block tables of different prompts contain the same block: {sorted(seen)}."
            assert manager.get_num_free_gpu_blocks() == 200 - len(seen), (
                f"{len(seen)} of 200 blocks are in tables, but {manager.get_num_free_gpu_blocks()} are free: allocate must take blocks from gpu_pool."
            )


def check_free(manager_class: type) -> None:
    """All blocks return to the pool once, the last one of a table first."""
    rng = random.Random(41)
    for block_size in _BLOCK_SIZES:
        manager = manager_class(block_size, 100, watermark=0.0)
        sequences = [make_sequence(f"{i}", rng.randrange(1, 12 * block_size)) for i in range(4)]
        for seq in sequences:
            manager.allocate(seq)
        rng.shuffle(sequences)
        for seq in sequences:
            before, table = manager.get_num_free_gpu_blocks(), list(manager.get_block_table(seq))
            manager.free(seq)
            got = manager.get_num_free_gpu_blocks() - before
            assert got == len(table), (
                f"free of a sequence with {len(table)} blocks must release all {len(table)}, but released {got}."
            )
            manager.free(seq)  # a second time: no error, no effect
            got = manager.get_num_free_gpu_blocks() - before
            assert got == len(table), (
                f"A second free of the same sequence must do nothing, but now {got} blocks instead of {len(table)} have been released."
            )
            assert seq.seq_id not in manager.block_tables, (
                "free must remove the sequence's table, but it is still in block_tables."
            )
        assert manager.get_num_free_gpu_blocks() == 100, "All sequences are freed, but not all blocks are free."
    manager = manager_class(2, 4, watermark=0.0)
    seq = make_sequence("a", 8)
    manager.allocate(seq)
    table = list(manager.get_block_table(seq))
    manager.free(seq)
    manager.allocate(seq)
    again = list(manager.get_block_table(seq))
    assert again == table[::-1], (
        f"The table was {table}. Its last block must be released first, so that it is reused first: the next table of 4 blocks "
        f"should be {table[::-1]}, but is {again}."
    )


def check_can_allocate(manager_class: type) -> None:
    """The answer just below and above the limit, with and without the watermark."""
    rng = random.Random(42)
    for block_size in _BLOCK_SIZES:
        for watermark in (0.0, 0.1, 0.25):
            manager = manager_class(block_size, 40, watermark=watermark)
            taken = make_sequence("a", block_size * rng.randrange(3, 9))
            manager.allocate(taken)
            free = manager.get_num_free_gpu_blocks()
            for keep in (True, False):
                room = free - (int(watermark * 40) if keep else 0)
                for num_blocks in (1, room - 1, room, room + 1, free + 1):
                    num_tokens = max(1, num_blocks * block_size - rng.randrange(block_size))
                    seq = make_sequence("b", num_tokens)
                    got, wanted = manager.can_allocate(seq, keep_watermark=keep), num_blocks <= room
                    assert bool(got) == wanted, (
                        f"{free} blocks of {block_size} are free, and the watermark is {int(watermark * 40)}. For a prompt of {num_tokens} "
                        f"tokens ({num_blocks} blocks), can_allocate(keep_watermark={keep}) should be {wanted}, but is {got!r}."
                    )
            assert manager.get_num_free_gpu_blocks() == free, (
                "can_allocate must not change anything, but the number of free blocks changed."
            )


def check_append(manager_class: type) -> None:
    """The tables of several sequences that grow token by token."""
    rng = random.Random(43)
    for block_size in _BLOCK_SIZES:
        manager = manager_class(block_size, 200, watermark=0.0)
        sequences = [make_sequence(f"{i}", rng.randrange(1, 3 * block_size + 2)) for i in range(3)]
        for seq in sequences:
            manager.allocate(seq)
        for _ in range(3 * block_size + 5):
            seq = rng.choice(sequences)
            add_token(seq)
            before = list(manager.get_block_table(seq))
            manager.append_slots(seq)
            table = list(manager.get_block_table(seq))
            manager.append_slots(seq)
            again = list(manager.get_block_table(seq))
            assert again == table, f"A second append_slots for the same token must change nothing, but {table} became {again}."
            wanted = (seq.num_tokens + block_size - 1) // block_size
            assert len(table) == wanted, (
                f"A sequence of {seq.num_tokens} tokens, the newest included, needs {wanted} blocks of {block_size} "
                f"(its table had {len(before)}), but after append_slots it has {len(table)}: look at the block boundary."
            )
            assert table[: len(before)] == before, f"append_slots must keep the earlier blocks, but {before} became {table}."
            check_references(manager, sequences)


def check_can_append(manager_class: type) -> None:
    """The answer with and without a free block, at a block boundary and within a block."""
    for block_size in _BLOCK_SIZES:
        for num_tokens in range(1, 3 * block_size + 1):
            for spare in (0, 1):
                num_blocks = -(-num_tokens // block_size)
                manager = manager_class(block_size, num_blocks + spare, watermark=0.0)
                seq = make_sequence("a", num_tokens)
                manager.allocate(seq)
                add_token(seq)
                at_boundary = num_tokens % block_size == 0
                got, wanted = manager.can_append_slots(seq), spare == 1 or not at_boundary
                assert bool(got) == wanted, (
                    f"A table of {num_blocks} blocks of {block_size} holds {num_tokens} tokens, one more must be appended, and {spare} blocks "
                    f"are free: can_append_slots should be {wanted}, but is {got!r}."
                )
                assert manager.get_num_free_gpu_blocks() == spare and len(manager.get_block_table(seq)) == num_blocks, (
                    "can_append_slots must not change anything, but it took a block."
                )


def check_fork(manager_class: type) -> None:
    """Siblings share the parent's blocks in lists of their own, and references are counted."""
    rng = random.Random(44)
    for block_size in _BLOCK_SIZES:
        manager = manager_class(block_size, 60, watermark=0.0)
        parent = make_sequence("a", rng.randrange(2 * block_size, 5 * block_size) + 1)
        manager.allocate(parent)
        free = manager.get_num_free_gpu_blocks()
        family = [parent]
        for _ in range(3):
            child = fork_sequence(parent)
            manager.fork(parent, child)
            family.append(child)
            got, wanted = list(manager.get_block_table(child)), list(manager.get_block_table(parent))
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
    """Siblings that grow: the first write to a shared block copies it, and full blocks stay shared."""
    rng = random.Random(45)
    for block_size in (2, 3, 4, 16):
        for num_tokens in (2 * block_size - 1, 2 * block_size, 2 * block_size + 1, rng.randrange(3 * block_size, 5 * block_size)):
            manager = manager_class(block_size, 60, watermark=0.0)
            parent = make_sequence("a", num_tokens)
            manager.allocate(parent)
            family = [parent]
            for _ in range(2):
                child = fork_sequence(parent)
                manager.fork(parent, child)
                family.append(child)
            for number in range(2 * block_size + 1):
                for seq in family:
                    add_token(seq)
                    grow_and_compare(manager, seq, first=number == 0)
                    check_references(manager, family)
            full = num_tokens // block_size
            heads = {tuple(manager.get_block_table(seq)[:full]) for seq in family}
            assert len(heads) == 1, (
                f"The first {full} blocks are full and never written again, so the siblings must still share them, but their tables begin with {heads}."
            )
    manager = manager_class(4, 3, watermark=0.0)
    parent = make_sequence("a", 6)
    manager.allocate(parent)
    child = fork_sequence(parent)
    manager.fork(parent, child)
    for seq in (child, parent):
        add_token(seq)
    manager.append_slots(child)
    assert manager.can_append_slots(parent), (
        "The child has its copy, so the parent now writes to a block of its own and needs no free block: can_append_slots should be "
        "True. Only the block being written matters, not those that are still shared."
    )
    for spare in (0, 1):
        manager = manager_class(4, 2 + spare, watermark=0.0)
        parent = make_sequence("a", 6)
        manager.allocate(parent)
        child = fork_sequence(parent)
        manager.fork(parent, child)
        add_token(child)
        got = manager.can_append_slots(child)
        assert bool(got) == bool(spare), (
            f"The next token goes into a shared block, whose copy needs a free block. There are {spare}: can_append_slots should be "
            f"{bool(spare)}, but is {got!r}."
        )


def check_swap(manager_class: type) -> None:
    """Swapping out and in: pairs in table order, blocks released on both sides, and the answers of can_swap_out and can_swap_in."""
    rng = random.Random(46)
    for block_size in _BLOCK_SIZES:
        manager = manager_class(block_size, 30, 9, watermark=0.1)
        for round_number in range(4):
            num_blocks = rng.randrange(4, 9)
            seq = make_sequence("a", num_blocks * block_size - (rng.randrange(block_size) if round_number % 2 else 0))
            other = make_sequence("b", 2 * block_size)
            for each in (seq, other):
                manager.allocate(each)
            add_token(seq)  # in every second round it needs one more block than the table has
            table = list(manager.get_block_table(seq))
            assert manager.can_swap_out(seq), (
                f"The host has 9 free blocks, and the table has {len(table)}: can_swap_out should be True."
            )
            moves = [tuple(pair) for pair in manager.swap_out(seq)]
            assert [device for device, _ in moves] == table, (
                f"swap_out must return (device block, host block) pairs in the order of the table {table}, but returned {moves}."
            )
            hosts = [host for _, host in moves]
            assert len(set(hosts)) == len(hosts) and set(hosts) <= set(range(9)), (
                f"The host blocks must be distinct numbers from 0 to 8, but are {hosts}."
            )
            assert manager.get_num_free_gpu_blocks() == 28, "A swapped-out sequence must hold no device block: release them."
            assert manager.cpu_pool.num_free == 9 - len(table), (
                f"{len(table)} host blocks are in use, but cpu_pool has {manager.cpu_pool.num_free} of 9 free: allocate them from cpu_pool."
            )
            assert list(manager.swapped_tables[seq.seq_id]) == hosts and seq.seq_id not in manager.block_tables, (
                "The table must move from block_tables to swapped_tables."
            )
            room = 9 - len(table)
            for num_blocks in {room, room + 1} - {0}:
                big = make_sequence("c", num_blocks * block_size)
                manager.allocate(big)
                add_token(big)  # the new token has no block yet, so it needs none on the host
                got, wanted = manager.can_swap_out(big), num_blocks <= room
                sizes = f"The host has {room} free blocks, and the table has {num_blocks}"
                assert bool(got) == wanted, f"{sizes}: can_swap_out should be {wanted}, but is {got!r}."
                manager.free(big)
            _check_can_swap_in(manager, seq)
            moves_back = [tuple(pair) for pair in manager.swap_in(seq)]
            assert [host for host, _ in moves_back] == hosts, (
                f"swap_in must return (host block, device block) pairs in the order of the table {hosts}, but returned {moves_back}."
            )
            assert list(manager.get_block_table(seq)) == [device for _, device in moves_back], (
                f"The table should consist of the device blocks in {moves_back}, but is {manager.get_block_table(seq)}."
            )
            assert manager.cpu_pool.num_free == 9 and seq.seq_id not in manager.swapped_tables, (
                "A swapped-in sequence must hold no host block: release them."
            )
            check_references(manager, [seq, other])
            if round_number % 2:
                manager.swap_out(seq)
            for each in (seq, other):
                manager.free(each)
            assert (manager.get_num_free_gpu_blocks(), manager.cpu_pool.num_free) == (30, 9), (
                "All sequences are freed, one of them while swapped out, but not all blocks are free: free must release blocks of both pools."
            )
    manager = manager_class(2, 3, 3, watermark=0.0)
    seq = make_sequence("a", 6)
    manager.allocate(seq)
    hosts = [host for _, host in manager.swap_out(seq)]
    back = [device for _, device in manager.swap_in(seq)]
    again = [host for _, host in manager.swap_out(seq)]
    assert back == [2, 1, 0] and again == hosts[::-1], (
        "Blocks must be released last one first, on the device and on the host: a table of 3 blocks that is swapped out and in should "
        f"be [2, 1, 0], and its host blocks the next time {hosts[::-1]}, but they are {back} and {again}."
    )


def _check_can_swap_in(manager: Any, seq: Sequence) -> None:
    """Ask with just enough free blocks, and with one too few; the newest token counts too."""
    needed = manager.num_blocks_for(seq.num_tokens)
    for keep in (True, False):
        room = manager.get_num_free_gpu_blocks() - (manager.watermark_blocks if keep else 0)
        for missing in (0, 1):
            filler = make_sequence("d", (room - needed + missing) * manager.block_size)
            manager.allocate(filler)
            got = manager.can_swap_in(seq, keep_watermark=keep)
            assert bool(got) == (not missing), (
                f"{manager.get_num_free_gpu_blocks()} device blocks are free, the watermark is {manager.watermark_blocks}, and the sequence needs "
                f"{needed}: can_swap_in(keep_watermark={keep}) should be {not missing}, but is {got!r}."
            )
            manager.free(filler)
