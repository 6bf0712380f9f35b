"""The checks of lesson 12 for sums in a ring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.ranks import Ring, run_rings
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds
from minivllm.distributed.partition import split_units

_ROUNDS = "the rounds: there is one less than ranks, and in each a rank sends one chunk and receives one"
_ROUNDS_OF_BOTH = (
    "the two halves: each has one round less than there are ranks, and in each round a rank sends one chunk and receives one"
)
_WHOLE = "which chunk is whole in the end, (rank + 1) % world_size: the first round sends chunk `rank`, and adds what comes in to chunk `rank - 1`"
_ORDER = (
    "which chunk goes out in which round: in the first one chunk `rank`, then always the one that was received and added to last"
)
_IN_PLACE = "`+=`: what is received must be added in place, to the chunk itself"
_GATHER = "all_gather: `own` goes out first, then always what was received last; copy_ writes it into the chunk's own memory"
_HALVES = "the two halves, over chunks that are views of x: split its numbers among the ranks"


def make_numbers(rng: random.Random) -> tuple[int, list[Tensor]]:
    """The number of ranks, and the tensor of each: now and then with fewer numbers than ranks."""
    world_size = rng.choice((1, 2, 2, 3, 4, 5))
    shape = rng.choice(((rng.randint(1, 3), rng.randint(1, 5)), (rng.randint(5, 30),)))
    return world_size, [make_tensor(rng, *shape) for _ in range(world_size)]


def cut(x: Tensor, world_size: int) -> list[Tensor]:
    """A tensor's numbers in chunks, one for each rank: views."""
    flat = x.view(-1)
    return [flat[part.start : part.stop] for part in (split_units(len(flat), world_size, rank) for rank in range(world_size))]


def add_up(numbers: list[Tensor]) -> Tensor:
    """The sum over the ranks."""
    return torch.stack(numbers).sum(dim=0)


def expect_chunk(said: str, what: str, expected: Tensor, got: Tensor, look: str, suspects: Sequence[Suspect] = ()) -> None:
    """As `expect_close`, for a chunk that may be empty."""
    if len(expected):
        expect_close(said, what, expected, got, look, suspects)


def expect_messages(said: str, rings: list[Ring], per_rank: int, look: str = _ROUNDS) -> None:
    """Unless every rank has sent so many messages, raise an AssertionError."""
    counts = {f"rank {ring.rank}": len(ring.sent) for ring in rings}
    expect(said, "messages sent", dict.fromkeys(counts, per_rank), counts, look)


def check_reduce_scatter(reduce_scatter: Any) -> None:
    """After n - 1 rounds each rank has the sum of one chunk."""
    for rng in rounds("scatter", 40):
        _check_scatter(reduce_scatter, *make_numbers(rng))


def _check_scatter(reduce_scatter: Any, world_size: int, numbers: list[Tensor]) -> None:
    said = f"{world_size} ranks, each with {numbers[0].numel()} numbers."

    def run(ring: Ring) -> tuple[Any, list[Tensor]]:
        chunks = cut(numbers[ring.rank].clone(), ring.world_size)
        return reduce_scatter(list(chunks), ring), chunks

    results, rings = run_rings(world_size, run, said)
    expect_messages(said, rings, world_size - 1)
    total = cut(add_up(numbers), world_size)
    for rank, (own, chunks) in enumerate(results):
        where, whole = f"{said} Rank {rank}.", (rank + 1) % world_size
        expect(where, "number of the whole chunk", whole, own, _WHOLE)
        suspects = [(cut(numbers[rank], world_size)[whole], _IN_PLACE)]
        expect_chunk(where, f"chunk {own}", total[whole], chunks[whole], _ORDER, suspects)


def check_all_reduce(all_gather: Any, all_reduce: Any) -> None:
    """All chunks on all ranks; the sum in the tensor itself, with the same bits everywhere."""
    for rng in rounds("gather", 30):
        world_size, numbers = make_numbers(rng)
        _check_gather(all_gather, world_size, rng.randrange(world_size), cut(numbers[0], world_size))
    for rng in rounds("all_reduce", 30):
        _check_sum(all_reduce, *make_numbers(rng))


def _check_gather(all_gather: Any, world_size: int, shift: int, whole: list[Tensor]) -> None:
    said = f"{world_size} ranks; rank r has chunk (r + {shift}) % {world_size}."

    def run(ring: Ring) -> list[Tensor]:
        own = (ring.rank + shift) % ring.world_size
        chunks = [chunk.clone() if i == own else torch.full_like(chunk, torch.nan) for i, chunk in enumerate(whole)]
        all_gather(list(chunks), own, ring)
        return chunks

    results, rings = run_rings(world_size, run, said)
    expect_messages(said, rings, world_size - 1)
    for rank, chunks in enumerate(results):
        for i, chunk in enumerate(chunks):
            expect_chunk(f"{said} Rank {rank}.", f"chunk {i} after all_gather", whole[i], chunk, _GATHER)


def _check_sum(all_reduce: Any, world_size: int, numbers: list[Tensor]) -> None:
    said = f"all_reduce of {list(numbers[0].shape)} numbers on {world_size} ranks."
    tensors = [x.clone() for x in numbers]
    results, rings = run_rings(world_size, lambda ring: all_reduce(tensors[ring.rank], ring), said)
    for rank, (x, returned) in enumerate(zip(tensors, results, strict=True)):
        where = f"{said} Rank {rank}."
        expect_close(where, "x", add_up(numbers), x, _HALVES)
        expect(where, "is x returned", True, returned is x, "what is returned: x itself")
        expect(where, "equal bits on all ranks", True, torch.equal(x, tensors[0]), _HALVES)
    expect_messages(said, rings, 2 * (world_size - 1), _ROUNDS_OF_BOTH)
    largest = max((message.num_bytes for ring in rings for message in ring.sent), default=0)
    chunk = -(-numbers[0].numel() // world_size) if world_size > 1 else 0
    expect(said, "bytes of the largest message", 4 * chunk, largest, "the chunks: as many as ranks, and as equal as can be")
