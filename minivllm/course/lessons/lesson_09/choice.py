"""The check of lesson 09 for a choice: the learner tries settings on some hours of a service, and is judged on others."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from minivllm.bench.production import load_conversation_trace
from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.lesson_09.metrics import is_good
from minivllm.course.lessons.timing import RequestTimes, request_times
from minivllm.course.observations import expect, fail, require, rounds
from minivllm.executor.simulated import CostModel
from minivllm.simulation.costs import DEFAULT_COSTS
from minivllm.simulation.engine import simulate

_HOURS = 5
"""The learner's seeds are 0 to 4; the grading seeds come after."""
_GOOD_ENOUGH = 0.97
_COMPARED = "what is compared: the mean of goodput (not throughput, nor TTFT alone; waits count from the arrival), each run over the time from its first arrival to its last token"
_load_trace = lru_cache(maxsize=1)(load_conversation_trace)


@dataclass(frozen=True)
class Machine:
    """A machine and its steps' costs, how many requests a second its service gets, goals in seconds, and values of `max_num_seqs` to try."""

    name: str
    costs: CostModel
    rate: float
    max_ttft: float
    max_tpot: float
    candidates: tuple[int, ...]


MACHINES = (
    Machine("a laptop", DEFAULT_COSTS, 8.6, 0.6, 0.050, (2, 4, 8, 16)),
    Machine("a large GPU", CostModel(fixed=0.005, per_prefill_step=0.001, per_prefill_token=4e-5, per_decode_seq=5e-4), 80, 0.3, 0.022, (64, 32, 16, 8)),
    Machine("a device that slows down with every sequence", CostModel(fixed=0.012, per_prefill_step=0.002, per_prefill_token=3e-4, per_decode_seq=0.003), 12, 0.4, 0.055, (4, 8, 16, 32)),
    Machine("a laptop whose users all come at once, and have time", DEFAULT_COSTS, 60, 60, 0.12, (4, 8, 16, 32)),
)  # fmt: skip


@lru_cache(maxsize=512)
def run_hour(machine: Machine, max_num_seqs: int, seed: int) -> tuple[RequestTimes, ...]:
    """A run of a service: Poisson arrivals, lengths drawn from a production trace, on a simulated machine. Its requests are in any order."""
    rng, requests, now = random.Random(f"{machine.name} {seed}"), [], 0.0
    for _ in range(80):
        now += rng.expovariate(machine.rate)
        _, prompt_len, output_len = rng.choice(_load_trace())
        requests.append(WorkloadRequest([1] * (1 + prompt_len // 32), 1 + output_len // 16, now))
    run = simulate(requests, cost_model=machine.costs, max_num_seqs=max_num_seqs, num_gpu_blocks=2000, max_model_len=2048)
    assert run.trace is not None
    records = request_times(run.trace)
    return tuple(rng.sample(records, len(records)))


@lru_cache(maxsize=16)
def sweep(machine: Machine, first_seed: int) -> dict[int, float]:
    """Mean goodput of each candidate over the hours from a seed on."""

    def goodput(max_num_seqs: int, seed: int) -> float:
        records = run_hour(machine, max_num_seqs, seed)
        good = sum(is_good(times, machine.max_ttft, machine.max_tpot) for times in records)
        return good / (max(times.tokens[-1] for times in records) - min(times.arrival for times in records))

    seeds = range(first_seed, first_seed + _HOURS)
    return {value: statistics.mean(goodput(value, seed) for seed in seeds) for value in machine.candidates}


def check_choose(choose: Any) -> None:
    """The choice is about as good as the best one, on unseen hours; among made-up hours it is the best."""
    for machine in MACHINES:
        _check_machine(choose, machine)
    for rng in rounds("hours", 16):
        candidates, run, goodputs = make_up_hours(rng)
        means = {value: round(statistics.mean(hours), 3) for value, hours in goodputs.items()}
        choice = choose(run, list(candidates), 1.0, 0.5)
        shown = {value: [round(hour, 2) for hour in hours] for value, hours in goodputs.items()}
        said = f"choose_max_num_seqs with max_ttft=1, max_tpot=0.5 and made-up hours. Goodput by candidate and seed: {shown}."
        look = "what is compared: the mean over the five seeds, each run over the time from its first arrival to its last token"
        expect(said, "mean goodput of the choice", max(means.values()), means.get(choice), look)


def _check_machine(choose: Any, machine: Machine) -> None:
    candidates, tried, goals = list(machine.candidates), set(), (machine.max_ttft, machine.max_tpot)
    said = f"choose_max_num_seqs(run, {candidates}, max_ttft={goals[0]:g}, max_tpot={goals[1]:g}) for {machine.name}."

    def run(max_num_seqs: int, seed: int) -> list[RequestTimes]:
        if max_num_seqs not in machine.candidates or seed not in range(_HOURS):
            expected = f"run(max_num_seqs, seed) with one of the candidates and a seed from 0 to {_HOURS - 1}"
            got = f"run({max_num_seqs!r}, {seed!r})"
            fail(f"{said}\nExpected: {expected}\nGot: {got}\nLook at the two arguments of run, and their order.")
        tried.add((max_num_seqs, seed))
        return list(run_hour(machine, max_num_seqs, seed))

    choice = choose(run, list(candidates), *goals)
    is_one = choice in candidates
    require(True, is_one, f"{said}\nExpected: one of the candidates\nGot: {choice!r}\nLook at what is returned.")
    missing = [f"run({value}, {seed})" for value, seed in product(candidates, range(_HOURS)) if (value, seed) not in tried]
    expect(said, "missing calls", [], missing[:5], "the loops: every candidate is tried with each of the seeds")
    unseen = sweep(machine, _HOURS)
    best = max(unseen.values())
    expected = f"a choice with at least {_GOOD_ENOUGH:.0%} of the best goodput on {_HOURS} hours that were not seen"
    got = f"max_num_seqs={choice}, with {unseen[choice]:.2f} requests/s there; the best candidate has {best:.2f}"
    is_good_enough = unseen[choice] >= _GOOD_ENOUGH * best
    require(True, is_good_enough, f"{said}\nExpected: {expected}\nGot: {got}\nLook at {_COMPARED}.")


def make_up_hours(rng: random.Random) -> tuple[list[int], Callable[[int, int], list[RequestTimes]], dict[int, list[float]]]:
    """Candidates, a `run` for them, and the goodput of each in each hour. Comparing anything but means mostly chooses differently."""
    candidates = rng.sample(range(1, 100), 4)
    good = {key: rng.randint(2, 17) for key in product(candidates, range(_HOURS))}
    clocks = {key: (float(rng.randint(0, 300)), float(rng.randint(40, 80)), rng.choice((0.25, 1.0, 1.5))) for key in good}

    def run(max_num_seqs: int, seed: int) -> list[RequestTimes]:
        num_good, (begin, span, gap) = good[max_num_seqs, seed], clocks[max_num_seqs, seed]
        arrivals = [begin + number * gap for number in range(20)]
        ttfts = [0.5 if 0 < number <= num_good else 2.0 for number in range(20)]
        tokens = [(arrival + ttft, arrival + ttft + 0.25) for arrival, ttft in zip(arrivals, ttfts, strict=True)]
        tokens[0] = (begin + 2.0, begin + span)  # the first to come is slow, and the last to end
        return [RequestTimes(arrival, arrival, ends) for arrival, ends in zip(arrivals, tokens, strict=True)][::-1]

    return (
        candidates,
        run,
        {value: [good[value, seed] / clocks[value, seed][1] for seed in range(_HOURS)] for value in candidates},
    )
