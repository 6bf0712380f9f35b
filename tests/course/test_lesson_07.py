"""Lesson 07's checks, tested as code is: the solution passes, a stub fails, and a plausible mistake fails where it belongs.

`tests/support/mutate_lesson.py 07` makes many more mistakes, small ones.
"""

from __future__ import annotations

import re

import pytest
from lesson_cells import Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors

from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07 import check_decisions

COMES, LEAVES, FITS = "a request waits at its place", "a request leaves from any queue", "three limits say who fits"
ADMIT, STEP = "nobody overtakes", "a step is a prefill or a decode"
UPDATE, LATEST = "tokens come in, and finished sequences leave", "the latest gives way"
SWAP_OUT, SWAP_IN = "a sequence that is swapped out loses nothing", "a sequence that is swapped out comes back in its turn"
SAME, TEXT = "the same decisions as the package's scheduler", "the same text from the real model"

WRONG = {
    "arrival time decides under FCFS": (COMES, "seq.order = (number,)", "seq.order = (request.metrics.arrival_time, number)"),
    "LIFO for FCFS": (COMES, "seq.order = (number,)", "seq.order = (-number,)"),
    "priority without arrival": (
        COMES,
        "seq.order = (request.priority, request.metrics.arrival_time, number)",
        "seq.order = (request.priority, number)",
    ),
    "two requests with the same order": (
        COMES,
        "seq.order = (request.priority, request.metrics.arrival_time, number)",
        "seq.order = (request.priority, request.metrics.arrival_time)",
    ),
    "a number that is not unique": (COMES, "number = next(self.numbers)", "number = len(self.requests)"),
    "put at the end, wherever its place is": (
        COMES,
        "self.put(self.waiting, seq)\n        ###",
        "self.waiting.append(seq)\n        ###",
    ),
    "the request does not know its sequence": (COMES, "        request.sequences.append(seq)\n", ""),
    "an aborted request keeps its blocks": (
        LEAVES,
        "        self.block_manager.free(seq)\n        seq.status = status\n",
        "        seq.status = status\n",
    ),
    "who is swapped out cannot leave": (
        LEAVES,
        "        else:\n            self.swapped.remove(seq)\n        self.block_manager.free(seq)",
        "        self.block_manager.free(seq)",
    ),
    "an unknown id is an error": (LEAVES, "if request_id in self.requests:", "if True:"),
    "one sequence too many": (FITS, "if len(self.running) >= self", "if len(self.running) > self"),
    "one sequence too few": (FITS, "if len(self.running) >= self", "if len(self.running) + 1 >= self"),
    "the token budget, off by one": (FITS, "seq.num_tokens > self.config.max", "seq.num_tokens >= self.config.max"),
    "the budget forgets what the step has": (FITS, "output.num_batched_tokens + seq.num_tokens > self", "seq.num_tokens > self"),
    "the budget counts the prompt only": (
        FITS,
        "output.num_batched_tokens + seq.num_tokens > self",
        "output.num_batched_tokens + seq.num_prompt_tokens > self",
    ),
    "the watermark is kept for nobody": (
        FITS,
        "keep_watermark=bool(self.running))\n        ###",
        "keep_watermark=True)\n        ###",
    ),
    "the watermark is never kept": (
        FITS,
        "keep_watermark=bool(self.running))\n        ###",
        "keep_watermark=False)\n        ###",
    ),
    "the last in the queue joins first": (
        ADMIT,
        "while self.waiting and self.fits(self.waiting[0], output):\n            seq = self.waiting.pop(0)",
        "while self.waiting and self.fits(self.waiting[-1], output):\n            seq = self.waiting.pop()",
    ),
    "overtaking: who fits goes first": (
        ADMIT,
        "while self.waiting and self.fits(self.waiting[0], output):\n            seq = self.waiting.pop(0)",
        "while fitting := [other for other in self.waiting if self.fits(other, output)]:\n            seq = fitting[0]\n"
        "            self.waiting.remove(seq)",
    ),
    "one admission a step": (
        ADMIT,
        "while self.waiting and self.fits(self.waiting[0], output):",
        "if self.waiting and self.fits(self.waiting[0], output):",
    ),
    "joins at the end of those that run": (
        ADMIT,
        "self.put(self.running, seq)\n            self.add(output, seq, seq.num_tokens)",
        "self.running.append(seq)\n            self.add(output, seq, seq.num_tokens)",
    ),
    "what was said before preemption is not recomputed": (
        ADMIT,
        "self.add(output, seq, seq.num_tokens)",
        "self.add(output, seq, seq.num_prompt_tokens)",
    ),
    "decode before prefill": (
        STEP,
        "        self.admit(output)\n        if not output.scheduled:\n            self.decode(output)\n        return output",
        "        self.decode(output)\n        if not output.scheduled:\n            self.admit(output)\n        return output",
    ),
    "prefill and decode in one step": (
        STEP,
        "        if not output.scheduled:\n            self.decode(output)\n        return output",
        "        self.decode(output)\n        return output",
    ),
    "no slot for the newest token": (
        STEP,
        "        for seq in self.running:\n            self.block_manager.append_slots(seq)\n",
        "        for seq in self.running:\n",
    ),
    "computed tokens grow by one": (UPDATE, "num_computed_tokens += part.num_tokens", "num_computed_tokens += 1"),
    "the aborted get tokens": (UPDATE, "            if seq.finished:\n                continue\n", ""),
    "who has ended goes on running": (
        UPDATE,
        "            if status is not None:\n                self.finish(seq, status)\n",
        "            if status is not None:\n                seq.status = status\n",
    ),
    "results in the order of those left over": (UPDATE, "advanced.append((seq, i))", "advanced.append((seq, len(advanced)))"),
    "who comes back keeps the watermark for nobody": (
        SWAP_IN,
        "if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):",
        "if not self.block_manager.can_swap_in(seq, keep_watermark=True):",
    ),
    "the earliest is preempted": (LATEST, "self.preempt(self.running[-1], output)", "self.preempt(self.running[0], output)"),
    "who needs the block is preempted itself": (LATEST, "self.preempt(self.running[-1], output)", "self.preempt(seq, output)"),
    "computed tokens are not reset": (LATEST, "        seq.num_computed_tokens = 0\n", ""),
    "what was said is taken back": (
        LATEST,
        "        seq.num_computed_tokens = 0\n",
        "        seq.num_computed_tokens = 0\n        del seq.token_ids[seq.num_prompt_tokens:]\n",
    ),
    "the preempted keeps its blocks": (
        LATEST,
        "        self.block_manager.free(seq)\n        seq.num_computed_tokens = 0\n",
        "        seq.num_computed_tokens = 0\n",
    ),
    "the preempted goes to the end of the queue": (
        LATEST,
        "self.put(self.waiting, seq)\n        seq.request.metrics",
        "self.waiting.append(seq)\n        seq.request.metrics",
    ),
    "nobody counts preemptions": (
        LATEST,
        "        self.put(self.waiting, seq)\n        seq.request.metrics.num_preemptions += 1\n",
        "        self.put(self.waiting, seq)\n",
    ),
    "swap without the list of copies": (
        SWAP_OUT,
        "output.blocks_to_swap_out.extend(self.block_manager.swap_out(seq))",
        "self.block_manager.swap_out(seq)",
    ),
    "only the last one's copies": (
        SWAP_OUT,
        "output.blocks_to_swap_out.extend(self.block_manager.swap_out(seq))",
        "output.blocks_to_swap_out = self.block_manager.swap_out(seq)",
    ),
    "swap though the host is full": (SWAP_OUT, " or not self.block_manager.can_swap_out(seq):", ":"),
    "swap whatever was asked for": (
        SWAP_OUT,
        'if self.config.preemption_mode != "swap" or not self',
        "if not self",
    ),
    "what is swapped out counts as lost": (
        SWAP_OUT,
        "        seq.status = SequenceStatus.SWAPPED\n",
        "        seq.status = SequenceStatus.SWAPPED\n        seq.num_computed_tokens = 0\n",
    ),
    "newcomers before those that are swapped out": (
        SWAP_IN,
        "        if self.swapped and self.swapped[0].order < seq.order:\n            return False\n",
        "",
    ),
    "swapped out before those that have waited longer": (
        SWAP_IN,
        "            if self.waiting and self.waiting[0].order < seq.order:\n                break\n",
        "",
    ),
    "one place too many after a swap": (
        SWAP_IN,
        "while self.swapped and len(self.running) < self.config.max_num_seqs:",
        "while self.swapped and len(self.running) <= self.config.max_num_seqs:",
    ),
    "back without a slot for the next token": (
        SWAP_IN,
        "self.put(self.running, seq)\n            self.block_manager.append_slots(seq)\n",
        "self.put(self.running, seq)\n",
    ),
    "back in, right after somebody was put out": (
        SWAP_IN,
        "            if not output.preempted:\n                self.swap_in(output)\n",
        "            self.swap_in(output)\n",
    ),
    "an order of its own": (COMES, "seq.order = (number,)", "seq.order = (0, number)"),
    "newcomers count twice": (FITS, "if len(self.running) >= self", "if len(self.running) + output.num_prefills >= self"),
    "asking takes tokens of the budget": (
        FITS,
        "        return self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))\n        ###",
        "        output.num_batched_tokens += seq.num_tokens\n"
        "        return self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))\n        ###",
    ),
    "asking sorts the queue": (
        FITS,
        "        if len(self.running) >= self.config.max_num_seqs:\n            return False\n        if output",
        "        self.waiting.sort(key=lambda other: other.num_tokens)\n"
        "        if len(self.running) >= self.config.max_num_seqs:\n            return False\n        if output",
    ),
    "asking counts a prefill": (
        FITS,
        "        return self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))\n        ###",
        "        output.num_prefills += 1\n"
        "        return self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))\n        ###",
    ),
    "the output of the step before": (
        STEP,
        "        output = SchedulerOutput()\n        self.admit(output)\n        if not output.scheduled:\n"
        "            self.decode(output)\n        return output",
        "        self.output = output = getattr(self, 'output', None) or SchedulerOutput()\n        self.admit(output)\n"
        "        if not output.scheduled:\n            self.decode(output)\n        return output",
    ),
    "lists of the step before": (
        STEP,
        "        output = SchedulerOutput()\n        self.admit(output)\n        if not output.scheduled:\n"
        "            self.decode(output)\n        return output",
        "        self.parts = getattr(self, 'parts', [])\n        output = SchedulerOutput(self.parts)\n        self.admit(output)\n"
        "        if not output.scheduled:\n            self.decode(output)\n        return output",
    ),
    "the table without the newest token's block": (
        STEP,
        "        for seq in self.running:\n            self.block_manager.append_slots(seq)\n            self.add(output, seq, 1)\n",
        "        for seq in self.running:\n            self.add(output, seq, 1)\n            self.block_manager.append_slots(seq)\n",
    ),
    "the table without it, where blocks may run out": (
        LATEST,
        "                self.block_manager.append_slots(seq)\n                self.add(output, seq, 1)\n",
        "                self.add(output, seq, 1)\n                self.block_manager.append_slots(seq)\n",
    ),
    "a preempted sequence gets a new order": (
        LATEST,
        "        seq.num_computed_tokens = 0\n",
        "        seq.num_computed_tokens = 0\n        seq.order = (next(self.numbers),)\n",
    ),
    "a swapped sequence gets a new order": (
        SWAP_OUT,
        "        seq.status = SequenceStatus.SWAPPED\n",
        "        seq.status = SequenceStatus.SWAPPED\n        seq.order = (*seq.order, 1)\n",
    ),
    "the watermark is asked about once, before the loop": (
        SWAP_IN,
        "        while self.swapped and len(self.running) < self.config.max_num_seqs:\n"
        "            seq = self.swapped[0]\n"
        "            if self.waiting and self.waiting[0].order < seq.order:\n                break\n"
        "            if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):\n",
        "        keep = bool(self.running)\n"
        "        while self.swapped and len(self.running) < self.config.max_num_seqs:\n"
        "            seq = self.swapped[0]\n"
        "            if self.waiting and self.waiting[0].order < seq.order:\n                break\n"
        "            if not self.block_manager.can_swap_in(seq, keep_watermark=keep):\n",
    ),
    "who comes back takes all its tokens from the budget": (
        SWAP_IN,
        "            if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):\n",
        "            if output.num_batched_tokens + seq.num_tokens > self.config.max_num_batched_tokens:\n                break\n"
        "            if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):\n",
    ),
    "back with the table without the newest token's block": (
        SWAP_IN,
        "            self.put(self.running, seq)\n            self.block_manager.append_slots(seq)\n            self.add(output, seq, 1)\n",
        "            self.put(self.running, seq)\n            self.add(output, seq, 1)\n            self.block_manager.append_slots(seq)\n",
    ),
    "who comes back does nothing yet": (
        SWAP_IN,
        "            self.put(self.running, seq)\n            self.block_manager.append_slots(seq)\n            self.add(output, seq, 1)\n",
        "            self.put(self.running, seq)\n",
    ),
    "one comes back a step": (
        SWAP_IN,
        "        while self.swapped and len(self.running) < self.config.max_num_seqs:\n            seq",
        "        for _ in range(bool(self.swapped and len(self.running) < self.config.max_num_seqs)):\n            seq",
    ),
    "nobody comes back when nobody decodes": (
        SWAP_IN,
        "            if not output.preempted:\n                self.swap_in(output)\n",
        "            if output.scheduled and not output.preempted:\n                self.swap_in(output)\n",
    ),
    "back in with a prefill": (
        SWAP_IN,
        "            self.decode(output)\n            if not output.preempted:\n                self.swap_in(output)\n",
        "            self.decode(output)\n        if not output.preempted:\n            self.swap_in(output)\n",
    ),
    "who comes back is not listed": (SWAP_IN, "            output.swapped_in.append(seq)\n", ""),
    "nobody keeps the watermark when coming back": (
        SWAP_IN,
        "if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):",
        "if not self.block_manager.can_swap_in(seq, keep_watermark=False):",
    ),
    "asking for a newcomer turns the swapped queue round": (
        SWAP_IN,
        "        if self.swapped and self.swapped[0].order < seq.order:\n",
        "        self.swapped.reverse()\n        if self.swapped and self.swapped[-1].order < seq.order:\n",
    ),
}
"""What is wrong: the check that must be the first to fail, the passage of the answer, and what stands there instead."""

SAYS = {
    "newcomers count twice": "count them once",
    "asking takes tokens of the budget": "Look at what fits() does to num_batched_tokens",
    "asking sorts the queue": "what fits() does to waiting",
    "nobody comes back when nobody decodes": "even if that was left with nobody",
    "back in with a prefill": "never after a prefill",
    "who comes back is not listed": "Look at output.swapped_in",
    "nobody keeps the watermark when coming back": "can_swap_in and its keep_watermark",
    "asking counts a prefill": "it must not change anything",
    "the output of the step before": "each step needs its own",
    "the table without the newest token's block": "append_slots before add",
    "the table without it, where blocks may run out": "append_slots before add",
    "back with the table without the newest token's block": "append_slots before add",
    "an order of its own": "Expected seq.order",
    "a preempted sequence gets a new order": "Look at seq.order",
    "a swapped sequence gets a new order": "Look at seq.order",
    "the watermark is asked about once, before the loop": "those that came back before it among them",
    "who comes back takes all its tokens from the budget": "It computes one token",
    "who comes back keeps the watermark for nobody": "Nobody runs, so the watermark is not kept",
    "who comes back does nothing yet": "it decodes in the same step",
    "newcomers before those that are swapped out": "the smaller `order` of swapped[0]",
    "swapped out before those that have waited longer": "in self.waiting has a smaller `order`",
    "one place too many after a swap": "max_num_seqs",
    "one comes back a step": "does not come back: it is its turn",
    "back without a slot for the next token": "the newest token needs a slot",
    "back in, right after somebody was put out": "only if nobody was preempted",
    "asking for a newcomer turns the swapped queue round": "what fits() does to swapped",
    "computed tokens grow by one": "it grows by part.num_tokens",
    "results in the order of those left over": "Expected result, for",
}
"""Words of the message that name the trouble."""


@pytest.fixture(scope="module")
def cells():
    return read_cells("07")


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(cells):
    outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in cells])
    assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.slow
@pytest.mark.parametrize("name", [cell.name for cell in read_cells("07") if cell.kind == "answer"])
def test_one_floor_left_out_fails_its_own_check_first(cells, name):
    number = [cell.name for cell in cells if cell.kind == "answer"].index(name)
    outcome = run_cells(
        [Cell(cell.name, untouched(cell.source), cell.kind) if cell.name == name else cell for cell in cells],
    )
    assert outcome.failed[0] == list(outcome.checks)[number] and outcome.broken == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong_and_hears_why(cells, name):
    first, old, new = WRONG[name]
    outcome = run_cells(without_earlier_checks(cells, edited(cells, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert outcome.broken == {}
    error = outcome.checks[first]
    if isinstance(error, AssertionError):
        assert "xpected" in str(error) and "ook at" in str(error)
    assert SAYS.get(name, "") in str(error)


def test_a_message_shows_the_one_sequence_that_is_wrong(cells):
    _, old, new = WRONG["computed tokens grow by one"]
    said = str(run_cells(without_earlier_checks(cells, edited(cells, old, new)), stop_at_failure=True).checks[UPDATE])
    lines = said.split("\n")
    assert re.fullmatch(r"Expected num_computed_tokens, for '.': \d+", lines[-3])
    assert re.fullmatch(r"Got num_computed_tokens, for '.': \d+", lines[-2])


def test_the_last_run_in_the_engine_swaps_often_and_keeps_a_watermark():
    trace = check_decisions(Scheduler)
    assert sum(len(step.preempted) for step in trace) >= 20 and sum(len(step.swapped_in) for step in trace) >= 20
    assert int(trace.config.watermark * trace.config.num_gpu_blocks) >= 1


def test_a_difference_in_the_engine_is_told_in_words():
    class Slower(Scheduler):
        """Lets one sequence run at a time, from the tenth request on."""

        def may_join(self, seq):
            return int(seq.request.request_id) < 10 or not self.running

    with pytest.raises(AssertionError) as failure:
        check_decisions(Slower)
    said = str(failure.value)
    assert re.search(r"^Forty requests with FCFS and recompute\. Step \d+, a prefill step", said)
    assert re.search(
        r"\nExpected batch, for 'request 10': prefill, \d+ tokens\nGot batch, for 'request 10': nothing\nLook at who", said
    )
    assert "SequenceStep(" not in said and len(said) < 400


@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    count, survivors = find_survivors("07", every=13)
    assert count >= 12
    assert len(survivors) <= (1 - WANTED) * count, [mutant.change for mutant in survivors]
