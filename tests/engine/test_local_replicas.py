"""The processes of a machine's replicas: which are started again, and when. Theirs are scripted here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from minivllm.data_parallel import messages, processes
from minivllm.data_parallel.engine_core_proc import Note
from minivllm.data_parallel.messages import NodeAlive, NodeWelcome, ReplicaDied
from minivllm.data_parallel.processes import LocalReplicas, RestartPolicy
from minivllm.distributed.sockets import Sockets
from minivllm.engine.engine_core_proc import RETURN_STATUS


class FakeProcess:
    """In place of `ReplicaProcess`."""

    started = []
    is_waiting = False

    def __init__(self, setup, num_threads, gpus):
        self.rank, self.num_threads = setup.engine_index, num_threads
        self.incarnation = len(self.started) + 1
        self.process_id = 1000 + self.incarnation
        self.exit_status = self.ready_since = None
        self.was_killed = self.was_told = self.is_silent = False
        self.patience = None
        self.notes = set()
        self.started.append(self)

    def poll(self):
        return None if self.exit_status is None else f"ended with status {self.exit_status}"

    def kill_if_silent(self, limit):
        self.patience = limit
        if self.is_silent and self.exit_status is None:
            self.kill()
            return True
        return False

    def drain(self):
        self.was_told = True

    def kill(self):
        self.exit_status = -9

    def shutdown(self, grace):
        self.exit_status = -9 if self.exit_status is None else self.exit_status


class Node:
    """Two ranks, a clock, and what the coordinator hears of them."""

    timeout = 10
    ranks = range(2, 4)

    def __init__(self, monkeypatch, tmp_path, **options):
        self.now = 100.0
        monkeypatch.setattr(FakeProcess, "started", [])
        monkeypatch.setattr(processes, "ReplicaProcess", FakeProcess)
        monkeypatch.setattr(processes, "LAST_WORDS_SECONDS", 0.0)
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self.now))
        parallel = SimpleNamespace(
            data_parallel_size=4,
            local_ranks=self.ranks,
            max_replica_deaths=3,
            tensor_parallel_size=1,
            replica_timeout=self.timeout,
        )
        config = SimpleNamespace(parallel_config=parallel, worker_config=SimpleNamespace(device="cpu"), to_bytes=lambda: b"")
        self.sockets = Sockets()
        self.reports, address = self.sockets.bind(zmq.PULL, f"ipc://{tmp_path}/reports")
        welcome = NodeWelcome([], [], address, 0.0)
        self.replicas = LocalReplicas(config, welcome, self.sockets, "node", **{"restart": True} | options)

    @property
    def started(self):
        return [process.rank for process in FakeProcess.started]

    def end(self, status, lived=None, process=-1, notes=()):
        """The newest process, or another, ends. Returns what is told of it."""
        process = FakeProcess.started[process]
        process.notes.update(notes)
        process.ready_since = None if lived is None else self.now - lived
        process.exit_status = status
        [died] = self.replicas.find_ended()
        assert (died.engine_index, died.incarnation) == (process.rank, process.incarnation)
        return died

    def heard(self):
        heard = []
        while self.reports.poll(100):
            heard.append(messages.decode_report(self.reports.recv()))
        return heard


@pytest.fixture
def node(monkeypatch, tmp_path):
    made = Node(monkeypatch, tmp_path)
    yield made
    made.sockets.close()


def test_one_that_lived_for_long_is_started_again_at_once(node):
    assert node.started == [2, 3]
    died = node.end(-9, lived=60.0)
    assert (died.outlook, died.has_died, died.num_deaths) == ("starting", True, 1)
    assert node.replicas.find_ended() == []
    assert node.started == [2, 3, 3]


def test_one_that_keeps_dying_is_started_after_longer_and_longer_pauses_and_then_given_up(node):
    for pause in (1.0, 2.0):
        assert node.end(1).outlook == "starting"
        node.replicas.find_ended()
        count = len(node.started)
        node.now += pause - 0.01
        node.replicas.find_ended()
        assert len(node.started) == count
        node.now += 0.02
        node.replicas.find_ended()
        assert len(node.started) == count + 1
    died = node.end(1, lived=RestartPolicy.SHORT_LIFE_SECONDS - 1)
    assert (died.outlook, died.num_deaths) == ("given up", 3)
    node.now += 1000.0
    node.replicas.find_ended()
    assert not node.replicas.is_done, "the other one is there"
    assert node.started == [2, 3, 3, 3]


def test_one_that_left_is_not_started_again_unless_it_was_to_return(node):
    died = node.end(0, lived=1.0, notes=[Note.FAREWELL])
    assert (died.outlook, died.has_died, died.num_deaths) == ("gone", False, 0)
    died = node.end(RETURN_STATUS, lived=1.0, process=0, notes=[Note.FAREWELL])
    assert (died.outlook, died.has_died, died.num_deaths) == ("starting", False, 0)
    node.replicas.find_ended()
    assert node.started == [2, 3, 2]


@pytest.mark.parametrize("status", [0, RETURN_STATUS])
def test_one_that_ends_without_a_farewell_has_died_whatever_its_exit_status(node, status):
    died = node.end(status, lived=60.0)
    assert (died.outlook, died.has_died, died.num_deaths) == ("starting", True, 1)
    for _ in range(2):
        node.now += 10.0
        node.replicas.find_ended()
        died = node.end(status)
    node.now += 10.0
    node.replicas.find_ended()
    assert node.end(status).outlook == "given up"


def test_deaths_that_are_blamed_on_requests_do_not_make_a_replica_be_given_up(node):
    """Its own death with a suspect at once; the first one, when the request was not suspected yet, as soon as that has been given up."""
    for _ in range(10):
        assert node.end(-9, lived=1.0, notes=[Note.READY]).outlook == "starting"
        node.now += 1.1
        node.replicas.find_ended()
        assert node.end(-11, lived=1.0, notes=[Note.READY, Note.HAS_SUSPECT, Note.DEATHS_EXPLAINED]).outlook == "starting"
        count = len(node.started)
        node.replicas.find_ended()
        assert len(node.started) == count + 1, "at once"


def test_without_restarts_who_dies_stays_dead(monkeypatch, tmp_path):
    node = Node(monkeypatch, tmp_path, restart=False)
    assert node.end(1, lived=60.0).outlook == "gone"
    node.now += 1000.0
    assert node.replicas.find_ended() == [] and node.started == [2, 3]
    node.sockets.close()


def test_a_node_that_is_to_end_ends_though_a_replica_was_about_to_be_started_again(node):
    node.end(1)
    node.replicas.drain()
    assert FakeProcess.started[0].was_told
    node.now += 1000.0
    assert node.replicas.find_ended() == []
    assert node.started == [2, 3] and not node.replicas.is_done
    assert node.end(RETURN_STATUS, process=0).outlook == "gone", "a restart that was asked for before counts no more"
    node.now += 1000.0
    node.replicas.find_ended()
    assert node.replicas.is_done and node.started == [2, 3]


def test_each_computes_with_as_many_threads_as_were_asked_for(monkeypatch, tmp_path):
    node = Node(monkeypatch, tmp_path, num_threads=3)
    assert [process.num_threads for process in FakeProcess.started] == [3, 3]
    node.sockets.close()


def test_only_the_process_that_is_meant_is_killed(node):
    node.replicas.kill(3, 1)
    node.replicas.kill(7, 1)
    assert [process.exit_status for process in FakeProcess.started] == [None, None]
    node.replicas.kill(3, 2)
    assert [process.exit_status for process in FakeProcess.started] == [None, -9]


def test_one_that_hangs_is_killed_and_another_is_started_in_every_state(node, caplog):
    for notes in ([], [Note.READY]):  # while it loads, too, when nobody can hear it yet
        process = FakeProcess.started[-1]
        process.notes.update(notes)
        process.is_silent = True
        [died] = node.replicas.find_ended()
        assert (died.outlook, died.has_died, died.was_killed) == ("starting", True, False)
        assert "Replica 3 shows no sign of life: its process is killed." in caplog.text
        caplog.clear()
        node.now += 5.0
        node.replicas.find_ended()
    assert node.started == [2, 3, 3, 3]
    FakeProcess.started[0].is_silent = True
    node.replicas.drain()
    node.replicas.find_ended()
    assert FakeProcess.started[0].exit_status == -9, "nor does a node wait for one for good when it is to end"


@pytest.mark.parametrize(("timeout", "patience"), [(2, 30.0), (10, 30.0), (60, 180.0)])
def test_how_long_a_replica_may_be_silent(monkeypatch, tmp_path, timeout, patience):
    monkeypatch.setattr(Node, "timeout", timeout)
    node = Node(monkeypatch, tmp_path)
    node.replicas.find_ended()
    assert {process.patience for process in FakeProcess.started} == {patience}
    node.sockets.close()


def test_the_coordinator_hears_that_the_node_is_alive_who_died_and_that_it_ends(node):
    died = node.end(1)
    node.now += 1.1
    node.replicas.find_ended()
    node.replicas.shutdown(told=())
    heard = node.heard()
    assert heard == [NodeAlive("node", [2, 3]), died, NodeAlive("node", [2, 3]), NodeAlive("node", [])]
    assert isinstance(died, ReplicaDied)
    node.replicas.shutdown(told=())


def test_one_that_is_being_started_again_is_ended_with_the_others(node):
    node.end(-9, lived=60.0)
    node.replicas.find_ended()
    assert FakeProcess.started[-1].exit_status is None
    node.replicas.shutdown(told=(2,))
    assert [process.exit_status for process in FakeProcess.started] == [-9, -9, -9]


def test_a_start_that_the_system_refuses_is_tried_again_like_one_that_failed(node, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(processes, "ReplicaProcess", refuse)
    node.end(-9, lived=60.0)
    [died] = node.replicas.find_ended()
    assert (died.engine_index, died.outlook, died.has_died) == (3, "starting", True)
    assert died.end == "its process could not be started: Cannot allocate memory"
    monkeypatch.setattr(processes, "ReplicaProcess", FakeProcess)
    assert node.replicas.find_ended() == [], "there is a pause first"
    node.now += 1.1
    node.replicas.find_ended()
    assert node.started == [2, 3, 3]
    monkeypatch.setattr(processes, "ReplicaProcess", refuse)
    node.end(1)
    node.now += 2.1
    [died] = node.replicas.find_ended()
    assert died.outlook == "given up"


# -- more and fewer --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch, tmp_path):
    """Ranks 0 and 1, ready."""
    monkeypatch.setattr(Node, "ranks", range(2))
    made = Node(monkeypatch, tmp_path)
    for process in FakeProcess.started:
        process.ready_since = made.now - 60.0
    yield made
    made.sockets.close()


def test_more_are_started_with_the_next_look(two):
    two.replicas.scale(4)
    two.replicas.find_ended()
    assert two.started == [0, 1, 2, 3]
    two.replicas.scale(4)
    two.replicas.find_ended()
    assert two.started == [0, 1, 2, 3], "there are as many already"


def test_the_last_finish_what_they_have_and_are_not_started_again(two):
    two.replicas.scale(1)
    first, second = FakeProcess.started
    assert (first.was_told, second.was_told) == (False, True)
    died = two.end(0, lived=60.0, notes=[Note.FAREWELL])
    assert (died.engine_index, died.outlook, died.has_died) == (1, "gone", False)
    two.now += 1000.0
    assert two.replicas.find_ended() == [] and two.started == [0, 1]
    assert two.heard()[-1] == NodeAlive("node", [0])


def test_one_that_dies_while_it_finishes_what_it_has_has_died_and_is_not_started_again(two):
    two.replicas.scale(1)
    died = two.end(-9, lived=60.0)
    assert (died.outlook, died.has_died) == ("gone", True)
    two.now += 1000.0
    assert two.replicas.find_ended() == [] and two.started == [0, 1]


def test_one_that_still_loads_is_ended_at_once_and_has_not_died(two):
    two.replicas.scale(3)
    two.replicas.find_ended()
    two.replicas.scale(2)
    assert FakeProcess.started[-1].exit_status == -9
    died = two.end(-9)
    assert (died.engine_index, died.outlook, died.has_died, died.num_deaths) == (2, "gone", False, 0)


def test_one_that_waits_to_be_started_again_is_not(two):
    assert two.end(-9, lived=1.0).outlook == "starting"
    two.replicas.scale(1)
    two.now += 1000.0
    two.replicas.find_ended()
    assert two.started == [0, 1]


def test_one_that_was_to_leave_and_is_wanted_again_is_replaced_when_it_has_left(two):
    two.replicas.scale(1)
    two.replicas.scale(2)
    died = two.end(0, lived=60.0, notes=[Note.FAREWELL])
    assert (died.engine_index, died.outlook, died.has_died) == (1, "starting", False)
    two.replicas.find_ended()
    assert two.started == [0, 1, 1]
    assert two.end(0, lived=60.0, notes=[Note.FAREWELL]).outlook == "gone", "somebody told it to end"


def test_one_that_was_given_up_gets_another_chance_when_it_has_been_left_out(two):
    for _ in range(3):
        died = two.end(1)
        two.now += 100.0
        two.replicas.find_ended()
    assert died.outlook == "given up"
    two.replicas.scale(1)
    two.replicas.scale(2)
    two.replicas.find_ended()
    assert two.started[-1] == 1 and FakeProcess.started[-1].exit_status is None


# -- elsewhere -------------------------------------------------------------------------------------------------------


def test_those_that_are_started_elsewhere_find_out_their_threads_there_and_may_wait_for_room(monkeypatch, tmp_path):
    def refuse(*arguments):
        raise AssertionError("not on this machine")

    node = Node(monkeypatch, tmp_path, start=lambda setup, num_threads: FakeProcess(setup, num_threads, None))
    monkeypatch.setattr(processes, "ReplicaProcess", refuse)
    assert [process.num_threads for process in FakeProcess.started] == [None, None]
    assert node.replicas.waiting == set()
    FakeProcess.started[1].is_waiting = True
    assert node.replicas.waiting == {3}
    node.end(-9, lived=60.0)
    node.replicas.find_ended()
    assert node.started == [2, 3, 3]
    node.sockets.close()
