"""Ranks as threads and as processes: they compute what they should, and nothing hangs, or is left behind."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch

from minivllm.course.lessons import rank_processes
from minivllm.course.lessons.rank_processes import RankProcesses, ring_sum, run_on_ranks
from minivllm.course.lessons.ranks import run_groups, run_rings
from minivllm.errors import WorkerError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def send_once(ring):
    ring.send(torch.tensor([float(ring.rank)]))
    return ring.receive().item()


def children():
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before, files = children(), psutil.Process().num_fds()
    yield
    assert children() <= before and psutil.Process().num_fds() <= files + 2  # Python may open a file of its own


def test_threads_pass_tensors_round():
    results, rings = run_rings(3, send_once)
    assert results == [2, 0, 1] and [len(ring.sent) for ring in rings] == [1, 1, 1]


def test_who_waits_for_whom_is_said_at_once():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 waits for a message from rank 1, rank 1 has returned"):
        run_rings(2, lambda ring: ring.receive() if ring.rank == 0 else None, "Two ranks.")
    with pytest.raises(AssertionError, match="rank 1 waits in all_reduce for the others"):
        run_groups(2, lambda group: group.all_reduce(torch.ones(1)) if group.rank else None, "Two ranks.")
    assert time.monotonic() - start < 2


def test_an_error_of_a_rank_comes_out():
    with pytest.raises(ZeroDivisionError):
        run_groups(2, lambda group: group.all_reduce(torch.ones(1)) if group.rank else 1 / 0, "")


@pytest.mark.slow
def test_processes_sum_in_shared_memory_and_in_a_ring():
    def run(group):
        x = torch.arange(4.0) + group.rank
        ring_sum(x, group.ring)
        return group.all_reduce(torch.ones(3)).tolist(), x.tolist(), os.getpid()

    results = run_on_ranks(3, run)
    assert [result[:2] for result in results] == [([3, 3, 3], [3, 6, 9, 12])] * 3
    assert len({os.getpid(), *(result[2] for result in results)}) == 4


@pytest.mark.slow
def test_an_error_and_the_end_of_a_process_come_out():
    with pytest.raises(WorkerError, match="Rank 1: ZeroDivisionError"):
        run_on_ranks(2, lambda group: 1 / (1 - group.rank))
    with pytest.raises(WorkerError, match="Rank 0 has ended"):
        run_on_ranks(1, lambda group: os._exit(3))


@pytest.mark.slow
def test_what_the_loop_of_a_worker_raises_is_told():
    def serve(ring, link, memory):
        raise NotImplementedError("write this")

    with RankProcesses(1, serve) as processes:
        assert processes.wait(5.0) == [0]
        with pytest.raises(WorkerError, match="Rank 0: NotImplementedError: write this"):
            processes.receive(0)


@pytest.mark.slow
def test_a_rank_whose_neighbour_is_silent_gives_up(monkeypatch):
    monkeypatch.setattr(rank_processes, "MOST_SECONDS", 0.3)
    with pytest.raises(WorkerError, match="has waited 0.3 s for a message|has ended, and rank"):
        run_on_ranks(2, lambda group: group.ring.receive())


@pytest.mark.slow
def test_large_tensors_of_any_shape_and_type_arrive():
    def run(group):
        group.ring.send(torch.arange(120_000, dtype=torch.float64).view(2, -1))
        group.ring.send(torch.empty(0, 3))
        received = group.ring.receive()
        return list(received.shape), str(received.dtype), received[1, -1].item(), list(group.ring.receive().shape)

    assert run_on_ranks(2, run) == [([2, 60_000], "torch.float64", 119_999, [0, 3])] * 2


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_behind():
    def run(ring, link, memory):
        while True:
            link.receive()

    with pytest.raises(KeyboardInterrupt), RankProcesses(2, run) as processes:
        assert len(children()) >= 2 and processes.wait(0.05) == []
        raise KeyboardInterrupt
    with RankProcesses(2, run) as processes:
        processes.kill(1)
        assert processes.wait(5.0) == [1]
        with pytest.raises(EOFError):
            processes.receive(1)
