"""The check of lesson 04 for swapping block tables to the host and back."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.lessons.block_tables import add_token, make_sequence
from minivllm.course.lessons.lesson_04.block_manager import check_free
from minivllm.course.lessons.lesson_04.tables import (
    BLOCK_SIZES,
    KEEP_WATERMARK,
    ask,
    check_references,
    count,
    format_call,
    grow_and_compare,
    make_family,
    table_of,
)
from minivllm.request import Sequence


def check_swap(manager_class: type) -> None:
    """Swapping out and in: pairs in table order, blocks released on both sides, shared blocks, and the answers beforehand."""
    check_free(manager_class)
    rng = random.Random(46)
    for block_size in BLOCK_SIZES:
        manager = manager_class(block_size, 30, 9, watermark=0.1)
        for round_number in range(4):
            num_blocks = rng.randrange(4, 9)
            seq = make_sequence("a", num_blocks * block_size - (rng.randrange(block_size) if round_number % 2 else 0))
            other = make_sequence("b", 2 * block_size)
            for each in (seq, other):
                manager.allocate(each)
            add_token(seq)  # in every second round it needs one more block than the table has
            _check_can_swap_out(manager, seq)
            _swap_out(manager, seq, running=[other], swapped=[seq])
            room = 9 - num_blocks
            for size in {room, room + 1} - {0}:
                big = make_sequence("c", size * block_size)
                manager.allocate(big)
                add_token(big)  # the new token has no block yet, so it needs none on the host
                _check_can_swap_out(manager, big)
                manager.free(big)
            _check_can_swap_in(manager, seq)
            _swap_in(manager, seq, running=[seq, other], swapped=[])
            if round_number % 2:
                manager.swap_out(seq)
            for each in (seq, other):
                manager.free(each)
            _check_all_free(manager, "one of them while it was on the host")
    for block_size in (2, 4):
        for num_tokens in (2 * block_size, 2 * block_size + 1):
            _check_swap_of_siblings(manager_class(block_size, 30, 30, watermark=0.1), num_tokens)
    manager = manager_class(2, 3, 3, watermark=0.0)
    seq = make_sequence("a", 6)
    manager.allocate(seq)
    hosts = [host for _, host in manager.swap_out(seq)]
    back = [device for _, device in manager.swap_in(seq)]
    again = [host for _, host in manager.swap_out(seq)]
    assert back == [0, 1, 2] and again == hosts, (
        "Blocks must be released last one first, on the device and on the host: a table of 3 blocks that is swapped out and in should "
        f"be [0, 1, 2], and its host blocks the next time {hosts}, but they are {back} and {again}."
    )


def _check_swap_of_siblings(manager: Any, num_tokens: int) -> None:
    """One sibling after another goes to the host, and two come back: blocks that others still use stay where they are."""
    family = make_family(manager, num_tokens, 3)
    for seq in family[:2]:
        add_token(seq)
        manager.append_slots(seq)
    add_token(family[2])
    running, swapped = list(family), []
    for seq in (family[1], family[2], family[0]):
        running.remove(seq)
        swapped.append(seq)
        _swap_out(manager, seq, running, swapped)
    for seq in (family[2], family[1]):
        swapped.remove(seq)
        running.append(seq)
        _swap_in(manager, seq, running, swapped)
        grow_and_compare(manager, seq)
        check_references(manager, running, swapped)
    for seq in family:
        manager.free(seq)
    _check_all_free(manager, "one of them, which had shared its blocks, while it was on the host")


def _swap_out(manager: Any, seq: Sequence, running: list[Sequence], swapped: list[Sequence]) -> None:
    """Call `swap_out`, and assert what it returned and that the table and all references are right; both lists are as afterwards."""
    table = table_of(manager, seq)
    shared = [block for block in table if manager.gpu_pool.ref_counts[block] > 1]
    case = f"swap_out of the table {table}" + (f", whose blocks {shared} others name too" if shared else "")
    moves = [tuple(pair) for pair in manager.swap_out(seq)]
    assert [device for device, _ in moves] == table, (
        f"{case} must return (device block, host block) pairs in the order of the table, but returned {moves}."
    )
    hosts = [host for _, host in moves]
    assert len(set(hosts)) == len(hosts) and set(hosts) <= set(range(manager.num_cpu_blocks)), (
        f"{case}: the host blocks must be distinct numbers from 0 to {manager.num_cpu_blocks - 1}, but are {hosts}."
    )
    assert seq.seq_id not in manager.block_tables and list(manager.swapped_tables.get(seq.seq_id, [])) == hosts, (
        f"{case}: the sequence must leave block_tables, and its table in swapped_tables must be the host blocks {hosts}."
    )
    _check_references_after(case, manager, running, swapped)


def _swap_in(manager: Any, seq: Sequence, running: list[Sequence], swapped: list[Sequence]) -> None:
    """Call `swap_in`, and assert what it returned and that the table and all references are right; both lists are as afterwards."""
    hosts = list(manager.swapped_tables[seq.seq_id])
    case = f"swap_in of the host blocks {hosts}"
    moves = [tuple(pair) for pair in manager.swap_in(seq)]
    assert [host for host, _ in moves] == hosts, (
        f"{case} must return (host block, device block) pairs in the order of the table, but returned {moves}."
    )
    assert seq.seq_id in manager.block_tables and seq.seq_id not in manager.swapped_tables, (
        f"{case}: the table must move from swapped_tables back to block_tables."
    )
    table = table_of(manager, seq)
    assert len(table) <= len(hosts), (
        f"{case} must bring back these {count(len(hosts), 'block')} and no more, but the table is now {table}. A block for the newest token is "
        f"taken by append_slots, which the scheduler calls afterwards."
    )
    devices = [device for _, device in moves]
    assert table == devices, f"{case}: the table should be {devices}, the device blocks of the returned pairs, but is {table}."
    _check_references_after(case, manager, running, swapped)


def _check_references_after(case: str, manager: Any, running: list[Sequence], swapped: list[Sequence]) -> None:
    try:
        check_references(manager, running, swapped)
    except AssertionError as error:
        raise AssertionError(f"After {case}: {error}") from None


def _check_all_free(manager: Any, how: str) -> None:
    free = manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
    assert free == (manager.num_gpu_blocks, manager.num_cpu_blocks), (
        f"All sequences are freed, {how}, but {free[0]} of {manager.num_gpu_blocks} device blocks and {free[1]} of {manager.num_cpu_blocks} host "
        f"blocks are free: free must release blocks of both pools."
    )


def _check_can_swap_out(manager: Any, seq: Sequence) -> None:
    free, size = manager.get_num_free_cpu_blocks(), len(table_of(manager, seq))
    got, wanted = ask(manager, "can_swap_out", seq), size <= free
    assert bool(got) == wanted, (
        f"The host has {count(free, 'free block')}, and the table has {count(size, 'block')}: can_swap_out should be {wanted}, but is {got!r}."
    )


def _check_can_swap_in(manager: Any, seq: Sequence) -> None:
    """Ask with just enough free blocks, and with one too few; the newest token counts too."""
    needed = -(-seq.num_tokens // manager.block_size)
    for options in KEEP_WATERMARK:
        room = manager.get_num_free_gpu_blocks() - (manager.watermark_blocks if options.get("keep_watermark", True) else 0)
        for missing in (0, 1):
            filler = make_sequence("d", (room - needed + missing) * manager.block_size)
            manager.allocate(filler)
            got = ask(manager, "can_swap_in", seq, **options)
            assert bool(got) == (not missing), (
                f"{count(manager.get_num_free_gpu_blocks(), 'device block')} are free, watermark_blocks is {manager.watermark_blocks}, "
                f"and the sequence's {count(seq.num_tokens, 'token')}, the newest included, need {count(needed, 'block')}: "
                f"{format_call('can_swap_in', options)} should be {not missing}, but is {got!r}."
            )
            manager.free(filler)
