"""The states of a request, in random interleavings of what can happen: no stream is lost, no token comes twice, and who kills is found."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.data_parallel.blame import MAX_DEATHS_IN_COMPANY, MAX_KILLS, NUM_TRIALS
from minivllm.data_parallel.failover import Failover, give_up_error
from minivllm.data_parallel.request_table import RequestTable
from minivllm.data_parallel.routing import make_router
from minivllm.engine.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    NewTokens,
    RequestsFailed,
    SchedulerStats,
    StoppedSequence,
)
from minivllm.engine.input_processor import ProcessedRequest
from minivllm.engine.output_processor import OutputProcessor
from minivllm.errors import EngineDeadError
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams

LENGTH = 6
MOST_DEATHS = MAX_DEATHS_IN_COMPANY + NUM_TRIALS


def token_at(seed, index, position):
    """What every replica computes there."""
    return random.Random(f"{seed}/{index}/{position}").randrange(1000)


@dataclass
class FakeReplica:
    """A process: the requests that it has, with their output so far; and what it has sent and nobody has read."""

    requests: dict[str, tuple[EngineCoreRequest, dict[int, list[int]]]] = field(default_factory=dict)
    is_stopped: bool = False
    is_dead: bool = False
    """Whether it answers nothing any more, though what it has sent is still read."""

    def add(self, request):
        assert request.request_id not in self.requests, "it is there already"
        output = request.resumption.output_token_ids if request.resumption else {i: [] for i in range(request.sampling_params.n)}
        assert output, "there is nothing to go on with"
        self.requests[request.request_id] = request, {index: list(tokens) for index, tokens in output.items()}

    def step(self, rng):
        """Advance some requests. Returns their outputs; or the name of the one that killed the process."""
        outputs = []
        for request_id in rng.sample(sorted(self.requests), rng.randint(0, len(self.requests))):
            request, output = self.requests[request_id]
            if any(len(tokens) >= request.priority for tokens in output.values()):
                return request_id
            sequences = []
            for index, tokens in output.items():
                if len(tokens) == LENGTH:
                    continue
                tokens.append(token_at(request.seed, index, len(tokens)))
                sequences.append(NewTokens(index, tokens[-1:], finish_reason="length" if len(tokens) == LENGTH else None))
            finished = all(len(tokens) == LENGTH for tokens in output.values())
            if finished:
                del self.requests[request_id]
            metrics = RequestMetrics(0.0)
            outputs.append(EngineCoreOutput(request_id, request.number, sequences, finished, metrics))
        return outputs


class World:
    """A frontend, and replicas that do what a random number says. `priority` is, here, the position at which a request kills."""

    def __init__(self, rng, size, by_sigkill):
        self.rng, self.size, self.by_sigkill = rng, size, by_sigkill
        self.table = RequestTable(make_router("least-loaded"), 16)
        self.processor = OutputProcessor(None)
        self.failover = Failover(self.table, self.send, self.clear, timeout=60.0)
        self.replicas: dict[int, FakeReplica] = {}
        self.old: list[tuple[int, FakeReplica]] = []
        """Stopped processes that were given up, and may go on."""
        self.in_transit: list[tuple[int, list[EngineCoreOutput] | int]] = []
        """Outputs, and numbers with which replicas say that they have aborted what they had."""
        self.states, self.aborted, self.given_up, self.deaths_by = {}, set(), set(), {}
        self.most_deaths = 0
        for index in range(size):
            self.start(index)

    def send(self, index, request):
        suspects = self.suspects() - {request.request_id}
        if request.request_id in self.suspects():
            assert not suspects & self.replicas[index].requests.keys(), "two suspects at one replica"
        alone = [item.request_id for item in self.table.requests.values() if item.is_alone and item.replica == index]
        assert not alone, "it is to be alone"
        self.replicas[index].add(request)
        return True

    def clear(self, index, number):
        if not self.replicas[index].is_dead:
            self.replicas[index].requests.clear()
            self.in_transit.append((index, number))
        return True

    def suspects(self):
        return {name for name, item in self.table.requests.items() if item.is_suspect}

    def start(self, index):
        self.replicas[index] = FakeReplica()
        self.table.take_in(index, 100)
        self.failover.retry_pending()

    def submit(self, poisonous):
        number = len(self.states)
        kills_at = self.rng.randrange(LENGTH) if poisonous else LENGTH + 1
        params = SamplingParams(max_tokens=LENGTH, n=self.rng.choice([1, 1, 3]))
        request = EngineCoreRequest(f"r{number}", [1, 2], params, 2 + LENGTH, seed=number, priority=kills_at)
        state = self.processor.add_request(ProcessedRequest(None, request))
        self.states[state.request.request_id] = state
        self.failover.submit(state.request)

    def abort(self):
        unfinished = sorted(self.processor.states)
        if unfinished:
            request_id = self.rng.choice(unfinished)
            self.aborted.add(request_id)
            self.processor.abort_request(request_id)
            index = self.table.remove(request_id)
            if index is not None and index in self.replicas:
                self.replicas[index].requests.pop(request_id, None)
            self.failover.retry_pending()

    def stop_sequence(self):
        """The frontend finds a stop string in a sequence: it gets no more tokens, wherever the request is."""
        for request_id in sorted(self.processor.states):
            state = self.processor.states[request_id]
            unfinished = [index for index, text in state.texts.items() if not text.output.finished]
            if len(unfinished) > 1:
                state.texts[unfinished[0]].output.finish_reason = "stop"
                told = self.table.stop(StoppedSequence(request_id, state.request.number, unfinished[0], "."))
                if told is not None:
                    request, output = self.replicas[told[0]].requests.get(request_id, (None, {}))
                    if request is not None and request.number == told[1].number:
                        output.pop(unfinished[0], None)
                return

    def step(self):
        running = [index for index, replica in self.replicas.items() if not replica.is_stopped]
        if running:
            index = self.rng.choice(running)
            outputs = self.replicas[index].step(self.rng)
            if isinstance(outputs, str):
                self.deaths_by[outputs] = self.deaths_by.get(outputs, 0) + 1
                self.lose(index, has_died=True, was_killed=self.by_sigkill)
            else:
                self.in_transit.append((index, outputs))

    def deliver(self):
        """Outputs arrive, those of a replica in order."""
        if self.in_transit:
            first = self.rng.randrange(len(self.in_transit))
            index = self.in_transit[first][0]
            place = next(i for i, (sender, _) in enumerate(self.in_transit) if sender == index)
            _, outputs = self.in_transit.pop(place)
            self.take(index, outputs)

    def take(self, index, outputs):
        if index not in self.replicas:
            return
        if isinstance(outputs, int):
            self.failover.note_cleared(index, outputs)
        else:
            outputs = [output for output in outputs if self.table.take_output(index, output)]
            self.processor.process_outputs(EngineCoreOutputs(outputs, 0.0, SchedulerStats(), engine_index=index))
        self.failover.retry_pending()

    def lose(self, index, *, has_died, was_killed=False, last_words=True):
        self.replicas[index].is_dead = True
        while last_words and any(sender == index for sender, _ in self.in_transit):
            place = next(i for i, (sender, _) in enumerate(self.in_transit) if sender == index)
            self.take(index, self.in_transit.pop(place)[1])
        self.in_transit = [(sender, outputs) for sender, outputs in self.in_transit if sender != index]
        self.replicas.pop(index)
        failed = self.failover.lose(index, has_died=has_died, was_killed=was_killed)
        for request_id, number in failed.requests if failed else ():
            assert self.processor.states[request_id].request.number == number
            self.given_up.add(request_id)
            self.processor.abort_request(request_id)
        self.failover.retry_pending()

    def kill(self):
        if self.replicas:
            self.lose(self.rng.choice(sorted(self.replicas)), has_died=True, was_killed=True, last_words=self.rng.random() < 0.5)

    def stop(self):
        if self.replicas:
            self.replicas[self.rng.choice(sorted(self.replicas))].is_stopped = True

    def miss(self):
        """A stopped replica has been silent for too long."""
        if stopped := [index for index, replica in self.replicas.items() if replica.is_stopped]:
            index = self.rng.choice(stopped)
            self.old.append((index, self.replicas[index]))
            self.lose(index, has_died=False)

    def wake(self):
        """A stopped replica goes on: with what it had, if it is not too late, and else it says things that nobody wants to hear."""
        for replica in self.replicas.values():
            replica.is_stopped = False
        if self.old:
            index, replica = self.old.pop()
            outputs = replica.step(self.rng)
            if index in self.replicas:
                self.in_transit.append((index, outputs if isinstance(outputs, list) else []))  # the rank has another process now
            else:
                self.start(index)

    def restart(self):
        if gone := [index for index in range(self.size) if index not in self.replicas]:
            self.start(self.rng.choice(gone))

    def check(self):
        self.most_deaths = max([self.most_deaths, *(item.num_deaths for item in self.table.requests.values())])
        at_replicas = [item.request_id for index in range(self.size) for item in self.table.requests_at(index)]
        waiting = [item.request_id for item in self.table.pending]
        assert sorted(at_replicas + waiting) == sorted(self.processor.states), "each request is at one replica, or waits"
        for request_id, state in self.processor.states.items():
            known = {index: text.output.token_ids for index, text in state.texts.items() if not text.output.finished}
            assert self.table.requests[request_id].token_ids == known, "the client knows what the frontend does"
        suspects = {self.table.requests[request_id].replica for request_id in self.suspects()}
        turns = suspects - {None} | self.failover._reserved()
        assert not (waiting and self.table.open) or turns, "requests wait only for their turn"


def run(seed, *, num_killers=0, with_kills=True, by_sigkill=False):
    rng = random.Random(seed)
    world = World(rng, rng.randint(1, 4), by_sigkill)
    events = (
        [world.step] * 8
        + [world.deliver] * 8
        + [world.abort, world.stop_sequence, world.restart, world.stop, world.miss, world.wake]
    )
    events += [lambda: world.submit(False)] * 3
    events += [world.kill] * (2 * with_kills)
    num_events = rng.randint(1, 120)
    killers_come = [rng.randrange(num_events) for _ in range(num_killers)]
    for i in range(num_events):
        rng.choice(events)()
        for _ in range(killers_come.count(i)):
            world.submit(True)
        world.check()
    for _ in range(3000):  # now everything goes well
        if not world.processor.states:
            break
        world.wake()
        world.restart()
        world.step()
        while world.in_transit:
            world.deliver()
        world.check()
    assert not world.processor.states, "all have come to an end"
    assert not world.table.requests and not world.table.pending
    for request_id, state in world.states.items():
        for index, text in state.texts.items():
            expected = [token_at(state.request.seed, index, position) for position in range(LENGTH)]
            tokens = text.output.token_ids
            assert tokens == expected[: len(tokens)], "no token twice, none missing, none of another"
        if request_id not in world.aborted | world.given_up:
            lengths = [len(text.output.token_ids) for text in state.texts.values() if text.output.finish_reason != "stop"]
            assert lengths and set(lengths) == {LENGTH} and len(state.texts) == state.params.n
    return world


@settings(max_examples=settings().max_examples * 10)
@given(st.integers(0, 2**32))
def test_streams_go_on_whatever_happens(seed):
    world = run(seed)
    assert world.most_deaths <= MOST_DEATHS + MAX_KILLS


@pytest.mark.parametrize("num_kills_elsewhere", [0, 1, 2, 3])
def test_who_is_there_again_and_again_when_somebody_kills_replicas_from_outside_is_not_blamed(num_kills_elsewhere):
    """Each kill of a replica without a suspect, which nothing explains, allows one more; but there is an end."""
    world = World(random.Random(0), 3, by_sigkill=False)
    for _ in range(num_kills_elsewhere):
        world.lose(2, has_died=True, was_killed=True)
        world.start(2)
    world.submit(False)
    for _ in range(MOST_DEATHS + min(num_kills_elsewhere, MAX_KILLS)):
        assert not world.given_up
        while world.in_transit:
            world.deliver()
        index = world.table.requests["r0"].replica
        world.lose(index, has_died=True, was_killed=True)
        world.start(index)
    assert world.given_up == {"r0"}


@settings(max_examples=settings().max_examples * 3)
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_who_kills_replicas_is_given_up_and_nobody_else_is(seed, num_killers, by_sigkill):
    world = run(seed, num_killers=num_killers, with_kills=False, by_sigkill=by_sigkill)
    killers = {request_id for request_id, state in world.states.items() if state.request.priority <= LENGTH}
    assert killers <= world.given_up | world.aborted
    assert all(deaths <= (MOST_DEATHS if by_sigkill else MAX_DEATHS_IN_COMPANY + 1) for deaths in world.deaths_by.values())
    assert world.given_up <= killers


def test_the_sender_of_a_request_that_is_given_up_is_told_why():
    error = give_up_error("replica 3", "its process was killed by SIGSEGV")
    assert "was given up" in str(error) and str(error).endswith("That was replica 3: its process was killed by SIGSEGV.")


def test_requests_wait_for_a_replica_for_a_while_and_then_new_ones_are_refused_until_there_is_one():
    table, error = RequestTable(make_router("least-loaded"), 16), EngineDeadError("none")
    failover = Failover(table, lambda index, request: True, lambda index, number: True, timeout=60.0)
    request = EngineCoreRequest("r", [1, 2], SamplingParams(), 10, number=7)
    failover.submit(request)
    assert failover.give_up_after_timeout(100.0, error) is None and failover.give_up_after_timeout(160.0, error) is None
    assert failover.give_up_after_timeout(161.0, error) == RequestsFailed([("r", 7)], error)
    assert not table.requests and failover.give_up_after_timeout(162.0, error) is None and failover.has_timed_out
    table.take_in(0, 100)
    failover.give_up_after_timeout(163.0, error)
    assert not failover.has_timed_out
    assert failover.submit(request) == 0 and not table.pending


def make_failover(num_replicas, send=lambda rank, request: True):
    table = RequestTable(make_router("least-loaded"), 16)
    for rank in range(num_replicas):
        table.take_in(rank, 100)
    return table, Failover(table, send, lambda rank, number: True, timeout=60.0)


def request_of(number, max_num_tokens=10):
    return EngineCoreRequest(f"r{number}", [1, 2], SamplingParams(), max_num_tokens, number=number)


def test_suspects_that_wait_for_their_turn_cost_nothing(monkeypatch):
    """A replica had a thousand requests when it died: two go on at the others, and nobody asks for the rest again and again."""
    table, failover = make_failover(1)
    for number in range(1000):
        failover.submit(request_of(number))
    failover.lose(0, has_died=True)
    for rank in (1, 2):
        table.take_in(rank, 100)
    places, scans = [], []
    place, find = table.place, failover._replicas_with_suspects
    monkeypatch.setattr(table, "place", lambda *given: places.append(given) or place(*given))
    monkeypatch.setattr(failover, "_replicas_with_suspects", lambda: scans.append(1) or find())
    assert [in_flight.replica for in_flight in failover.retry_pending()] == [1, 2]
    assert failover.retry_pending() == [] and len(table.pending) == 998
    assert (len(places), len(scans)) == (2, 2)


def test_a_request_that_is_too_large_for_the_open_replicas_times_out_though_others_are_placed():
    table, failover = make_failover(1)
    error = EngineDeadError("none")
    failover.submit(request_of(0, max_num_tokens=16 * 200))
    assert failover.give_up_after_timeout(100.0, error) is None
    failover.submit(request_of(1))
    assert failover.retry_pending() == [] and failover.give_up_after_timeout(160.0, error) is None
    assert failover.give_up_after_timeout(161.0, error) == RequestsFailed([("r0", 0)], error)
    assert not failover.has_timed_out, "there is a replica: smaller requests are welcome"
    assert list(table.requests) == ["r1"]


def test_a_request_that_could_not_be_sent_is_not_counted_as_resumed():
    table, failover = make_failover(1, lambda rank, request: rank == 1)
    failover.submit(request_of(0))
    assert table.pending and not table.open
    table.take_in(1, 100)
    assert failover.retry_pending() == [] and not table.pending


def test_a_request_that_cannot_be_encoded_leaves_nothing_behind():
    def refuse(rank, request):
        raise UnicodeEncodeError("utf-8", "", 0, 1, "surrogates not allowed")

    table, failover = make_failover(1, refuse)
    with pytest.raises(UnicodeEncodeError):
        failover.submit(request_of(0))
    assert not table.requests and not table.pending and table._router.num_in_flight == [0]


def test_a_request_that_is_given_up_is_counted_at_the_replica_that_it_killed_last():
    table, failover = make_failover(2)
    failover.submit(request_of(0))
    for rank in (0, 1):
        assert table.requests["r0"].replica == rank and failover.lose(rank, has_died=True) is None
        failover.retry_pending()
        table.take_in(rank, 100)
    failover.retry_pending()
    assert table.requests["r0"].replica is None, "it goes on alone: a replica is being cleared for it"
    assert failover.note_cleared(0, 1).replica == 0
    failed = failover.lose(0, has_died=True, cause="it broke")
    assert (failed.requests, failed.engine_index) == ([("r0", 0)], 0)
    assert failover.excused == {0, 1}
