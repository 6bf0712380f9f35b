"""Lesson 04's checks: the solution passes, an untouched exercise fails at each, and plausible mistakes fail where they should."""

from __future__ import annotations

import pytest
from lesson_cells import Cell, edited, read_cells, run_cells, untouched

CELLS = read_cells("04")
POOL = "the pool hands out free blocks and counts tables"
ALLOCATE = "a prompt gets as many blocks as its tokens fill"
FREE = "free gives every block back, once"
ROOM = "who is let in leaves the watermark free"
APPEND = "the table grows at the block boundary"
CAN_APPEND = "it says beforehand whether a token has a place"
FORK = "siblings name the same blocks in tables of their own"
COPY = "who writes into a shared block gets a copy first"
SWAP = "what goes to the host comes back in order"
ENGINE = "the engine takes the same decisions"
TEXT = "a real model writes the same text"

WRONG = {
    "the newest free block first": ("self.free_blocks.popleft()", "self.free_blocks.pop()", POOL),
    "freed blocks come first": ("self.free_blocks.append(block)", "self.free_blocks.appendleft(block)", POOL),
    "a fresh block has no reference": ("self.ref_counts[block] = 1", "pass", POOL),
    "a shared block is freed by the first to go": ("if self.ref_counts[block] == 0:\n            self.free_blocks", "if True:\n            self.free_blocks", POOL),
    "a block can be freed twice": ('            raise ValueError(f"block {block} is free already")', "return", POOL),
    "freed twice goes below zero": ("if self.ref_counts[block] == 0:\n            raise", "if self.ref_counts[block] < 0:\n            raise", POOL),
    "sharing is not counted": ("        self.ref_counts[block] += 1", "        self.ref_counts[block] = 1", POOL),
    "blocks are rounded down": ("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size", ALLOCATE),
    "one block too many at the boundary": ("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1", ALLOCATE),
    "blocks are a fraction": ("return -(-num_tokens // self.block_size)", "return num_tokens / self.block_size", ALLOCATE),
    "room for the longest text": ("range(self.num_blocks_for(seq.num_tokens))]", "range(10)]", ALLOCATE),
    "the table is kept after free": ("for block in reversed(self.block_tables.pop(seq.seq_id, [])):", "for block in reversed(self.block_tables.get(seq.seq_id, [])):", FREE),
    "free twice raises": ("reversed(self.block_tables.pop(seq.seq_id, []))", "reversed(self.block_tables.pop(seq.seq_id))", FREE),
    "the first block is given back first": ("for block in reversed(self.block_tables.pop(seq.seq_id, [])):", "for block in self.block_tables.pop(seq.seq_id, []):", FREE),
    "free forgets the blocks": ("self.gpu_pool.release(block)\n        ### END", "pass\n        ### END", FREE),
    "the watermark may be used up": ("<= room", "<= self.gpu_pool.num_free", ROOM),
    "one block must be left besides the watermark": ("<= room", "< room", ROOM),
    "the watermark is kept from nobody": ("(self.watermark_blocks if keep_watermark else 0)\n        return", "self.watermark_blocks\n        return", ROOM),
    "the table grows one token late": ("while len(table) < self.num_blocks_for(seq.num_tokens):", "while len(table) < self.num_blocks_for(seq.num_tokens - 1):", APPEND),
    "the table grows one token early": ("while len(table) < self.num_blocks_for(seq.num_tokens):", "while len(table) < self.num_blocks_for(seq.num_tokens + 1):", APPEND),
    "a block for every token": ("while len(table) < self.num_blocks_for(seq.num_tokens):\n            table", "if True:\n            table", APPEND),
    "grown at the front": ("table.append(self.gpu_pool.allocate())", "table.insert(0, self.gpu_pool.allocate())", APPEND),
    "a block whenever a boundary was crossed": (
        "while len(table) < self.num_blocks_for(seq.num_tokens):",
        "if self.num_blocks_for(seq.num_tokens) > self.num_blocks_for(seq.num_tokens - 1):",
        APPEND,
    ),
    "always room": ("return self.gpu_pool.num_free >= missing", "return True", CAN_APPEND),
    "room only if a block is free": ("return self.gpu_pool.num_free >= missing", "return self.gpu_pool.num_free >= 1", CAN_APPEND),
    "one table for both siblings": ("self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = table", FORK),
    "references are forgotten": ("self.gpu_pool.share(block)", "pass", FORK),
    "fork copies the blocks": ("self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = [self.gpu_pool.allocate() for _ in table]", FORK),
    "writes into shared blocks": ("return place < len(table) and self.gpu_pool.ref_counts[table[place]] > 1", "return False", COPY),
    "any shared block needs a copy": (
        "return place < len(table) and self.gpu_pool.ref_counts[table[place]] > 1",
        "return any(self.gpu_pool.ref_counts[block] > 1 for block in table)",
        COPY,
    ),
    "always copies": ("return place < len(table) and self.gpu_pool.ref_counts[table[place]] > 1", "return place < len(table)", COPY),
    "copies the block of the last token": ("place = seq.num_computed_tokens // self.block_size\n        return", "place = len(table) - 1\n        return", COPY),
    "the old block keeps its reference": ("self.gpu_pool.release(old)", "pass", COPY),
    "the pair is the wrong way round": ("return old, new", "return new, old", COPY),
    "the copy is not told": ("return old, new", "return None", COPY),
    "the copy is not counted as needed": ("return super().can_append_slots(seq) and (not self.must_copy(seq) or self.gpu_pool.num_free >= 1)", "return super().can_append_slots(seq)", COPY),
    "the newest token is forgotten on the way back": ("self.num_blocks_for(seq.num_tokens) >= watermark", "len(self.swapped_tables[seq.seq_id]) >= watermark", SWAP),
    "host pairs the wrong way round": ("moves = [(block, self.cpu_pool.allocate()) for block in table]", "moves = [(self.cpu_pool.allocate(), block) for block in table]", SWAP),
    "device blocks stay taken": ("self.gpu_pool.release(block)\n        self.swapped_tables", "pass\n        self.swapped_tables", SWAP),
    "host blocks stay taken": ("self.cpu_pool.release(host)", "pass", SWAP),
    "the table comes back reversed": ("self.block_tables[seq.seq_id] = [block for _, block in moves]", "self.block_tables[seq.seq_id] = [block for _, block in moves][::-1]", SWAP),
    "swapped out without asking": ("return self.cpu_pool.num_free >= len(self.get_block_table(seq))", "return True", SWAP),
    "one host block must stay free": ("return self.cpu_pool.num_free >= len(self.get_block_table(seq))", "return self.cpu_pool.num_free > len(self.get_block_table(seq))", SWAP),
    "host blocks of one that ends are lost": ("self.cpu_pool.release(block)\n", "pass\n", SWAP),
}  # fmt: skip
"""What was written instead, by what is wrong with it: a passage of the solution, its replacement, and the first check to fail."""


def test_the_solution_gets_all_points():
    outcome = run_cells(CELLS, with_model=True)
    assert (outcome.failed, outcome.broken, outcome.points, outcome.most_points) == ([], {}, 20, 20)


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(cells)
    assert outcome.points == 0
    assert outcome.broken == {}
    assert len(outcome.failed) == 10


@pytest.mark.parametrize("old, new, first", WRONG.values(), ids=WRONG)
def test_a_mistake_fails_where_it_was_made(old, new, first):
    outcome = run_cells(edited(CELLS, old, new))
    assert outcome.failed[:1] == [first]
    assert str(outcome.checks[first]), "it is said in words"
    assert outcome.broken == {}


def test_blocks_that_are_not_read_through_the_table_change_the_text():
    wrong = edited(CELLS, "self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = table[::-1]")
    assert TEXT in run_cells(wrong, with_model=True).failed
