"""The check of lesson 15 for reports that cannot be true."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.fleets import Machine, Plan, Sample, engine_options
from minivllm.course.lessons.lesson_15.fleet import make_sample
from minivllm.course.observations import expect, rounds
from minivllm.executor.simulated import CostModel
from minivllm.simulation.engine import simulate


@dataclass(frozen=True)
class Report:
    """What a fleet, or a plan for one, is said to do. Times are means, in seconds.

    Attributes:
        rate: Requests that are answered a second.
        wait, ttft, latency: From a request's arrival until it runs, until its first token, and until it is finished.
        prompt: What a prompt takes on a machine that does nothing else.
        waiting, running: Requests that wait and that run, on average over time.
        clients: How many users ask again only when they have an answer (a closed loop); 0 if users come by themselves.
        tokens: Tokens that a running request keeps in the cache, on average.
        work: Seconds of a replica's time that a request takes while nothing is in its prefix cache.
        num_replicas, max_num_seqs, cache_tokens: The fleet, and of each replica the seats and the tokens for which its cache has room.
    """

    rate: float
    wait: float
    ttft: float
    latency: float
    prompt: float
    waiting: float
    running: float
    clients: int
    tokens: float
    work: float
    num_replicas: int
    max_num_seqs: int
    cache_tokens: int


LAWS = ("queue", "little", "ttft", "loop", "seats", "cache", "cold")


def true_report(rng: random.Random) -> Report:
    """A report in which everything fits, with the small errors that every measurement has."""
    rate, wait, latency = rng.uniform(2, 400), rng.uniform(0.05, 2.5), rng.uniform(5.5, 30)
    running, replicas, prompt = rate * (latency - wait), rng.randint(1, 40), rng.uniform(0.02, 0.3)
    tokens, error = rng.uniform(100, 3000), rng.uniform(0.98, 1.02)
    return Report(
        rate=rate,
        wait=wait,
        ttft=wait + prompt * rng.uniform(1.02, 1.6),
        latency=latency,
        prompt=prompt,
        waiting=rate * wait * error,
        running=running * error,
        clients=rng.choice((0, int(rate * latency * rng.uniform(1.0, 1.6)) + 1)),
        tokens=tokens,
        work=replicas / rate * rng.uniform(0.4, 0.97),
        num_replicas=replicas,
        max_num_seqs=int(running * error / replicas * rng.uniform(1.05, 2)) + 1,
        cache_tokens=int(running * error * tokens / replicas * rng.uniform(1.05, 2)) + 1,
    )


def tampered(report: Report, law: str, rng: random.Random) -> Report:
    """The same with a number that cannot be true."""
    in_flight = report.waiting + report.running
    if law == "queue":  # as many in flight, but not as many of them wait
        factor = rng.choice([factor for factor in (0.4, 0.9, 1.1, 2.0) if report.waiting * factor < 0.9 * in_flight])
        return replace(report, waiting=report.waiting * factor, running=in_flight - report.waiting * factor)
    if law == "little":
        return replace(report, running=report.running * rng.choice((0.6, 0.85)))
    if law == "ttft":
        return replace(report, ttft=rng.choice((report.prompt * 1.1, report.wait + 0.5 * report.prompt, report.wait)))
    if law == "loop":
        return replace(report, clients=max(1, int(report.rate * report.latency * rng.choice((0.3, 0.8)))))
    if law == "seats":
        return replace(report, max_num_seqs=max(1, int(report.running / report.num_replicas * 0.9)))
    if law == "cache":
        return replace(report, cache_tokens=int(report.running * report.tokens / report.num_replicas * 0.9))
    return replace(report, work=report.num_replicas / report.rate * rng.choice((1.1, 2.0)))


def broken_laws(report: Report) -> list[str]:
    """The laws that a report breaks, in the order of `LAWS`."""
    in_flight = report.waiting + report.running
    broken = {
        "queue": abs(report.waiting - report.rate * report.wait) > 0.05 * report.waiting,
        "little": abs(in_flight - report.rate * report.latency) > 0.05 * in_flight,
        "ttft": report.ttft < report.wait + report.prompt,
        "loop": report.clients > 0 and report.rate * report.latency > 1.05 * report.clients,
        "seats": report.running > report.num_replicas * report.max_num_seqs,
        "cache": report.running * report.tokens > report.num_replicas * report.cache_tokens,
        "cold": report.rate * report.work > report.num_replicas,
    }
    return [law for law in LAWS if broken[law]]


_LOOKS = {
    "queue": '"queue": Little\'s law for those that wait: waiting = rate · wait, within 5 % of waiting',
    "little": '"little": Little\'s law for all in flight, those that wait and those that run: in_flight = rate · latency, within 5 % of in_flight; the latency holds the wait',
    "ttft": '"ttft": the first token comes after the wait in the queue and the prompt; a time to first token without its queue is that of an idle machine',
    "loop": '"loop": clients that wait for their answers cannot have more in flight than there are clients, so rate · latency is at most 5 % above clients; with 0 clients this law says nothing',
    "seats": '"seats": all replicas together cannot run more than they have seats; those that wait need none',
    "cache": '"cache": the tokens of all that run must fit into the caches of all replicas',
    "cold": '"cold": after a failure the prefix caches are empty, and the work that arrives a second, rate · work, must not be more than all replicas can do in a second',
}


def check_audit(audit: Any) -> None:
    """What is true passes, and each number that does not fit the others is found."""
    for rng in rounds("audit", 80):
        report = true_report(rng)
        for law in rng.sample(LAWS, rng.choice((0, 1, 1, 2))):
            report = tampered(report, law, rng)
        values = ", ".join(f"{name} {value:.4g}" for name, value in vars(report).items())
        _compare(f"A report: {values}.", broken_laws(report), audit(report))
    for rng in rounds("audit of a simulation", 2):
        _check_simulated(audit, rng)


def _compare(said: str, right: list[str], got: Any) -> None:
    wrong = next((law for law in LAWS if (law in right) != (law in got)), None)
    names = f"the order and the names of what you return: those of {', '.join(LAWS)} that are broken, once each, in this order"
    expect(said, "broken laws", right, list(got), _LOOKS[wrong] if wrong else names)


def _check_simulated(audit: Any, rng: random.Random) -> None:
    """A run of the real scheduler keeps the laws: users come by themselves, or wait for each other. Numbers in flight are counted step by step."""
    machine = Machine("A", 1.0, CostModel(0.01, 0, 4e-5, 0, 2e-4))
    sample, plan = make_sample(rng, "a few seconds", 60, 150, 10, count=200), Plan(machine, 4, 1)
    latecomer = WorkloadRequest([1], 2, sample.requests[-1].arrival_time + 10)  # the replica idles before it comes
    sample = Sample(sample.name, [*sample.requests, latecomer])
    for clients in (0, 8):
        report = report_of(plan, sample, clients)
        said = (
            f"A simulated run of {len(sample.requests)} requests{f', with {clients} clients' if clients else ''}: {report.rate:.2f} requests a second, latency "
            f"{report.latency:.3f} s; counted step by step, {report.waiting:.2f} wait and {report.running:.2f} run."
        )
        _compare(f"{said} A real run keeps these laws.", [], audit(report))


def report_of(plan: Plan, sample: Sample, clients: int) -> Report:
    """What is counted while one replica serves a sample: all that come, or `clients` at a time."""
    run = simulate(sample.requests, max_concurrency=clients or None, **engine_options(plan, sample))
    assert run.trace is not None
    costs, records = plan.machine.costs, list(run.trace.requests.values())
    waits = [record.first_scheduled_time - record.arrival_time for record in records if record.first_scheduled_time is not None]
    return Report(
        rate=run.requests_per_second,
        wait=statistics.mean(waits),
        ttft=run.ttft.mean,
        latency=run.latency.mean,
        prompt=costs.fixed + costs.per_prefill_token * statistics.mean(record.num_prompt_tokens for record in records),
        waiting=sum(step.num_waiting * (step.end - step.start) for step in run.trace) / run.seconds,
        running=run.mean_running * run.busy_seconds / run.seconds,
        clients=clients,
        tokens=statistics.mean(len(request.prompt_token_ids) + request.output_len for request in sample.requests),
        work=run.busy_seconds / run.completed,
        num_replicas=1,
        max_num_seqs=plan.max_num_seqs,
        cache_tokens=plan.machine.cache_tokens,
    )
