"""A learner's block manager, called at random, and what must be true after each call.

A check says which calls there are; they come in any order. Only names that the exercise introduces are used. Which block a table gets is the
pool's business, so no block's number is kept for the grader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any

from minivllm.course.lessons.block_tables import add_token, add_tokens, fork_sequence, make_sequence
from minivllm.course.lessons.lesson_04.looks import (
    PLACES,
    ask,
    check_references,
    count,
    count_names,
    describe_change,
    name_of,
    next_blocks,
    table_of,
    tables_of,
)
from minivllm.course.observations import require, rounds
from minivllm.request import Sequence as TokenSequence

BLOCK_SIZES = (1, 3, 4, 16)
_KEEP_WATERMARK: tuple[dict[str, bool], ...] = ({"keep_watermark": True}, {"keep_watermark": False}, {})
"""The arguments of a question about the watermark; without the argument, it is kept."""
_NEWEST = "A block for the newest token is taken by append_slots, which the scheduler calls after swap_in."


def walks(name: str, manager_class: type, block_sizes: Sequence[int] = BLOCK_SIZES, most_tables: int = 4) -> Iterator[Walk]:
    """A new manager for each round of a check, with one block size after another."""
    for number, rng in enumerate(rounds(name, 12)):
        sizes, watermark = (rng.randrange(30, 60), rng.randrange(10, 40)), rng.choice((0.1, 0.25, 0.0))
        yield Walk(manager_class(block_sizes[number % len(block_sizes)], *sizes, watermark=watermark), rng, most_tables)


def take_walks(name: str, manager_class: type, *calls: tuple[int, str], block_sizes: Sequence[int] = BLOCK_SIZES) -> None:
    """In each round, make so many of some calls, which are separated by spaces, in any order; then so many of others."""
    for walk in walks(name, manager_class, block_sizes):
        for num_calls, names in calls:
            for _ in range(num_calls):
                getattr(walk, walk.rng.choice(names.split()))()


class Walk:
    """A manager and the sequences that have a table in it. The public methods without arguments are the calls.

    Args:
        manager: The learner's.
        rng: Decides what happens.
        most_tables: How many sequences run at most.
    """

    def __init__(self, manager: Any, rng: random.Random, most_tables: int) -> None:
        self.manager, self.rng, self.most_tables = manager, rng, most_tables
        self.block_size: int = manager.block_size
        self.running: list[TokenSequence] = []
        self.swapped: list[TokenSequence] = []
        self.known: dict[str, dict[int, list[int]]] = {place: {} for place in PLACES}
        self.num_grown = 0

    # -- calls ---------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """A prompt that there is room for; the watermark plays no part."""
        room = self.manager.get_num_free_gpu_blocks() * self.block_size
        if not room or len(self.running) >= self.most_tables:
            return
        seq = self._make_newcomer(room)
        self.manager.allocate(seq)
        self.running.append(seq)
        wanted, table = self._blocks(seq.num_tokens), table_of(self.manager, seq)
        said = f"A prompt of {count(seq.num_tokens, 'token')} in blocks of {self.block_size}"
        require(wanted, len(table), f"{said} needs {count(wanted, 'block')}, but its table is {table}.")
        self._look("allocate", seq)

    def ask_newcomer(self) -> None:
        """Whether there is room for a prompt."""
        seq = self._make_newcomer()
        needed = self._blocks(seq.num_tokens)
        said = f"a prompt of {count(seq.num_tokens, 'token')} needs {count(needed, 'block')}"
        self._ask_room("can_allocate", seq, needed, said)

    def free(self) -> None:
        """A sequence ends, wherever it is."""
        if not self.running + self.swapped:
            return
        manager, seq = self.manager, self.rng.choice(self.running + self.swapped)
        group, place = (self.swapped, "cpu_pool") if seq in self.swapped else (self.running, "gpu_pool")
        name, pool, tables = name_of(manager, "free"), getattr(manager, place), getattr(manager, PLACES[place])
        table, queue = list(map(index, tables[seq.seq_id])), next_blocks(pool)
        freed = self._only_in(table, place)
        which = "the whole table" if freed == table else "since other tables name the rest"
        both = ": free must release blocks of both pools" if group is self.swapped else ""
        first = f"{name} must release {count(len(freed), 'block')} of {place}, {which}"
        for said, wanted in ((first, len(freed)), (f"A second {name} of the same sequence must release nothing", 0)):
            before = index(pool.num_free)
            manager.free(seq)
            got = index(pool.num_free) - before
            require(wanted, got, f"{said}, but released {got}{both}.")
        left = f"{name} must remove the sequence's table, but it is still in {PLACES[place]}."
        require(False, seq.seq_id in tables, left)
        group.remove(seq)
        self._look("free", seq)
        self._check_queue(f"{name} of the table {table}", place, freed, queue)

    def fork(self) -> None:
        """A sibling of a sequence that has not grown yet."""
        parents = [seq for seq in self.running if not seq.num_computed_tokens]
        if not parents or len(self.running) >= self.most_tables:
            return
        manager, parent = self.manager, self.rng.choice(parents)
        child, free = fork_sequence(parent), manager.get_num_free_gpu_blocks()
        manager.fork(parent, child)
        self.running.append(child)
        got, wanted = table_of(manager, child), table_of(manager, parent)
        require(True, got == wanted, f"The child's table should equal the parent's, {wanted}, but is {got}.")
        table = manager.get_block_table(child)
        is_own = isinstance(table, tuple) or table is not manager.get_block_table(parent)
        shares = "Parent and child share one list, so when one table grows, the other does too. Give the child a copy."
        require(True, is_own, shares)
        require(free, manager.get_num_free_gpu_blocks(), "fork copies no block, so it must not take one.")
        self._look("fork", child)

    def grow(self) -> None:
        """New tokens, if there is room for them: one at first, and later several."""
        if self.running:
            seq, num_new = self.rng.choice(self.running), self._choose_num_new()
            most = self._blocks(seq.num_tokens + num_new) - len(table_of(self.manager, seq)) + 1
            if most <= self.manager.get_num_free_gpu_blocks():
                add_tokens(seq, num_new)
                self._append_slots(seq)

    def ask_growth(self) -> None:
        """Whether there is room for new tokens, which are taken back."""
        if not self.running:
            return
        seq, num_new = self.rng.choice(self.running), self._choose_num_new()
        was = seq.num_tokens, seq.num_computed_tokens
        add_tokens(seq, num_new)
        table = table_of(self.manager, seq)
        growth, shared = self._blocks(seq.num_tokens) - len(table), self._is_written_shared(seq, table)
        held = (
            f"a table of {count(len(table), 'block')}{', shared by a sibling,' if shared else ''} holds {count(was[0], 'token')}"
        )
        said = f"{held}, and {count(num_new, 'new token')} must be placed. That takes {count(growth, 'block')} to grow by"
        if shared:
            said += " and 1 block for the copy of the shared one"
        elif self._only_in(table, "gpu_pool") != table:
            said += " (only the block being written matters, not the ones still shared)"
        self._ask_room("can_append_slots", seq, growth + shared, said)
        del seq.token_ids[was[0] :]
        seq.num_computed_tokens = was[1]

    def swap_out(self) -> None:
        """A sequence goes to the host, whose newest token has no block yet."""
        manager = self.manager
        fitting = [seq for seq in self.running if len(table_of(manager, seq)) <= manager.get_num_free_cpu_blocks()]
        if fitting:
            seq = self.rng.choice(fitting)
            add_token(seq)
            table = table_of(manager, seq)
            self._ask_room("can_swap_out", seq, len(table), f"a table has {count(len(table), 'block')}", "cpu_pool")
            shared = [block for block in table if block not in self._only_in(table, "gpu_pool")]
            case = f"swap_out of the table {table}" + (f", whose blocks {shared} others name too" if shared else "")
            self._move(seq, "swap_out", case, self.running, self.swapped)

    def swap_in(self) -> None:
        """A sequence comes back, if all of it fits, and gets room for its newest token."""
        manager = self.manager
        fitting = [seq for seq in self.swapped if self._blocks(seq.num_tokens) <= manager.get_num_free_gpu_blocks()]
        if fitting:
            seq = self.rng.choice(fitting)
            needed = self._blocks(seq.num_tokens)
            said = f"a sequence's {count(seq.num_tokens, 'token')}, the newest included, need {count(needed, 'block')}"
            self._ask_room("can_swap_in", seq, needed, said)
            case = f"swap_in of the host blocks {list(map(index, manager.swapped_tables[seq.seq_id]))}"
            self._move(seq, "swap_in", case, self.swapped, self.running)
            self._append_slots(seq)

    def _move(self, seq: TokenSequence, method: str, case: str, group: list[TokenSequence], other: list[TokenSequence]) -> None:
        """Call one of the two methods that swap a sequence, and look at the pairs and at the table in its new place."""
        places, kinds = list(PLACES), ["device block", "host block"]
        if method == "swap_in":
            places, kinds = places[::-1], kinds[::-1]
        here, there = (getattr(self.manager, PLACES[place]) for place in places)
        old, queue = list(map(index, here[seq.seq_id])), next_blocks(getattr(self.manager, places[0]))
        freed = self._only_in(old, places[0])
        moves = [tuple(map(index, pair)) for pair in getattr(self.manager, method)(seq)]
        group.remove(seq)
        other.append(seq)
        order = f"{case} must return ({', '.join(kinds)}) pairs in the order of the table, but returned {moves}."
        require(True, [block for block, _ in moves] == old, order)
        moved = f"{case}: the table must move from {PLACES[places[0]]} to {PLACES[places[1]]}."
        require(True, seq.seq_id in there and seq.seq_id not in here, moved)
        table, new = list(map(index, there[seq.seq_id])), [block for _, block in moves]
        more = f"{case} must move {count(len(old), 'block')} and no more, but the table is now {table}. {_NEWEST}"
        require(True, len(table) <= len(old), more)
        wanted = f"{case}: the table should be {new}, the {kinds[1]}s of the returned pairs, each of them once, but is {table}."
        require(True, table == new and len(set(new)) == len(new), wanted)
        self._look(case, seq)
        self._check_queue(case, places[0], freed, queue)

    # -- what they have in common ----------------------------------------------------------------------------------

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _make_newcomer(self, most_tokens: int = 2**20) -> TokenSequence:
        size = self.block_size
        num_tokens = self.rng.choice((size, 2 * size - 1, 2 * size, 2 * size + 1, self.rng.randint(1, 6 * size)))
        return make_sequence("a", min(num_tokens, most_tokens))

    def _choose_num_new(self) -> int:
        self.num_grown += 1
        return self.rng.choice((1, 2 * self.block_size + 1, 1, self.block_size, 2, 1)[: self.num_grown])

    def _only_in(self, table: list[int], place: str) -> list[int]:
        """The blocks of a table that no other table names."""
        named = count_names(self.manager, place)
        return [block for block in table if named[block] == 1]

    def _is_written_shared(self, seq: TokenSequence, table: list[int]) -> bool:
        """Whether the first new token goes into a block that others name too."""
        place = seq.num_computed_tokens // self.block_size
        return place < len(table) and count_names(self.manager, "gpu_pool")[table[place]] > 1

    def _append_slots(self, seq: TokenSequence) -> None:
        """Call `append_slots` for a sequence with new tokens, twice."""
        manager, method = self.manager, name_of(self.manager, "append_slots")
        before, place, wanted = table_of(manager, seq), seq.num_computed_tokens // self.block_size, self._blocks(seq.num_tokens)
        shared = self._is_written_shared(seq, before)
        must_copy = ask(manager, "must_copy", seq) if hasattr(manager, "must_copy") else shared
        copied = manager.append_slots(seq)
        table = table_of(manager, seq)
        new = count(seq.num_tokens - seq.num_computed_tokens, "new token")
        case = f"With block size {self.block_size}, a table {before} and {new} from position {seq.num_computed_tokens} on"
        too_short = f"{case}: {count(seq.num_tokens, 'token')} in all need {count(wanted, 'block')}, but after {method} the table is {table}."
        require(wanted, len(table), too_short + (" It must grow whether or not a block was copied." if shared else ""))
        if shared:
            case += f". Entry {place}, block {before[place]}, is shared"
            fresh = f"{case} and about to be written: {method} must put a fresh block in its place, but the table is now {table}."
            require(True, table[place] != before[place], fresh)
            pair = before[place], table[place]
            told = f"{case}: {method} must return (old block, new block), here {pair}, but returned {copied!r}."
            require(True, copied is not None and tuple(copied) == pair, told)
            before[place] = table[place]
        else:
            nothing = f"{case}: no shared block is written, so nothing needs copying, but {method} returned {copied!r}."
            require(True, copied is None, nothing)
        others = f"{case}: all other entries must stay as they are, but {method} made the table {table}."
        require(True, before == table[: len(before)], others)
        require(shared, bool(must_copy), f"{case}: {name_of(manager, 'must_copy')} should be {shared}, but was {must_copy!r}.")
        again = manager.append_slots(seq)
        said, now = f"A second {method} for the same tokens has nothing to", table_of(manager, seq)
        require(True, now == table, f"{said} do, but the table {table} became {now}.")
        require(True, again is None, f"{said} copy, but it returned {again!r}.")
        self._look("append_slots", seq)

    def _ask_room(self, question: str, seq: TokenSequence, needed: int, said: str, place: str = "gpu_pool") -> None:
        """Ask with just enough free blocks, with one fewer and with one more: the others are taken from the pool meanwhile."""
        manager, pool = self.manager, getattr(self.manager, place)
        has_option = question in ("can_allocate", "can_swap_in")
        for options in _KEEP_WATERMARK if has_option else ({},):
            limit = needed + (manager.watermark_blocks if has_option and options.get("keep_watermark", True) else 0)
            for spare in sorted({0, limit - 1, limit, limit + 1} & set(range(index(pool.num_free) + 1))):
                taken = pool.allocate(index(pool.num_free) - spare)
                got, wanted = ask(manager, question, seq, **options), spare >= limit
                pool.release(taken)
                call, hint = name_of(manager, question), ""
                free = f"{count(spare, 'block')} of {place} {'is' if spare == 1 else 'are'} free"
                if has_option:
                    call += f"({', '.join(['seq', *(f'{name}={value}' for name, value in options.items())])})"
                    free += f" (watermark_blocks is {manager.watermark_blocks})"
                elif question == "can_append_slots" and wanted and manager.watermark_blocks:
                    hint = f" The watermark of {manager.watermark_blocks} applies only to newcomers, not to running sequences."
                case = f"With block size {self.block_size}, {said}, and {free}"
                require(wanted, bool(got), f"{case}: {call} should be {wanted}, but is {got!r}.{hint}")

    def _check_queue(self, case: str, place: str, freed: list[int], queue: list[int]) -> None:
        """Blocks that became free are the first in the queue, in the order of their table."""
        got = next_blocks(getattr(self.manager, place))
        why = "the last block must be released first, so that the first one is next in the queue"
        should = f"{place} should hand out {freed} next, but would hand out {got[: len(freed)]}"
        require(True, got == freed + queue, f"After {case}: {why}. {should}.")

    def _look(self, call: str, seq: TokenSequence) -> None:
        """After a call about a sequence: every reference count is the number of tables with the block, and no other table has changed."""
        case = name_of(self.manager, call) if hasattr(self.manager, call) else call
        check_references(case, self.manager)
        for place, known in self.known.items():
            now = tables_of(self.manager, place)
            before, after = ({key: table for key, table in tables.items() if key != seq.seq_id} for tables in (known, now))
            change = describe_change(PLACES[place], before, after) if before != after else ""
            require(True, before == after, f"{case} must change no other sequence's table, but {change}.")
            self.known[place] = now
