"""The checks of lesson 13 for a client in bad company: requests that kill replicas, and a storm of deaths."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.lessons.fake_replicas import Cluster, some
from minivllm.course.lessons.lesson_13.failover import compare, compare_texts, expect_nothing_left
from minivllm.course.observations import fail, rounds, seeded


def check_poison(cls: Any) -> None:
    """A request that kills is given up after three replicas, and no other is."""
    for rng in rounds("company", 20):
        _check_company(cls, rng)
    for rng in rounds("poison", 12):
        cluster = Cluster(cls, rng, 3)
        requests = cluster.submit(6, n=1, max_tokens=rng.randint(5, 14), ignore_eos=True)
        poison, position = rng.choice(requests).request_id, rng.randint(0, 3)
        said = f"Three replicas, six requests. {poison} kills whichever replica computes its token {position}; another process always takes its place."
        deaths = run_with_poison(cluster, poison, position)
        compare(said, "replicas that it has killed", 3, deaths)
        compare(said, "what its user is told", ["error"], cluster.ends.get((poison, 0), []))
        compare_texts(said, cluster, requests, {poison})
        expect_nothing_left(said, cluster)
    _check_acquittal(cls)
    for rng in rounds("given up", 4):
        _check_given_up(cls, rng)


def _check_given_up(cls: Any, rng: random.Random) -> None:
    """Of several continuations, those that go on are given up."""
    cluster = Cluster(cls, rng, 1)
    cluster.submit(1, n=3)
    item = cluster.client.requests["r0"]
    item.num_deaths, item.unfinished = 2, set(rng.sample(range(3), rng.randint(1, 2)))
    said = f"r0 has n=3, of which {sorted(item.unfinished)} go on, and has seen 2 replicas die. Now a third one dies with it."
    cluster.kill(0)
    expected = {("r0", index): ["error"] for index in sorted(item.unfinished)}
    compare(said, "what its user is told", expected, cluster.ends)


def _check_company(cls: Any, rng: random.Random) -> None:
    cluster = Cluster(cls, rng, 3)
    cluster.submit(4)
    for item in cluster.client.requests.values():
        item.num_deaths, item.replica = rng.choice((0, 0, 1, 1, 2, 3)), rng.choice((0, 0, 1))
    wanted = cluster.client.requests["r0"]
    wanted.replica = None
    deaths = {rank: [item.num_deaths for item in cluster.client.requests.values() if item.replica == rank] for rank in range(3)}
    said = f"r0 has seen {some(wanted.num_deaths, 'replica')} die, and those that are at each replica so many: {deaths}."
    expected = [rank for rank in range(3) if not deaths[rank] or (wanted.num_deaths < 2 and max(deaths[rank]) < 2)]
    compare(said, "replicas that may have r0", expected, [rank for rank in range(3) if cluster.client.may_have(wanted, rank)])


def _check_acquittal(cls: Any) -> None:
    cluster = Cluster(cls, seeded("acquittal"), 1)
    requests = cluster.submit(1, n=1, max_tokens=14, ignore_eos=True)
    for _ in range(5):
        cluster.run(1)
        cluster.kill(0)
        cluster.start(0)
    cluster.run()
    said = "A replica dies five times with r0, which has got a token each time: somebody else is to blame."
    compare_texts(said, cluster, requests)


def run_with_poison(cluster: Cluster, poison: str, position: int) -> int:
    """Run until all is done. Returns how many replicas have died."""
    deaths = 0
    for _ in range(200):
        for replica in list(cluster.cores):
            cluster.handle(replica)
            output = cluster.cores[replica].requests.get(poison, (None, {}))[1]
            if not any(len(tokens) >= position for tokens in output.values()):
                cluster.step(replica)
            elif deaths < 7:
                deaths += 1
                cluster.kill(replica)
                cluster.start(replica)
        cluster.deliver()
        if not cluster.client.requests:
            break
    return deaths


def check_storm(cls: Any) -> None:
    """Random deaths, silences and newcomers: each user reads what an undisturbed replica writes."""
    said = "Three replicas, ten requests; replicas die and others take their places, and messages come late."
    for rng in rounds("storm", 30):
        cluster, requests = Cluster(cls, rng, 3), []
        for _ in range(5000):
            _do_something(cluster, requests)
            if len(cluster.sent) > 2000:
                said += f"\nExpected: an end\nGot: {len(cluster.sent)} messages to replicas."
                fail(f"{said}\nLook at `retry`: only what waits is sent.")
            if len(requests) == 10 and not cluster.client.requests:
                break
        else:
            left = ", ".join(sorted(cluster.client.requests)) or "none, but not all have been submitted"
            fail(f"{said}\nExpected: all requests end\nGot: still in flight: {left}.\nLook at `lose`, `retry` and `take`.")
        compare_texts(said, cluster, requests)
        expect_nothing_left(said, cluster)


def _do_something(cluster: Cluster, requests: list[Any]) -> None:
    """A request comes, a replica computes, outputs are delivered, or a replica dies."""
    rng = cluster.rng
    action = rng.choice(("submit", "step", "step", "step", "deliver", "deliver", "kill"))
    if action == "submit" and len(requests) < 10:
        requests += cluster.submit(1)
    elif action == "deliver":
        cluster.deliver(rng.randint(1, 6))
    elif action == "kill" and rng.random() < 0.3:
        cluster.deliver(rng.randint(0, 9))
        if not any(item.num_deaths for item in cluster.client.requests.values()):  # kills from outside blame nobody
            replica = rng.choice(sorted(cluster.cores))
            cluster.kill(replica)
            cluster.start(replica)
    else:
        cluster.step(rng.choice(sorted(cluster.cores)))
