"""Who is blamed for deaths of replicas, in all interleavings of what can happen: a model check of `Failover` and `Blame`, without processes.

Three replicas, six innocent requests, three that kill, and two kills from outside. At any moment, one of these things happens:

- a request that was at a replica that died gets another token;
- one that kills does so, and from then on wherever it is, before it gives a token: before that it is like any other;
- a replica is killed from outside; one that is dead comes back;
- a replica that was told to abort what it has does so, and says so. Until then it computes what it had.

What makes the space small enough to try all of it:

- Requests of a kind in the same state are interchangeable, and so are replicas: a state is sorted.
- It does not say where a request is that is no suspect, or whether it has come yet. When a replica dies, each number of these that can have
  been there is tried. So it does not matter when requests come, how they are routed, or whether they finish.
- It does not say in which order requests wait either: each time, all orders are tried that differ in who comes first, second and third.
- Nobody kills so often that it counts in favour of a request: that makes blame only rarer.
"""

from __future__ import annotations

import pytest

from minivllm.data_parallel import blame
from minivllm.data_parallel.blame import MAX_DEATHS_IN_COMPANY, NUM_TRIALS
from minivllm.data_parallel.failover import Failover
from minivllm.data_parallel.request_table import InFlightRequest, RequestTable
from minivllm.errors import EngineDeadError
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams

SIZE = 3
INNOCENT, SLEEPER, KILLER = 0, 1, 2
"""Kinds of requests: one that kills is a sleeper until it does so for the first time."""
DEAD, COMPANY, ALONE, CLEARED, EMPTY = range(5)
REQUESTS = [EngineCoreRequest(str(number), [1], SamplingParams(), 2) for number in range(9)]


class Choices:
    """Tries all ways through a piece of code that asks for choices."""

    def __init__(self):
        self.prefix, self.taken = [], []

    def __call__(self, num_options):
        place = len(self.taken)
        choice = self.prefix[place] if place < len(self.prefix) else 0
        self.taken.append((choice, num_options))
        return choice

    def next(self):
        """Prepare the next way. False if there is none."""
        while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
            self.taken.pop()
        if not self.taken:
            return False
        self.prefix = [choice for choice, _ in self.taken[:-1]] + [self.taken[-1][0] + 1]
        self.taken = []
        return True


class FirstRouter:
    """In place of a `Router`: the first open replica, since those that a suspect may get are in the same state."""

    def __init__(self):
        self.is_open = [False] * SIZE

    def open(self, replica, cache_tokens):
        self.is_open[replica] = True

    def close(self, replica):
        self.is_open[replica] = False

    def route(self, prompt_token_ids, cache_salt, avoid):
        for replica, is_open in enumerate(self.is_open):
            if is_open and replica not in avoid:
                return replica
        raise EngineDeadError("none")

    def finish(self, replica):
        pass


class AnyOrder(RequestTable):
    """Requests that wait are looked at in any order, as far as it matters: as many are chosen as there are replicas without a suspect."""

    def __init__(self, world):
        super().__init__(FirstRouter(), 16)
        self._world, self._order = world, None

    @property
    def pending(self):
        if self._order is None:
            num_places = len(self.open) - sum(item.replica is not None for item in self.requests.values())
            cleared = self._world.cleared()
            num_places -= len(cleared)
            waiting = [item for item in self._pending.values() if item.request_id not in cleared]
            in_company = self._choose([item for item in waiting if item.num_deaths < MAX_DEATHS_IN_COMPANY], num_places)
            alone = [item for item in waiting if item.num_deaths >= MAX_DEATHS_IN_COMPANY]
            self._order = in_company + self._choose(alone, num_places - len(in_company))
        return [in_flight for in_flight in self._order if in_flight.request_id in self._pending]

    def _choose(self, waiting, num_places):
        """The ones that come first."""
        if len(waiting) <= num_places:
            return waiting
        chosen, least = [], ()
        for _ in range(num_places):
            most = max(item.num_deaths for item in waiting)
            firsts = {self._world.describe(item): item for item in waiting if item.num_deaths == most}
            options = sorted(described for described in firsts if described >= least) or sorted(firsts)
            least = options[self._world.choose(len(options)) if len(options) > 1 else 0]
            chosen.append(firsts[least])
            waiting.remove(chosen[-1])
        return chosen


class World:
    """A state, as real objects. What happens to them gives the next one.

    A state is: how many innocent requests are no suspects, and how many sleepers; the kills from outside to come; the suspects that wait,
    each as its deaths, kind, and deaths when it was alone; and the replicas. Each is dead (0); or open, with such a suspect (1), with one that
    is alone (2), about to be cleared for one (3), or with none (4).
    """

    def __init__(self, state, choose, by_sigkill):
        self.clean, self.kills, waiting, replicas = [state[0], state[1]], state[2], state[3], state[4]
        self.choose, self.by_sigkill, self.kinds, self.num_requests = choose, by_sigkill, {}, 0
        self.table = table = AnyOrder(self)
        self.failover = Failover(table, lambda rank, request: True, lambda rank, number: True, timeout=60.0)
        for suspect in waiting:
            self.add(*suspect)
        for rank, (kind, *suspect) in enumerate(replicas):
            if kind != DEAD:
                table.take_in(rank, 100)
            if kind not in (DEAD, EMPTY):
                in_flight = self.add(*suspect, rank=None if kind == CLEARED else rank)
                in_flight.is_alone = kind == ALONE
                if kind != COMPANY:
                    self.failover._trials[rank] = in_flight
                if kind == CLEARED:
                    self.failover._clearing[rank] = 1

    def add(self, num_deaths, kind, num_trials=0, rank=None):
        request = REQUESTS[self.num_requests]
        self.num_requests += 1
        self.kinds[request.request_id] = kind
        in_flight = self.table.requests[request.request_id] = InFlightRequest(request)
        in_flight.num_deaths, in_flight.num_trials, in_flight.replica = num_deaths, num_trials, rank
        if rank is None:
            self.table._pending[request.request_id] = in_flight
        return in_flight

    def describe(self, item):
        return item.num_deaths, self.kinds[item.request_id], item.num_trials

    def cleared(self):
        """The requests for which replicas are being cleared."""
        return {self.failover._trials[rank].request_id for rank in self.failover._clearing}

    def state(self):
        trials, clearing, cleared = self.failover._trials, self.failover._clearing, self.cleared()
        waiting, replicas, clean = [], [(EMPTY if rank in self.table.open else DEAD,) for rank in range(SIZE)], list(self.clean)
        for item in self.table.requests.values():
            if not item.is_suspect:
                clean[self.kinds[item.request_id]] += 1
            elif item.replica is not None:
                replicas[item.replica] = (ALONE if item.is_alone else COMPANY, *self.describe(item))
            elif item.request_id not in cleared:
                waiting.append(self.describe(item))
        for rank in clearing:
            replicas[rank] = (CLEARED, *self.describe(trials[rank]))
        return *clean, self.kills, tuple(sorted(waiting)), tuple(sorted(replicas))

    def forget_clean(self):
        """Those that are no suspects are anywhere again."""
        for name, item in list(self.table.requests.items()):
            if not item.is_suspect:
                self.table.remove(name)
                self.clean[self.kinds[name]] += 1

    # -- what can happen

    def give_token(self, request_id):
        self.table.requests[request_id].acquit()

    def kill_its_replica(self, request_id):
        self.kinds[request_id] = KILLER
        self.die(self.table.requests[request_id].replica, self.by_sigkill)

    def begin_to_kill(self, rank):
        """A sleeper that was no suspect kills a replica."""
        self.clean[SLEEPER] -= 1
        self.add(0, KILLER, rank=rank)
        self.die(rank, self.by_sigkill)

    def kill_from_outside(self, rank):
        self.kills -= 1
        self.die(rank, was_killed=True)

    def die(self, rank, was_killed):
        """With any of those that are no suspects, unless it has one alone."""
        if not self.is_alone(rank):
            for kind in (INNOCENT, SLEEPER):
                count = self.choose(self.clean[kind] + 1) if self.clean[kind] else 0
                self.clean[kind] -= count
                for _ in range(count):
                    self.add(0, kind, rank=rank)
        failed = self.failover.lose(rank, has_died=True, was_killed=was_killed)
        for request_id, _ in failed.requests if failed else ():
            assert self.kinds[request_id] == KILLER, "an innocent request is given up"

    def come_back(self, rank):
        self.table.take_in(rank, 100)

    def answer(self, rank):
        self.failover.note_cleared(rank, self.failover._clearing[rank])

    def is_alone(self, rank):
        return any(item.is_alone for item in self.table.requests_at(rank))

    def events(self):
        """All that can happen, but each of several that come to the same only once."""
        found = {}
        for name, item in self.table.requests.items():
            kind, described = self.kinds[name], (self.kinds[name], item.num_deaths, item.num_trials, item.is_alone)
            if item.replica is not None and kind != KILLER:
                found["give_token", described] = name
            if item.replica is not None and kind != INNOCENT:
                found["kill_its_replica", described] = name
        for rank in range(SIZE):
            there = tuple(self.describe(item) for item in self.table.requests_at(rank))
            place = rank in self.table.open, there, self.is_alone(rank), rank in self.failover._clearing
            if rank not in self.table.open:
                found["come_back",] = rank
                continue
            if rank in self.failover._clearing:
                found["answer", self.describe(self.failover._trials[rank])] = rank
                place += self.describe(self.failover._trials[rank])
            if self.kills:
                found["kill_from_outside", place] = rank
            if self.clean[SLEEPER] and not self.is_alone(rank):
                found["begin_to_kill", place] = rank
        return [(name, argument) for (name, *_), argument in found.items()]

    def check(self):
        for item in self.table.requests.values():
            assert item.num_deaths <= MAX_DEATHS_IN_COMPANY + NUM_TRIALS - 1
            if item.is_alone and item.replica is not None:
                assert self.table.requests_at(item.replica) == [item], "it is alone"
        suspects = [item.replica for item in self.table.requests.values() if item.replica is not None]
        assert len(suspects) == len(set(suspects)), "one suspect at a time"
        assert not self.table._pending or suspects or self.failover._clearing or len(self.table.open) < SIZE, "all have turns"


def explore(num_innocent, num_killers, num_kills, by_sigkill):
    """Go through all states. Returns how many there are."""
    first = (num_innocent, num_killers, num_kills, (), ((EMPTY,),) * SIZE)
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        for name, argument in World(state, None, by_sigkill).events():
            choices = Choices()
            while True:
                world = World(state, choices, by_sigkill)
                getattr(world, name)(argument)
                world.forget_clean()
                world.failover.retry_pending()
                world.check()
                if (after := world.state()) not in seen:
                    seen.add(after)
                    todo.append(after)
                if not choices.next():
                    break
    return len(seen)


@pytest.mark.parametrize("by_sigkill", [False, True], ids=["by crashes", "by SIGKILL"])
@pytest.mark.parametrize(
    ("num_killers", "num_kills"),
    [
        (1, 2),
        (2, 0),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 2, marks=[pytest.mark.long, pytest.mark.nightly]),
    ],
)
def test_who_kills_is_given_up_and_no_innocent_request_ever_is(monkeypatch, num_killers, num_kills, by_sigkill):
    monkeypatch.setattr(blame, "MEMORY_SECONDS", 0.0)
    assert explore(6, num_killers, num_kills, by_sigkill) > 800


def test_the_model_finds_blame_that_comes_too_early(monkeypatch):
    """With one trial less, two kills from outside are enough to blame an innocent request."""
    monkeypatch.setattr(blame, "MEMORY_SECONDS", 0.0)
    monkeypatch.setattr(blame, "NUM_TRIALS", 2)
    with pytest.raises(AssertionError, match="an innocent request is given up"):
        explore(1, 2, 2, by_sigkill=True)
