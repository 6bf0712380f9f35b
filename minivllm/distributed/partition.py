"""Which part of a weight belongs to which rank: the same arithmetic for loading, computing and pictures.

vLLM requires every size to be divisible by the number of ranks (`vllm/distributed/utils.py`, `divide`); here parts may be uneven.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 16
"""Parts are cut at multiples of this, if there are enough of them: the width of a panel of `kernels.cpu.native.panels`."""


def split(total: int, world_size: int, rank: int) -> range:
    """The rows or columns, of `total`, that belong to a rank. The first ranks have the larger parts.

    >>> [len(split(1536, 2, rank)) for rank in range(2)], [len(split(40, 3, rank)) for rank in range(3)]
    ([768, 768], [16, 16, 8])
    """
    unit = next(
        unit for unit in (UNIT, UNIT // 2, UNIT // 4, 2, 1) if total % unit == 0 and (total >= unit * world_size or unit == 1)
    )
    part = split_units(total // unit, world_size, rank)
    return range(part.start * unit, part.stop * unit)


def split_units(total: int, world_size: int, rank: int) -> range:
    """As `split`, cut anywhere."""
    size, larger = divmod(total, world_size)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


@dataclass(frozen=True)
class HeadSplit:
    """The query heads of one rank, and the KV heads that they read; these are shared with other ranks if there are more ranks than KV heads."""

    query: range
    kv: range


def split_heads(num_heads: int, num_kv_heads: int, world_size: int, rank: int) -> HeadSplit:
    """A rank's heads: KV heads with all their query heads or, if there are more ranks than KV heads, some query heads of one.

    >>> split_heads(9, 3, 2, 0), split_heads(9, 3, 2, 1)
    (HeadSplit(query=range(0, 6), kv=range(0, 2)), HeadSplit(query=range(6, 9), kv=range(2, 3)))
    >>> split_heads(8, 2, 4, 1)
    HeadSplit(query=range(2, 4), kv=range(0, 1))
    """
    group = num_heads // num_kv_heads
    if world_size <= num_kv_heads:
        kv = split_units(num_kv_heads, world_size, rank)
        return HeadSplit(range(kv.start * group, kv.stop * group), kv)
    for kv_head in range(num_kv_heads):
        ranks = split_units(world_size, num_kv_heads, kv_head)
        if rank in ranks:
            part = split_units(group, len(ranks), rank - ranks.start)
            return HeadSplit(range(kv_head * group + part.start, kv_head * group + part.stop), range(kv_head, kv_head + 1))
    raise ValueError(f"rank is {rank}, but there are {world_size} ranks.")
