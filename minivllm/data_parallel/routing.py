"""Which replica of the model gets a request.

    RoundRobinRouter    one after the other
    LeastLoadedRouter   the least busy, as vLLM's `DPLBAsyncMPClient.get_core_engine_for_request`
    PrefixAwareRouter   where least of the prompt is left to compute, and least else is to be done: as in Dynamo's KV router

No sockets here, so that the server and the simulator decide alike.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from minivllm.config import ROUTINGS, check_choice
from minivllm.engine.core_messages import ReplicaLoad
from minivllm.errors import EngineDeadError

_GROUP = 32
"""Of so many replicas the least score is remembered: of a thousand, about as many groups as there are replicas in one."""


def load_score(load: ReplicaLoad, num_in_flight: int, client_count: int = 1) -> float:
    """How busy a replica is, as one number.

    What it reported is a little old. What this client has sent and not got back is exact, but there are `client_count` such clients: the
    greater of the two counts. Where the cache is more than half full, a queue drains slowly, and waiting requests count up to four times.
    """
    score = float(max(client_count * num_in_flight, load.waiting + load.running))
    if load.waiting:
        score += load.waiting * 6 * max(0.0, load.kv_cache_usage - 0.5)
    return score


class Router(ABC):
    """Chooses replicas, and counts the unfinished requests of this client at each.

    Args:
        client_count: API servers, each with a router of its own, that send requests to the same replicas.
        client_index: Which of them this is.
        max_num_seqs: Sequences that a replica runs at once.
    """

    def __init__(self, client_count: int = 1, client_index: int = 0, max_num_seqs: int = 256) -> None:
        self.client_count, self.client_index, self.max_num_seqs = client_count, client_index, max_num_seqs
        self.num_in_flight: list[int] = []
        self._loads: list[ReplicaLoad] = []
        self._scores: list[float] = []
        """`load_score` of each; infinite for one that is closed."""
        self._is_open: list[bool] = []
        self._least: list[float] = []
        """The least score of each `_GROUP` of replicas, unless the group is in `_stale`."""
        self._stale: set[int] = set()
        self._start = 0
        self.has_reports = True
        """Whether replicas report how busy they are. If not, only what is in flight counts."""

    def open(self, replica: int, cache_tokens: int = 2**20) -> None:
        """From now on, a replica takes requests. Nothing is in flight there. Its KV cache holds `cache_tokens` tokens."""
        while len(self._scores) <= replica:
            self._loads.append(ReplicaLoad())
            self._scores.append(math.inf)
            self._is_open.append(False)
            self.num_in_flight.append(0)
        self._is_open[replica] = True
        self.num_in_flight[replica] = 0
        self.update(replica, ReplicaLoad())
        self._start = self.client_index * len(self._scores) // self.client_count  # clients do not all begin with the same one

    def close(self, replica: int) -> None:
        """From now on, a replica takes no requests. What is in flight there goes on."""
        self._is_open[replica] = False
        self._set_score(replica, math.inf)

    def stop_reports(self) -> None:
        """Nobody tells how busy replicas are any more."""
        self.has_reports = False
        for replica in range(len(self._loads)):
            self.update(replica, ReplicaLoad())

    def update(self, replica: int, load: ReplicaLoad) -> None:
        """A replica has reported how busy it is."""
        self._loads[replica] = load
        if self._is_open[replica]:
            self._set_score(replica, load_score(load, self.num_in_flight[replica], self.client_count))

    def _set_score(self, replica: int, score: float) -> None:
        self._scores[replica] = score
        self._stale.add(replica // _GROUP)

    def least_loaded(self, start: int) -> int:
        """The replica with the least score; of several, the first one from `start` on, around the end.

        Of n replicas, it looks at those whose groups have changed, and at n / `_GROUP` groups.
        """
        scores, groups = self._scores, self._least
        groups += [math.inf] * (-(-len(scores) // _GROUP) - len(groups))
        for group in self._stale:
            groups[group] = min(scores[group * _GROUP : (group + 1) * _GROUP])
        self._stale.clear()
        least = min(groups)
        group = start // _GROUP
        if groups[group] == least:
            with contextlib.suppress(ValueError):  # before `start` only
                return scores.index(least, start, (group + 1) * _GROUP)
        try:
            group = groups.index(least, group + 1)
        except ValueError:
            group = groups.index(least)
        return scores.index(least, group * _GROUP, (group + 1) * _GROUP)

    def route(self, prompt_token_ids: Sequence[int], cache_salt: str | None = None, avoid: Collection[int] = ()) -> int:
        """Choose a replica for a request, but none to `avoid`, and count it there. Nothing cached under another salt is of use to it.

        Raises:
            EngineDeadError: No replica takes requests.
        """
        avoided = [replica for replica in avoid if self._is_open[replica]]
        for replica in avoided:
            self.close(replica)
        try:
            if True not in self._is_open:
                raise EngineDeadError("There is no replica of the model that takes requests.")
            replica = self.choose(prompt_token_ids, cache_salt)
        finally:
            for other in avoided:  # what was in flight there still is
                self._is_open[other] = True
                self.update(other, self._loads[other])
        return self.assign(replica)

    def assign(self, replica: int) -> int:
        """Count a request at a replica. Returns the replica."""
        self.num_in_flight[replica] += 1
        load = self._loads[replica]  # the next report may come only after the next request
        self.update(replica, load._replace(waiting=load.waiting + self.client_count) if self.has_reports else load)
        return replica

    def finish(self, replica: int) -> None:
        """A request that was routed to this replica has finished."""
        self.num_in_flight[replica] -= 1
        self.update(replica, self._loads[replica])

    @abstractmethod
    def choose(self, prompt_token_ids: Sequence[int], cache_salt: str | None) -> int:
        """An open replica; there is at least one."""


class RoundRobinRouter(Router):
    """One replica after the other."""

    def choose(self, prompt_token_ids: Sequence[int], cache_salt: str | None) -> int:
        """The next open replica."""
        while not self._is_open[self._start]:
            self._start = (self._start + 1) % len(self._is_open)
        replica, self._start = self._start, (self._start + 1) % len(self._is_open)
        return replica


class LeastLoadedRouter(Router):
    """The replica with the least `load_score`. Where several have it, the first one from a start that moves on with each request."""

    def choose(self, prompt_token_ids: Sequence[int], cache_salt: str | None) -> int:
        """The least loaded replica."""
        start = self._start
        self._start = (start + 1) % len(self._scores)
        return self.least_loaded(start)


class PrefixAwareRouter(LeastLoadedRouter):
    """The replica where a prompt costs least: the tokens that it would have to compute there, and `TOKENS_PER_REQUEST` for each request that is there.

    But one that is too busy only if all are: where it would wait for a place, or far busier than the least busy one. What is cached where is what
    this client knows from what it has sent; prompts are compared in pieces of `chunk_size` tokens.
    """

    MIN_MATCH = 0.3
    """The part of a prompt that must be cached to count."""
    TOKENS_PER_REQUEST = 32
    """What a request at a replica (by `load_score`) counts, in tokens to compute: a beginning of 512 cached tokens outweighs 16 requests."""
    MAX_DIFFERENCE, MAX_RATIO = 16, 1.5
    """A replica is far busier if its score exceeds the least one by more than this difference and by more than this factor, however much it has
    cached: the others will have it, too, once it has been sent there."""

    def __init__(self, client_count: int = 1, client_index: int = 0, max_num_seqs: int = 256, *, chunk_size: int = 128) -> None:
        super().__init__(client_count, client_index, max_num_seqs)
        self._tree = PrefixTree()
        self._chunk_size = chunk_size

    def choose(self, prompt_token_ids: Sequence[int], cache_salt: str | None) -> int:
        """The replica where the prompt costs least."""
        prefixes = hash_prefixes(prompt_token_ids, self._chunk_size, cache_salt)
        least_loaded = super().choose(prompt_token_ids, cache_salt)
        cached = {least_loaded: self._tree.length_at(least_loaded, prefixes)} | self._tree.find(prefixes, self._is_open)
        min_length = self.MIN_MATCH * len(prompt_token_ids) / self._chunk_size
        least = self._scores[least_loaded]
        most = max(least + self.MAX_DIFFERENCE, least * self.MAX_RATIO)

        def cost(replica: int) -> tuple[bool, float, float]:
            score, length = self._scores[replica], cached[replica]
            is_too_busy = score > most or score >= self.max_num_seqs > least
            saved = length * self._chunk_size if length > min_length else 0
            return is_too_busy, score * self.TOKENS_PER_REQUEST - saved, score

        replica = min(cached, key=cost)
        self._tree.insert(prefixes, replica)
        return replica

    def open(self, replica: int, cache_tokens: int = 2**20) -> None:
        """As for `Router`. Nothing is cached there."""
        super().open(replica, cache_tokens)
        self._tree.open(replica, max(1, cache_tokens // self._chunk_size))


class PrefixTree:
    """Which replicas have which beginnings of prompts cached: about, since they say nothing of what they evict.

    A node is named by the hash of all tokens up to it, so that the way from the root needs no edges: it is the list of these hashes.
    """

    MOST_FOUND = 64
    """Replicas that `find` returns at most."""

    def __init__(self) -> None:
        self._capacity: dict[int, int] = {}
        """By replica: the nodes that it can hold. Beyond them it forgets the one that was not used for longest."""
        self._holders: dict[int, OrderedDict[int, None]] = {}
        """By node: the replicas that have it, least recently used first."""
        self._nodes: dict[int, OrderedDict[int, None]] = {}
        """By replica: its nodes, the ones used last at the end."""

    def insert(self, prefixes: list[int], replica: int) -> None:
        """A replica computes a prompt."""
        nodes = self._nodes[replica]
        for node in reversed(prefixes):  # the beginning counts as used last, so that no node is forgotten before those behind it
            nodes[node] = None
            nodes.move_to_end(node)
            if (holders := self._holders.get(node)) is None:
                holders = self._holders[node] = OrderedDict()
            holders[replica] = None
            holders.move_to_end(replica)
        while len(nodes) > self._capacity[replica]:
            node, _ = nodes.popitem(last=False)
            self._drop(node, replica)

    def find(self, prefixes: list[int], is_open: Sequence[bool]) -> dict[int, int]:
        """How much of a prompt open replicas have, in nodes: those that have most, and of those that have the same the ones that used it last."""
        found: dict[int, int] = {}
        num_known = next((i for i, node in enumerate(prefixes) if node not in self._holders), len(prefixes))
        num_holders = 0  # of the longer prefix: all of them have the shorter one, too
        for length in range(num_known, 0, -1):
            holders = self._holders[prefixes[length - 1]]
            if len(holders) > num_holders:
                num_holders = len(holders)
                new = (replica for replica in reversed(holders) if is_open[replica] and replica not in found)
                found |= dict.fromkeys(islice(new, self.MOST_FOUND - len(found)), length)
        return found

    def length_at(self, replica: int, prefixes: list[int]) -> int:
        """How much of a prompt a replica has, in nodes."""
        nodes = self._nodes[replica]
        return next((i for i, node in enumerate(prefixes) if node not in nodes), len(prefixes))

    def open(self, replica: int, capacity: int) -> None:
        """A replica has nothing cached, and room for `capacity` nodes."""
        for node in self._nodes.pop(replica, ()):
            self._drop(node, replica)
        self._nodes[replica], self._capacity[replica] = OrderedDict(), capacity

    def _drop(self, node: int, replica: int) -> None:
        holders = self._holders[node]
        del holders[replica]
        if not holders:
            del self._holders[node]


def hash_prefixes(token_ids: Sequence[int], chunk_size: int, cache_salt: str | None = None) -> list[int]:
    """A hash of the first chunk, one of the first two, and so on: a hash stands for all tokens up to there.

    Should two prompts have the same hash, a request goes to the wrong replica, where it gets the right answer.
    """
    tokens, hashes, last = tuple(token_ids), [], hash(cache_salt)
    for end in range(chunk_size, len(tokens) + 1, chunk_size):
        last = hash((last, tokens[end - chunk_size : end]))
        hashes.append(last)
    return hashes


class LoadPublisher:
    """When the coordinator tells routers the loads: soon after a change, but not more often than ten times a second. Next when it is `due`."""

    PAUSE_SECONDS = 0.1
    """After publishing, until a change is published."""
    IDLE_SECONDS = 5.0
    """After publishing, until the same is published again."""

    def __init__(self, now: float) -> None:
        self.loads: dict[int, ReplicaLoad] = {}
        self._last = now
        self.due = now + self.IDLE_SECONDS

    def report(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """A replica says how busy it is."""
        if self.loads.get(replica) != load:
            self.loads[replica] = load
            self.due = max(now, self._last + self.PAUSE_SECONDS)

    def forget(self, replica: int) -> None:
        """A replica is gone."""
        self.loads.pop(replica, None)

    def publish(self, now: float) -> dict[int, ReplicaLoad]:
        """The loads, which are published now."""
        self._last, self.due = now, now + self.IDLE_SECONDS
        return dict(self.loads)

    def skip_to(self, now: float) -> None:
        """Nothing is reported until `now`: leave out what would only be published again, except for the last time."""
        skipped = (now - self.due) // self.IDLE_SECONDS * self.IDLE_SECONDS
        if skipped > 0:
            self._last, self.due = self._last + skipped, self.due + skipped


ROUTERS: dict[str, type[Router]] = dict(zip(ROUTINGS, (LeastLoadedRouter, PrefixAwareRouter, RoundRobinRouter), strict=True))


def make_router(routing: str, client_count: int = 1, client_index: int = 0, max_num_seqs: int = 256) -> Router:
    """The router of this name, with the arguments of `Router`. Raises ConfigError if there is none."""
    check_choice("data_parallel_routing", routing, ROUTINGS)
    return ROUTERS[routing](client_count, client_index, max_num_seqs)
