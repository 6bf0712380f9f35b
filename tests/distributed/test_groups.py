"""Groups of real processes: operations against what they should give, on all ranks; and ranks that go, come late, or do something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")
from minivllm.distributed.parallel_state import SingleRank
from minivllm.distributed.shared_memory import create_group_memory

RANK = Path(__file__).parents[1] / "support" / "rank.py"


def run_ranks(kind, scenario, world_size, where, descriptors=()):
    """What each rank says: the list that it printed, or its exit status."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, kind, scenario, str(rank), str(world_size), where],
            stdout=subprocess.PIPE, text=True, pass_fds=descriptors, env=environment,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(text) if text else rank.returncode for text, rank in zip(said, ranks, strict=True)]


@pytest.fixture
def run_shared():
    """Runs a scenario with small buffers in shared memory, so that tensors go through them in pieces."""
    descriptors = []

    def run(scenario, world_size, buffer_bytes=4096):
        descriptors.append(create_group_memory(world_size, buffer_bytes))
        return run_ranks("shared", scenario, world_size, str(descriptors[-1]), descriptors[-1:])

    yield run
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_random_operations_in_shared_memory(run_shared, world_size):
    results = run_shared("random_operations", world_size)
    assert [wrong for wrong, _ in results] == [[]] * world_size
    assert len({digest for _, digest in results}) == 1, "the same bits on all ranks"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_random_operations_over_gloo(tmp_path, world_size):
    results = run_ranks("torch", "random_operations", world_size, f"file://{tmp_path}/meet")
    assert [wrong for wrong, _ in results] == [[]] * world_size
    assert len({digest for _, digest in results}) == 1


@pytest.mark.slow
def test_a_killed_rank_is_noticed_within_2_seconds(run_shared):
    results = run_shared("killed", 3)
    assert results[1] == -9
    for said, seconds in (results[0], results[2]):
        assert "Rank 1 (process " in said and "has ended" in said
        assert seconds < 2


@pytest.mark.slow
def test_ranks_that_do_different_things_are_told_what(run_shared):
    for (said,) in run_shared("different", 2):
        assert "rank 0 all_reduce of 2,304 bytes, rank 1 all_reduce of 2,560 bytes" in said


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_given_up(run_shared):
    (said,), _ = run_shared("late", 2)
    assert "Rank 1 (process " in said and "did not come within 0.5 s" in said


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm here")
def test_shared_memory_has_no_name():
    before = set(Path("/dev/shm").iterdir())
    descriptor = create_group_memory(2)
    assert set(Path("/dev/shm").iterdir()) == before
    os.close(descriptor)


def test_a_group_of_one_gives_back_what_it_got():
    group, x = SingleRank(), torch.randn(3, 4)
    assert group.all_reduce(x) is x and group.broadcast(x) is x
    assert torch.equal(group.all_gather(x, 0), x) and group.gather(x) is x
