"""The check of lesson 15 for the cheapest fleet: a sweep of traffic, goals and price lists that nobody has seen."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.fleets import FleetGoals, Machine, Plan, Sample, run_fleet
from minivllm.course.lessons.lesson_15.replicas import probability, smallest_total
from minivllm.course.observations import expect, is_recording, require, rounds, seeded
from minivllm.executor.simulated import CostModel

SEATS = (4, 32)
"""The values of `max_num_seqs` to choose from."""
MOST = 12
"""Replicas that a fleet may need at most, spares not counted."""
KINDS = ("slow", "fast", "itl", "seats", "none")
"""Of the situations: the slow machine pays, the fast one pays, the slow one cannot keep the ITL, only few seats keep it on few machines, no
machine keeps the goals."""
MARGIN = 1.02
"""How much more than the cheapest plan a plan may cost."""


@dataclass(frozen=True)
class Situation:
    """What a plan is for."""

    traffic: list[Sample]
    goals: FleetGoals
    prices: list[Machine]


def make_sample(rng: random.Random, name: str, rate: float, prompt: int, output: int, count: int = 48) -> Sample:
    """Requests at random times, two thirds of them in bursts of three; lengths vary by a factor of nine."""
    now, requests = 0.0, []
    while len(requests) < count:
        size = rng.choice((1, 3))
        now += rng.expovariate(rate / 2)
        for _ in range(size):
            lengths = (max(1, round(mean * 3 ** rng.uniform(-1, 1))) for mean in (prompt, output))
            prompt_len, output_len = lengths
            requests.append(WorkloadRequest([1] * prompt_len, output_len, now))
    return Sample(name, requests)


def make_machine(
    rng: random.Random, name: str, speed: float, price: float, availability: float, per_seq: float = 3e-4
) -> Machine:
    """A machine `speed` times as fast as the slowest, of which a step takes `per_seq` seconds for each sequence that decodes."""
    costs = CostModel(
        fixed=0.02 / speed, per_prefill_token=8e-5 / speed, per_decode_seq=per_seq / speed, per_context_token=4e-7 / speed
    )
    return Machine(name, round(price * rng.uniform(0.95, 1.05), 2), costs, 65_536, availability)


def make_situation(rng: random.Random, kind: str) -> Situation:
    """Traffic of two days, goals and prices of one of the `KINDS`."""
    rate, prompt, output = rng.uniform(24, 34), rng.choice((800, 1200)), rng.choice((8, 12))
    # the price of a speed: dearer than it is worth, or cheaper
    fast_price, fast_up = {
        "slow": (1.9, 0.9),
        "fast": (1.3, 0.99),
        "itl": (3.1, 0.95),
        "none": (2.0, 0.95),
        "seats": (2.6, 0.95),
    }[kind]
    slow = make_machine(rng, "slow", 1.0, 1.0, 0.99 if kind == "slow" else 0.9)
    fast = make_machine(rng, "fast", 2.0, fast_price, fast_up)
    goals = {
        "slow": FleetGoals(1.0, 0.2, 0.999),
        "fast": FleetGoals(0.8, 0.2, 0.999),
        "itl": FleetGoals(0.8, 0.075, 0.99),
        "none": FleetGoals(1.0, 0.004, 0.999),
        "seats": FleetGoals(2.0, 0.05, 0.99),
    }[kind]
    busier_first = kind == "seats" or (kind != "itl" and rng.random() < 0.2)
    if kind == "itl":  # longer answers: with few seats more machines must share them
        prompt, output = rng.choice((500, 700)), rng.choice((20, 24))
    if (
        kind == "seats"
    ):  # short prompts, and steps that get longer with each sequence: with many seats more machines must share them
        rate, prompt, output = rate, 100, rng.choice((14, 18))
        slow, fast = (
            make_machine(rng, name, speed, price, 0.95, per_seq=5e-3)
            for name, speed, price in (("slow", 1.0, 1.0), ("fast", 2.0, fast_price))
        )
    quiet = 0.6 if kind in ("itl", "seats") else 1.0
    days = [1.7, quiet] if busier_first else [quiet, 1.7]
    traffic = [
        make_sample(rng, name, rate * factor, prompt, output) for name, factor in zip(("Monday", "Tuesday"), days, strict=True)
    ]
    return Situation(traffic, goals, [slow, fast] if rng.random() < 0.5 else [fast, slow])


def is_enough(machine: Machine, seats: int, number: int, situation: Situation) -> bool:
    """Whether so many replicas keep the goals in all samples."""
    return all(situation.goals.are_met_by(run_fleet(Plan(machine, seats, number), sample)) for sample in situation.traffic)


def find_fewest(machine: Machine, seats: int, situation: Situation) -> int | None:
    """The smallest number that is enough, by halving."""
    low, high = 1, MOST + 1
    while low < high:
        middle = (low + high) // 2
        if is_enough(machine, seats, middle, situation):
            high = middle
        else:
            low = middle + 1
    return low if low <= MOST else None


def find_plans(situation: Situation, every_seats: Sequence[int] = SEATS) -> list[tuple[int, Plan]]:
    """For each machine and each of these numbers of seats: the fewest replicas that keep the goals, and a plan for them with its spares."""
    plans = []
    for machine in situation.prices:
        for seats in every_seats:
            needed = find_fewest(machine, seats, situation)
            if needed is not None:
                total = smallest_total(needed, machine.availability, situation.goals.availability)
                plans.append((needed, Plan(machine, seats, total)))
    return plans


def cheapest(situation: Situation, every_seats: Sequence[int] = SEATS) -> Plan | None:
    """The cheapest plan, spares included, with these numbers of seats."""
    return min((plan for _, plan in find_plans(situation, every_seats)), key=lambda plan: plan.price, default=None)


def number_up(plan: Plan, goal: float) -> int:
    """How many replicas of a plan are up with the probability that is promised."""
    return max(
        (up for up in range(plan.num_replicas + 1) if probability(up, plan.num_replicas, plan.machine.availability) >= goal),
        default=0,
    )


def _describe(situation: Situation) -> str:
    traffic = "; ".join(
        f"{sample.name}: {len(sample.requests) / sample.seconds:.1f} requests a second" for sample in situation.traffic
    )
    prices = "; ".join(
        f"{machine.name}: ${machine.price:.2f} an hour, up {machine.availability:.0%}" for machine in situation.prices
    )
    goals = situation.goals
    return f"Traffic: {traffic}. Prices: {prices}. Goals: p99 of TTFT {goals.ttft:g} s, of ITL {goals.itl * 1e3:g} ms, {goals.availability:.1%} of the time."


def is_right(plan: Plan | None, situation: Situation) -> bool:
    """Whether a plan would pass: it keeps the goals with as many replicas as are up, and costs no more than the cheapest, within `MARGIN`."""
    reference = cheapest(situation)
    if plan is None or reference is None:
        return plan is reference
    up = number_up(plan, situation.goals.availability)
    return up > 0 and is_enough(plan.machine, plan.max_num_seqs, up, situation) and plan.price <= MARGIN * reference.price


def misses_mistakes(situation: Situation, kind: str) -> bool:
    """Whether a planner would pass that makes one of the mistakes for which this kind is there."""
    wrong: list[Plan | None] = []
    if kind == "itl":  # the ITL is ignored, only the first day looked at, only few seats tried
        wrong = [
            cheapest(replace(situation, goals=replace(situation.goals, itl=math.inf))),
            cheapest(replace(situation, traffic=situation.traffic[:1])),
            cheapest(situation, SEATS[:1]),
        ]
    elif kind == "slow":  # the fewest machines are taken, spares come after the choice
        plans = find_plans(situation)
        wrong = [
            min(plans, key=lambda pair: pair[1].num_replicas)[1],
            min(plans, key=lambda pair: pair[0] * pair[1].machine.price)[1],
        ]
    elif kind == "seats":  # only many seats tried, only the last day looked at
        wrong = [cheapest(situation, SEATS[1:]), cheapest(replace(situation, traffic=situation.traffic[1:]))]
    return any(is_right(plan, situation) for plan in wrong)


def find_situation(name: str, kind: str) -> Situation:
    """The first of some random situations of a kind in which its mistakes cost something."""
    for rng in rounds(name, 12):
        situation = make_situation(rng, kind)
        if not misses_mistakes(situation, kind):
            break
    return situation


def check_choose_fleet(choose_fleet: Any) -> None:
    """Each plan keeps the goals in every sample with as many replicas as are up, and no other plan is much cheaper."""
    kinds = list(KINDS)
    if is_recording():  # each takes seconds: those whose mistakes are missed elsewhere, and one more
        kinds = ["itl", "seats", seeded("kind of fleet").choice([kind for kind in KINDS if kind not in ("itl", "seats")])]
    for kind in kinds:
        situation = find_situation(f"fleet {kind}", kind)
        said, plan = _describe(situation), choose_fleet(situation.traffic, situation.goals, situation.prices)
        reference = cheapest(situation)
        if reference is None:
            look = "what you return when no machine keeps the goals, even with the most replicas: None, no plan that breaks the promise"
            expect(said, "plan", None, plan if plan is None else str(plan), look)
            continue
        expect(
            said,
            "type of the plan",
            "Plan",
            type(plan).__name__,
            "what `choose_fleet` returns: a `Plan` for a machine that can, and None only if there is none",
        )
        _expect_possible(said, plan, situation.prices)
        _expect_kept(said, plan, situation)
        _expect_cheap(said, plan, reference, situation)


def _expect_possible(said: str, plan: Plan, prices: Sequence[Machine]) -> None:
    require(
        True, plan.machine in prices and plan.max_num_seqs in SEATS,
        f"{said}\nExpected: one of these machines, with {' or '.join(map(str, SEATS))} seats\nGot: {plan}\nLook at the machines and the seats that `choose_fleet` tries.",
    )  # fmt: skip


def _expect_kept(said: str, plan: Plan, situation: Situation) -> None:
    goals, up = situation.goals, number_up(plan, situation.goals.availability)
    for sample in situation.traffic:
        run = run_fleet(Plan(plan.machine, plan.max_num_seqs, min(up, 40)), sample) if up else None
        if run is not None and goals.are_met_by(run):
            require(True, True, "")
            continue
        kept = run is not None and goals.are_met_by(
            run_fleet(Plan(plan.machine, plan.max_num_seqs, min(plan.num_replicas, 40)), sample)
        )
        alone = [find_fewest(plan.machine, plan.max_num_seqs, replace(situation, traffic=[other])) for other in situation.traffic]
        totals = [smallest_total(number, plan.machine.availability, goals.availability) for number in alone if number is not None]
        if plan.num_replicas in totals:
            look = "the samples: the plan is enough for one of them, and must be for each"
        elif run is None or kept:
            look = "the spares: with all replicas up the goals are kept, but this often fewer are up"
        elif run.itl.p99 > goals.itl and run.ttft.p99 <= goals.ttft:
            look = "the goal for ITL: more replicas do not make a slow machine's steps shorter"
        else:
            look = "what is planned for: the p99 of a simulation of each sample, not the mean and not the work alone"
        got = "none is up" if run is None else f"p99 of TTFT {run.ttft.p99:.2f} s, of ITL {run.itl.p99 * 1e3:.0f} ms"
        require(
            True, False,
            f"{said}\nYour plan: {plan}. With {goals.availability:.1%} certainty {up} of them are up.\nExpected on {sample.name}: p99 of TTFT {goals.ttft:g} s at the most, of ITL "
            f"{goals.itl * 1e3:g} ms\nGot on {sample.name}: {got}\nLook at {look}.",
        )  # fmt: skip


def _expect_cheap(said: str, plan: Plan, reference: Plan, situation: Situation) -> None:
    same_seats = cheapest(situation, [plan.max_num_seqs])
    if plan.machine == reference.machine and plan.max_num_seqs == reference.max_num_seqs:
        look = "the number: fewer of the same are enough"
    elif plan.machine == reference.machine:
        look = "the seats: another `max_num_seqs` needs fewer machines"
    elif plan.max_num_seqs != reference.max_num_seqs and same_seats is not None and plan.price <= same_seats.price:
        look = f"the seats: with {plan.max_num_seqs} of them nothing is cheaper, with another `max_num_seqs` another fleet is"
    else:
        look = "what you compare: the price of the whole fleet with its spares, not the number of machines, nor a machine's price, nor the fleet without spares"
    require(
        True, plan.price <= MARGIN * reference.price,
        f"{said}\nExpected: ${MARGIN * reference.price:.2f} an hour at the most (the cheapest that was found costs ${reference.price:.2f})\nGot: {plan}\nLook at {look}.",
    )  # fmt: skip
