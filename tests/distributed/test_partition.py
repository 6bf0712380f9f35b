"""Who gets which part: together all of it, once, in order, and as even as can be."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from minivllm.distributed import partition
from minivllm.distributed.partition import UNIT, split, split_heads


def test_examples_in_docstrings():
    assert doctest.testmod(partition).failed == 0


@given(st.integers(1, 12), st.integers(0, 100_000))
def test_parts_are_the_whole(world_size, more):
    total = world_size + more
    parts = [split(total, world_size, rank) for rank in range(world_size)]
    assert [i for part in parts for i in (part.start, part.stop)] == [
        0,
        *(x for p in parts[:-1] for x in (p.stop, p.stop)),
        total,
    ]
    sizes = [len(part) for part in parts]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= UNIT
    if total % UNIT == 0 and total >= UNIT * world_size:
        assert all(size % UNIT == 0 for size in sizes)


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_heads_are_complete_and_with_their_kv_head(num_kv_heads, group, data):
    num_heads = num_kv_heads * group
    world_size = data.draw(st.integers(1, num_heads))
    ranks = [split_heads(num_heads, num_kv_heads, world_size, rank) for rank in range(world_size)]
    assert [head for heads in ranks for head in heads.query] == list(range(num_heads))
    for heads in ranks:
        assert len(heads.query) > 0 and len(heads.query) % len(heads.kv) == 0
        assert [head // group for head in heads.query] == [
            kv for kv in heads.kv for _ in range(len(heads.query) // len(heads.kv))
        ]
    if world_size <= num_kv_heads:  # nobody has what another has
        assert [kv for heads in ranks for kv in heads.kv] == list(range(num_kv_heads))
    sizes = [len(heads.kv) for heads in ranks]
    assert max(sizes) - min(sizes) <= 1
