"""What a frontend tells its users of replicas that end, or cannot be started again."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from minivllm import SamplingParams
from minivllm.data_parallel.launcher import FrontendPlace
from minivllm.data_parallel.liveness import MAX_REPLICAS
from minivllm.data_parallel.messages import ReplicaDied
from minivllm.data_parallel.replica_group import ReplicaGroup
from minivllm.engine.core_messages import (
    AbortClientRequests,
    AddRequest,
    CoreFailed,
    CoreLost,
    CoreReady,
    DeathsExplained,
    Heartbeat,
    RequestsAborted,
    RequestsResumed,
)
from minivllm.request import EngineCoreRequest


class Group:
    """Replicas that are restarted, and what was sent to them."""

    def __init__(self, size=1, is_first=True, client_count=2):
        parallel = SimpleNamespace(
            data_parallel_size=size, replica_timeout=10.0, failover_timeout=60.0, is_on_one_machine=True,
            data_parallel_routing="least-loaded", local_ranks=range(size),
        )  # fmt: skip
        config = SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        )
        self.sent = []
        place = FrontendPlace(0 if is_first else 1, client_count, "", None, True, "", None)
        self.group = ReplicaGroup(
            config, place, lambda rank, _, message: self.sent.append((rank, message)) or True, is_first=is_first
        )

    def begin(self, rank, incarnation):
        self.group.connect([(rank, incarnation)])
        return self.group.hear(incarnation, 0, CoreReady(100, rank, process_id=7))


@pytest.mark.parametrize("is_first", [True, False])
def test_why_an_engine_cannot_be_started_again_is_logged_and_told_when_it_is_given_up(caplog, is_first):
    world = Group(is_first=is_first)
    group = world.group
    world.begin(0, 1)
    group.note_death(
        ReplicaDied(0, 1, "its process was killed by SIGKILL", has_died=True, was_killed=True, num_deaths=1, outlook="starting")
    )
    group.retry_pending()
    for incarnation, outlook in ((2, "starting"), (3, "given up")):
        group.hear(incarnation, 0, CoreFailed("ModelLoadError", f"There is no model ({incarnation}).", 0))
        end = {"has_died": True, "was_killed": False, "num_deaths": incarnation, "outlook": outlook}
        group.note_death(ReplicaDied(0, incarnation, "its process ended with status 1", **end))
    [lost] = group.retry_pending()
    assert isinstance(lost, CoreLost)
    assert str(lost.error) == "The engine has ended: ModelLoadError: There is no model (3)."
    logged = [text for _, level, text in caplog.record_tuples if level == logging.ERROR and "could not start" in text]
    whole = [f"The engine could not start: ModelLoadError: There is no model ({incarnation})." for incarnation in (2, 3)]
    assert logged == (whole if is_first else []), "once, and not by each API server"


def test_one_that_is_back_with_the_message_that_shows_the_loss_has_not_left(caplog):
    world = Group()
    world.begin(0, 1)
    caplog.clear()
    world.group.hear(1, 5, Heartbeat(0, 100, 7))
    logged = [(level, text) for _, level, text in caplog.record_tuples]
    assert logged == [
        (logging.ERROR, "The engine is lost: messages from it were lost."),
        (logging.WARNING, "The engine takes requests."),
    ]


def test_one_that_ends_without_a_word_is_given_up_for_how_its_process_ended():
    world = Group()
    world.begin(0, 1)
    world.group.note_death(
        ReplicaDied(0, 1, "its process was killed by SIGKILL", has_died=True, was_killed=True, num_deaths=3, outlook="given up")
    )
    [lost] = world.group.retry_pending()
    assert str(lost.error) == "The engine has ended: its process was killed by SIGKILL."


def test_a_request_that_kills_the_only_engine_is_told_so_in_words_for_one():
    world = Group(client_count=1)
    request = EngineCoreRequest("r", [1, 2], SamplingParams(), 10, number=7)
    for incarnation in (1, 2, 3):
        world.begin(0, incarnation)
        if incarnation == 1:
            world.group.add_request(request)
        world.group.retry_pending()
        if incarnation == 3:
            assert world.sent[-1] == (0, AbortClientRequests(0, number=1)), "it is to be alone"
            [resumed] = world.group.hear(incarnation, 1, RequestsAborted(0, number=1, engine_index=0))
            assert resumed == RequestsResumed(0, 1)
        told = world.group.note_death(
            ReplicaDied(
                0,
                incarnation,
                "its process ended with status 1",
                has_died=True,
                was_killed=False,
                num_deaths=1,
                outlook="starting",
            )
        )
    assert str(told[-1].error).endswith("That was the engine: its process ended with status 1.")
    sent = [message for _, message in world.sent if isinstance(message, AddRequest)]
    assert [message.is_suspect for message in sent] == [False, True, True]
    world.begin(0, 4)
    assert world.sent[-1] == (0, DeathsExplained()), "the engine is not broken"


def test_more_and_fewer_replicas(caplog):
    world = Group(size=2)
    group = world.group
    for rank in range(2):
        world.begin(rank, rank + 1)
    assert [told.engine_index for told in group.resize(4)] == [2, 3]
    assert [status.state for status in group.statuses()] == ["ready", "ready", "starting", "starting"]
    world.begin(3, 10)
    assert "Replica 3 takes requests." in caplog.text and group.table.open == [0, 1, 3]
    assert group.resize(1) == []
    assert [status.state for status in group.statuses()] == ["ready", "ready", "ready"], "they have not been told yet"
    assert [status.rank for status in group.statuses()] == [0, 1, 3], "one had not begun"
    for rank, incarnation in ((1, 2), (3, 10)):
        end = {"has_died": False, "was_killed": False, "num_deaths": 0, "outlook": "gone"}
        group.note_death(ReplicaDied(rank, incarnation, "its process ended with status 0", **end))
    assert [(status.rank, status.state) for status in group.statuses()] == [(0, "ready")]
    assert "There are to be 1 replicas instead of 4." in caplog.text
    [again] = group.resize(2)
    assert again.engine_index == 1 and group.statuses()[1].state == "starting"


def test_one_that_is_heard_before_the_number_of_replicas_is_admitted_but_nobody_beyond_all_bounds():
    world = Group(size=2)
    world.begin(5, 3)
    assert world.group.table.open == [5]
    assert [status.rank for status in world.group.statuses()] == [0, 1, 5]
    world.group.resize(6)
    assert [status.state for status in world.group.statuses()] == [*["starting"] * 5, "ready"]
    assert world.begin(MAX_REPLICAS, 4) == [] and world.begin(-1, 4) == []
    assert len(world.group.liveness.peers) == 6
