"""Lesson 07's checks, tested as code is: the solution passes, a stub fails, and a plausible mistake fails where it belongs.

`tests/support/mutate_lesson.py 07` makes many more mistakes, small ones.
"""

from __future__ import annotations

import re

import pytest
from lesson_cells import Cell, read_cells, run_cells, untouched, without_earlier_checks
from lesson_checks import LessonChecks, find_answer

from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07 import check_decisions


class TestChecks(LessonChecks):
    number = "07"
    says = ("xpected", "ook at")
    every = 13


@pytest.fixture(scope="module")
def cells():
    return read_cells("07")


@pytest.mark.slow
@pytest.mark.parametrize("name", [cell.name for cell in read_cells("07") if cell.kind == "answer"])
def test_one_stage_left_out_fails_its_own_check_first(cells, name):
    number = [cell.name for cell in cells if cell.kind == "answer"].index(name)
    outcome = run_cells(
        [Cell(cell.name, untouched(cell.source), cell.kind) if cell.name == name else cell for cell in cells],
    )
    assert outcome.failed[0] == list(outcome.checks)[number] and outcome.broken == {}


def test_a_message_shows_the_one_sequence_that_is_wrong(cells):
    answer = find_answer("07", "computed tokens grow by one")
    said = str(run_cells(without_earlier_checks(cells, answer.make(cells)), stop_at_failure=True).checks[answer.about])
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
        r"\nExpected batch, for 'request 10': prefill, \d+ tokens\nGot batch, for 'request 10': nothing\nLook at which sequences",
        said,
    )
    assert "SequenceStep(" not in said and len(said) < 400
