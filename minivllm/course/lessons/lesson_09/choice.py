"""The check of lesson 09 for a choice: the learner tries settings on some hours of a service, and is judged by others."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minivllm.bench.costs import DEFAULT_COSTS
from minivllm.bench.production import load_conversation_trace
from minivllm.bench.simulation import simulate
from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.lesson_09.metrics import waits_of
from minivllm.course.lessons.timing import RequestTimes, request_times
from minivllm.executor.simulated import CostModel

_NUM_REQUESTS = 80
_HOURS = 5
"""The learner's seeds are 0 to 4; those that judge come after."""
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
    Machine("a laptop", DEFAULT_COSTS, 8.6, 0.6, 0.050, (4, 8, 16, 32)),
    Machine("a large GPU", CostModel(fixed=0.005, per_prefill_step=0.001, per_prefill_token=4e-5, per_decode_seq=5e-4), 80, 0.3, 0.022, (8, 16, 32, 64)),
    Machine("a device that slows down with every sequence", CostModel(fixed=0.012, per_prefill_step=0.002, per_prefill_token=3e-4, per_decode_seq=0.003), 12, 0.4, 0.055, (4, 8, 16, 32)),
)  # fmt: skip


@lru_cache(maxsize=512)
def run_hour(machine: Machine, max_num_seqs: int, seed: int) -> tuple[RequestTimes, ...]:
    """A run of a service: Poisson arrivals, lengths drawn from a production trace, on a simulated machine."""
    rng, trace = random.Random(f"{machine.name} {seed}"), _trace()
    requests, now = [], 0.0
    for _ in range(_NUM_REQUESTS):
        now += rng.expovariate(machine.rate)
        _, prompt_len, output_len = rng.choice(trace)
        requests.append(WorkloadRequest([1] * (1 + prompt_len // 32), 1 + output_len // 16, now))
    run = simulate(requests, cost_model=machine.costs, max_num_seqs=max_num_seqs, num_gpu_blocks=2000, max_model_len=2048)
    assert run.trace is not None
    return tuple(request_times(run.trace))


@lru_cache(maxsize=1)
def _trace() -> list[Any]:
    return load_conversation_trace()


def goodput_of(machine: Machine, records: Sequence[RequestTimes]) -> float:
    """Requests per second of a run that met both goals."""
    good = 0
    for ttft, gaps, latency in map(waits_of, records):
        good += ttft <= machine.max_ttft and (not gaps or (latency - ttft) / len(gaps) <= machine.max_tpot)
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
    """What `choose_max_num_seqs` is given as `run`; it notes what is tried."""

    def __init__(self, machine: Machine, said: str) -> None:
        self.machine, self.said = machine, said
        self.tried: set[tuple[int, int]] = set()

    def __call__(self, max_num_seqs: int, seed: int) -> list[RequestTimes]:
        if max_num_seqs not in self.machine.candidates or seed not in range(_HOURS):
            raise AssertionError(
                f"{self.said}\nExpected: run(max_num_seqs, seed) with one of the candidates and a seed from 0 to {_HOURS - 1}\n"
                f"Got: run({max_num_seqs!r}, {seed!r})\nLook at the two arguments of run, and their order."
            )
        self.tried.add((max_num_seqs, seed))
        return list(run_hour(self.machine, max_num_seqs, seed))


def check_choose(choose: Any) -> None:
    """The choice is about as good as the best one, on hours that were not seen."""
    for machine in MACHINES:
        given = list(machine.candidates)
        if machine is MACHINES[1]:
            given.reverse()
        goals = f"max_ttft={machine.max_ttft:g}, max_tpot={machine.max_tpot:g}"
        said = f"choose_max_num_seqs(run, {given}, {goals}) for {machine.name}."
        run = _Hours(machine, said)
        choice = choose(run, list(given), machine.max_ttft, machine.max_tpot)
        assert choice in machine.candidates, (
            f"{said}\nExpected: one of the candidates\nGot: {choice!r}\nLook at what is returned."
        )
        missing = [(value, seed) for value in given for seed in range(_HOURS) if (value, seed) not in run.tried]
        assert not missing, (
            f"{said}\nExpected: every candidate tried with the seeds 0 to {_HOURS - 1}\n"
            f"Got: no run({', '.join(map(str, missing[0]))})\nLook at the loops."
        )
        unseen = sweep(machine, _HOURS)
        best = max(unseen.values())
        assert unseen[choice] >= _GOOD_ENOUGH * best, (
            f"{said}\nExpected: a choice with at least {_GOOD_ENOUGH:.0%} of the best goodput on {_HOURS} hours that were not seen\n"
            f"Got: max_num_seqs={choice}, with {unseen[choice]:.2f} requests/s there; the best candidate has {best:.2f}\n"
            "Look at what is compared: the mean of goodput (not throughput, nor TTFT alone), each run over the time from its first "
            "arrival to its last token."
        )


def observe_choose(choose: Any, rng: random.Random) -> list[Any]:
    """What is chosen of runs that are made up: in each, one candidate meets the goals more often than the others."""
    facts: list[Any] = []
    for _ in range(6):
        candidates = rng.sample(range(1, 100), 4)
        gaps = {value: rng.randint(1, 60) / 64 for value in candidates}
        max_ttft, max_tpot = 1.0, sorted(gaps.values())[1]
        starts = {(value, seed): rng.randint(1, 90) / 64 for value in candidates for seed in range(_HOURS)}

        def run(max_num_seqs: int, seed: int, gaps: Any = gaps, starts: Any = starts) -> list[RequestTimes]:
            records = []
            for number in range(20):
                first = number + 0.5 + starts[max_num_seqs, seed] * number / 16
                times = tuple(first + gaps[max_num_seqs] * (number % 5 + 1) / 4 * i for i in range(4))
                records.append(RequestTimes(number + 0.5, first, times))
            return records

        facts.append(int(choose(run, candidates, max_ttft, max_tpot)))
    return facts
