"""Lesson 09's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

`tests/support/mutate_lesson.py 09` makes many more mistakes, small ones.
"""

from __future__ import annotations

import random
import statistics

import pytest
from lesson_cells import read_cells
from lesson_checks import LessonChecks

from minivllm.bench.offline import run_offline
from minivllm.bench.summary import percentile
from minivllm.bench.workloads import WorkloadRequest
from minivllm.core.static_batching import StaticBatchScheduler
from minivllm.course.lessons.lesson_09.choice import MACHINES, sweep
from minivllm.course.lessons.timing import RequestTimes, request_times, timed
from minivllm.simulation.engine import make_simulated_engine

CELLS = read_cells("09")


class TestChecks(LessonChecks):
    number = "09"
    points = 19
    says = ("Expected", "Got", "Look at")
    raises = AssertionError
    every = 9


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_choice_that_is_checked_has_one_answer(machine):
    for first_seed in (0, 5):
        best, second = sorted(sweep(machine, first_seed).items(), key=lambda item: -item[1])[:2]
        assert best[1] > 1.05 * second[1]
        assert best[0] not in (machine.candidates[0], machine.candidates[-1])
    assert max(sweep(machine, 0).items(), key=lambda item: item[1])[0] == best[0]


# -- what the lesson builds on ---------------------------------------------------------------------------------------


def answers():
    """What the solution defines."""
    space = {"__name__": "__main__"}
    for cell in CELLS:
        if cell.kind == "answer" or cell.name in ("setup", "spread"):
            exec(compile(cell.source, f"<{cell.name}>", "exec"), space)
    return space


def test_the_answers_agree_with_the_package():
    space, rng = answers(), random.Random(3)
    engine = make_simulated_engine(scheduler=StaticBatchScheduler, max_num_seqs=4)
    requests = [WorkloadRequest([1] * rng.randint(1, 40), rng.randint(1, 30)) for _ in range(60)]
    with timed(engine) as bench:
        space["drive"](bench, requests, space["poisson_times"](5.0, 60, rng))
        records, steps = bench.request_times(), bench.step_times()
    assert len(records) == 60 and not engine.has_unfinished_requests() and engine.trace is None
    assert [times.arrival for times in records] == sorted(times.arrival for times in records)
    summary = space["summarize"](records, 0.0)
    again = run_offline(make_simulated_engine(scheduler="static", max_num_seqs=4), "static", "", requests, use_tqdm=False)
    assert summary.requests_per_second == pytest.approx(60 / records_end(records))
    theirs = [times.tokens[0] - times.arrival for times in request_times(again.trace)]
    assert again.ttft.p99 == pytest.approx(percentile(theirs, 99)) == pytest.approx(space["percentile"](theirs, 99))
    busy, useful = space["utilisation"](steps, 0.0, records_end(records), 4)
    assert 0 < useful <= busy <= 1
    latency = statistics.mean(times.tokens[-1] - times.arrival for times in records)
    littles = len(records) / records_end(records) * latency
    assert space["average_in_system"](records, 0.0, records_end(records)) == pytest.approx(littles)


def records_end(records: list[RequestTimes]) -> float:
    """When the last token came."""
    return max(times.tokens[-1] for times in records)


def test_an_interrupted_measurement_leaves_nothing_behind():
    engine = make_simulated_engine(trace=False)
    with pytest.raises(KeyboardInterrupt), timed(engine) as bench:
        bench.add(WorkloadRequest([1, 2, 3], 9), bench.now())
        bench.step()
        raise KeyboardInterrupt
    assert not engine.has_unfinished_requests() and engine.trace is None
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks
