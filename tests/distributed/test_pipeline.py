"""What passes from stage to stage: tensors, in order and whole, and failures in their place; and stages that go, or come late."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")
from minivllm.distributed.partition import Stage
from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.distributed.shared_memory import create_group_memory, create_pipeline_memory
from minivllm.distributed.shared_memory_pipeline import SharedMemoryPipeline
from minivllm.errors import DistributedError, StageError

RANK = Path(__file__).parents[1] / "support" / "rank.py"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_pipeline(num_stages, pipe_bytes=256):
    """A pipeline, as each stage sees it; stages that are threads of one process."""
    memory = create_pipeline_memory(num_stages, pipe_bytes)
    ranks = tuple(range(1, 2 * num_stages, 2))  # as if each stage had two ranks
    stages = [SharedMemoryPipeline(memory, Stage(rank, num_stages), ranks, timeout=20) for rank in range(num_stages)]
    os.close(memory)
    return stages


def run_stages(function, pipelines):
    """Run a function for all stages at the same time."""
    with ThreadPoolExecutor(len(pipelines)) as pool:
        return list(pool.map(function, pipelines))


def batch(number, num_tokens, hidden_size, dtype):
    generator = torch.Generator().manual_seed(number)
    names = ("hidden_states", "residual")
    return IntermediateTensors({name: torch.randn(num_tokens, hidden_size, generator=generator).to(dtype) for name in names})


def like(tensors):
    return IntermediateTensors({name: torch.full_like(x, 7) for name, x in tensors.tensors.items()})


def assert_equal(found, expected):
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected.tensors)


step_sizes = st.tuples(st.sampled_from([0, 1, 2, 17]), st.sampled_from([1, 5, 48]), st.sampled_from(DTYPES))


@given(st.integers(2, 4), st.lists(step_sizes, min_size=1, max_size=6), st.data())
def test_every_stage_gets_each_batch_or_why_there_is_none(num_stages, sizes, data):
    """Stages fail before or after they have received; those behind are told which stage was the first, and the next step is as any other."""
    fails = data.draw(
        st.lists(
            st.lists(st.sampled_from(["", "", "", "before", "after"]), min_size=num_stages, max_size=num_stages),
            min_size=len(sizes), max_size=len(sizes),
        )
    )  # fmt: skip
    late = data.draw(st.sampled_from([None, *range(num_stages)]))

    def run(pipeline):
        rank, said = pipeline.rank, []
        for number, (size, fail) in enumerate(zip(sizes, fails, strict=True)):
            if late == rank:
                time.sleep(0.003)
            try:
                with pipeline.step():
                    if fail[rank] == "before":
                        raise ValueError(f"step {number}")
                    tensors = batch(number, *size)
                    if not pipeline.stage.is_first:
                        tensors = pipeline.recv(like(tensors))
                    if fail[rank] == "after":
                        raise ValueError(f"step {number}")
                    if not pipeline.stage.is_last:
                        pipeline.send(tensors)
                said.append(tensors)
            except (ValueError, StageError) as error:
                said.append(error)
        return said

    for rank, said in enumerate(run_stages(run, make_pipeline(num_stages))):
        for number, (result, fail) in enumerate(zip(said, fails, strict=True)):
            first = next((stage for stage in range(rank) if fail[stage]), None)
            if fail[rank] == "before" or (fail[rank] and first is None):
                assert str(result) == f"step {number}" and isinstance(result, ValueError)
            elif first is not None:
                expected = f"Stage {first} of {num_stages} (rank {2 * first + 1}) failed: ValueError: step {number}"
                assert isinstance(result, StageError) and str(result) == expected
            else:
                assert_equal(result, batch(number, *sizes[number]))


def test_a_stage_is_ahead_of_the_next_one_until_the_ring_is_full():
    first, second = make_pipeline(2, pipe_bytes=4096)
    sent = []

    def send():
        for number in range(4):
            with first.step():
                first.send(batch(number, 2, 100, torch.float32))  # 1,600 bytes and what announces them: two fit
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    while len(sent) < 2:
        time.sleep(0.01)
    time.sleep(0.1)
    assert sent == [0, 1]
    for number in range(4):
        expected = batch(number, 2, 100, torch.float32)
        with second.step():
            assert_equal(second.recv(like(expected)), expected)
    thread.join()


def test_times_and_bytes_are_noted():
    first, second = make_pipeline(2, pipe_bytes=4096)
    tensors = batch(0, 3, 8, torch.float32)
    start = time.perf_counter()
    with first.step():
        first.send(tensors)
    with second.step():
        second.recv(like(tensors))
    for pipeline in (first, second):
        ((begin, end),), num_bytes = pipeline.take_timing()
        assert start <= begin <= end <= time.perf_counter() and num_bytes == 2 * 3 * 8 * 4
        assert pipeline.take_timing() == ([], 0)


def test_a_batch_of_another_size_is_refused_and_out_of_the_way():
    first, second = make_pipeline(2, pipe_bytes=4096)
    for number, num_tokens in enumerate((3, 2)):
        with first.step():
            first.send(batch(number, num_tokens, 8, torch.float32))
    expected = batch(1, 2, 8, torch.float32)
    with pytest.raises(DistributedError, match=r"Stage 0 of 2 \(rank 1\) sends .*\[3, 8\].* were expected"), second.step():
        second.recv(like(expected))
    with second.step():
        assert_equal(second.recv(like(expected)), expected)


def test_a_stage_that_does_not_come_is_given_up():
    first, second = make_pipeline(2)
    first.timeout = second.timeout = 0.3
    tensors = batch(0, 20, 48, torch.float32)
    for pipeline, other in ((second, 0), (first, 1)):
        named = rf"Stage {other} of 2 \(rank {2 * other + 1}\), process \d+, did not come within 0.3 s"
        with pytest.raises(DistributedError, match=named), pipeline.step():
            pipeline.recv(like(tensors)) if pipeline is second else pipeline.send(tensors)


def test_a_stage_that_gives_up_does_so_once_and_the_next_one_hears_of_it(monkeypatch):
    _, second, third = make_pipeline(3)
    second.timeout, tensors, waits = 0.3, batch(0, 2, 4, torch.float32), []
    receive = second._recv_bytes
    monkeypatch.setattr(second, "_recv_bytes", lambda: (waits.append(1), receive())[1])
    for pipeline in (second, third):
        with pytest.raises(DistributedError, match=r"Stage 0 of 3 .* did not come within 0.3 s") as error, pipeline.step():
            pipeline.recv(like(tensors))
    assert waits == [1]
    assert not isinstance(error.value, StageError)


def test_a_failure_of_the_group_is_no_failure_of_a_step():
    """Where a rank of the first stage is lost, the next stage does not take it for an error of one step."""
    first, second = make_pipeline(2)
    with pytest.raises(DistributedError), first.step():
        raise DistributedError("Rank 0 has ended.")
    with pytest.raises(DistributedError, match="failed: DistributedError: Rank 0 has ended.") as error, second.step():
        second.recv(batch(0, 1, 1, torch.float32))
    assert not isinstance(error.value, StageError)


@pytest.fixture
def run_processes():
    """Runs a scenario of `rank.py` with `size` ranks in each stage, a process each, by shared memory or by torch.distributed. What each says: the list
    that it printed, or its exit status.
    """
    memories = []

    def run(kind, scenario, num_stages, size):
        memories.extend(create_group_memory(size) for _ in range(num_stages))
        memories.extend(create_pipeline_memory(num_stages, 4096) for _ in range(size))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        shared = {"group_memories": memories[:num_stages], "pipeline_memories": memories[num_stages:]}
        where, world_size = json.dumps(shared | {"size": size, "port": port}), num_stages * size
        ranks = [
            subprocess.Popen(
                [sys.executable, RANK, kind, scenario, str(rank), str(world_size), where],
                stdout=subprocess.PIPE, text=True, pass_fds=memories, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(world_size)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [json.loads(text) if text else rank.returncode for text, rank in zip(said, ranks, strict=True)]

    yield run
    for memory in memories:
        os.close(memory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared stages", pytest.param("gloo stages", marks=pytest.mark.long)])
def test_batches_and_failures_pass_between_processes(run_processes, kind):
    """Two ranks in each stage: sums stay within a stage, and batches go to the neighbour with the same place."""
    assert run_processes(kind, "stages", 2, 2) == [[[]]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared stages", pytest.param("gloo stages", marks=pytest.mark.long)])
def test_a_killed_stage_is_named(run_processes, kind):
    before, killed, after = run_processes(kind, "stage_killed", 3, 1)
    assert killed == -9
    for said, seconds in (before, after):
        assert "Stage 1 of 3 (rank 1)" in said and "has ended" in said
        assert seconds < 2
