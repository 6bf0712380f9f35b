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

import torch

from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.distributed.shared_memory_group import SharedMemoryGroup
from minivllm.distributed.torch_group import TorchGroup
from minivllm.errors import DistributedError

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


if __name__ == "__main__":
    kind, scenario, rank, world_size, where = sys.argv[1:]
    if kind == "shared":
        group: GroupCoordinator = SharedMemoryGroup(int(where), int(rank), int(world_size))
    else:
        group = TorchGroup(int(rank), int(world_size), where)
    print(json.dumps(globals()[scenario](group)), flush=True)
    os._exit(0)  # torch.distributed would wait for ranks that are gone
