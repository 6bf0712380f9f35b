"""The check of lesson 09 for a choice: the learner tries settings on some hours of a service, and is judged on others."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minivllm.bench.production import load_conversation_trace
from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.lesson_09.metrics import is_good
from minivllm.course.lessons.timing import RequestTimes, request_times
from minivllm.course.observations import expect, fail, require, rounds
from minivllm.executor.simulated import CostModel
from minivllm.simulation.costs import DEFAULT_COSTS
from minivllm.simulation.engine import simulate

_NUM_REQUESTS = 80
_HOURS = 5
"""The learner's seeds are 0 to 4; the grading seeds come after."""
_GOOD_ENOUGH = 0.97


@dataclass(frozen=True)
class Machine:
    """A machine, how many requests a second its service gets, and the goals.

    Attributes:
        costs: Seconds of a step.
        rate: Requests per second.
        max_ttft, max_tpot: Seconds.
        candidates: Values of `max_num_seqs` to try.
    """

    name: str
    costs: CostModel
    rate: float
    max_ttft: float
    max_tpot: float
    candidates: tuple[int, ...]


MACHINES = (
    Machine("a laptop", DEFAULT_COSTS, 8.6, 0.6, 0.050, (2, 4, 8, 16)),
    Machine("a large GPU", CostModel(fixed=0.005, per_prefill_step=0.001, per_prefill_token=4e-5, per_decode_seq=5e-4), 80, 0.3, 0.022, (8, 16, 32, 64)),
    Machine("a device that slows down with every sequence", CostModel(fixed=0.012, per_prefill_step=0.002, per_prefill_token=3e-4, per_decode_seq=0.003), 12, 0.4, 0.055, (4, 8, 16, 32)),
    Machine("a laptop whose users all come at once, and have time", DEFAULT_COSTS, 60, 60, 0.12, (4, 8, 16, 32)),
)  # fmt: skip


@lru_cache(maxsize=512)
def run_hour(machine: Machine, max_num_seqs: int, seed: int) -> tuple[RequestTimes, ...]:
    """A run of a service: Poisson arrivals, lengths drawn from a production trace, on a simulated machine.

    Its requests are in any order, and its clock does not begin at 0.
    """
    rng, trace = random.Random(f"{machine.name} {seed}"), _trace()
    requests, now = [], 0.0
    for _ in range(_NUM_REQUESTS):
        now += rng.expovariate(machine.rate)
        _, prompt_len, output_len = rng.choice(trace)
        requests.append(WorkloadRequest([1] * (1 + prompt_len // 32), 1 + output_len // 16, now))
    run = simulate(requests, cost_model=machine.costs, max_num_seqs=max_num_seqs, num_gpu_blocks=2000, max_model_len=2048)
    assert run.trace is not None
    other = random.Random(f"{machine.name} {seed} {max_num_seqs}")
    is_inner = max_num_seqs not in (machine.candidates[0], machine.candidates[-1])
    shift = 400.0 if is_inner else 20.0  # measuring from 0 on the clock would not choose these
    records = [
        RequestTimes(times.arrival + shift, times.started + shift, tuple(token + shift for token in times.tokens))
        for times in request_times(run.trace)
    ]
    other.shuffle(records)
    first = (min if is_inner else max)(records, key=lambda times: times.arrival)
    records.sort(key=lambda times: times is not first)  # nor would measuring from the first of the list
    return tuple(records)


@lru_cache(maxsize=1)
def _trace() -> list[Any]:
    return load_conversation_trace()


def goodput_of(machine: Machine, records: Sequence[RequestTimes]) -> float:
    """Requests per second of a run that met both goals."""
    good = sum(is_good(times, machine.max_ttft, machine.max_tpot) for times in records)
    return good / (max(times.tokens[-1] for times in records) - min(times.arrival for times in records))


@lru_cache(maxsize=16)
def sweep(machine: Machine, first_seed: int) -> dict[int, float]:
    """Mean goodput of each candidate over the hours from a seed on."""
    seeds = range(first_seed, first_seed + _HOURS)
    return {
        value: statistics.mean(goodput_of(machine, run_hour(machine, value, seed)) for seed in seeds)
        for value in machine.candidates
    }


class _Hours:
    """The `run` passed to `choose_max_num_seqs`; it records what is tried."""

    def __init__(self, machine: Machine, said: str) -> None:
        self.machine, self.said = machine, said
        self.tried: set[tuple[int, int]] = set()

    def __call__(self, max_num_seqs: int, seed: int) -> list[RequestTimes]:
        if max_num_seqs not in self.machine.candidates or seed not in range(_HOURS):
            fail(
                f"{self.said}\nExpected: run(max_num_seqs, seed) with one of the candidates and a seed from 0 to {_HOURS - 1}\n"
                f"Got: run({max_num_seqs!r}, {seed!r})\nLook at the two arguments of run, and their order."
            )
        self.tried.add((max_num_seqs, seed))
        return list(run_hour(self.machine, max_num_seqs, seed))


def check_choose(choose: Any) -> None:
    """The choice is about as good as the best one, on unseen hours."""
    for machine in MACHINES:
        given = list(machine.candidates)
        if machine is MACHINES[1]:
            given.reverse()
        goals = f"max_ttft={machine.max_ttft:g}, max_tpot={machine.max_tpot:g}"
        said = f"choose_max_num_seqs(run, {given}, {goals}) for {machine.name}."
        run = _Hours(machine, said)
        choice = choose(run, list(given), machine.max_ttft, machine.max_tpot)
        require(
            True,
            choice in machine.candidates,
            f"{said}\nExpected: one of the candidates\nGot: {choice!r}\nLook at what is returned.",
        )
        missing = [(value, seed) for value in given for seed in range(_HOURS) if (value, seed) not in run.tried]
        if missing:
            fail(
                f"{said}\nExpected: every candidate tried with each of the seeds 0 to {_HOURS - 1}\n"
                f"Got: run({', '.join(map(str, missing[0]))}) was never called\nLook at the loops over candidates and seeds."
            )
        unseen = sweep(machine, _HOURS)
        best = max(unseen.values())
        require(
            True, unseen[choice] >= _GOOD_ENOUGH * best,
            f"{said}\nExpected: a choice with at least {_GOOD_ENOUGH:.0%} of the best goodput on {_HOURS} hours that were not seen\n"
            f"Got: max_num_seqs={choice}, with {unseen[choice]:.2f} requests/s there; the best candidate has {best:.2f}\n"
            "Look at what is compared: the mean of goodput (not throughput, nor TTFT alone; waits count from the arrival), each run over the "
            "time from its first arrival to its last token.",
        )  # fmt: skip
    check_means(choose)


def make_up_hours(rng: random.Random) -> tuple[list[int], Any, dict[int, list[float]]]:
    """Candidates, a `run` for them, and the goodput of each in each hour: every comparison except that of means would choose differently."""
    candidates = rng.sample(range(1, 100), 4)
    good = {(value, seed): rng.randint(2, 18) for value in candidates for seed in range(_HOURS)}
    spans = {key: float(rng.randint(20, 60)) for key in good}
    begins = {key: float(rng.randint(0, 300)) for key in good}

    def run(max_num_seqs: int, seed: int) -> list[RequestTimes]:
        num_good, span, begin = (part[max_num_seqs, seed] for part in (good, spans, begins))
        records = []
        for number in range(20):
            arrival = begin + number * 0.5
            wait = 0.5 if number < num_good else 2.0
            records.append(RequestTimes(arrival, arrival, (arrival + wait, arrival + wait + 0.25)))
        records[7] = RequestTimes(begin + 3.5, begin + 3.5, (begin + 6.0, begin + span))  # slow, and the last to end
        return records

    def goodput(value: int, seed: int) -> float:
        return (good[value, seed] - (good[value, seed] > 7)) / spans[value, seed]

    return candidates, run, {value: [goodput(value, seed) for seed in range(_HOURS)] for value in candidates}


def check_means(choose: Any) -> None:
    """The candidate with the highest mean, among made-up hours."""
    for rng in rounds("hours", 8):
        candidates, run, goodputs = make_up_hours(rng)
        means = {value: round(statistics.mean(hours), 3) for value, hours in goodputs.items()}
        choice = choose(run, list(candidates), 1.0, 0.5)
        shown = {value: [round(hour, 2) for hour in hours] for value, hours in goodputs.items()}
        expect(
            f"choose_max_num_seqs with max_ttft=1, max_tpot=0.5 and made-up hours. Goodput by candidate and seed: {shown}.",
            "mean goodput of the choice", max(means.values()), means.get(choice), "what is compared: the mean over the five seeds",
        )  # fmt: skip
