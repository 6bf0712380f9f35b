"""Lesson 04's checks: the solution passes, an untouched exercise fails at each, and plausible mistakes fail where they should."""

from __future__ import annotations

import ast
import multiprocessing
from functools import cache

import nbformat
import pytest
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import LIMIT, mutants_of

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.course.lessons.lesson_04.engine import _CROWDS, run_simulated

CELLS = read_cells("04")
POOL = "the pool hands out free blocks and counts tables"
ALLOCATE = "a prompt gets as many blocks as its tokens fill"
FREE = "free gives every block back, once"
ROOM = "who is let in leaves the watermark free"
APPEND = "the table grows with the text"
CAN_APPEND = "it says beforehand whether the new tokens have a place"
FORK = "siblings name the same blocks in tables of their own"
COPY = "who writes into a shared block gets a copy first"
SWAP = "what goes to the host comes back in order"
ENGINE = "the engine takes the same decisions"
TEXT = "a real model writes the same text"

_CAN_ALLOCATE = "return self.num_blocks_for(seq.num_tokens) <= room"
_CAN_GROW = "return self.gpu_pool.num_free >= missing\n"
_GROW = "table.extend(self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens) - len(table)))"
_MUST_COPY = "return place < len(table) and self.gpu_pool.ref_counts[table[place]] > 1"
_CAN_COPY = "return self.gpu_pool.num_free >= missing + (1 if self.must_copy(seq) else 0)"
_COPIED = "            copy = old, new\n        super().append_slots(seq)\n        return copy"
_CAN_SWAP_OUT = "return self.cpu_pool.num_free >= len(self.get_block_table(seq))"
_CAN_SWAP_IN = "return self.gpu_pool.num_free - self.num_blocks_for(seq.num_tokens) >= watermark"

WRONG = {
    "the last in line first": ("self.free_blocks.popleft()", "self.free_blocks.pop()", POOL, "the first blocks in line"),
    "freed blocks come last": ("self.free_blocks.appendleft(block)", "self.free_blocks.append(block)", POOL, "goes to the front"),
    "the first of a list is free first": ("for block in reversed(blocks):", "for block in blocks:", POOL, "Of a list, the last block is released first"),
    "a fresh block has no reference": ("self.ref_counts[block] = 1", "pass", POOL, "ref_counts should be"),
    "a shared block is freed by the first to go": ("if self.ref_counts[block] == 0:\n                self.free_blocks", "if True:\n                self.free_blocks", POOL, "when its last reference is released"),
    "a block can be freed twice": ('raise ValueError(f"one of the blocks {blocks} to release is free")', "return", POOL, "release([0, 3]) must raise a ValueError"),
    "only the first block is looked at": (
        'if any(self.ref_counts[block] == 0 for block in blocks):\n            raise ValueError(f"one of the blocks {blocks} to release',
        'if blocks and self.ref_counts[blocks[0]] == 0:\n            raise ValueError(f"one of the blocks {blocks} to release',
        POOL,
        "must raise a ValueError, because block 3 is free",
    ),
    "a free block can be shared": ('raise ValueError(f"one of the blocks {blocks} to share is free")', "pass", POOL, "share([0, 3]) must raise a ValueError"),
    "an empty pool raises what the deque raises": ("if count > self.num_free:", "if False:", POOL, "raised an IndexError"),
    "an empty pool gives what it has": ('raise ValueError(f"{count} blocks are asked for, but only {self.num_free} are free")', "count = self.num_free", POOL, "allocate(3) must raise a ValueError"),
    "what was taken before the error is kept": (
        'if count > self.num_free:\n            raise ValueError(f"{count} blocks are asked for, but only {self.num_free} are free")\n        blocks = [self.free_blocks.popleft() for _ in range(count)]',
        'blocks = []\n        for _ in range(count):\n            if not self.free_blocks:\n                raise ValueError("none left")\n            blocks.append(self.free_blocks.popleft())',
        POOL,
        "must then leave the pool as it was",
    ),
    "sharing is not counted": ("        self.ref_counts[block] += 1", "        self.ref_counts[block] = 1", POOL, "ref_counts should be"),
    "blocks are rounded down": ("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size", ALLOCATE, "should need 1 block"),
    "one block too many at the boundary": ("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1", ALLOCATE, "num_blocks_for returned"),
    "blocks are a fraction": ("return -(-num_tokens // self.block_size)", "return num_tokens / self.block_size", ALLOCATE, "num_blocks_for returned"),
    "room for the longest text": ("self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens))", "self.gpu_pool.allocate(10)", ALLOCATE, "but its table is"),
    "blocks are not taken from the pool": ("self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens))", "list(range(self.num_blocks_for(seq.num_tokens)))", ALLOCATE, "its reference count is 0"),
    "the table is kept after free": ("self.gpu_pool.release(self.block_tables.pop(seq.seq_id, []))", "self.gpu_pool.release(self.block_tables.get(seq.seq_id, []))", FREE, "to release is free"),
    "free twice raises": ("self.block_tables.pop(seq.seq_id, [])", "self.block_tables.pop(seq.seq_id)", FREE, ""),
    "the first block is given back first": ("self.gpu_pool.release(self.block_tables.pop(seq.seq_id, []))", "self.gpu_pool.release(self.block_tables.pop(seq.seq_id, [])[::-1])", FREE, "last block must be released first"),
    "free forgets the blocks": ("self.gpu_pool.release(self.block_tables.pop(seq.seq_id, []))", "self.block_tables.pop(seq.seq_id, [])", FREE, "but released 0"),
    "the watermark may be used up": ("<= room", "<= self.gpu_pool.num_free", ROOM, "keep_watermark=True) should be False"),
    "one block must be left besides the watermark": ("<= room", "< room", ROOM, "should be True, but is False"),
    "the watermark is not kept unless it is asked for": ("def can_allocate(self, seq, cached_blocks=(), keep_watermark=True):", "def can_allocate(self, seq, cached_blocks=(), keep_watermark=False):", ROOM, "can_allocate(seq) should be False"),
    "the watermark is kept from nobody": ("(self.watermark_blocks if keep_watermark else 0)\n        return", "self.watermark_blocks\n        return", ROOM, "keep_watermark=False) should be True"),
    "a newcomer's blocks are taken while asking": (_CAN_ALLOCATE, f"self.gpu_pool.allocate(min(1, self.gpu_pool.num_free))\n        {_CAN_ALLOCATE}", ROOM, "Admitting.can_allocate only answers a question"),
    "a newcomer is tried and sent away": (
        _CAN_ALLOCATE,
        f"if self.gpu_pool.num_free > 1:\n            self.gpu_pool.release(self.gpu_pool.allocate(2)[::-1])\n        {_CAN_ALLOCATE}",
        ROOM,
        "the order in which gpu_pool hands out its free blocks changed",
    ),
    "the table grows one token late": (_GROW, _GROW.replace("num_tokens)", "num_tokens - 1)"), APPEND, "but after Growing.append_slots the table is"),
    "the table grows one token early": (_GROW, _GROW.replace("num_tokens)", "num_tokens + 1)"), APPEND, "but after Growing.append_slots"),
    "a block for every call": (_GROW, "table.extend(self.gpu_pool.allocate(1))", APPEND, "A second Growing.append_slots"),
    "one block at most": (_GROW, _GROW.replace("self.num_blocks_for(seq.num_tokens) - len(table)", "min(1, self.num_blocks_for(seq.num_tokens) - len(table))"), APPEND, "new tokens from position"),
    "grown at the front": (_GROW, "table[:0] = self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens) - len(table))", APPEND, "other entries must stay"),
    "a block whenever a boundary was crossed": (
        _GROW,
        "table.extend(self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens) - self.num_blocks_for(seq.num_computed_tokens)))",
        APPEND,
        "A second Growing.append_slots",
    ),
    "always room": (_CAN_GROW, "return True\n", CAN_APPEND, "Growing.can_append_slots should be False"),
    "room only if a block is free": (_CAN_GROW, "return self.gpu_pool.num_free >= max(1, missing)\n", CAN_APPEND, "should be True, but is False"),
    "room if any block is free": (_CAN_GROW, "return missing == 0 or self.gpu_pool.num_free >= 1\n", CAN_APPEND, "should be False, but is True"),
    "the watermark is kept from those who run": (_CAN_GROW, "return self.gpu_pool.num_free - self.watermark_blocks >= missing\n", CAN_APPEND, "is not for sequences that run, only for newcomers"),
    "blocks are taken while asking": (_CAN_GROW, "self.append_slots(seq)\n        return True\n", CAN_APPEND, ""),
    "a block is taken while asking": (
        _CAN_GROW,
        "if self.gpu_pool.num_free >= missing:\n            self.gpu_pool.allocate(missing)\n            return True\n        return False\n",
        CAN_APPEND,
        "Growing.can_append_slots only answers a question",
    ),
    "a token is tried and taken back": (
        _CAN_GROW,
        "if self.gpu_pool.num_free >= missing:\n            self.gpu_pool.release(self.gpu_pool.allocate(missing)[::-1])\n            return True\n        return False\n",
        CAN_APPEND,
        "the order in which gpu_pool hands out its free blocks changed",
    ),
    "one table for both siblings": ("self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = table", FORK, "share one list"),
    "references are forgotten": ("self.gpu_pool.share(table)", "pass", FORK, "4 tables name block"),
    "fork copies the blocks": ("self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = self.gpu_pool.allocate(len(table))", FORK, "should equal the parent's"),
    "writes into shared blocks": (_MUST_COPY, "return False", COPY, "is shared and about to be written: Sharing.append_slots must put a fresh block"),
    "any shared block needs a copy": (_MUST_COPY, "return any(self.gpu_pool.ref_counts[block] > 1 for block in table)", COPY, ""),
    "always copies": (_MUST_COPY, "return place < len(table)", COPY, "A second Sharing.append_slots"),
    "copies the block of the last token": ("place = seq.num_computed_tokens // self.block_size\n        return", "place = len(table) - 1\n        return", COPY, ""),
    "looks at the block of the newest token": ("place = seq.num_computed_tokens // self.block_size\n        return", "place = (seq.num_tokens - 1) // self.block_size\n        return", COPY, "is shared and about to be written"),
    "any new block is told as a copy": (_GROW, _GROW + "\n        return (table[-1], table[-1])", APPEND, "nothing needs copying"),
    "the table stays on the device": ("table = self.block_tables.pop(seq.seq_id)", "table = self.block_tables[seq.seq_id]", SWAP, "must leave block_tables"),
    "the table stays on the host": ("hosts = self.swapped_tables.pop(seq.seq_id)", "hosts = self.swapped_tables[seq.seq_id]", SWAP, "must move from swapped_tables back"),
    "the old block keeps its reference": ("self.gpu_pool.release([old])", "pass", COPY, "a release is missing"),
    "the pair is the wrong way round": ("copy = old, new", "copy = new, old", COPY, "must return (old block, new block)"),
    "the copy is not told": ("            copy = old, new\n", "", COPY, "but returned None"),
    "the copy is not counted as needed": (_CAN_COPY, "return super().can_append_slots(seq)", COPY, "and 1 block for the copy of the shared one"),
    "the growth is not counted beside the copy": (_CAN_COPY, "return self.gpu_pool.num_free >= (1 if self.must_copy(seq) else missing)", COPY, "and 1 block for the copy of the shared one"),
    "siblings keep the watermark": (_CAN_COPY, _CAN_COPY.replace("num_free >=", "num_free - self.watermark_blocks >="), COPY, "Sharing.can_append_slots should be True"),
    "the copy is made while asking": (
        _CAN_COPY,
        f"if self.must_copy(seq) and self.gpu_pool.num_free:\n            self.gpu_pool.allocate(1)\n        {_CAN_COPY}",
        COPY,
        "Sharing.can_append_slots only answers a question",
    ),
    "a sibling is tried and sent away": (
        _CAN_COPY,
        f"if self.gpu_pool.num_free > 1:\n            self.gpu_pool.release(self.gpu_pool.allocate(2)[::-1])\n        {_CAN_COPY}",
        COPY,
        "Sharing.can_append_slots only answers a question",
    ),
    "tables no longer grow": (_COPIED, "            copy = old, new\n        return copy", COPY, "after Sharing.append_slots the table is"),
    "a table that was copied does not grow": (_COPIED, "            return old, new\n        super().append_slots(seq)", COPY, "must grow whether or not a block was copied"),
    "growing is told as a copy": (_COPIED, _COPIED.replace("return copy", "return copy or (0, 0)"), COPY, "nothing needs copying"),
    "the newest token is forgotten on the way back": (_CAN_SWAP_IN, _CAN_SWAP_IN.replace("self.num_blocks_for(seq.num_tokens)", "len(self.swapped_tables[seq.seq_id])"), SWAP, "the newest included"),
    "who comes back may use up the watermark": (_CAN_SWAP_IN, _CAN_SWAP_IN.replace("watermark", "0"), SWAP, "keep_watermark=True) should be False"),
    "who comes back keeps the watermark only if asked to": ("def can_swap_in(self, seq, keep_watermark=True):", "def can_swap_in(self, seq, keep_watermark=False):", SWAP, "can_swap_in(seq) should be False"),
    "who comes back must always keep the watermark": ("watermark = self.watermark_blocks if keep_watermark else 0", "watermark = self.watermark_blocks", SWAP, "keep_watermark=False) should be True"),
    "the newest token's block is taken on the way back": ("table = self.gpu_pool.allocate(len(hosts))", "table = self.gpu_pool.allocate(self.num_blocks_for(seq.num_tokens))", SWAP, "and no more"),
    "host pairs the wrong way round": ("return list(zip(table, hosts))", "return list(zip(hosts, table))", SWAP, "(device block, host block) pairs"),
    "device blocks stay taken": ("self.gpu_pool.release(table)\n", "pass\n", SWAP, "of gpu_pool, but its reference count is 1: a release is missing"),
    "shared device blocks stay taken": ("self.gpu_pool.release(table)\n", "self.gpu_pool.release([b for b in table if self.gpu_pool.ref_counts[b] == 1])\n", SWAP, "others name too"),
    "shared device blocks are freed under the siblings": (
        "self.gpu_pool.release(table)\n",
        "for block in reversed(table):\n            self.gpu_pool.ref_counts[block] = 0\n            self.gpu_pool.free_blocks.appendleft(block)\n",
        SWAP,
        "others name too",
    ),
    "device blocks are released twice if they can be": (
        "self.gpu_pool.release(table)\n",
        "self.gpu_pool.release(table)\n        self.gpu_pool.release([b for b in table if self.gpu_pool.ref_counts[b] > 0])\n",
        SWAP,
        "others name too",
    ),
    "the last device block stays taken": ("self.gpu_pool.release(table)\n", "self.gpu_pool.release(table[:-1])\n", SWAP, "a release is missing"),
    "shared blocks do not travel": ("hosts = self.cpu_pool.allocate(len(table))", "table = [b for b in table if self.gpu_pool.ref_counts[b] == 1]\n        hosts = self.cpu_pool.allocate(len(table))", SWAP, "in the order of the table"),
    "host blocks stay taken": ("self.cpu_pool.release(hosts)", "pass", SWAP, "of cpu_pool, but its reference count is 1"),
    "host blocks are taken twice": ("hosts = self.cpu_pool.allocate(len(table))", "hosts = self.cpu_pool.allocate(len(table))\n        self.cpu_pool.share(hosts)", SWAP, "of cpu_pool, but its reference count is 2"),
    "the first device block is given back first": ("self.gpu_pool.release(table)\n", "self.gpu_pool.release(table[::-1])\n", SWAP, "last one first"),
    "the first host block is given back first": ("self.cpu_pool.release(hosts)", "self.cpu_pool.release(hosts[::-1])", SWAP, "last one first"),
    "the table comes back reversed": ("self.block_tables[seq.seq_id] = table\n", "self.block_tables[seq.seq_id] = table[::-1]\n", SWAP, "the device blocks of the returned pairs"),
    "swapped out without asking": (_CAN_SWAP_OUT, "return True", SWAP, "can_swap_out should be False"),
    "one host block must stay free": (_CAN_SWAP_OUT, _CAN_SWAP_OUT.replace(">=", ">"), SWAP, "can_swap_out should be True"),
    "host blocks are taken while asking": (_CAN_SWAP_OUT, f"self.cpu_pool.allocate(min(1, self.cpu_pool.num_free))\n        {_CAN_SWAP_OUT}", SWAP, "Swapping.can_swap_out only answers a question"),
    "device blocks are taken while asking": (_CAN_SWAP_IN, f"self.gpu_pool.allocate(min(1, self.gpu_pool.num_free))\n        {_CAN_SWAP_IN}", SWAP, "Swapping.can_swap_in only answers a question"),
    "host blocks of one that ends are lost": ("self.cpu_pool.release(self.swapped_tables.pop(seq.seq_id, []))", "self.swapped_tables.pop(seq.seq_id, [])", SWAP, "blocks of both pools"),
    "only host blocks are freed": ("super().free(seq)", "pass", SWAP, "Swapping.free must release"),
}  # fmt: skip
"""What was written instead, by what is wrong with it: a passage of the solution, its replacement, the check that must be the first to fail,
and words of its message."""


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(cells)
    assert outcome.points == 0
    assert outcome.broken == {}
    assert len(outcome.failed) == 10


@pytest.mark.slow
@pytest.mark.parametrize("old, new, first, words", WRONG.values(), ids=WRONG)
def test_a_mistake_fails_where_it_was_made_and_is_named(old, new, first, words):
    outcome = run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert words in str(outcome.checks[first])
    assert outcome.broken == {}


FLOORS = {
    "pool": [POOL],
    "allocating": [ALLOCATE, FREE],
    "admitting": [ROOM],
    "growing": [APPEND, CAN_APPEND],
    "sharing": [FORK, COPY],
    "swapping": [SWAP],
}
"""The checks below each answer."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("floor", FLOORS)
def test_no_small_change_gets_past_the_checks_of_its_floor(floor):
    """Each small change to an answer (`mutate_lesson.py` makes them) fails at a check right below it, never only at a later one."""
    run_cells(CELLS)  # everything is imported before the forks
    through = {}
    for mutant in mutants_of(next(cell for cell in CELLS if cell.name == floor)):
        first = first_failure([mutant.cell if cell.name == floor else cell for cell in CELLS])
        if (
            first not in FLOORS[floor] and mutant.change != "allocating: False → True"
        ):  # enable_prefix_caching: not used before lesson 10
            through[mutant.change] = first
    assert through == {}


def first_failure(cells):
    """The first check that fails, found out in a process of its own, since a changed loop may never end; None if all pass."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(run_cells(cells, stop_at_failure=True).failed), daemon=True)
    process.start()
    failed = receiver.recv() if receiver.poll(LIMIT) else ["it does not end"]
    process.kill()
    process.join()
    return failed[0] if failed else None


def test_messages_count_in_words():
    """A number of one takes the singular, wherever a message counts."""
    for old, new, first in (
        ("self.gpu_pool.release(table)\n", "pass\n", SWAP),
        (
            "blocks = [self.free_blocks.popleft() for _ in range(count)]",
            "blocks = [self.free_blocks.pop() for _ in range(count)]",
            POOL,
        ),
        (_MUST_COPY, "return False", COPY),
    ):
        message = str(run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new)), stop_at_failure=True).checks[first])
        assert not any(
            f" {wrong}" in f" {message}"
            for wrong in ("1 tables", "1 blocks", "1 tokens", "1 new tokens", "no block are", "0 tables")
        )


@cache
def crowd_runs():
    return [run_simulated(BlockSpaceManager, crowd) for crowd in _CROWDS]


def test_the_simulated_runs_are_crowded_enough():
    """Watermarks count, sequences give way often, and shared blocks go to the host."""
    assert all(int(crowd.watermark * crowd.num_gpu_blocks) >= 2 for crowd in _CROWDS)
    for crowd, steps in zip(_CROWDS, crowd_runs(), strict=True):
        assert sum(bool(step["the list of blocks to copy"]) for step in steps) >= 5
        assert sum(bool(step["the sequence that gives way"]) for step in steps) >= 6
        if crowd.preemption_mode == "swap":
            assert sum(bool(step["the list of blocks to swap out"]) for step in steps) >= 5
            assert sum(bool(step["the list of blocks to swap in"]) for step in steps) >= 5
            moved = [[device for device, _ in step["the list of blocks to swap out"]] for step in steps]
            assert any(len(set(blocks)) < len(blocks) for blocks in moved), "siblings that share blocks go in one step"


class KeepsTheWatermark(BlockSpaceManager):
    """Not even running sequences may use the watermark's blocks."""

    def can_append_slots(self, seq):
        return super().can_append_slots(seq) and self.get_num_free_gpu_blocks() > self.watermark_blocks


class TakesWhileAsking(BlockSpaceManager):
    """A question takes two blocks, and gives them back in another order."""

    def can_append_slots(self, seq):
        if self.gpu_allocator.num_free > 1:
            for block in [self.gpu_allocator.allocate(), self.gpu_allocator.allocate()]:
                self.gpu_allocator.release(block)
        return super().can_append_slots(seq)


class LosesSharedBlocks(BlockSpaceManager):
    """A block that others name keeps the reference of a sequence that went to the host."""

    def swap_out(self, seq):
        for block in self.block_tables[seq.seq_id]:
            if self.gpu_allocator.ref_counts[block] > 1:
                self.gpu_allocator.share(block)
        return super().swap_out(seq)


@pytest.mark.parametrize("wrong", [KeepsTheWatermark, TakesWhileAsking, LosesSharedBlocks], ids=lambda cls: cls.__name__)
def test_the_engine_would_notice_too(wrong):
    """What the floors' own checks catch is also seen in the engine: the runs reach these cases."""
    from minivllm.course.lessons import lesson_04

    with pytest.raises((AssertionError, IndexError)):
        lesson_04.check_block_manager(wrong)


def test_a_difference_in_the_engine_is_told_with_the_place_to_look():
    from minivllm.course.lessons import lesson_04

    with pytest.raises(AssertionError, match="In step [0-9]+ of a simulated run, .* is not the same: .*\n *Where to look: "):
        lesson_04.check_block_manager(KeepsTheWatermark)


@pytest.mark.slow
def test_blocks_that_are_not_read_through_the_table_change_the_text():
    wrong = edited(CELLS, "self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = table[::-1]")
    assert TEXT in run_cells(wrong, with_model=True).failed


def classes_of_the_walkthrough():
    """The source of all classes that the walkthrough writes, in order."""
    cells = nbformat.read(ROOT / "notebooks" / "04_paged_kv_cache.ipynb", as_version=4).cells
    sources = [
        "\n".join(line for line in cell.source.split("\n") if not line.startswith("%"))
        for cell in cells
        if cell.cell_type == "code"
    ]
    return [ast.unparse(node) for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_little():
    """Each floor gets the walkthrough's finished manager, which is more than a paste cell by cell."""
    classes = classes_of_the_walkthrough()
    floors = ("Allocating", "Admitting", "Growing", "Sharing", "Swapping")
    pasted = "\n\n".join(["from collections import deque", *classes, *(f"{floor} = MyBlockSpaceManager" for floor in floors)])
    cells = []
    for cell in CELLS:
        if cell.kind != "answer":
            cells.append(cell)
        elif cell.name == "pool":
            cells.append(Cell(cell.name, pasted, cell.kind))
    outcome = run_cells(cells)
    assert outcome.points <= 5, [name for name in outcome.checks if name not in outcome.failed]
