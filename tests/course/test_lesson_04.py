"""Lesson 04's checks: the solution passes, an untouched exercise fails at each, and plausible mistakes fail where they should."""

from __future__ import annotations

import ast
import multiprocessing
import re

import pytest
from lesson_cells import Cell, edited, read_cells, read_walkthrough, run_cells
from lesson_checks import LessonChecks
from mutate_lesson import LIMIT, mutants_of
from nightly import NIGHTLY

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.course.lessons import lesson_04
from minivllm.course.lessons.lesson_04.engine import _CROWDS, run_simulated

CELLS = read_cells("04")
STAGES = [cell.name for cell in CELLS if cell.kind == "answer"]


class TestChecks(LessonChecks):
    number = "04"
    points = 19
    says = (r"(?s)\A(?!.*(?<!\d)1 (?:tables|blocks|tokens|new tokens)\b|.*\b0 (?:tables|blocks)\b|.*\bno block are)",)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_no_small_change_gets_past_the_checks_of_its_stage(stage):
    """Each small change to an answer (`mutate_lesson.py` makes them) fails at a check right below it, never only at a later one. By day: every fifth."""
    run_cells(CELLS)  # everything is imported before the forks
    place = [cell.name for cell in CELLS].index(stage)
    end = next(i for i, cell in enumerate(CELLS) if i > place and cell.kind != "check")
    below = [re.search(r'check\("(.*?)"', cell.source)[1] for cell in CELLS[place + 1 : end]]
    through = {}
    for mutant in list(mutants_of(CELLS[place]))[:: 1 if NIGHTLY else 5]:
        first = first_failure([mutant.cell if cell.name == stage else cell for cell in CELLS])
        if first not in below and mutant.change != "allocating: False → True":  # enable_prefix_caching: not used before lesson 10
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


def test_the_simulated_runs_are_crowded_enough():
    """Watermarks count, sequences give way often, and shared blocks go to the host."""
    assert all(int(crowd.watermark * crowd.num_gpu_blocks) >= 2 for crowd in _CROWDS)
    for crowd in _CROWDS:
        steps = run_simulated(BlockSpaceManager, crowd)
        assert sum(bool(step["list of blocks to copy"]) for step in steps) >= 5
        assert sum(bool(step["sequence that gives way"]) for step in steps) >= 6
        if crowd.preemption_mode == "swap":
            assert sum(bool(step["list of blocks to swap out"]) for step in steps) >= 5
            assert sum(bool(step["list of blocks to swap in"]) for step in steps) >= 5
            moved = [[device for device, _ in step["list of blocks to swap out"]] for step in steps]
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
    with pytest.raises((AssertionError, IndexError)) as error:
        lesson_04.check_block_manager(wrong)
    if wrong is KeepsTheWatermark:
        assert re.search(r"In step \d+ of a simulated run, .*\nExpected .*\nGot .*\nLook at ", str(error.value))


@pytest.mark.slow
@pytest.mark.long
def test_blocks_that_are_not_read_through_the_table_change_the_text():
    wrong = edited(CELLS, "self.block_tables[child.seq_id] = list(table)", "self.block_tables[child.seq_id] = table[::-1]")
    assert "a real model writes the same text" in run_cells(wrong, with_model=True).failed


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_little():
    """Each stage gets the walkthrough's finished manager, which is more than a paste cell by cell."""
    classes = [ast.unparse(node) for node in read_walkthrough("04") if isinstance(node, ast.ClassDef)]
    stages = ("Allocating", "Admitting", "Growing", "Sharing", "Swapping")
    pasted = "\n\n".join(["from collections import deque", *classes, *(f"{stage} = MyBlockSpaceManager" for stage in stages)])
    cells = [cell for cell in CELLS if cell.kind != "answer"]
    cells.insert(1, Cell("pasted", pasted, "answer"))
    outcome = run_cells(cells)
    assert outcome.points <= 5, [name for name in outcome.checks if name not in outcome.failed]
