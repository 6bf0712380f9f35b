"""The checks of lesson 12 for who gets what."""

from __future__ import annotations

from typing import Any

from minivllm.course.lessons.ranks import situation
from minivllm.course.observations import expect, rounds
from minivllm.distributed.partition import split_heads, split_units


def as_range(value: Any) -> Any:
    """A range in comparable form; anything else as it is shown."""
    if not isinstance(value, range) or value.step != 1:
        return repr(value)[:100]
    return [value.start, max(value.start, value.stop)]


def check_split(split: Any) -> None:
    """Every index has exactly one rank, in order, and the parts differ by one at the most."""
    look = "the first `total % world_size` ranks, which get one more, and where a part begins after them"
    for rng in rounds("split", 60):
        total, world_size = rng.choice((0, 1, 2, rng.randrange(60))), rng.randint(1, 7)
        for rank in range(world_size):
            said = f"split({total}, {world_size}, {rank})."
            expected = as_range(split_units(total, world_size, rank))
            with situation(said):
                got = split(total, world_size, rank)
            expect(said, "start and stop of the range", expected, as_range(got), look)


def check_split_heads(split_heads_of: Any) -> None:
    """Query heads go where their keys are; a KV head that several ranks need is on each of them."""
    few = "whole groups: a rank's KV heads, and all query heads that read them"
    many = "which ranks share a KV head (split the ranks among the KV heads), and how they split its query heads"
    for rng in rounds("heads", 60):
        num_kv_heads, group = rng.randint(1, 4), rng.randint(1, 4)
        num_heads = num_kv_heads * group
        world_size = rng.randint(1, num_heads)
        for rank in range(world_size):
            said = f"split_heads({num_heads}, {num_kv_heads}, {world_size}, {rank})."
            right = split_heads(num_heads, num_kv_heads, world_size, rank)
            with situation(said):
                got = split_heads_of(num_heads, num_kv_heads, world_size, rank)
            is_pair = isinstance(got, (tuple, list)) and len(got) == 2
            pair = {"query heads": as_range(got[0]), "KV heads": as_range(got[1])} if is_pair else repr(got)[:100]
            expected = {"query heads": as_range(right.query), "KV heads": as_range(right.kv)}
            expect(said, "start and stop", expected, pair, few if world_size <= num_kv_heads else many)
