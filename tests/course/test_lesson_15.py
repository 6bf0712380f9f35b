"""Lesson 15's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

`tests/support/mutate_lesson.py 15` makes many more mistakes, small ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from lesson_checks import LessonChecks

from minivllm.course.lessons.fleets import FleetGoals, Machine, Plan, Sample, run_fleet
from minivllm.course.lessons.lesson_15.audit import LAWS, broken_laws, report_of, tampered, true_report
from minivllm.course.lessons.lesson_15.days import LATE, STARTUP, TICK, day_rates, run_day
from minivllm.course.lessons.lesson_15.fleet import SEATS, Situation, cheapest, check_choose_fleet, make_sample, number_up
from minivllm.course.lessons.lesson_15.load import nearest_rank
from minivllm.course.lessons.lesson_15.replicas import probability, smallest_total
from minivllm.course.lessons.lesson_15.scaling import check_scaler
from minivllm.course.lessons.lesson_15.tails import check_tail
from minivllm.course.lessons.planning import Patient, run_separate, run_with_failure
from minivllm.course.observations import recording
from minivllm.executor.simulated import CostModel
from minivllm.viz.engine_map import PARTS, USED, draw_engine_map


class TestChecks(LessonChecks):
    number = "15"
    points = 20
    says = ("Expected", "Got", "Look at")
    every = 9
    tries_mistakes_at_night = True


MACHINE = Machine("A", 2.0, CostModel(0.01, per_prefill_token=4e-5, per_decode_seq=2e-4))


def test_a_fleet_is_simulated_once_and_its_price_is_that_of_all_machines():
    sample, plan = make_sample(random.Random(0), "a minute", 30, 100, 8, count=20), Plan(MACHINE, 8, 3)
    first = run_fleet(plan, sample)
    assert first.completed == len(sample.requests) and first.num_replicas == 3
    assert run_fleet(plan, sample) is first and run_fleet(Plan(MACHINE, 8, 2), sample) is not first
    assert plan.price == 6.0 and str(plan) == "3 machines of kind A, 8 seats each: $6.00 an hour"


def test_goals_are_kept_by_a_p99_that_is_as_long_as_they_are():
    run = run_fleet(Plan(MACHINE, 8, 2), make_sample(random.Random(0), "a minute", 30, 100, 8, count=20))
    assert FleetGoals(run.ttft.p99, run.itl.p99).are_met_by(run)
    assert not FleetGoals(run.ttft.p99 * 0.99, run.itl.p99).are_met_by(run)
    assert not FleetGoals(run.ttft.p99, run.itl.p99 * 0.99).are_met_by(run)


def test_a_sample_lasts_from_its_first_request_to_its_last():
    sample = make_sample(random.Random(0), "a minute", 30, 100, 8, count=20)
    late = Sample("late", [request for request in sample.requests if request.arrival_time > sample.requests[3].arrival_time])
    assert late.seconds == sample.requests[-1].arrival_time - late.requests[0].arrival_time


@pytest.mark.parametrize("availability", [0.9, 0.99])
def test_spares_agree_with_machines_that_fail_at_random(availability):
    rng, total = random.Random(0), smallest_total(5, availability, 0.95)
    ups = [sum(rng.random() < availability for _ in range(total)) for _ in range(4000)]
    assert abs(sum(up >= 5 for up in ups) / len(ups) - probability(5, total, availability)) < 0.02
    assert number_up(Plan(Machine("A", 1.0, CostModel(0.01), availability=availability), 8, total), 0.95) >= 5


class Constant:
    """An autoscaler that wants the same number all day, or one number and then another."""

    def __init__(self, number, later=None, when=math.inf):
        self.number, self.later, self.when = number, later, when

    def decide(self, observed):
        return self.number if observed.now < self.when else self.later


def test_a_day_with_replicas_to_spare_has_no_late_request():
    day = run_day(Constant(4), [10.0] * 100, capacity=4.0, start=4)
    assert (day.late, day.flaps) == (0.0, 0) and day.replica_hours == pytest.approx(4 * 100 * TICK / 3600)


def test_a_replica_is_paid_for_from_the_moment_it_is_ordered_and_answers_when_it_has_started():
    day = run_day(Constant(2), [1.0] * 100, capacity=4.0, start=1)
    assert day.ready.index(2) * TICK == STARTUP
    assert day.replica_hours == pytest.approx((1 + 2 * 99) * TICK / 3600)


def test_too_few_replicas_make_requests_late_and_the_queue_grows():
    day = run_day(Constant(2), [10.0] * 100, capacity=4.0, start=2)
    assert day.late > 0.9 and day.waits == sorted(day.waits) and day.waits[-1] > LATE


def test_a_start_soon_after_a_stop_is_a_flap():
    soon, later = (run_day(Constant(2, 3, when=when), [1.0] * 200, capacity=4.0, start=3).flaps for when in (600.0, 1200.0))
    assert (soon, later) == (1, 0)


def test_a_stop_makes_one_flap_however_many_orders_follow():
    class Climb:
        def decide(self, observed):
            return 2 if observed.now < 60 else 2 + int(observed.now // 60)

    assert run_day(Climb(), [1.0] * 60, capacity=4.0, start=5).flaps == 1


def test_a_replica_that_dies_loses_no_request_and_the_others_have_longer_waits():
    plan, sample = Plan(MACHINE, 8, 3), make_sample(random.Random(0), "a minute", 60, 100, 8, count=60)
    run, moved = run_with_failure(plan, sample, after=sample.seconds / 2)
    assert run.completed == len(sample.requests) and moved > 0 and run.num_requests == len(sample.requests) + moved
    assert run.ttft.p99 >= run_fleet(plan, sample).ttft.p99


def test_separate_machines_answer_all_and_no_prompt_comes_between_two_tokens():
    plan, sample = Plan(MACHINE, 8, 4), make_sample(random.Random(0), "a minute", 60, 400, 8, count=60)
    apart = run_separate(plan, sample, num_prefill=2, transfer=1e-6)
    assert apart.itl.p99 < run_fleet(plan, sample).itl.p99 and apart.second.p50 > apart.itl.p50


def test_the_gap_from_a_machine_for_prompts_to_one_for_tokens_is_an_inter_token_latency():
    plan, sample = Plan(MACHINE, 8, 4), make_sample(random.Random(0), "a minute", 60, 400, 8, count=60)
    quick, slow = (run_separate(plan, sample, num_prefill=2, transfer=transfer) for transfer in (0.0, 1e-4))
    moved = [len(request.prompt_token_ids) * 1e-4 for request in sample.requests if request.output_len > 1]
    assert slow.ttft == quick.ttft and slow.second.mean - quick.second.mean == pytest.approx(sum(moved) / len(moved), rel=0.2)
    num_gaps = sum(request.output_len - 1 for request in sample.requests)
    assert (slow.itl.mean - quick.itl.mean) * num_gaps == pytest.approx(sum(moved), rel=0.2)


def test_hidden_situations_fail_who_ignores_the_itl_or_tries_one_number_of_seats_or_one_day():
    wrong = {
        "more replicas do not make": lambda traffic, goals, prices: cheapest(
            Situation(traffic, replace(goals, itl=math.inf), prices)
        ),
        "the seats: ": lambda *args: cheapest(Situation(*args), SEATS[1:]),
        "the seats: another": lambda *args: cheapest(Situation(*args), SEATS[:1]),
        "for one of them": lambda traffic, goals, prices: cheapest(Situation(traffic[1:], goals, prices)),
        "enough for one of": lambda traffic, goals, prices: cheapest(Situation(traffic[:1], goals, prices)),
    }
    for words, planner in wrong.items():
        with recording(7), pytest.raises(AssertionError, match=words):
            check_choose_fleet(planner)


def test_reports_break_a_law_only_if_they_are_tampered_with():
    for seed in range(200):
        rng = random.Random(seed)
        report = true_report(rng)
        assert broken_laws(report) == []
        for law in LAWS:
            wrong = tampered(report, law, rng)
            assert law in broken_laws(wrong) and min(vars(wrong).values()) >= 0


@pytest.mark.parametrize("clients", [0, 8])
def test_a_run_of_the_scheduler_is_counted_and_keeps_the_laws_of_a_report(clients):
    report = report_of(Plan(MACHINE, 4, 1), make_sample(random.Random(0), "a minute", 60, 150, 10, count=60), clients)
    assert report.waiting > 0 and report.running > 0 and broken_laws(replace(report, work=0.99 * report.work)) == []
    assert broken_laws(replace(report, waiting=2 * report.waiting)) == ["queue", "little"]


def test_goals_that_are_judged_with_numpy_are_judged():
    check_tail(_tail, lambda goals, logs: np.bool_(_meets(goals, logs)))


def _tail(groups, percent):
    return nearest_rank([wait for group in groups for wait in group], percent)


def _meets(goals, logs):
    ttfts = [[math.inf if ttft is None else ttft for ttft, _ in log] for log in logs]
    itls = [[gap for _, gaps in log for gap in gaps] for log in logs]
    return _tail(ttfts, 99) <= goals.ttft and _tail(itls, 99) <= goals.itl


def test_the_walkthroughs_patient_rule_passes_the_exercises_check():
    check_scaler(lambda capacity: Patient(0.7 * capacity))


def test_a_burst_lasts_half_an_hour():
    quiet, burst = (day_rates(random.Random(3), 100.0, factor) for factor in (1.0, 1.5))
    raised = [b / a for a, b in zip(quiet, burst, strict=True) if b > a]
    assert len(raised) * TICK == pytest.approx(1800, abs=2 * TICK) and max(raised) == pytest.approx(1.5)


def test_the_parts_that_the_lesson_uses_are_lit_on_the_map():
    bold = {
        text.get_text()
        for text in draw_engine_map(lesson=15).axes[0].texts
        if text.get_color() in {"#009E73", "#E69F00", "#0072B2"}
    }
    assert bold & {part.name for part in PARTS} == set(USED[15])
