"""What a frontend knows of its replicas, after any interleaving of what can happen."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm import SamplingParams
from minivllm.data_parallel.processes import divide_gpus
from minivllm.data_parallel.request_table import RequestTable
from minivllm.data_parallel.routing import ROUTERS, LoadPublisher, make_router
from minivllm.engine.core_messages import EngineCoreOutput, NewTokens, ReplicaLoad, StoppedSequence
from minivllm.errors import EngineDeadError
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest

REPLICAS = st.integers(0, 3)


class World(RuleBasedStateMachine):
    """Replicas that start late, leave and die; requests that come, end, are aborted and stopped; outputs and loads that come late, or never.

    The model: for each replica, what was sent to it and not taken back, in order.
    """

    @initialize(routing=st.sampled_from(sorted(ROUTERS)))
    def begin(self, routing):
        self.router = make_router(routing)
        self.table = RequestTable(self.router, block_size=16)
        self.publisher, self.now = LoadPublisher(0.0), 0.0
        self.state = {}
        """By replica: "open" or "draining"."""
        self.num_blocks = {}
        self.at = {}
        """By request: its number, its replica (None while it waits), and its unfinished sequences."""
        self.sent = {}
        """By request, what was sent last."""
        self.running = []
        """What replicas compute: (replica, request id, number, unfinished sequences), also what the frontend has given up."""
        self.num_requests = 0

    @rule(replica=REPLICAS, num_blocks=st.integers(1, 100))
    def a_replica_is_ready(self, replica, num_blocks):
        if replica not in self.state:
            self.table.take_in(replica, num_blocks)
            self.state[replica], self.num_blocks[replica] = "open", num_blocks

    @rule(replica=REPLICAS)
    def a_replica_leaves(self, replica):
        self.table.close(replica)
        if self.state.get(replica) == "open":
            self.state[replica] = "draining"

    @rule()
    def the_coordinator_dies(self):
        self.table.stop_reports()
        assert all(load.waiting == 0 for load in self.router._loads)

    @rule(replica=REPLICAS)
    def a_replica_dies(self, replica):
        lost = self.table.lose(replica)
        assert sorted(item.request_id for item in lost) == sorted(name for name, (_, at, _) in self.at.items() if at == replica)
        for in_flight in lost:
            number, _, unfinished = self.at[in_flight.request_id]
            self.at[in_flight.request_id] = (number, None, unfinished)
        self.running = [item for item in self.running if item[0] != replica]
        self.state.pop(replica, None)
        self.publisher.forget(replica)

    @rule(
        name=st.integers(0, 4),
        n=st.integers(1, 3),
        token=st.integers(0, 2),
        num_blocks=st.integers(1, 100),
        wanted=st.none() | REPLICAS,
    )
    def a_request_comes(self, name, n, token, num_blocks, wanted):
        if str(name) in self.at:
            return
        request = EngineCoreRequest(
            str(name), [token] * 70, SamplingParams(n=n), 16 * num_blocks + 1, number=self.num_requests, data_parallel_rank=wanted
        )
        self.at[str(name)] = (self.num_requests, None, set(range(n)))
        self.num_requests += 1
        self.place(self.table.add(request))

    @precondition(lambda self: self.table.pending)
    @rule(data=st.data(), is_out_of_reach=st.booleans())
    def a_request_that_waits_is_sent(self, data, is_out_of_reach):
        in_flight = data.draw(st.sampled_from(self.table.pending))
        if self.place(in_flight) and is_out_of_reach:
            name = in_flight.request_id
            self.table.take_back(in_flight)
            self.running = [item for item in self.running if item[1:3] != (name, self.sent[name].number)]
            self.at[name] = (self.at[name][0], None, self.at[name][2])

    def place(self, in_flight):
        """Choose a replica, if one may have the request. Returns whether one may."""
        name, request = in_flight.request_id, in_flight.request
        num_blocks, wanted = (request.max_num_tokens - 1) // 16, request.data_parallel_rank
        number, _, unfinished = self.at[name]
        may_have_it = [r for r, state in self.state.items() if state == "open" and self.num_blocks[r] >= num_blocks]
        if not may_have_it:
            with pytest.raises(EngineDeadError):
                self.table.place(in_flight)
            return False
        replica, sent = self.table.place(in_flight)
        assert replica in may_have_it
        assert replica == wanted or wanted not in may_have_it
        begun = sent.resumption.output_token_ids if sent.resumption else dict.fromkeys(range(request.sampling_params.n))
        assert begun.keys() == unfinished, "what has finished is not computed again"
        self.at[name], self.sent[name] = (number, replica, unfinished), sent
        self.running.append((replica, name, sent.number, set(unfinished)))
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_replica_sends_tokens(self, data):
        item = data.draw(st.sampled_from(self.running))
        replica, name, number, unfinished = item
        ended = data.draw(st.sets(st.sampled_from(sorted(unfinished))))
        sequences = [NewTokens(index, [1], finish_reason="length" if index in ended else None) for index in sorted(unfinished)]
        unfinished -= ended
        output = EngineCoreOutput(name, number, sequences, not unfinished, RequestMetrics(0.0))
        if not unfinished:
            self.running.remove(item)
        is_there = self.table.take_output(replica, output)
        assert is_there == (name in self.at and (self.sent[name].number, self.at[name][1]) == (number, replica))
        if is_there:
            assert output.number == self.at[name][0], "the number by which the frontend knows it"
            self.at[name][2].difference_update(ended)
            if not self.at[name][2] or not unfinished:
                del self.at[name]

    @precondition(lambda self: any(self.table.requests[name].token_ids for name in self.at))
    @rule(data=st.data(), is_stale=st.booleans())
    def a_stop_string_is_found(self, data, is_stale):
        name = data.draw(st.sampled_from(sorted(name for name in self.at if self.table.requests[name].token_ids)))
        number, replica, unfinished = self.at[name]
        index = data.draw(st.sampled_from(sorted(unfinished)))
        told = self.table.stop(StoppedSequence(name, number - is_stale, index, "stop"))
        if is_stale or replica is None:
            assert told is None
        else:
            assert told == (replica, StoppedSequence(name, self.sent[name].number, index, "stop"))
        if not is_stale:
            unfinished.discard(index)
            if not unfinished:
                del self.at[name]

    @rule(name=st.integers(0, 4))
    def a_request_is_aborted(self, name):
        known = self.at.pop(str(name), None)
        assert self.table.remove(str(name)) == (known and known[1])

    @rule(replica=REPLICAS, load=st.builds(ReplicaLoad, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)))
    def a_replica_reports(self, replica, load):
        self.publisher.report(replica, load, self.now)

    @rule(seconds=st.floats(0, 7))
    def time_passes(self, seconds):
        self.now += seconds
        if self.now >= self.publisher.due:
            self.table.update_loads(self.publisher.publish(self.now))

    @invariant()
    def each_request_is_at_one_replica_that_is_there_or_waits(self):
        for replica in range(4):
            names = sorted(in_flight.request_id for in_flight in self.table.requests_at(replica))
            assert names == sorted(name for name, (_, where, _) in self.at.items() if where == replica)
            assert not names or replica in self.state
        waiting = sorted(in_flight.request_id for in_flight in self.table.pending)
        assert waiting == sorted(name for name, (_, where, _) in self.at.items() if where is None)
        assert self.table.requests.keys() == self.at.keys()

    @invariant()
    def counts_are_right(self):
        is_open = [replica for replica, state in self.state.items() if state == "open"]
        assert sorted(self.table.open) == sorted(is_open)
        assert self.table.num_gpu_blocks == min((self.num_blocks[replica] for replica in is_open), default=0)
        for replica, count in enumerate(self.router.num_in_flight):
            if replica in self.state:
                assert count == len(self.table.requests_at(replica))


TestWorld = World.TestCase


def test_loads_are_published_soon_after_a_change_and_now_and_then_without():
    publisher = LoadPublisher(0.0)
    assert publisher.due == 5.0
    publisher.report(0, ReplicaLoad(1, 2, 0.5), 3.0)
    assert publisher.due == 3.0
    assert publisher.publish(3.0) == {0: ReplicaLoad(1, 2, 0.5)}
    assert publisher.due == 8.0
    publisher.report(0, ReplicaLoad(1, 2, 0.5), 3.01)  # no change
    assert publisher.due == 8.0
    publisher.report(1, ReplicaLoad(), 3.02)
    publisher.report(0, ReplicaLoad(), 3.05)
    assert publisher.due == pytest.approx(3.1)
    assert publisher.publish(3.1) == {0: ReplicaLoad(), 1: ReplicaLoad()}
    publisher.forget(0)
    assert publisher.publish(8.1) == {1: ReplicaLoad()}


@pytest.mark.parametrize(
    ("ranks", "workers", "gpus", "seen"),
    [
        (range(4), 1, "0123", ["0", "1", "2", "3"]),
        (range(2, 4), 2, "4567", ["4,5", "6,7"]),
        (range(3), 2, "012", ["0,1", "2,0", "1,2"]),
        (range(2), 4, "01", ["0,1", "0,1"]),
    ],
)
def test_replicas_of_a_machine_take_different_gpus_as_far_as_there_are_enough(ranks, workers, gpus, seen):
    assert divide_gpus(ranks, workers, list(gpus)) == dict(zip(ranks, seen, strict=True))
