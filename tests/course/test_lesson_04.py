"""Lesson 04's checks: the solution passes, an untouched exercise fails at each, and plausible mistakes fail where they should."""

from __future__ import annotations

import ast
import multiprocessing
from functools import cache

import nbformat
import pytest
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, without_earlier_checks
from lesson_checks import LessonChecks
from mutate_lesson import LIMIT, mutants_of

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.course.lessons.lesson_04.engine import _CROWDS, run_simulated

CELLS = read_cells("04")
POOL = "the pool hands out free blocks and counts tables"
ALLOCATE = "a prompt gets as many blocks as its tokens fill"
FREE = "free gives every block back, once"
ROOM = "admission leaves the watermark free"
APPEND = "the table grows with the text"
CAN_APPEND = "it says in advance whether the new tokens fit"
FORK = "siblings share the same blocks in their own tables"
COPY = "the first to write into a shared block gets a copy"
SWAP = "what goes to the host comes back in order"
TEXT = "a real model writes the same text"

_MUST_COPY = "return place < len(table) and self.gpu_pool.ref_counts[table[place]] > 1"


STAGES = {
    "pool": [POOL],
    "allocating": [ALLOCATE, FREE],
    "admitting": [ROOM],
    "growing": [APPEND, CAN_APPEND],
    "sharing": [FORK, COPY],
    "swapping": [SWAP],
}
"""The checks below each answer."""


class TestChecks(LessonChecks):
    number = "04"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_no_small_change_gets_past_the_checks_of_its_stage(stage):
    """Each small change to an answer (`mutate_lesson.py` makes them) fails at a check right below it, never only at a later one."""
    run_cells(CELLS)  # everything is imported before the forks
    through = {}
    for mutant in mutants_of(next(cell for cell in CELLS if cell.name == stage)):
        first = first_failure([mutant.cell if cell.name == stage else cell for cell in CELLS])
        if (
            first not in STAGES[stage] and mutant.change != "allocating: False → True"
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
    """What the stages' own checks catch is also seen in the engine: the runs reach these cases."""
    from minivllm.course.lessons import lesson_04

    with pytest.raises((AssertionError, IndexError)):
        lesson_04.check_block_manager(wrong)


def test_a_difference_in_the_engine_is_told_with_the_place_to_look():
    from minivllm.course.lessons import lesson_04

    with pytest.raises(AssertionError, match="In step [0-9]+ of a simulated run, .* is not the same: .*\n *Where to look: "):
        lesson_04.check_block_manager(KeepsTheWatermark)


@pytest.mark.slow
@pytest.mark.long
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
    """Each stage gets the walkthrough's finished manager, which is more than a paste cell by cell."""
    classes = classes_of_the_walkthrough()
    stages = ("Allocating", "Admitting", "Growing", "Sharing", "Swapping")
    pasted = "\n\n".join(["from collections import deque", *classes, *(f"{stage} = MyBlockSpaceManager" for stage in stages)])
    cells = []
    for cell in CELLS:
        if cell.kind != "answer":
            cells.append(cell)
        elif cell.name == "pool":
            cells.append(Cell(cell.name, pasted, cell.kind))
    outcome = run_cells(cells)
    assert outcome.points <= 5, [name for name in outcome.checks if name not in outcome.failed]
