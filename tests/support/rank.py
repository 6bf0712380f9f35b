"""One rank of a group, as a process of its own: runs a scenario and prints what came of it as JSON.

python tests/support/rank.py KIND SCENARIO RANK WORLD_SIZE WHERE
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from minivllm.config import ParallelConfig
from minivllm.distributed import torch_group
from minivllm.distributed.meeting import Meeting
from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.distributed.pipeline import IntermediateTensors, PipelineGroup
from minivllm.distributed.shared_memory_group import SharedMemoryGroup
from minivllm.errors import DistributedError, StageError

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def random_operations(group: GroupCoordinator, seed: int = 0, count: int = 150) -> list[object]:
    """Operations that all ranks choose alike, on numbers that each makes of its own: the errors found, and a digest of all results."""
    rng, wrong, digest = random.Random(seed), [], 0
    for number in range(count):
        dtype, kind = rng.choice(DTYPES), rng.choice(("reduce", "gather", "uneven", "broadcast", "to one"))
        shape = [rng.choice((0, 1, 3, 16)), rng.choice((1, 5, 576)), rng.choice((1, 2))]
        dim, src = rng.randrange(-3, 3), rng.randrange(group.world_size)
        sizes = (
            [rng.choice((0, 1, 7, 40)) for _ in range(group.world_size)]
            if kind in ("uneven", "to one")
            else [shape[dim]] * group.world_size
        )
        parts = []
        for rank, size in enumerate(sizes):
            own = list(shape)
            own[dim] = size
            generator = torch.Generator().manual_seed(1000 * number + rank)
            parts.append((torch.randn(own, generator=generator) * 100).to(dtype))
        x, what = parts[group.rank].clone(), f"operation {number}: {kind} {dtype} {shape} dim {dim} sizes {sizes}"
        if rng.random() < 0.3 and kind in ("reduce", "gather", "broadcast"):
            x = torch.stack((x, x), dim=-1)[..., 0]  # not contiguous
        if rng.random() < 0.1:
            time.sleep(0.02 * ((number + group.rank) % 3))  # late, one after the other
        if kind == "reduce":
            result = group.all_reduce(x)
            wide = torch.float32 if dtype.is_floating_point else dtype
            expected = sum(part.to(wide) for part in parts).to(dtype)
            same = (
                torch.equal(result, expected)
                if isinstance(group, SharedMemoryGroup)
                else torch.allclose(result, expected, atol=1e-3)
            )
            if result is not x:
                wrong.append(f"{what}: not in place")
        elif kind in ("gather", "uneven"):
            result = group.all_gather(x, dim, sizes if kind == "uneven" else None)
            same = torch.equal(result, torch.cat(parts, dim))
        elif kind == "broadcast":
            result = group.broadcast(x, src)
            same = torch.equal(result, parts[src])
        else:
            result = group.gather(x, src, dim, sizes)
            if group.rank != src:
                if result is not None:
                    wrong.append(f"{what}: rank {group.rank} got something")
                continue
            same = torch.equal(result, torch.cat(parts, dim))
        if not same:
            wrong.append(what)
        if kind == "to one":
            continue
        digest = hash((digest, result.to(torch.float64).contiguous().numpy().tobytes()))
    return [wrong, digest]  # the digest is of what all ranks have


def killed(group: GroupCoordinator) -> list[object]:
    """Rank 1 is killed in the midst of it; how long until the others know, and what they are told."""
    x = torch.ones(576)
    for _ in range(10):
        group.all_reduce(x)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        group.all_reduce(x)
    except DistributedError as error:
        return [str(error), time.monotonic() - start]
    return ["nothing", 0]


def different(group: GroupCoordinator) -> list[object]:
    """Rank 1 reduces more numbers than the others."""
    try:
        group.all_reduce(torch.ones(576 if group.rank != 1 else 640))
    except DistributedError as error:
        return [str(error)]
    return ["nothing"]


def late(group: GroupCoordinator) -> list[object]:
    """Rank 1 does not come, though it lives."""
    group.timeout = 0.5
    if group.rank == 1:
        time.sleep(2)
        return ["late"]
    return different(group)


Links = tuple[GroupCoordinator, PipelineGroup]


def _batch(number: int, make=torch.randn) -> IntermediateTensors:
    """What all stages know that the first one sends in a step; or room for it."""
    rng = random.Random(number)
    shape, dtype = (rng.choice((0, 1, 3, 40)), rng.choice((1, 48))), rng.choice(DTYPES[:4])
    torch.manual_seed(number)
    return IntermediateTensors({name: make(shape).to(dtype) for name in ("hidden_states", "residual")})


def stages(links: Links, count: int = 60) -> list[object]:
    """Steps in which a stage is late or fails now and then, and its ranks sum numbers: what was wrong."""
    (group, pipeline), rng, wrong = links, random.Random(0), []
    num_stages = pipeline.world_size
    for number in range(count):
        failing, late = rng.choice((None, *range(num_stages))), rng.choice((None, *range(num_stages)))
        if late == pipeline.rank:
            time.sleep(0.01)
        seed = 1000 * group.rank + number
        expected = _batch(seed)
        try:
            with pipeline.step():
                if failing == pipeline.rank:
                    raise ValueError("boom")
                tensors = expected if pipeline.stage.is_first else pipeline.recv(_batch(seed, torch.zeros))
                if not pipeline.stage.is_last:
                    pipeline.send(tensors)
            if failing is not None and failing <= pipeline.rank:
                wrong.append(f"step {number}: no failure")
            elif not all(torch.equal(tensors[name], expected[name]) for name in expected.tensors):
                wrong.append(f"step {number}: other numbers")
        except StageError as error:
            rank = None if failing is None else failing * group.world_size + group.rank
            said = f"Stage {failing} of {num_stages} (rank {rank}) failed: ValueError: boom"
            if failing is None or failing >= pipeline.rank or str(error) != said:
                wrong.append(f"step {number}: {error}")
        except ValueError as error:
            if failing != pipeline.rank:
                wrong.append(f"step {number}: {error}")
        total = group.all_reduce(torch.full((3,), 10.0 * pipeline.rank + group.rank))
        if total.tolist() != 3 * [sum(10.0 * pipeline.rank + rank for rank in range(group.world_size))]:
            wrong.append(f"step {number}: sum {total}")
        if not torch.equal(group.broadcast(torch.tensor(pipeline.rank + group.rank), src=1), torch.tensor(pipeline.rank + 1)):
            wrong.append(f"step {number}: not from the second rank of the stage")
    if dist.is_initialized():
        dist.barrier()  # what has been sent would be lost with the process
    return [wrong]


def stage_killed(links: Links) -> list[object]:
    """Stage 1 is killed; how long until its neighbours know, and what they are told."""
    pipeline = links[1]
    if pipeline.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(100):
            with pipeline.step():
                if pipeline.stage.is_first:
                    pipeline.send(_batch(1))
                else:
                    pipeline.recv(_batch(1))
    except DistributedError as error:
        return [str(error), time.monotonic() - start]
    return ["nothing", 0]


def _join(kind: str, rank: int, world_size: int, where: dict[str, Any]) -> Links:
    """As workers do. `where` has their number in a stage, a port, and what each stage, and each pipeline, shares."""
    if kind == "gloo stages":
        torch_group.has_cpu_kernels = lambda: False
    size = where["size"]
    config = ParallelConfig(tensor_parallel_size=size, pipeline_parallel_size=world_size // size)
    memories = where["group_memories"][rank // size], where["pipeline_memories"][rank % size]
    links = torch_group.join_groups(rank, config, torch.device("cpu"), *memories, Meeting(f"127.0.0.1:{where['port']}"))
    assert type(links[1]).__name__ == ("TorchPipeline" if kind == "gloo stages" else "SharedMemoryPipeline")
    return links


def _make_group(kind: str, rank: int, world_size: int, where: str) -> GroupCoordinator:
    if kind == "shared":
        return SharedMemoryGroup(int(where), rank, world_size)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    return torch_group.TorchGroup(rank, world_size)


if __name__ == "__main__":
    kind, scenario, rank, world_size, where = sys.argv[1:]
    if kind in ("shared stages", "gloo stages"):
        made: Any = _join(kind, int(rank), int(world_size), json.loads(where))
    else:
        made = _make_group(kind, int(rank), int(world_size), where)
    print(json.dumps(globals()[scenario](made)), flush=True)
    os._exit(0)  # torch.distributed would wait for ranks that are gone
