"""Which process has a rank, and whether what it says counts: worked examples, then a network that delays, loses and cuts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.data_parallel.liveness import MAX_DEAD, Join, Lose, PeerState, ReplicaLiveness, Withdraw
from minivllm.engine.core_messages import CoreDraining, CoreFailed, CoreReady, EngineCoreOutputs, Heartbeat, SchedulerStats

OUTPUTS = EngineCoreOutputs([], 0.0, SchedulerStats())
READY = CoreReady(100, process_id=7)


class Frontend:
    """A `ReplicaLiveness` of two ranks, and a clock. Messages are numbered as a process numbers them."""

    def __init__(self, **options):
        self.liveness = ReplicaLiveness(2, 10.0, **{"restarts": True, "expected": range(2)} | options)
        self.now, self.numbers = 1.0, {}

    def hear(self, message, rank=0, incarnation=5, skip=0):
        number = self.numbers.get((rank, incarnation), 0) + skip
        self.numbers[rank, incarnation] = number + 1
        return self.liveness.hear(rank, incarnation, number, message, self.now)

    def state(self, rank=0):
        return self.liveness.state_of(rank)

    def begin(self, rank=0, incarnation=5):
        self.liveness.connect(rank, incarnation)
        assert self.hear(READY, rank, incarnation) == [Join(rank, 100)]


@pytest.fixture
def frontend():
    made = Frontend()
    made.begin()
    return made


def test_a_replica_joins_when_it_is_ready_and_connected_in_either_order():
    frontend = Frontend()
    assert frontend.state() == "starting"
    assert frontend.liveness.connect(0, 5) == []
    assert frontend.hear(READY) == [Join(0, 100)]
    assert frontend.state() == "ready"
    assert frontend.hear(READY, rank=1) == []
    assert frontend.liveness.connect(1, 5) == [Join(1, 100)]
    assert frontend.hear(Heartbeat(0, 100, 7)) == [], "it is there already"


def test_a_heartbeat_stands_in_for_a_ready_message_that_was_lost():
    frontend = Frontend()
    frontend.liveness.connect(0, 5)
    assert frontend.hear(Heartbeat(0, 50, 7), skip=1) == [Join(0, 50)]
    assert frontend.liveness.peers[0].ready.process_id == 7


def test_a_gap_in_the_numbers_fences_until_the_next_heartbeat(frontend):
    assert frontend.hear(OUTPUTS, skip=1) == [Lose(0, "messages from it were lost")]
    assert frontend.state() == "unreachable" and not frontend.liveness.is_believed(0, 5)
    assert frontend.hear(OUTPUTS) == []
    assert frontend.hear(Heartbeat(0, 100, 7)) == [Join(0, 100)]
    assert frontend.liveness.is_believed(0, 5)


def test_a_gap_in_front_of_the_message_that_announces_its_leaving_is_no_exception(frontend):
    lose, withdraw = frontend.hear(CoreDraining(), skip=1)
    assert lose == Lose(0, "messages from it were lost")
    assert withdraw == Withdraw(0, PeerState.FENCED)


def test_a_new_connection_fences(frontend):
    [lose] = frontend.liveness.connect(0, 5)
    assert "connection broke" in lose.cause and not lose.has_died
    assert frontend.hear(Heartbeat(0, 100, 7)) == [Join(0, 100)]


def test_a_process_that_is_back_after_a_cut_does_not_take_its_successors_place(frontend):
    frontend.liveness.connect(0, 6)
    frontend.hear(READY, incarnation=6)
    assert frontend.liveness.connect(0, 5) == []
    assert frontend.hear(Heartbeat(0, 100, 7), incarnation=5) == []
    assert frontend.state() == "ready" and frontend.liveness.is_believed(0, 6)
    assert frontend.liveness.peers[0].connected == 6, "nothing is sent to the other one"


def test_silence_fences_and_the_next_word_ends_it_though_others_keep_it_busy(frontend):
    frontend.begin(rank=1)
    frontend.now = 9.0
    frontend.hear(OUTPUTS)
    frontend.now = 11.5
    [lose] = frontend.liveness.find_silent(frontend.now)
    assert lose == Lose(1, "nothing was heard from it for 10 seconds")
    assert frontend.hear(OUTPUTS, rank=1) == []
    assert frontend.hear(Heartbeat(1, 100, 7), rank=1) == [Join(1, 100)]
    frontend.now = 50.0
    frontend.liveness.excuse_silence(frontend.now)
    assert frontend.liveness.find_silent(frontend.now) == [], "it was us who did not listen"


def test_a_late_notice_of_a_death_is_not_taken_for_that_of_the_next_process(frontend):
    assert frontend.liveness.connect(0, 6) == []
    [lose, join] = frontend.hear(READY, incarnation=6)
    assert lose.has_died and join == Join(0, 100)
    assert frontend.liveness.note_death(0, 5, "its process was killed by SIGKILL") == []
    assert frontend.state() == "ready"
    assert frontend.hear(CoreFailed("", "late"), incarnation=5) == []
    assert frontend.hear(Heartbeat(0, 100, 7), incarnation=5) == []
    assert frontend.hear(OUTPUTS, incarnation=6) == [] and frontend.liveness.is_believed(0, 6)


def test_a_notice_of_the_death_of_a_process_that_nobody_has_heard_loses_what_the_one_before_had(frontend):
    [lose] = frontend.liveness.note_death(0, 6, "its process ended with status 1", outlook="given up")
    assert lose.has_died and frontend.state() == "given up"
    assert frontend.hear(Heartbeat(0, 100, 7)) == [Join(0, 100)], "it was there all the time"


def test_a_straggler_of_an_older_process_that_was_never_heard_is_ignored(frontend):
    assert frontend.hear(READY, incarnation=4) == []
    assert frontend.liveness.is_believed(0, 5)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_death_is_told_once_whoever_tells_it_first(restarts):
    frontend = Frontend(restarts=restarts)
    frontend.begin()
    assert frontend.hear(CoreFailed("ValueError", "no")) == [Lose(0, "ValueError: no", has_died=True)]
    assert frontend.state() == ("starting" if restarts else "gone")
    assert frontend.liveness.note_death(0, 5, "its process ended with status 1", outlook="given up") == []
    assert frontend.state() == "given up" and not frontend.liveness.peers[0].may_return
    assert frontend.hear(Heartbeat(0, 100, 7)) == [], "sent before it ended"


def test_a_worker_that_was_killed_may_have_been_killed_from_outside(frontend):
    [lose] = frontend.hear(CoreFailed("", "Rank 1 was killed by SIGKILL.", was_killed=True))
    assert lose.has_died and lose.was_killed


def test_one_that_leaves_is_told_so_again_and_again_until_it_has_left(frontend):
    assert frontend.hear(CoreDraining()) == [Withdraw(0, PeerState.READY)]
    assert frontend.state() == "draining" and frontend.liveness.is_believed(0, 5)
    assert frontend.hear(Heartbeat(0, 100, 7, is_draining=True)) == [Withdraw(0, PeerState.DRAINING)]
    assert frontend.hear(CoreDraining(is_drained=True, returns=True)) == [Lose(0, "it left", has_left=True)]
    assert frontend.state() == "starting" and frontend.liveness.peers[0].may_return
    assert frontend.liveness.note_death(0, 5, "its process ended with status 75", has_died=False, outlook="starting") == []
    frontend.liveness.connect(0, 6)
    assert frontend.hear(READY, incarnation=6) == [Join(0, 100)]


def test_one_that_is_fenced_while_it_leaves_gets_no_requests_when_it_is_heard_again(frontend):
    frontend.hear(CoreDraining())
    assert frontend.hear(OUTPUTS, skip=1) == [Lose(0, "messages from it were lost")]
    assert frontend.hear(Heartbeat(0, 100, 7, is_draining=True)) == [Withdraw(0, PeerState.FENCED)]
    assert frontend.state() == "draining"


def test_a_process_that_should_have_ended_is_hopeless_and_one_that_loads_is_not(frontend):
    frontend.hear(CoreFailed("", "later"), rank=1)
    assert frontend.liveness.find_hopeless(31.0) == []
    assert frontend.liveness.find_hopeless(31.5) == [(0, 5), (1, 5)]
    loading = Frontend()
    loading.hear(CoreDraining())  # anything that it says before it is ready
    assert loading.liveness.find_hopeless(1000.0) == []


def test_how_many_deaths_are_remembered_is_limited(frontend):
    for incarnation in range(6, 6 + 2 * MAX_DEAD):
        frontend.liveness.note_death(0, incarnation, "again")
    assert len(frontend.liveness.peers[0].dead) == MAX_DEAD


# -- a network that delays, loses and cuts ---------------------------------------------------------------------------


@dataclass
class Process:
    """A replica's process: what it has sent and nobody has read, and what was sent to it.

    Outputs name their `epoch`: the `AbortClientRequests` with which the process last started again. Within an epoch they are counted.
    """

    rank: int
    incarnation: int
    epoch: int = -1
    num_outputs: int = 0
    num_sent: int = 0
    is_ready: bool = False
    is_draining: bool = False
    is_told: bool = False
    is_connected: bool = False
    outbox: list[tuple[int, object, tuple[int, int] | None]] = field(default_factory=list)
    inbox: list[object] = field(default_factory=list)
    end: str = ""

    def send(self, message, position=None):
        self.outbox.append((self.num_sent, message, position))
        self.num_sent += 1

    def step(self):
        """Read what has come, and generate."""
        for message in self.inbox:
            if message == "drained":
                self.is_told = True
            else:
                self.epoch, self.num_outputs = message, 0
        self.inbox.clear()
        if self.is_ready:
            self.send(EngineCoreOutputs([], 0.0, SchedulerStats(), engine_index=self.rank), (self.epoch, self.num_outputs))
            self.num_outputs += 1
        if self.is_draining and self.is_told:
            self.send(CoreDraining(self.rank, is_drained=True))
            self.end = "left"


class Network:
    """Two ranks, their processes, a frontend, and everything that can go wrong between them."""

    SIZE, TIMEOUT = 2, 10.0

    def __init__(self, rng):
        self.rng, self.now = rng, 0.0
        self.liveness = ReplicaLiveness(self.SIZE, self.TIMEOUT, restarts=True, expected=range(self.SIZE))
        self.processes = []
        self.notices = []
        """Of deaths, on their way: rank and incarnation, in any order."""
        self.hellos = []
        self.epochs = 0
        self.session = {}
        """By rank that is ready or leaves: the epoch in which it was taken in, and the outputs of that epoch that were believed."""
        for rank in range(self.SIZE):
            self.start(rank)

    def addressed(self, rank):
        """The process of a rank that the frontend sends to."""
        incarnation = self.liveness.peers[rank].incarnation
        return next(process for process in self.processes if process.incarnation == incarnation)

    def current(self, rank):
        """The newest process of a rank."""
        return [process for process in self.processes if process.rank == rank][-1]

    # -- what can happen

    def start(self, rank):
        process = Process(rank, len(self.processes) + 1)
        self.processes.append(process)
        self.connect(process)

    def connect(self, process):
        process.is_connected = True
        self.hellos.append(process)

    def cut(self):
        """A connection breaks: what is on it is lost, or in one direction only. It is made again."""
        process = self.rng.choice(self.processes)
        if not process.end and process.is_connected:
            if self.rng.random() < 0.7:
                process.outbox.clear()
            if self.rng.random() < 0.7:
                process.inbox.clear()
                self.connect(process)

    def ready(self):
        process = self.rng.choice(self.processes)
        if not process.end and not process.is_ready:
            process.is_ready = True
            process.send(CoreReady(10, process.rank))

    def beat(self, process=None):
        process = process or self.rng.choice(self.processes)
        if not process.end and process.is_ready:
            process.send(Heartbeat(process.rank, 10, 1, process.is_draining))

    def step(self, process=None):
        process = process or self.rng.choice(self.processes)
        if not process.end:
            process.step()
            if process.end:
                self.notices.append((process.rank, process.incarnation))

    def drain(self):
        process = self.rng.choice(self.processes)
        if not process.end and process.is_ready and not process.is_draining:
            process.is_draining = True
            process.send(CoreDraining(process.rank))

    def die(self):
        process = self.rng.choice(self.processes)
        if not process.end:
            process.end = "died"
            if self.rng.random() < 0.5:
                process.outbox.clear()
            self.notices.append((process.rank, process.incarnation))

    def restart(self):
        rank = self.rng.randrange(self.SIZE)
        if self.current(rank).end:
            self.start(rank)

    def wait(self):
        self.now += self.rng.choice([0.1, 1.0, 12.0])

    # -- what the frontend hears

    def hear_hello(self):
        if self.hellos:
            process = self.hellos.pop(0)
            self.carry_out(self.liveness.connect(process.rank, process.incarnation))

    def deliver(self, process=None):
        while self.hellos:
            self.hear_hello()
        process = process or self.rng.choice(self.processes)
        if process.outbox:
            number, message, position = process.outbox.pop(0)
            rank = process.rank
            self.carry_out(self.liveness.hear(rank, process.incarnation, number, message, self.now))
            if isinstance(message, EngineCoreOutputs) and self.liveness.is_believed(rank, process.incarnation):
                epoch, outputs = self.session[rank]
                if position[0] == epoch:
                    outputs.append(position[1])
                    assert outputs == list(range(len(outputs))), "an output is missing, or came twice"

    def hear_notice(self):
        if self.notices:
            rank, incarnation = self.notices.pop(self.rng.randrange(len(self.notices)))
            self.carry_out(self.liveness.note_death(rank, incarnation, "it died", outlook="starting"))

    def check(self):
        self.carry_out(self.liveness.find_silent(self.now))

    def carry_out(self, decisions):
        for decision in decisions:
            rank = decision.rank
            if isinstance(decision, Lose):
                del self.session[rank]
                continue
            receiver = self.addressed(rank)
            if isinstance(decision, Withdraw) and decision.previous in (PeerState.READY, PeerState.DRAINING):
                assert rank in self.session
            else:
                assert rank not in self.session, "it was lost first"
                self.epochs += 1
                self.session[rank] = self.epochs, []
                receiver.inbox.append(self.epochs)
            if isinstance(decision, Withdraw):
                receiver.inbox.append("drained")


@settings(max_examples=settings().max_examples * 5)
@given(st.integers(0, 2**32))
def test_no_output_is_missing_and_who_is_there_is_found(seed):
    rng = random.Random(seed)
    network = Network(rng)
    often = [network.step, network.deliver, network.deliver, network.beat, network.ready, network.hear_hello]
    rarely = [network.cut, network.drain, network.die, network.restart, network.wait, network.hear_notice, network.check]
    for _ in range(rng.randint(1, 150)):
        rng.choice(often * 3 + rarely)()
        members = {rank for rank, peer in enumerate(network.liveness.peers) if peer.is_member}
        assert members == network.session.keys()
    for turn in range(6):  # now nothing goes wrong any more
        network.now += 1.0
        for rank in range(network.SIZE):
            if network.current(rank).end and turn < 3:
                network.start(rank)
            process = network.current(rank)
            if not process.end and not process.is_ready:
                process.is_ready = True
                process.send(CoreReady(10, rank))
        while network.notices:
            network.hear_notice()
        for process in network.processes:
            network.beat(process)
            network.step(process)
            while process.outbox:
                network.deliver(process)
        network.check()
    for rank in range(network.SIZE):
        process, state = network.current(rank), network.liveness.state_of(rank)
        assert state == ("ready" if not process.end else "starting" if process.end == "died" else state), (state, process)
        assert state != "draining", "who leaves has left by now"
        if state == "ready":
            epoch, outputs = network.session[rank]
            assert outputs and process.epoch == epoch, "it started again when it was taken in"
