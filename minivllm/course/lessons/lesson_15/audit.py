"""The check of lesson 15 for reports that cannot be true."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from minivllm.course.lessons.fleets import Machine, Plan, run_fleet
from minivllm.course.lessons.lesson_15.fleet import make_sample
from minivllm.course.observations import expect, rounds
from minivllm.executor.simulated import CostModel


@dataclass(frozen=True)
class Report:
    """What a fleet, or a plan for one, is said to do.

    Attributes:
        rate: Requests that are answered a second.
        wait, latency: Mean seconds from a request's arrival until it runs, and until it is finished.
        waiting, running: Requests that wait and that run, on average over time.
        tokens: Tokens that a running request keeps in the cache, on average.
        num_replicas, max_num_seqs, cache_tokens: The fleet, and of each replica the seats and the tokens for which its cache has room.
    """

    rate: float
    wait: float
    latency: float
    waiting: float
    running: float
    tokens: float
    num_replicas: int
    max_num_seqs: int
    cache_tokens: int


LAWS = ("queue", "little", "seats", "cache")


def true_report(rng: random.Random) -> Report:
    """A report in which everything fits, with the small errors that every measurement has."""
    rate, wait, latency = rng.uniform(2, 400), rng.uniform(0.05, 3), rng.uniform(3.5, 30)
    running, replicas = rate * (latency - wait), rng.randint(1, 40)
    tokens = rng.uniform(100, 3000)
    error = rng.uniform(0.98, 1.02)
    return Report(
        rate, wait, latency, rate * wait * error, running * error, tokens, replicas,
        int(running * error / replicas * rng.uniform(1.05, 2)) + 1, int(running * error * tokens / replicas * rng.uniform(1.05, 2)) + 1,
    )  # fmt: skip


def tampered(report: Report, law: str, rng: random.Random) -> Report:
    """The same with a number that cannot be true."""
    if law == "queue":
        factor = rng.choice((0.4, 0.9, 1.1, 2.0))
        total = report.waiting + report.running
        return replace(report, waiting=report.waiting * factor, running=total - report.waiting * factor)
    if law == "little":
        return replace(report, running=report.running * rng.choice((0.6, 0.85)))
    if law == "seats":
        return replace(report, max_num_seqs=max(1, int(report.running / report.num_replicas * 0.9)))
    return replace(report, cache_tokens=int(report.running * report.tokens / report.num_replicas * 0.9))


def broken_laws(report: Report) -> list[str]:
    """The laws that a report breaks, in the order of `LAWS`."""
    in_flight = report.waiting + report.running
    broken = {
        "queue": abs(report.waiting - report.rate * report.wait) > 0.05 * report.waiting,
        "little": abs(in_flight - report.rate * report.latency) > 0.05 * in_flight,
        "seats": report.running > report.num_replicas * report.max_num_seqs,
        "cache": report.running * report.tokens > report.num_replicas * report.cache_tokens,
    }
    return [law for law in LAWS if broken[law]]


def check_audit(audit: Any) -> None:
    """What is true passes, and each number that does not fit the others is found."""
    looks = {
        "queue": '"queue": Little\'s law for those that wait: waiting = rate · wait, within 5 % of waiting',
        "little": '"little": Little\'s law for all in flight, those that wait and those that run: in_flight = rate · latency, within 5 % of in_flight; the latency holds the wait',
        "seats": '"seats": all replicas together cannot run more than they have seats; those that wait need none',
        "cache": '"cache": the tokens of all that run must fit into the caches of all replicas',
    }
    for rng in rounds("audit", 60):
        report = true_report(rng)
        for law in rng.sample(LAWS, rng.choice((0, 1, 1, 2))):
            report = tampered(report, law, rng)
        right, got = broken_laws(report), audit(report)
        said = ", ".join(f"{name} {value:.4g}" for name, value in vars(report).items()) + "."
        wrong = next((law for law in LAWS if (law in right) != (law in got)), None)
        look = (
            looks[wrong]
            if wrong
            else f"the order and the names of what you return: those of {', '.join(LAWS)} that are broken, once each, in this order"
        )
        expect(said, "broken laws", right, list(got), look)
    for rng in rounds("audit of a simulation", 2):
        _check_simulated(audit, rng)


def _check_simulated(audit: Any, rng: random.Random) -> None:
    """A run of the real scheduler keeps the laws."""
    sample, plan = (
        make_sample(rng, "a minute", 30, 150, 10, count=60),
        Plan(Machine("A", 1.0, CostModel(0.01, 0, 4e-5, 0, 2e-4)), 32, 2),
    )
    run = run_fleet(plan, sample)
    in_flight = sum(run.mean_in_flight)
    rate, wait = run.requests_per_second, 0.2 * run.latency.mean
    report = Report(rate, wait, run.latency.mean, rate * wait, in_flight - rate * wait, 180, 2, 32, plan.machine.cache_tokens)
    said = f"A simulated run: {rate:.2f} requests a second, latency {run.latency.mean:.3f} s, {in_flight:.2f} in flight."
    expect(said, "broken laws", [], list(audit(report)), "your tolerance: a real run keeps these laws")
