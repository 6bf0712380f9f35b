"""The checks of lesson 12 for sums in a ring."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.ranks import Ring, run_rings
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import expect, rounds
from minivllm.distributed.partition import split_units

_ROUNDS = "the rounds: there is one less than ranks, and in each a rank sends one chunk and receives one"


def make_numbers(rng: random.Random) -> tuple[int, list[Tensor]]:
    """The number of ranks, and the tensor of each: now and then with fewer numbers than ranks."""
    world_size = rng.choice((1, 2, 2, 3, 4, 5))
    shape = rng.choice(((rng.randint(1, 3), rng.randint(1, 5)), (rng.randint(5, 30),)))
    return world_size, [make_tensor(rng, *shape) for _ in range(world_size)]


def cut(x: Tensor, world_size: int) -> list[Tensor]:
    """A tensor's numbers in chunks, one for each rank: views."""
    flat = x.view(-1)
    return [flat[part.start : part.stop] for part in (split_units(len(flat), world_size, rank) for rank in range(world_size))]


def expect_messages(said: str, rings: list[Ring], per_rank: int) -> None:
    """Unless every rank has sent so many messages, raise an AssertionError."""
    counts = {f"rank {ring.rank}": len(ring.sent) for ring in rings}
    expect(said, "messages sent", {name: per_rank for name in counts}, counts, _ROUNDS)


def check_reduce_scatter(reduce_scatter: Any) -> None:
    """After n - 1 rounds each rank has the sum of one chunk."""
    look = "which chunk goes out in which round: in the first one chunk `rank`, then always the one that was received and added to last"
    for rng in rounds("scatter", 40):
        world_size, numbers = make_numbers(rng)
        said = f"{world_size} ranks, each with {numbers[0].numel()} numbers."

        def run(ring: Ring) -> tuple[Any, list[Tensor]]:
            chunks = cut(numbers[ring.rank].clone(), ring.world_size)
            return reduce_scatter(chunks, ring), chunks

        results, rings = run_rings(world_size, run, said)
        expect_messages(said, rings, world_size - 1)
        total = cut(sum(numbers[1:], numbers[0].clone()), world_size)
        for rank, (own, chunks) in enumerate(results):
            where = f"{said} Rank {rank}."
            expect(where, "number of the chunk that it has whole", (rank + 1) % world_size, own, "what is returned: (rank + 1) % world_size")
            if not len(total[own]):
                continue
            suspects = [(numbers[rank].view(-1)[_range(numbers[rank], world_size, own)], "`+=`: what is received must be added in place, to the chunk itself")]
            expect_close(where, f"chunk {own}", total[own], chunks[own], look, suspects)


def _range(x: Tensor, world_size: int, rank: int) -> slice:
    part = split_units(x.numel(), world_size, rank)
    return slice(part.start, part.stop)


def check_all_reduce(all_gather: Any, all_reduce: Any) -> None:
    """All chunks on all ranks; the sum in the tensor itself, with the same bits everywhere."""
    for rng in rounds("gather", 30):
        world_size, numbers = make_numbers(rng)
        shift = rng.randrange(world_size)
        said = f"{world_size} ranks; rank r has chunk (r + {shift}) % {world_size}."
        whole = cut(numbers[0], world_size)

        def run(ring: Ring) -> list[Tensor]:
            own = (ring.rank + shift) % ring.world_size
            chunks = [chunk.clone() if i == own else torch.full_like(chunk, torch.nan) for i, chunk in enumerate(whole)]
            views = list(chunks)
            all_gather(views, own, ring)
            return chunks

        results, rings = run_rings(world_size, run, said)
        expect_messages(said, rings, world_size - 1)
        look = "all_gather: `own` goes out first, then always what was received last; copy_ writes it into the chunk's own memory"
        for rank, chunks in enumerate(results):
            for i, chunk in enumerate(chunk for chunk in chunks if len(chunk)):
                expect_close(f"{said} Rank {rank}.", f"chunk {i} after all_gather", whole[i], chunk, look)
    for rng in rounds("all_reduce", 30):
        world_size, numbers = make_numbers(rng)
        said = f"all_reduce of {list(numbers[0].shape)} numbers on {world_size} ranks."
        tensors = [x.clone() for x in numbers]
        results, rings = run_rings(world_size, lambda ring: all_reduce(tensors[ring.rank], ring), said)
        expected = sum(numbers[1:], numbers[0].clone())
        look = "the two halves, over chunks that are views of x: split its numbers among the ranks"
        for rank, (x, returned) in enumerate(zip(tensors, results, strict=True)):
            where = f"{said} Rank {rank}."
            expect_close(where, "x", expected, x, look)
            expect(where, "is x returned", True, returned is x, "what is returned: x itself")
            expect(where, "equal bits on all ranks", True, bool(torch.equal(x, tensors[0])), look)
        expect_messages(said, rings, 2 * (world_size - 1))
        largest = 4 * -(-numbers[0].numel() // world_size)
        sizes = [message.num_bytes for ring in rings for message in ring.sent]
        expect(said, "bytes in the largest message at most", True, max(sizes, default=0) <= largest, "the chunks: a message has one n-th of the numbers, not all")
