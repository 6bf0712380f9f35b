"""Who gets which part: together all of it, once, in order, and as even as can be."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.distributed import partition
from minivllm.distributed.partition import UNIT, Stage, get_pp_indices, split, split_heads


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


@given(st.integers(1, 8), st.integers(0, 60))
def test_stages_have_all_layers_in_order_and_as_even_as_can_be(num_stages, more):
    num_layers = num_stages + more
    stages = [Stage(rank, num_stages) for rank in range(num_stages)]
    assert [layer for stage in stages for layer in stage.layers(num_layers)] == list(range(num_layers))
    sizes = [len(stage.layers(num_layers)) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage computes the logits, too"
    assert num_stages < 3 or num_layers % num_stages > num_stages - 2 or sizes[0] == min(sizes), "the first has the embedding"
    assert [stage.is_first for stage in stages].index(True) == 0 and [stage.is_last for stage in stages].index(
        True
    ) == num_stages - 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_stages_have_the_layers_that_they_are_given(partition):
    found = [get_pp_indices(sum(partition), rank, len(partition), partition) for rank in range(len(partition))]
    assert [stop - start for start, stop in found] == partition
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][:-1]


@pytest.mark.parametrize(
    ("partition", "reason"), [([2, 2], "each of 2 stages"), ([2, 2, 2], "adds up to 6"), ([0, 2, 3], "needs a layer")]
)
def test_layers_that_are_not_all_of_them_are_refused(partition, reason):
    with pytest.raises(ValueError, match=reason):
        get_pp_indices(5, 0, 3, partition)
