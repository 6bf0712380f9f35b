"""Routers: the choice as vLLM and SGLang make it, and accounts that are right after anything that can happen."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.data_parallel.routing import (
    ROUTERS,
    LeastLoadedRouter,
    PrefixAwareRouter,
    PrefixTree,
    hash_prefixes,
    load_score,
    make_router,
)
from minivllm.engine.core_messages import ReplicaLoad
from minivllm.errors import ConfigError, EngineDeadError


def opened(routing, num_replicas, **options):
    router = make_router(routing, **options)
    for replica in range(num_replicas):
        router.open(replica)
    return router


@pytest.mark.parametrize(
    ("load", "in_flight", "clients", "score"),
    [
        (ReplicaLoad(0, 0, 0.0), 0, 1, 0),
        (ReplicaLoad(2, 5, 0.4), 3, 1, 7),  # what it reported
        (ReplicaLoad(2, 5, 0.4), 3, 4, 12),  # what four clients like this one have sent
        (ReplicaLoad(2, 5, 1.0), 0, 1, 7 + 2 * 3),  # a full cache: those who wait count four times
        (ReplicaLoad(0, 5, 1.0), 0, 1, 5),  # nobody waits
        (ReplicaLoad(4, 0, 0.75), 1, 1, 4 + 4 * 1.5),
    ],
)
def test_the_score_is_vllms(load, in_flight, clients, score):
    assert load_score(load, in_flight, clients) == pytest.approx(score)


def reference_choice(scores, start):
    """As vLLM's loop does it."""
    best, least = 0, math.inf
    for i in range(len(scores)):
        index = (start + i) % len(scores)
        if scores[index] < least:
            best, least = index, scores[index]
    return best


loads = st.builds(ReplicaLoad, st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 0.5, 0.75, 1.0]))


@given(st.lists(loads, min_size=1, max_size=7), st.integers(1, 3), st.data())
def test_the_first_minimum_from_a_start_that_moves_on_wins(reported, client_count, data):
    client_index = data.draw(st.integers(0, client_count - 1))
    router = LeastLoadedRouter(client_count, client_index)
    for replica in range(len(reported)):
        router.open(replica)
    reported, in_flight = list(reported), [0] * len(reported)
    for replica, load in enumerate(reported):
        router.update(replica, load)
    start = client_index * len(reported) // client_count
    for i in range(12):
        scores = [load_score(load, count, client_count) for load, count in zip(reported, in_flight, strict=True)]
        expected = reference_choice(scores, (start + i) % len(reported))
        assert router.route([1]) == expected
        in_flight[expected] += 1
        reported[expected] = reported[expected]._replace(waiting=reported[expected].waiting + client_count)


@given(st.integers(1, 140), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_choice_among_many_replicas_is_that_of_looking_at_each(num_replicas, client_count, rng):
    """With replicas that report, finish requests, close, open again and are avoided."""
    router = LeastLoadedRouter(client_count, rng.randrange(client_count))
    for replica in range(num_replicas):
        router.open(replica)
    start = router.client_index * num_replicas // client_count
    for _ in range(60):
        for replica in rng.sample(range(num_replicas), rng.randint(0, num_replicas // 2)):
            router.update(replica, ReplicaLoad(rng.randrange(4), rng.randrange(4), rng.choice([0.0, 1.0])))
        replica = rng.randrange(num_replicas)
        if router._is_open[replica]:
            router.close(replica)
        else:
            router.open(replica)
            start = router.client_index * num_replicas // client_count
        avoided = set(rng.sample(range(num_replicas), rng.randint(0, num_replicas // 3)))
        scores = [
            load_score(load, count, client_count) if is_open and index not in avoided else math.inf
            for index, (load, count, is_open) in enumerate(zip(router._loads, router.num_in_flight, router._is_open, strict=True))
        ]
        if min(scores) == math.inf:
            continue
        chosen = router.route([1], avoid=avoided)
        assert chosen == reference_choice(scores, start)
        start = (start + 1) % num_replicas
        if rng.random() < 0.5:
            router.finish(chosen)


def test_a_burst_between_two_reports_is_spread():
    router = opened("least-loaded", 4)
    assert sorted(router.route([1, 2]) for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_round_robin_takes_turns_whatever_the_loads():
    router = opened("round-robin", 3)
    router.update(1, ReplicaLoad(100, 100, 1.0))
    assert [router.route([1]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router.close(1)
    assert [router.route([1]) for _ in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize("routing", list(ROUTERS))
def test_one_that_leaves_gets_nothing_and_one_that_comes_late_is_taken_in(routing):
    router = opened(routing, 2)
    router.close(0)
    router.update(0, ReplicaLoad())
    assert {router.route([1] * 200) for _ in range(6)} == {1}
    router.open(2)
    assert 2 in {router.route([i] * 200) for i in range(6)}
    router.close(1)
    router.close(2)
    with pytest.raises(EngineDeadError, match="no replica"):
        router.route([1])
    router.open(0)
    assert router.route([1]) == 0


def test_a_prompt_goes_where_its_beginning_is():
    router = opened("prefix-aware", 4)
    rng = random.Random(0)
    groups = [[rng.randrange(1000) for _ in range(256)] for _ in range(4)]
    homes = [router.route(group) for group in groups]
    assert sorted(homes) == [0, 1, 2, 3]
    for _ in range(20):
        group = rng.randrange(4)
        prompt = groups[group] + [rng.randrange(1000) for _ in range(100)]
        assert router.route(prompt) == homes[group]


def test_a_short_match_or_another_salt_is_no_reason_to_go_there():
    router = opened("prefix-aware", 2)
    home = router.route([1] * 128)
    router.update(home, ReplicaLoad(1, 0, 0.0))
    router.update(1 - home, ReplicaLoad())
    assert router.route([1] * 128 + [2] * 384) == 1 - home  # a quarter of the prompt
    router = opened("prefix-aware", 2)
    home = router.route([1] * 256, "mine")
    assert router.route([1] * 256, "yours") == 1 - home
    assert router.route([1] * 256, "mine") == home


def routed_with(scores, prompt, home=0, **options):
    """Where a prompt that one replica has cached goes, with these scores."""
    router = opened("prefix-aware", len(scores), **options)
    while router.route(prompt) != home:
        pass
    for replica in range(len(scores)):
        if replica != home:
            router.open(replica)  # the others have nothing cached
        router.update(replica, ReplicaLoad(0, scores[replica], 0.0))
    router.num_in_flight[home] = 0
    router.update(home, ReplicaLoad(0, scores[home], 0.0))
    return router.route(prompt)


@pytest.mark.parametrize(
    ("scores", "length", "options", "goes_home"),
    [
        ([8, 0], 256, {}, False),  # eight requests outweigh 256 tokens
        ([7, 0], 256, {}, True),
        ([15, 0], 512, {}, True),  # the longer the match, the more
        ([16, 0], 4096, {}, True),
        ([17, 0], 4096, {}, False),  # but not without limit
        ([60, 40], 4096, {}, True),  # which is a factor where all are busy
        ([61, 40], 4096, {}, False),
        ([7, 0], 4096, {"max_num_seqs": 8}, True),
        ([8, 0], 4096, {"max_num_seqs": 8}, False),  # no place is free, and elsewhere there is
        ([9, 8], 4096, {"max_num_seqs": 8}, True),  # it must wait anyway
        ([90, 8], 4096, {"max_num_seqs": 8}, False),
    ],
)
def test_a_match_outweighs_some_more_requests_but_no_lack_of_places(scores, length, options, goes_home):
    assert (routed_with(scores, [1] * length, **options) == 0) == goes_home


@pytest.mark.parametrize("length", [200, 512, 2048, 8192])
@pytest.mark.parametrize("max_num_seqs", [8, 256])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_requests_that_share_a_beginning_are_spread_when_one_replica_gets_busy(num_replicas, max_num_seqs, length):
    router, rng = opened("prefix-aware", num_replicas, max_num_seqs=max_num_seqs), random.Random(0)
    for _ in range(60):
        router.route([1] * length + [rng.randrange(1000) for _ in range(40)])
    assert sum(router.num_in_flight) == 60
    assert max(router.num_in_flight) <= 60 / num_replicas + 2
    assert min(router.num_in_flight) >= 9


def test_requests_that_share_a_beginning_stay_together_while_there_are_few():
    router, rng = opened("prefix-aware", 4), random.Random(0)
    homes = [router.route([1] * 512 + [rng.randrange(1000) for _ in range(40)]) for _ in range(9)]
    assert len(set(homes)) == 1


def test_of_two_matches_the_longer_one_wins_unless_its_replica_is_busier():
    router = opened("prefix-aware", 2)
    router.close(1)
    router.route([1] * 1024)
    router.open(1)
    router.close(0)
    router.route([1] * 768)
    router._is_open[0] = True
    for score, chosen in ((0, 0), (7, 0), (8, 1)):  # 256 tokens count as much as 8 requests
        router.update(0, ReplicaLoad(0, 1 + score, 0.0))
        router.update(1, ReplicaLoad(0, 1, 0.0))
        assert router._tree.find(hash_prefixes([1] * 1024, 128), [True, True]) == {0: 8, 1: 6}
        replica = router.route([1] * 1024)
        assert replica == chosen
        router.finish(replica)


def test_a_replica_that_comes_back_has_nothing_cached():
    router = opened("prefix-aware", 2)
    home = router.route([1] * 256)
    router.close(home)
    router.open(home)
    router.update(home, ReplicaLoad(1, 0, 0.0))
    assert router.route([1] * 256) == 1 - home


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=30), st.integers(1, 6)
)
def test_the_tree_remembers_what_each_replica_used_last(inserted, capacity):
    tree, open_ = PrefixTree(), [True] * 3
    for replica in range(3):
        tree.open(replica, capacity)
    used = {replica: [] for replica in range(3)}
    for replica, tokens in inserted:
        prefixes = hash_prefixes(tokens, 1)
        tree.insert(prefixes, replica)
        for node in reversed(prefixes):
            if node in used[replica]:
                used[replica].remove(node)
            used[replica].append(node)
        del used[replica][:-capacity]
    for _, tokens in inserted:
        prefixes = hash_prefixes(tokens, 1)
        known = [{replica for replica in range(3) if node in used[replica]} for node in prefixes]
        expected = next((i for i, holders in enumerate(known) if not holders), len(known))
        lengths = {replica: sum(replica in holders for holders in known) for replica in range(3)}
        assert max(lengths.values()) == expected
        assert tree.find(prefixes, open_) == {replica: length for replica, length in lengths.items() if length}
        assert {replica: tree.length_at(replica, prefixes) for replica in range(3)} == lengths
    for replica in range(3):
        tree.open(replica, capacity)
    assert not tree._holders and not any(tree._nodes.values())


def test_hashes_stand_for_everything_before_them():
    one, other = hash_prefixes([1, 2, 3, 4, 5], 2), hash_prefixes([9, 2, 3, 4], 2)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
    assert hash_prefixes([1, 2, 3, 4], 2, "salt") != one
    assert hash_prefixes([1], 2) == []


def test_names_of_routers_are_checked():
    with pytest.raises(ConfigError, match="data_parallel_routing is 'random', but must be one of 'least-loaded'"):
        make_router("random")
    assert isinstance(make_router("prefix-aware"), PrefixAwareRouter)


class RouterAccounts(RuleBasedStateMachine):
    """Any order of arrivals, ends, reports, replicas that come and go."""

    @initialize(routing=st.sampled_from(sorted(ROUTERS)), client_count=st.integers(1, 3))
    def begin(self, routing, client_count):
        self.router = make_router(routing, client_count)
        self.open, self.in_flight = set(), {}

    @rule(replica=st.integers(0, 4))
    def comes(self, replica):
        if replica not in self.open:
            self.router.open(replica, cache_tokens=256)
            self.open.add(replica)
            self.in_flight[replica] = 0
            for other in range(replica):
                self.in_flight.setdefault(other, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leaves(self, data):
        replica = data.draw(st.sampled_from(sorted(self.open)))
        self.router.close(replica)
        self.open.discard(replica)

    @precondition(lambda self: self.open)
    @rule(token=st.integers(0, 3), length=st.integers(1, 300))
    def arrives(self, token, length):
        replica = self.router.route([token] * length)
        assert replica in self.open
        self.in_flight[replica] += 1

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data())
    def ends(self, data):
        replica = data.draw(st.sampled_from(sorted(replica for replica, count in self.in_flight.items() if count)))
        self.router.finish(replica)
        self.in_flight[replica] -= 1

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), load=loads)
    def reports(self, data, load):
        self.router.update(data.draw(st.sampled_from(sorted(self.in_flight))), load)

    @invariant()
    def counts_are_right(self):
        assert self.router.num_in_flight == [self.in_flight[replica] for replica in sorted(self.in_flight)]
        scores = self.router._scores
        for replica, score in enumerate(scores):
            load = self.router._loads[replica]
            expected = load_score(load, self.in_flight[replica], self.router.client_count)
            assert score == (expected if replica in self.open else math.inf)


TestRouterAccounts = RouterAccounts.TestCase
