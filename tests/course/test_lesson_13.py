"""Lesson 13's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

And the solved client loses nothing in twenty kills. `tests/support/mutate_lesson.py 13` makes many more mistakes, small ones.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from lesson_cells import read_cells
from lesson_checks import LessonChecks
from nightly import NIGHTLY

from minivllm.bench.production import load_conversation_trace, replay_trace
from minivllm.course.lessons.lesson_13.engine import PARAMS, PROMPTS, check_kill, compare_written
from minivllm.course.lessons.nodes import HeadlessNode, free_port
from minivllm.course.lessons.replicas import Replicas, Service
from minivllm.course.lessons.traffic import run_router
from minivllm.data_parallel.routing import make_router
from minivllm.simulation.engine import simulate_replicas


class TestChecks(LessonChecks):
    number = "13"
    points = 19
    says = ("Expected", "Got", "Look at")
    every = 9


_space: dict = {}


def answers():
    """What the solution defines."""
    if not _space:
        _space["__name__"] = "__main__"
        for cell in read_cells("13"):
            if cell.kind == "answer" or cell.name == "setup":
                exec(compile(cell.source, f"<{cell.name}>", "exec"), _space)
    return _space


@pytest.mark.parametrize(("mine", "theirs"), [("MyRouter", "least-loaded"), ("MyPrefixRouter", "prefix-aware")])
def test_the_solved_routers_serve_traffic_as_the_package_s_do(mine, theirs):
    requests = replay_trace(load_conversation_trace()[:150], request_rate=19, length=1 / 4)
    options = {"max_num_seqs": 64, "num_gpu_blocks": 4096, "max_model_len": 16_384}
    got, _ = run_router(answers()[mine](), requests, 4, **options)
    expected = simulate_replicas(requests, 4, routing=theirs, **options)
    assert (got.requests, got.ttft, got.mean_in_flight) == (expected.requests, expected.ttft, expected.mean_in_flight)


def test_any_router_can_be_simulated():
    requests = replay_trace(load_conversation_trace()[:50], request_rate=19, length=1 / 4)
    run, chosen = run_router(make_router("round-robin"), requests, 4, name="turns", max_model_len=16_384)
    assert run.routing == "turns" and run.completed == 50
    assert chosen == [number % 4 for number in range(50)]


class Broken:
    """A replica whose process fails."""

    def __init__(self, *arguments):
        pass

    def run(self):
        raise ValueError("there is a mistake in it")


@pytest.mark.slow
def test_what_fails_in_a_process_is_said_here():
    mine = answers()
    with (
        Replicas(Broken, size=1) as replicas,
        pytest.raises(AssertionError, match="failed: ValueError: there is a mistake in it"),
    ):
        Service(replicas, mine["MyClient"], mine["MyRouter"](), mine["MyCoordinator"]).wait(1)


class Short(Broken):
    """A replica whose process ends before it has said a word."""

    def run(self):
        os._exit(3)


@pytest.mark.slow
def test_a_process_that_ends_too_early_is_not_waited_for():
    mine = answers()
    with (
        Replicas(Short, size=1) as replicas,
        pytest.raises(AssertionError, match="the process of replica 0 ended with status 3 before it took requests"),
    ):
        Service(replicas, mine["MyClient"], mine["MyRouter"](), mine["MyCoordinator"]).wait(1)


class Mute:
    """A replica that does everything but say that it is ready."""

    def __init__(self, core, receive, send, report):
        self.receive = receive

    def run(self):
        while self.receive() is not None:
            pass


def test_a_replica_that_is_never_ready_starts_no_process(monkeypatch):
    monkeypatch.setattr(Replicas, "start", lambda self, rank: pytest.fail("a process is started"))
    mine = answers()
    with pytest.raises(AssertionError, match="sent first"):
        check_kill(Mute, mine["MyClient"], mine["MyPrefixRouter"], mine["MyCoordinator"])


@pytest.mark.long
@pytest.mark.slow
def test_kills_at_random_tokens_lose_nothing_and_double_nothing():
    num_kills = 20 if NIGHTLY else 6
    mine, rng = answers(), random.Random(13)
    with Replicas(mine["MyReplica"]) as replicas:
        service = Service(replicas, mine["MyClient"], mine["MyPrefixRouter"](), mine["MyCoordinator"])
        service.wait(2)
        expected = service.write(PROMPTS, PARAMS)
        moved = 0
        for number in range(num_kills):
            rank, after = rng.randrange(2), rng.randint(1, 180)
            got = service.write(PROMPTS, PARAMS, after, rank)
            compare_written(f"Kill {number}: replica {rank} after {after} tokens.", expected, got)
            moved += got.moved
            replicas.start(rank)
            service.wait(2)
        assert moved > (num_kills if NIGHTLY else num_kills // 2)


def test_interrupted_replicas_leave_no_process_and_no_socket():
    with pytest.raises(KeyboardInterrupt), Replicas(answers()["MyReplica"]) as replicas:
        processes = [replica.process.process_id for replica in replicas.alive.values()]
        assert all(is_running(process) for process in processes) and Path(replicas.folder).exists()
        raise KeyboardInterrupt
    assert not any(is_running(process) for process in processes)
    assert not Path(replicas.folder).exists()


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_node_that_is_forgotten_ends():
    node = HeadlessNode(
        "smollm2-135m", start_rank=1, data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=free_port()
    )
    process = node.process_id
    assert is_running(process)
    del node
    assert not is_running(process)
