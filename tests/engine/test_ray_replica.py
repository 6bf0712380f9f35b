"""A replica on a Ray cluster, as the command that serves sees it: its actor answers, is lost, or has no place. Ray is scripted here."""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace

import pytest

from minivllm import __version__
from minivllm.data_parallel import ray_replicas
from minivllm.data_parallel.engine_core_proc import Note, ReplicaSetup
from minivllm.data_parallel.ray_replicas import RayReplica, RayReplicas
from minivllm.data_parallel.replica_actor import ActorPlace, Clock, ProcessNews, ReplicaActor
from minivllm.executor.processes import GRACE_SECONDS, START_SECONDS


class RayActorError(Exception):
    """As in `ray.exceptions`."""


class ActorUnavailableError(RayActorError):
    """As in `ray.exceptions`."""


class Actor:
    """What it was asked, and the answers that it owes."""

    def __init__(self):
        self.asked = []
        for name in ("introduce", "start", "watch", "kill", "drain"):
            setattr(self, name, SimpleNamespace(remote=lambda *given, name=name: self._ask(name, given)))

    def _ask(self, name, given):
        answer = concurrent.futures.Future()
        self.asked.append((name, given, answer))
        return SimpleNamespace(future=lambda: answer)

    @property
    def names(self):
        return [name for name, _, _ in self.asked]

    def answer(self, value):
        [owed] = [answer for name, _, answer in self.asked if not answer.done() and name in ("introduce", "start", "watch")]
        owed.set_exception(value) if isinstance(value, Exception) else owed.set_result(value)


class Cluster:
    """In place of `RayReplicas`, with a clock."""

    num_replicas, patience, needs = 3, 30.0, "1 free CPU"
    has_room, num_looks = False, 0

    def __init__(self, monkeypatch):
        self.now, self.actors, self.killed, self.lost = 100.0, [], [], []
        errors = SimpleNamespace(RayActorError=RayActorError, ActorUnavailableError=ActorUnavailableError)
        self.ray = SimpleNamespace(exceptions=errors, is_initialized=lambda: True, kill=self.killed.append)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(ray_replicas, "time", clock)
        self.replica = RayReplica(self, SimpleNamespace(engine_index=2, incarnation=7), None)

    def sleep(self, seconds):
        self.now += seconds

    def make_actor(self):
        self.actors.append(Actor())
        return self.actors[-1]

    def look_for_room(self):
        self.num_looks += 1
        found = concurrent.futures.Future()
        found.set_result(self.has_room)
        return found

    def note_lost(self, node_id):
        self.lost.append(node_id)

    def answer(self, value):
        self.actors[-1].answer(value)
        return self.replica.poll()

    def begin(self, *notes):
        self.answer(ActorPlace("node 1", "10.0.0.1", __version__))
        self.answer(news())
        assert self.answer(news(*notes)) is None


def news(*notes, is_silent=False, end=None, status=None, was_killed=False):
    return ProcessNews(4711, frozenset(notes), is_silent, end, status, was_killed)


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def test_it_is_started_where_it_has_a_place_and_watched(cluster):
    replica = cluster.replica
    assert replica.poll() is None and replica.process_id == 0
    cluster.begin(Note.READY)
    name, (setup, threads, num_replicas, patience, clock), _ = cluster.actors[0].asked[1]
    assert (name, setup.engine_index, threads, num_replicas, patience) == ("start", 2, None, 3, 30.0)
    assert clock.boot_id == Clock.now().boot_id
    assert (replica.incarnation, replica.process_id, replica.ready_since, replica.notes) == (7, 4711, 100.0, {Note.READY})
    assert (
        cluster.answer(news(Note.READY, Note.FAREWELL, end="ended with status 0", status=0)) == "ended with status 0 on 10.0.0.1"
    )
    assert (replica.exit_status, replica.was_killed, Note.FAREWELL in replica.notes) == (0, False, True)
    assert cluster.actors[0].names == ["introduce", "start", "watch", "watch"]


def test_one_that_is_lost_with_its_actor_was_killed_from_outside(cluster):
    cluster.begin()
    assert cluster.answer(RayActorError("The actor died unexpectedly.")) == "was lost with its Ray actor on 10.0.0.1"
    assert (cluster.replica.exit_status, cluster.replica.was_killed, cluster.lost) == (-9, True, [])


def test_one_that_is_lost_with_its_node_was_killed_from_outside_and_the_node_is_avoided(cluster):
    cluster.begin()
    assert cluster.answer(RayActorError("The actor died because its node has died.")) == "was lost with its node on 10.0.0.1"
    assert (cluster.replica.was_killed, cluster.lost) == (True, ["node 1"])


def test_a_connection_that_breaks_may_come_back_but_not_after_a_while(cluster):
    cluster.begin()
    assert cluster.answer(ActorUnavailableError("Socket closed")) is None
    assert cluster.answer(news()) is None, "it was asked again"
    cluster.now += 60.0
    assert cluster.answer(ActorUnavailableError("Socket closed")) is None
    cluster.now += ray_replicas.UNAVAILABLE_SECONDS + 0.1
    assert cluster.replica.poll() == "was lost with its node on 10.0.0.1", "whether it answers or not"
    assert (cluster.replica.was_killed, cluster.lost, cluster.killed) == (True, ["node 1"], cluster.actors)


def test_one_whose_node_is_lost_before_it_was_started_looks_for_another_place(cluster):
    assert cluster.answer(RayActorError("The actor died because its node has died.")) is None
    assert len(cluster.actors) == 2
    cluster.answer(ActorPlace("node 2", "10.0.0.2", __version__))
    assert cluster.answer(RayActorError("The actor died because its node has died.")) is None
    assert (len(cluster.actors), cluster.lost) == (3, ["node 2"])


def test_one_that_has_no_place_says_so_once_and_waits_for_as_long_as_it_takes(cluster, caplog):
    for _ in range(100):
        cluster.now += 10.0
        assert cluster.replica.poll() is None and not cluster.replica.kill_if_silent(30.0)
    assert cluster.replica.is_waiting
    assert caplog.messages == ["Replica 2 waits for a node with 1 free CPU."]
    cluster.begin(Note.READY)
    assert not cluster.replica.is_waiting


def test_one_whose_process_only_takes_long_to_start_waits_for_no_room_unless_it_takes_very_long(cluster, caplog):
    cluster.has_room = True
    for _ in range(6):
        cluster.now += 9.9
        assert cluster.replica.poll() is None and not cluster.replica.is_waiting
    assert caplog.messages == [] and cluster.num_looks == 3
    cluster.now += 10.1
    cluster.replica.poll()
    assert cluster.replica.is_waiting, "no single node has room"


def test_an_actor_that_answers_nothing_is_ended(cluster):
    cluster.begin()
    for _ in range(int(START_SECONDS)):
        assert not cluster.replica.kill_if_silent(10.0)
        cluster.now += 1.0
    cluster.now += 0.1
    assert cluster.replica.kill_if_silent(10.0) and cluster.killed == cluster.actors
    assert cluster.answer(RayActorError("The actor was killed by ray.kill.")) == "was lost with its Ray actor on 10.0.0.1"
    assert not cluster.replica.was_killed, "not from outside"


def test_after_a_pause_of_this_process_nobody_was_silent(cluster):
    cluster.begin()
    cluster.now += 1000.0
    assert not cluster.replica.kill_if_silent(10.0)


def test_a_process_that_its_actor_has_killed_for_its_silence_is_told_of_once(cluster):
    cluster.begin()
    cluster.answer(news(is_silent=True))
    assert cluster.replica.kill_if_silent(10.0) and not cluster.replica.kill_if_silent(10.0)
    assert cluster.killed == []


def test_it_is_killed_by_its_actor_and_with_it_if_that_does_not_answer(cluster):
    cluster.begin()
    cluster.replica.kill()
    assert cluster.actors[0].names[-1] == "kill" and cluster.replica.poll() is None and cluster.killed == []
    cluster.now += GRACE_SECONDS + 0.1
    assert "does not answer" in cluster.replica.poll()
    assert not cluster.replica.was_killed and cluster.killed == cluster.actors


def test_one_without_a_place_needs_none_when_it_is_to_end(cluster):
    cluster.replica.drain()
    assert cluster.killed == cluster.actors
    assert cluster.answer(RayActorError("its node has died: cancelled")) is not None
    assert len(cluster.actors) == 1, "nor does it look for another"


def test_a_start_that_fails_says_why(cluster):
    cluster.answer(ActorPlace("node 1", "10.0.0.1", __version__))
    assert cluster.answer(OSError("Cannot allocate memory")) == "could not be started on 10.0.0.1: Cannot allocate memory"
    assert (cluster.replica.exit_status, cluster.replica.was_killed) == (1, False)


def test_a_node_that_cannot_make_the_actor_says_why(cluster):
    error = RayActorError(
        "The actor died because of an error raised in its creation task.\nModuleNotFoundError: No module named 'minivllm'\n"
    )
    assert cluster.answer(error) == "could not be started: ModuleNotFoundError: No module named 'minivllm'"
    assert (cluster.replica.exit_status, cluster.replica.was_killed) == (1, False)


def test_another_version_on_a_node_is_refused(cluster):
    assert (
        cluster.answer(ActorPlace("node 1", "10.0.0.1", "0.0.0"))
        == f"could not be started on 10.0.0.1: minivllm 0.0.0 is there, and {__version__} here"
    )


@pytest.mark.parametrize("ends", [True, False])
def test_at_the_end_it_has_some_seconds_to_end(cluster, ends):
    cluster.begin()
    cluster.now, start = 200.0, 200.0
    if ends:
        cluster.actors[0].answer(news(Note.FAREWELL, end="ended with status 0", status=0))
    cluster.replica.shutdown(5.0)
    assert cluster.killed == cluster.actors
    assert cluster.now - start == pytest.approx(0.0 if ends else 5.0, abs=0.1)


def test_clocks_are_compared_unless_they_are_one():
    here, there = Clock(5.0, "this machine"), Clock(1000.0, "another")
    assert there.offset_to(here) == 995.0
    assert Clock(5.5, "this machine").offset_to(here) == 0.0
    assert Clock(5.5, "").offset_to(Clock(5.0, "")) == 0.5, "who knows"


def test_a_head_node_that_does_not_answer_is_a_failed_start(cluster, monkeypatch):
    def refuse():
        raise RuntimeError("the head node is gone")

    monkeypatch.setattr(cluster, "make_actor", refuse)
    replica = RayReplica(cluster, SimpleNamespace(engine_index=2, incarnation=8), None)
    assert replica.poll() == "could not be started: the head node is gone"
    assert replica.exit_status != 0 and not replica.was_killed
    replica.shutdown()
    assert cluster.killed == [], "there is no actor"


def test_room_is_not_missing_if_ray_does_not_say_what_there_is(monkeypatch):
    cluster = RayReplicas.__new__(RayReplicas)
    cluster.num_replicas, cluster._resources = 3, {"CPU": 2.0}
    asked = []
    monkeypatch.setattr(ray_replicas.ray_cluster, "are_there", asked.append)  # returns None: there is no room
    assert not cluster.look_for_room().result(10)
    assert asked == [{"CPU": 6.0}]

    def refuse(wanted):
        raise ConnectionError("the head node is gone")

    monkeypatch.setattr(ray_replicas.ray_cluster, "are_there", refuse)
    assert cluster.look_for_room().result(10)


def test_an_actor_that_is_asked_again_starts_no_second_process(monkeypatch):
    class Process:
        process_id, notes, exit_status, was_killed = 17, (), None, False

        def __init__(self, setup, num_threads):
            started.append(num_threads)

        def poll(self):
            return None

        def kill_if_silent(self, limit):
            return False

    started = []
    monkeypatch.setattr("minivllm.data_parallel.replica_process.ReplicaProcess", Process)
    actor = ReplicaActor()
    first, second = (actor.start(ReplicaSetup(b"", "", 0, None, None, 0.0), 2, 3, 30.0, Clock.now()) for _ in range(2))
    assert first == second and first.process_id == 17
    assert started == [2]
