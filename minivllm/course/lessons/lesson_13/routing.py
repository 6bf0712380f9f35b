"""The checks of lesson 13 for the coordinator's table and for routers, against the package's."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.lessons.fake_replicas import some
from minivllm.course.observations import expect, require, rounds, seeded
from minivllm.data_parallel.routing import LeastLoadedRouter, LoadPublisher, hash_prefixes
from minivllm.engine.core_messages import ReplicaLoad

_TABLE_LOOKS = {
    "due": "`due`: 5 s after publishing; a change brings it forward to 0.1 s after publishing, or to now if that is over; a report that changes nothing does not",
    "published": "`loads`: the newest report of each replica, without those that are forgotten",
    "loads": "what `publish` gives away: a copy, into which its reader may write; the table itself stays",
}
_SCORE_LOOK = "`score`: the greater of client_count times what this client has in flight, and the sequences that wait and run; and what waiting before a full cache adds; and which of the two numbers `assign`, `update` and `finish` change"
_CHOICE_LOOK = "`choose`: the least score; among equals the first from `self.start` on, round the circle; and `start` moves on by one with each request"

_PREFIX_LOOK = "`choose`: 32 for each unit of `score`, less the cached tokens, and among equals `nearest`; and `remember`, once, where the prompt goes"


_RUNNING = (0, 1, 3, 8, 10, 11, 15, 16, 17, 32, 33), (40, 44, 57, 58, 59, 61, 64)
"""How many run at replicas, some of which are far busier than others: by 16, or by half."""


def random_load(rng: random.Random) -> ReplicaLoad:
    """How busy a replica is."""
    return ReplicaLoad(rng.choice((0, 0, 1, 5)), rng.randint(0, 8), rng.choice((0.1, 0.5, 0.75, 1.0)))


def check_coordinator(cls: Any) -> None:
    """Loads are published soon after a change, at most ten times a second, and otherwise every five seconds."""
    for rng in rounds("coordinator", 40):
        now = rng.choice((0.0, 100.0))
        mine, theirs, said = cls(now), LoadPublisher(now), f"A coordinator that starts at {now:g} s."
        for _ in range(14):
            now += rng.choice((0.01, 0.03, 0.2, 1.0, 6.0))
            replica, load = rng.randrange(3), rng.choice((ReplicaLoad(running=1), ReplicaLoad(running=2)))
            action = rng.choice(("report", "report", "report", "forget", "publish"))
            said += f" At {now:g} s: "
            if action == "report":
                said += f"replica {replica} reports {load.running} running."
                mine.report(replica, load, now)
                theirs.report(replica, load, now)
            elif action == "forget":
                said += f"replica {replica} is forgotten."
                mine.forget(replica)
                theirs.forget(replica)
            else:
                said += "publish; its reader writes an entry for 9 into what it gets."
                got = mine.publish(now)
                expect(said, "published", theirs.publish(now), got, _TABLE_LOOKS["published"])
                got[9] = "what its reader has written"
            expect(said, "due (s)", round(theirs.due, 6), round(mine.due, 6), _TABLE_LOOKS["due"])
            expect(said, "loads", theirs.loads, mine.loads, _TABLE_LOOKS["loads"])


class RouterPair:
    """A learner's router and the package's, which are told the same."""

    def __init__(self, cls: Any, num_replicas: int, client_count: int) -> None:
        self.mine, self.theirs = cls(client_count), LeastLoadedRouter(client_count)
        self.said = f"{some(num_replicas, 'replica')}, {some(client_count, 'API server')}."
        self.busy: list[int] = []
        """The replica of each request that has not finished."""
        for replica in range(num_replicas):
            self.mine.open(replica)
            self.theirs.open(replica)

    def act(self, rng: random.Random) -> None:
        """Something happens, to both."""
        action = rng.choice(("route", "route", "route", "update", "finish"))
        replica = rng.randrange(len(self.theirs.num_in_flight))
        if action == "finish" and self.busy:
            replica = self.busy.pop(rng.randrange(len(self.busy)))
            self.said += f" Replica {replica} finishes one."
            self.mine.finish(replica)
            self.theirs.finish(replica)
        elif action == "update":
            load = random_load(rng)
            self.said += f" Replica {replica} is said to have {load.waiting} waiting, {load.running} running, a cache {load.kv_cache_usage:.0%} full."
            self.mine.update(replica, load)
            self.theirs.update(replica, load)
        else:
            avoid = rng.choice(([], [], [replica])) if len(self.theirs.num_in_flight) > 1 else []
            self.said += f" A request{f' that must avoid replica {replica}' if avoid else ''}."
            expected, got = self.theirs.route([1, 2], avoid=avoid), self.mine.route([1, 2], avoid)
            expect(self.said, "it goes to replica", expected, got, _CHOICE_LOOK)
            self.busy.append(expected)
            self.said += f" It goes to {expected}."
        for number, score in enumerate(self.theirs._scores):
            expect(self.said, f"score of replica {number}", round(score, 6), round(self.mine.score(number), 6), _SCORE_LOOK)


def check_least_loaded(cls: Any) -> None:
    """The same choices as the package's, whatever is reported and finished; a burst is spread, also over what is not reported yet."""
    for rng in rounds("least loaded", 40):
        pair = RouterPair(cls, rng.randint(1, 5), rng.choice((1, 1, 2, 4)))
        for _ in range(14):
            pair.act(rng)
    for rng in rounds("burst", 4):
        count, size = rng.randint(2, 4), rng.randint(3, 6)
        router = cls()
        for replica in range(size):
            router.open(replica)
            router.update(replica, ReplicaLoad(running=0 if replica == 1 else 2))
        choices = [router.route([1]) for _ in range(size * count)]
        for replica in range(size):
            router.update(replica, ReplicaLoad(running=0 if replica == 1 else 2))  # of a moment ago
        choices += [router.route([1]) for _ in range(size)]
        said = f"Replica 1 of {size} has nothing, the others 2 running. {size * count} requests in a burst, then the coordinator repeats the loads of before, then {size} more."
        most = max(map(choices.count, choices))
        require(
            True,
            most <= count + 3,
            f"{said}\nExpected at the busiest replica: not more than {count + 3}\nGot at the busiest replica: {most}\nLook at `assign` and `score`: what was sent counts at once, also when a load is older than that.",
        )


# -- prefixes --------------------------------------------------------------------------------------------------------


def remembered(seen: list[int], hashes: list[int], capacity: int) -> list[int]:
    """What a replica has after a prompt, the hashes used last at the end."""
    return [*(name for name in seen if name not in hashes), *reversed(hashes)][-capacity:]


class PrefixModel:
    """What a prefix-aware router must do, as plainly as can be."""

    def __init__(self, router: Any, capacity: int) -> None:
        self.router, self.capacity = router, capacity
        self.seen: dict[int, list[int]] = {replica: [] for replica in sorted(router.open_replicas)}
        """By replica: chunks, the ones used last at the end."""

    def cached(self, replica: int, hashes: list[int], chunk: int) -> int:
        """Tokens of a prompt that a replica has."""
        count = 0
        while count < len(hashes) and hashes[count] in self.seen[replica]:
            count += 1
        return count * chunk

    def choose(self, prompt: list[int], avoid: list[int], nearest: int) -> int:
        """The replica where it costs least, if that is not too busy."""
        router, chunk = self.router, self.router.CHUNK
        hashes = hash_prefixes(prompt, chunk)
        least = router.score(nearest)
        best, lowest = nearest, router.score(nearest) * 32 - self.cached(nearest, hashes, chunk)
        for replica in sorted(set(self.seen) - set(avoid)):
            score = router.score(replica)
            cost = score * 32 - self.cached(replica, hashes, chunk)
            if not (score > least + 16 and score > 1.5 * least) and cost < lowest:
                best, lowest = replica, cost
        self.seen[best] = remembered(self.seen[best], hashes, self.capacity)
        return best


def check_prefix(cls: Any) -> None:
    """A prompt goes where its beginning is, unless that costs more than it saves, or that replica is far busier."""
    _check_crowd(cls)
    for rng in rounds("cached", 6):
        _check_cached(cls, rng)
        _check_remembered(cls, rng)
    for least, score in ((0, 16), (0, 17), (8, 24), (8, 25), (40, 57), (40, 60), (40, 61)):
        _check_limit(cls, least, score)
    small = type("SmallChunks", (cls,), {"CHUNK": 24})
    for rng in rounds("prefix", 60):
        _check_prompts(small, rng)


def _check_cached(cls: Any, rng: random.Random) -> None:
    router, hashes = cls(), [rng.randrange(10**6) for _ in range(8)]
    router.open(0, 10**4)
    known = [name for name in hashes if rng.random() < 0.8]
    router.seen[0].update(dict.fromkeys(known))
    count = next((i for i, name in enumerate(hashes) if name not in known), len(hashes))
    said = f"Hashes {hashes}, of which {known} are at the replica; chunks of {cls.CHUNK} tokens."
    look = "`cached_tokens`: it ends at the first hash that is not there"
    expect(said, "cached_tokens", count * cls.CHUNK, router.cached_tokens(0, hashes), look)


def _check_remembered(cls: Any, rng: random.Random) -> None:
    router, seen, said = cls(), [], "A replica with room for 6 hashes."  # type: ignore[var-annotated]
    router.open(0, 6 * cls.CHUNK)
    for start in (10, 20, rng.choice((10, 20)), 30):
        hashes = list(range(start, start + rng.randint(2, 4)))
        router.remember(0, hashes)
        seen, said = remembered(seen, hashes, 6), f"{said} A prompt with the hashes {hashes} goes there."
        look = "`remember`: all hashes of the prompt move to the end, the last one first; then those at the front that are too many are forgotten"
        expect(said, "in `seen`, in order", seen, list(router.seen[0]), look)


def _check_limit(cls: Any, least: int, score: int) -> None:
    """As busy as it may be, and one busier."""
    rng, router = seeded(f"limit {score}"), cls()
    prompt = [rng.randrange(50) for _ in range(cls.CHUNK * 10)]
    for replica, running in ((0, least), (1, score)):
        router.open(replica)
        router.update(replica, ReplicaLoad(running=running))
    router.remember(1, hash_prefixes(prompt, cls.CHUNK))
    said = f"Replica 0 has {least} running and nothing cached; replica 1 has {score} running, and all {len(prompt)} tokens of a prompt cached."
    expected = int(score <= max(least + 16, 1.5 * least))
    expect(said, "it goes to replica", expected, router.route(prompt), f"{_PREFIX_LOOK}; and the limit")


def _check_prompts(cls: Any, rng: random.Random) -> None:
    """Prompts with beginnings in common, and loads that change."""
    size, capacity, chunk = rng.randint(2, 4), rng.choice((6, 150)), cls.CHUNK
    router, least = cls(), LeastLoadedRouter()
    running = rng.choice(_RUNNING)
    for replica in range(size):
        router.open(replica, cache_tokens=capacity * chunk)
        least.open(replica)
        for told in (router, least):
            told.update(replica, ReplicaLoad(running=running[0]))
    model = PrefixModel(router, capacity)
    stems = [[rng.randrange(50) for _ in range(chunk * rng.randint(1, 50))] for _ in range(3)]
    start, recent = f"{size} replicas, caches of {capacity} chunks of {chunk} tokens, {running[0]} running at each.", ""
    for _ in range(20):
        stem, avoid = rng.randrange(3), rng.choice(([], [], [], [rng.randrange(size)]))
        prompt = stems[stem] + [rng.randrange(50) for _ in range(rng.choice((3, chunk)))]
        if rng.random() < 0.4:
            replica, load = rng.randrange(size), ReplicaLoad(running=rng.choice(running))
            recent += f" Replica {replica} is said to have {load.running} running."
            router.update(replica, load)
            least.update(replica, load)
        recent += (
            f" A prompt of {len(prompt)} tokens that begins like number {stem}{f', not to replica {avoid[0]}' if avoid else ''}."
        )
        expected = model.choose(prompt, avoid, _nearest(least, avoid))
        expect(f"{start} …{recent}", "it goes to replica", expected, router.route(prompt, avoid), _PREFIX_LOOK)
        least.assign(expected)
        recent = f"{recent[-400:]} It goes to {expected}."


def _nearest(least: LeastLoadedRouter, avoid: list[int]) -> int:
    """What the least loaded router would choose; it counts nothing, and its start moves on."""
    replica = least.route([1], avoid=avoid)
    load = least._loads[replica]
    least.num_in_flight[replica] -= 1
    least.update(replica, load._replace(waiting=load.waiting - 1))
    return replica


def _check_crowd(cls: Any) -> None:
    rng, router = seeded("crowd"), cls()
    for replica in range(3):
        router.open(replica, cache_tokens=10**6)
    stem = [rng.randrange(50) for _ in range(cls.CHUNK * 200)]
    choices = [router.route([*stem, number]) for number in range(60)]
    most = max(map(choices.count, choices))
    require(
        True, most <= 36,
        f"60 requests with one prefix of {len(stem)} tokens, three replicas.\nExpected at the busiest replica: at most 36\nGot at the busiest replica: {most}\n"
        "Look at `choose`: a replica whose score exceeds the least one by more than 16 and by more than half is passed over, however much it has cached.",
    )  # fmt: skip
